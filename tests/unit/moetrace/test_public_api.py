"""The package as users call it: one tracer per process, and harmless without one."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import nn

import moetrace
from moetrace.adapters.reference import ReferenceMoE
from moetrace.testing import FakeTime, MemoryEmitter
from moetrace.timing.clock import HostClock

from .otlp_server import Blackhole, wait_until


def start(**settings: Any) -> MemoryEmitter:
    """A tracer of this process that keeps its records."""
    emitter = MemoryEmitter()
    moetrace.init(**{"run_id": "test-run", "emitters": [emitter], **settings})
    return emitter


def layer() -> ReferenceMoE:
    """A small MoE layer."""
    return ReferenceMoE(8, 16, num_experts=4, top_k=2)


# --- without a tracer ----------------------------------------------------------------------------


def test_without_a_tracer_steps_and_phases_are_no_ops() -> None:
    """Code that is marked up runs as if it were not."""
    with moetrace.step(3, forward_mode="decode"), moetrace.phase("router", layer=1):
        ran = True
    assert ran
    assert moetrace.shutdown() is True
    moetrace.uninstrument()


def test_without_a_tracer_wrap_returns_the_callables_untouched() -> None:
    """The very same objects, under the names they came with."""
    gate = nn.Linear(2, 2)
    before = dict(vars(gate))
    wrapped = moetrace.wrap(router=gate, experts=len, layer=0)
    assert wrapped.router is gate
    assert wrapped.experts is len
    assert dict(vars(gate)) == before


def test_without_a_tracer_a_wrong_name_is_still_a_configuration_error() -> None:
    """A typing mistake does not wait for the day on which tracing is switched on."""
    with pytest.raises(moetrace.ConfigError, match="no such part"):
        moetrace.wrap(expert=len, layer=0)


def test_without_a_tracer_there_is_no_current_one() -> None:
    """The error says what to call."""
    with pytest.raises(moetrace.NotInitializedError, match=r"call moetrace\.init\(\) first"):
        moetrace.current_tracer()


def test_instrument_starts_a_tracer_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A launcher's variables are enough; no code has to call `init`."""
    monkeypatch.setenv("MOETRACE_RUN_ID", "from-environment")
    monkeypatch.setenv("MOETRACE_ENDPOINT", "")
    monkeypatch.setenv("MOETRACE_JSONL_DIR", str(tmp_path))
    model = layer()
    moetrace.instrument(model)
    model(torch.randn(2, 8))
    assert moetrace.current_tracer().context.run_id == "from-environment"
    assert moetrace.shutdown()
    assert len((tmp_path / "rank-00000.jsonl").read_text().splitlines()) == 1


# --- switched off --------------------------------------------------------------------------------


def test_switched_off_nothing_is_wrapped_or_recorded() -> None:
    """`enabled=False` leaves model, functions and modules as they are."""
    emitter = start(enabled=False)
    model, gate = layer(), nn.Linear(8, 4)
    before, gate_before = dict(vars(model)), dict(vars(gate))
    report = moetrace.instrument(model)
    assert not report
    assert "tracing is off" in str(report)
    assert moetrace.wrap(router=gate, experts=len, layer=0).experts is len
    with moetrace.step(), moetrace.phase("router", layer=0):
        model(torch.randn(2, 8))
    assert dict(vars(model)) == before
    assert dict(vars(gate)) == gate_before
    assert moetrace.shutdown()
    assert emitter.records == []


def test_switched_off_a_clock_that_does_not_exist_here_does_no_harm() -> None:
    """The same settings serve a machine without a device, as long as nothing is traced."""
    start(enabled=False, clock="cuda")


# --- starting and stopping -----------------------------------------------------------------------


def test_a_second_init_replaces_the_first_tracer() -> None:
    """What the first recorded is delivered, and its model is restored."""
    first, model = start(), layer()
    before = dict(vars(model))
    moetrace.instrument(model)
    with moetrace.step():
        pass
    second = start()
    assert len(first.records) == 1
    assert dict(vars(model)) == before
    with moetrace.step():
        pass
    moetrace.shutdown()
    assert (len(first.records), len(second.records)) == (1, 1)


def test_a_second_init_may_use_the_same_prometheus_registry() -> None:
    """A tracer that is shut down leaves its registry."""
    registry = CollectorRegistry()
    for _ in range(2):
        start(prometheus_registry=registry)
        with moetrace.step():
            pass
    moetrace.shutdown()
    assert list(registry.collect()) == []


def test_a_wrong_setting_leaves_the_running_tracer_alone() -> None:
    """Settings are checked before anything is stopped."""
    start()
    running = moetrace.current_tracer()
    with pytest.raises(moetrace.ConfigError):
        moetrace.init(sample="often")
    assert moetrace.current_tracer() is running


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_cuda_clock_without_a_device_is_a_configuration_error() -> None:
    """The message says what is missing and what would do."""
    with pytest.raises(moetrace.ConfigError, match="clock='cuda': torch sees no CUDA device here"):
        start(clock="cuda")


def test_a_directory_that_cannot_be_written_is_a_configuration_error(tmp_path: Path) -> None:
    """The message names the setting, its value and the reason."""
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(moetrace.ConfigError, match=r"jsonl_dir='.*file': cannot be written"):
        moetrace.init(run_id="r", endpoint="", jsonl_dir=str(file))


def test_several_ranks_without_a_common_run_id_are_a_configuration_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks that cannot agree on a run would never be joined."""
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "MOETRACE_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(moetrace.ConfigError, match="set MOETRACE_RUN_ID to the same value on all ranks"):
        moetrace.init(rank=0, world_size=2, endpoint="")


def test_a_single_process_draws_its_own_run_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trying it out needs no settings at all."""
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "MOETRACE_RUN_ID", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    tracer = moetrace.init(endpoint="", emitters=[])
    assert tracer.context.run_id.startswith("run-")


def test_a_clock_of_ones_own_is_taken() -> None:
    """Tests of code that uses moetrace bring their own time."""
    time = FakeTime()
    emitter = start(clock=HostClock(time.now_ns))
    with moetrace.step():
        time.advance(42)
    moetrace.shutdown()
    assert [record.duration_ns for record in emitter.records] == [42]


def test_shutdown_twice_is_shutdown_once() -> None:
    """The second call has nothing to do and says so."""
    start()
    assert moetrace.shutdown() is True
    assert moetrace.shutdown() is True


def test_with_a_collector_that_never_answers_every_step_is_accounted_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The model runs on, each sampled step is dropped for a reason; a line at once, and one at the end."""
    hole, model = Blackhole(), layer()
    tracer = moetrace.init(
        run_id="r", endpoint=hole.endpoint, export_timeout_s=0.2, queue_steps=20, buffers=4
    )
    moetrace.instrument(model)
    hidden = torch.randn(2, 8)
    expected = model(hidden)
    with caplog.at_level(logging.INFO):
        assert all(torch.equal(model(hidden), expected) for _ in range(100))
        wait_until(lambda: bool(caplog.messages))
        assert moetrace.shutdown(timeout_s=0.5) is False
    hole.close()
    metrics = tracer.metrics
    assert metrics.steps_sampled == 101
    assert metrics.exported.total() == 0
    assert metrics.dropped.total() == 101
    first, last = caplog.messages
    assert first.startswith(f"moetrace: the collector at {hole.endpoint} does not take data (")
    assert last.startswith("moetrace: 101 of 101 recorded steps not delivered: ")


# --- fork ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_records_nothing_and_its_model_runs_on() -> None:
    """A data-loader worker forked inside a step neither hangs nor writes into the parent's data."""
    emitter, model = start(), layer()
    moetrace.instrument(model)
    hidden = torch.randn(2, 8)
    with moetrace.step():
        expected = model(hidden)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                tracer = moetrace.current_tracer()
                fine = tracer.buffer is None
                fine = fine and torch.equal(model(hidden), expected)
                with moetrace.step(), moetrace.phase("router", layer=0):
                    model(hidden)
                # It did step, and nobody records that: not all was delivered.
                status = 0 if fine and not moetrace.shutdown(timeout_s=1) else 1
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    moetrace.shutdown()
    (step,) = emitter.records
    assert [sum(row.counts) for row in step.experts] == [4]
