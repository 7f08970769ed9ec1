"""`moetrace join` serves the series of steps that a collector that joins exports, with the same values."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from integration.collector_process import ask, collector, environment, moetrace, rows
from moetrace_collectors.model import RankStep, ViolationCount, WaitCycles
from moetrace_collectors.testing import SyntheticRun, request
from moetrace_schemas.enums import PHASE_CODE, ROUTING_VIOLATION_CODE, Phase, RoutingViolation

RUN = SyntheticRun(run_id="twice", world_size=4, num_layers=2, slow_rank=2)
NUM_STEPS = 24
READY = re.compile(r"moetrace join: metrics (http://\S+)/metrics")
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def load() -> Iterator[list[RankStep]]:
    """Steps as ranks send them: with waits, violations, coverage and cost; the last one without a rank."""
    for step in range(NUM_STEPS):
        ranks = [
            replace(
                one,
                tracer_ns=20_000 + 100 * one.rank,
                expected_sites=10,
                seen_sites=10 - one.rank % 2,
                model_name="tiny-moe",
                model_version="v1",
                placement_version=1 + step // 12,
                violations=(
                    ViolationCount(
                        layer=1,
                        violation=ROUTING_VIOLATION_CODE[RoutingViolation.ID_OUT_OF_RANGE],
                        count=1 + one.rank,
                    ),
                )
                if step % 5 == 0
                else (),
                waits=(
                    WaitCycles(
                        phase=PHASE_CODE[Phase.DISPATCH],
                        cycles=np.array([9_000 if other == 2 != one.rank else 10 for other in range(4)]),
                    ),
                ),
            )
            for one in RUN.step(step)
        ]
        yield ranks if step < NUM_STEPS - 1 else ranks[:3]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinProcess:
    """A running `moetrace join`."""

    process: subprocess.Popen[str]
    url: str

    def series(self) -> Series:
        """What it exports."""
        return parsed(ask(f"{self.url}/metrics", None, {}).body.decode())


@contextmanager
def joining(directory: Path, *options: str) -> Iterator[JoinProcess]:
    """`moetrace join` over a store, serving metrics on a free port."""
    process = subprocess.Popen(
        [
            sys.executable, "-m", "moetrace_collectors.cli", "join", "--dir", str(directory),
            "--metrics-port", "0", *options,
        ],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if (ready := READY.match(line)) is not None:
                yield JoinProcess(process=process, url=ready[1])
                return
        raise AssertionError(f"no metrics: {said}")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def parsed(text: str) -> Series:
    """Samples by name and labels, without the moments at which series were made."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def of_steps(series: Series) -> Series:
    """Series of steps and of the ledger: all but those of a collector about itself."""
    return {key: value for key, value in series.items() if not key[0].startswith("moetrace_collector_")}


def closed(series: Series) -> float:
    """Steps that were judged."""
    return sum(value for (name, _), value in series.items() if name == "moetrace_collector_steps_total")


@pytest.fixture(scope="module")
def online(tmp_path_factory: pytest.TempPathFactory) -> Series:
    """What a collector exports that joins."""
    with collector(tmp_path_factory.mktemp("online"), "--join-timeout-s", "1") as process:
        for ranks in load():
            assert process.send(request(ranks)).status == 200
        process.wait_for("moetrace_collector_steps_total", NUM_STEPS)
        return parsed(process.get("/metrics").body.decode())


@pytest.fixture(scope="module")
def in_store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Series, Path]:
    """What moetrace join exports over the rows of a collector that does not join, and the run directory."""
    directory = tmp_path_factory.mktemp("in_store")
    with collector(directory, "--join", "store") as process:
        for ranks in load():
            assert process.send(request(ranks)).status == 200
        process.wait_for("moetrace_collector_joined_total", 4 * NUM_STEPS - 1)
        assert of_steps(parsed(process.get("/metrics").body.decode())) == {}
        assert process.terminate() == 0
    with joining(directory, "--join-timeout-s", "1") as join:
        series: Series = {}
        for _ in range(400):
            series = join.series()
            if closed(series) >= NUM_STEPS:
                break
            with pytest.raises(subprocess.TimeoutExpired):
                join.process.wait(0.05)
        assert ask(f"{join.url}/healthz", None, {}).body == b"ok\n"
        join.process.send_signal(signal.SIGTERM)
        assert join.process.wait(60) == 0
    return series, directory


def test_both_ways_export_the_same_series(online: Series, in_store: tuple[Series, Path]) -> None:
    """Every series of steps, its labels and its value: extensions, verdicts, exchanges, experts, receipts."""
    want, have = of_steps(online), of_steps(in_store[0])
    assert have.keys() == want.keys()
    for key, value in want.items():
        assert have[key] == pytest.approx(value, rel=1e-9), key
    names = {name for name, _ in want}
    assert {
        "moetrace_step_seconds_count",
        "moetrace_extension_seconds_total",
        "moetrace_verdicts_total",
        "moetrace_critical_cause_steps_total",
        "moetrace_missing_rank_steps_total",
        "moetrace_exchange_rank_seconds_total",
        "moetrace_exchange_rows_total",
        "moetrace_group_exchange_bytes_total",
        "moetrace_expert_tokens_total",
        "moetrace_routing_violations_total",
        "moetrace_rank_site_coverage_ratio",
        "moetrace_tracer_seconds_total",
        "moetrace_placement_version",
        "moetrace_placement_rows_total",
    } <= names


def test_closed_steps_are_counted_alike(online: Series, in_store: tuple[Series, Path]) -> None:
    """Complete and timed out, and ranks that are missing."""
    for name in ("moetrace_collector_steps_total", "moetrace_collector_missing_ranks_total"):
        of = [
            {key: value for key, value in series.items() if key[0] == name}
            for series in (online, in_store[0])
        ]
        assert of[0] == of[1] != {}


def test_joining_rolls_up_when_it_stops(in_store: tuple[Series, Path]) -> None:
    """Loads, phases and exchanges by minute are there, each row once."""
    [sums] = rows(
        in_store[1],
        "SELECT (SELECT sum(intervals) FROM phase_minutes) AS spans, "
        "(SELECT count() FROM phase_spans FINAL) AS spans_of_rows, "
        "(SELECT sum(exchanges) FROM exchange_minutes) AS exchanges, "
        "(SELECT count() FROM step_barriers FINAL WHERE phase != 'outside') AS exchanges_of_rows",
    )
    assert sums["spans"] == sums["spans_of_rows"] != "0"
    assert sums["exchanges"] == sums["exchanges_of_rows"] != "0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--once", "--metrics-port", "0"), "--metrics-port: nothing is served with --once"),
        (
            ("--metrics-port", "0", "--host", "0.0.0.0"),
            "is reachable from other machines: add tls_certificate",
        ),
        (("--metrics-port", "99999"), "--metrics-port 99999: 0 to 65535 expected"),
    ],
)
def test_wrong_usage_is_one_line(
    in_store: tuple[Series, Path], arguments: tuple[str, ...], message: str
) -> None:
    """Metrics are not served in the open, nor where nobody could ask."""
    done = moetrace("join", "--dir", str(in_store[1]), *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
