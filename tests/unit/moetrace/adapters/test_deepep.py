"""DeepEP against a stand-in with its signatures: events, hooks, deferred and plain calls, rows received."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

import moetrace
from moetrace.record.types import StepRecord
from moetrace.testing import FakeTime, MemoryEmitter
from moetrace.timing.clock import HostClock
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import CountKind, Phase
from unit.moetrace import deep_ep_package as deep_ep

GEMM_NS, ROUTER_NS = 50, 20
SEND_NS, RECEIVE_NS, LAYOUT_NS = deep_ep.SEND_NS, deep_ep.RECEIVE_NS, deep_ep.LAYOUT_NS
EXPERTS, RANK, RANKS = 6, 1, 2
IDS = torch.tensor([[0, 4], [3, 5]])
ARRIVING = deep_ep.Arriving([[0, -1], [1, 2], [1, -1]], EXPERTS // RANKS, RANK, RANKS)
RECEIVED = [0, 0, 0, 1, 2, 1]

Between = Callable[[], None]
X = torch.ones(2, 2)


def legacy(buffer: deep_ep.Buffer, between: Between, experts: Between, style: str, **more: Any) -> None:
    """Normal kernels of 1.x: layout, dispatch, combine; waits as `style` says."""
    later = style != "plain"
    per_rank, _, per_expert, in_rank, event = buffer.get_dispatch_layout(
        topk_idx=IDS, num_experts=EXPERTS, previous_event=buffer.capture(), async_finish=later
    )
    *_, handle, event = buffer.dispatch(
        X,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=IDS,
        topk_weights=torch.ones(2, 2),
        previous_event=event,
        async_finish=later,
        allocate_on_comm_stream=later,
        **more,
    )
    _wait(event, between, style)
    experts()
    *_, event = buffer.combine(X, handle, async_finish=later, allocate_on_comm_stream=later)
    _wait(event, lambda: None, style)


def low_latency(buffer: deep_ep.Buffer, between: Between, experts: Between, style: str, **more: Any) -> None:
    """Low-latency kernels: by hook, by event, or at once."""
    how = {"async_finish": style == "event", "return_recv_hook": style == "hook"}
    *_, handle, event, hook = buffer.low_latency_dispatch(X, IDS, 8, EXPERTS, use_fp8=False, **how)
    _end(event, hook, between, style)
    experts()
    _, event, hook = buffer.low_latency_combine(X, IDS, torch.ones(2, 2), handle, **how)
    _end(event, hook, lambda: None, style)


def second(buffer: Any, between: Between, experts: Between, style: str, **more: Any) -> None:
    """Buffers of 2.x; `deferred` gets its results from the wait."""
    later = style != "plain"
    if style == "deferred":
        event = buffer.dispatch(
            X, IDS, num_experts=EXPERTS, async_with_compute_stream=True, defer_epilogue=True, **more
        )
        between()
        *_, handle = event.current_stream_wait(release_handle=True)
        experts()
        event = buffer.combine(X, handle, async_with_compute_stream=True, defer_epilogue=True)
        rows, _ = event.current_stream_wait()
        assert rows is X
        return
    *_, handle, event = buffer.dispatch(X, IDS, num_experts=EXPERTS, async_with_compute_stream=later, **more)
    assert isinstance(event, deep_ep.EventOverlap2), "what the caller gets is the event itself"
    _wait(event, between, style)
    experts()
    *_, event = buffer.combine(X, handle, async_with_compute_stream=later)
    _wait(event, lambda: None, style)


def hybrid(
    buffer: deep_ep.HybridEPBuffer, between: Between, experts: Between, style: str, **more: Any
) -> None:
    """Permute and dispatch in one call."""
    *_, handle = buffer.dispatch_with_permute(hidden=X, topk_idx=IDS, num_of_experts=EXPERTS)
    experts()
    buffer.combine_with_unpermute(hidden=X, handle=handle)


def _wait(event: Any, between: Between, style: str) -> None:
    if style == "block":
        with event:
            between()
    else:
        between()
        if event.event is not None:
            event.current_stream_wait()


def _end(event: Any, hook: Any, between: Between, style: str) -> None:
    between()
    if style == "hook":
        hook()
    elif event.event is not None:
        event.current_stream_wait()


CALLS: dict[str, tuple[type, type, Any]] = {
    "legacy": (deep_ep.Buffer, deep_ep.EventOverlap1, legacy),
    "low latency": (deep_ep.Buffer, deep_ep.EventOverlap1, low_latency),
    "elastic": (deep_ep.ElasticBuffer, deep_ep.EventOverlap2, second),
    "2.5": (deep_ep.EPBuffer, deep_ep.EventOverlap2, second),
    "hybrid": (deep_ep.HybridEPBuffer, deep_ep.EventOverlap2, hybrid),
}
STYLES = [
    ("legacy", "plain"),
    ("legacy", "event"),
    ("legacy", "block"),
    ("low latency", "plain"),
    ("low latency", "event"),
    ("low latency", "hook"),
    ("elastic", "plain"),
    ("elastic", "event"),
    ("elastic", "block"),
    ("2.5", "event"),
    ("2.5", "block"),
    ("2.5", "deferred"),
    ("hybrid", "plain"),
]


@pytest.fixture(autouse=True)
def _stopped() -> Iterator[None]:
    yield
    moetrace.shutdown(timeout_s=2)


def _record(
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    style: str,
    *,
    overlap: bool = False,
    layers: int = 1,
    package: str = "deep_ep",
    **more: Any,
) -> StepRecord:
    """One step of hand-written layers that exchange by a buffer; all callables are restored after it."""
    owner, event, run = CALLS[call]
    monkeypatch.setitem(sys.modules, package, deep_ep.package(owner, event=event))
    owners = (owner, event)
    before = [dict(vars(one)) for one in owners]
    signatures = {name: inspect.signature(value) for name, value in vars(owner).items() if callable(value)}
    time, emitter = FakeTime(), MemoryEmitter()
    buffer = owner(time, ARRIVING)
    tracer = moetrace.init(run_id="deepep", emitters=[emitter], endpoint="", clock=HostClock(time.now_ns))
    parts = [
        moetrace.wrap(
            layer=layer,
            num_experts=EXPERTS,
            router=lambda: (time.advance(ROUTER_NS), IDS)[1],
            experts=lambda: time.advance(GEMM_NS),
            shared_expert=lambda: time.advance(GEMM_NS),
        )
        for layer in range(layers)
    ]
    assert {name: inspect.signature(getattr(owner, name)) for name in signatures} == signatures
    with moetrace.step():
        for layer, part in enumerate(parts):
            with moetrace.phase("fused", layer=layer):
                part.router()
                run(buffer, part.shared_expert if overlap else lambda: None, part.experts, style, **more)
    assert tracer.guard.errors == {}
    (record,) = emitter.wait_for(1)
    moetrace.shutdown()
    assert [dict(vars(one)) for one in owners] == before
    return record


def _rows(record: StepRecord) -> list[tuple[Phase, bool, int]]:
    return [
        (row.phase, bool(row.flags & RowFlag.BARRIER), row.duration_ns)
        for row in record.phases
        if row.layer == 0
    ]


def _received(record: StepRecord) -> dict[int, list[int]]:
    return {row.layer: list(row.counts) for row in record.experts if row.kind is CountKind.RECEIVED}


@pytest.mark.parametrize(("call", "style"), STYLES)
def test_an_exchange_lasts_until_its_rows_are_there(
    monkeypatch: pytest.MonkeyPatch, call: str, style: str
) -> None:
    """In the call, at the event, behind its `with` block, or in the hook: one barrier, sending included."""
    rows = _rows(_record(monkeypatch, call, style))
    barriers = [(phase, ns) for phase, barrier, ns in rows if barrier]
    assert barriers == [(Phase.DISPATCH, SEND_NS + RECEIVE_NS), (Phase.COMBINE, SEND_NS + RECEIVE_NS)]


def test_a_release_under_another_name_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wheels of 2.5 are imported as deep_ep_v25 where deep_ep itself is another release."""
    record = _record(monkeypatch, "2.5", "event", package="deep_ep_v25")
    barriers = [(phase, ns) for phase, barrier, ns in _rows(record) if barrier]
    assert barriers == [(Phase.DISPATCH, SEND_NS + RECEIVE_NS), (Phase.COMBINE, SEND_NS + RECEIVE_NS)]
    assert _received(record) == {0: RECEIVED}


@pytest.mark.parametrize(("call", "style"), [each for each in STYLES if each[1] != "plain"])
def test_work_between_send_and_receive_is_not_part_of_the_exchange(
    monkeypatch: pytest.MonkeyPatch, call: str, style: str
) -> None:
    """Only the time that the receive is waited for is exposed."""
    rows = _rows(_record(monkeypatch, call, style, overlap=True))
    barriers = [(phase, ns) for phase, barrier, ns in rows if barrier]
    assert barriers == [(Phase.DISPATCH, RECEIVE_NS), (Phase.COMBINE, SEND_NS + RECEIVE_NS)]
    assert (Phase.SHARED_EXPERT, False, GEMM_NS) in rows


def test_the_layout_is_local_work_before_the_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no exchange, and its event ends none."""
    rows = _rows(_record(monkeypatch, "legacy", "event"))
    assert rows[:3] == [
        (Phase.ROUTER, False, ROUTER_NS),
        (Phase.PERMUTE, False, LAYOUT_NS),
        (Phase.DISPATCH, True, SEND_NS + RECEIVE_NS),
    ]


COUNTED: list[tuple[str, str, dict[str, Any]]] = [
    ("legacy", "plain", {}),
    ("legacy", "event", {}),
    ("legacy", "event", {"expert_alignment": 4}),
    ("legacy", "block", {"expert_alignment": 4}),
    ("legacy", "event", {"num_worst_tokens": 64}),
    ("low latency", "plain", {}),
    ("low latency", "event", {}),
    ("low latency", "hook", {}),
    ("elastic", "event", {}),
    ("2.5", "plain", {}),
    ("2.5", "event", {"expert_alignment": 4}),
    ("2.5", "event", {"do_cpu_sync": False}),
    ("2.5", "event", {"do_cpu_sync": False, "expert_alignment": 4, "do_expand": True}),
    ("2.5", "event", {"expert_alignment": 4, "do_expand": True}),
    ("2.5", "deferred", {}),
    ("2.5", "deferred", {"do_cpu_sync": False}),
]


@pytest.mark.parametrize(("call", "style", "more"), COUNTED)
def test_rows_received_are_counted_once_they_are_there(
    monkeypatch: pytest.MonkeyPatch, call: str, style: str, more: dict[str, Any]
) -> None:
    """Exactly, whatever the numbers are rounded up to; tensors are not read before the wait; layers apart."""
    record = _record(monkeypatch, call, style, layers=2, **more)
    assert _received(record) == {0: RECEIVED, 1: RECEIVED}


@pytest.mark.parametrize(
    ("call", "style", "more"),
    [
        ("2.5", "event", {"do_cpu_sync": False, "expert_alignment": 4}),
        ("hybrid", "plain", {}),
    ],
)
def test_numbers_that_are_not_exact_are_missing(
    monkeypatch: pytest.MonkeyPatch, call: str, style: str, more: dict[str, Any]
) -> None:
    """Rounded up, with nothing exact beside them: missing, and not nearly right."""
    assert _received(_record(monkeypatch, call, style, **more)) == {}


def test_a_handle_that_is_used_again_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A further dispatch by the same layout (of a gradient above all) brings the same rows again."""

    def twice(buffer: deep_ep.Buffer, between: Between, experts: Between, style: str) -> None:
        legacy(buffer, between, experts, style)
        assert buffer.dispatch(X, ("handle",))[3] is None

    monkeypatch.setitem(CALLS, "legacy", (deep_ep.Buffer, deep_ep.EventOverlap1, twice))
    assert _received(_record(monkeypatch, "legacy", "plain")) == {0: RECEIVED}


def test_a_dispatch_without_a_counted_router_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose rows they are is then not known."""
    monkeypatch.setitem(sys.modules, "deep_ep", deep_ep.package(deep_ep.Buffer))
    time, emitter = FakeTime(), MemoryEmitter()
    buffer = deep_ep.Buffer(time, ARRIVING)
    tracer = moetrace.init(run_id="deepep", emitters=[emitter], endpoint="", clock=HostClock(time.now_ns))
    parts = moetrace.wrap(layer=0, num_experts=EXPERTS, router=lambda: IDS)
    with moetrace.step():
        low_latency(buffer, lambda: None, lambda: None, "hook")
        parts.router()
    (record,) = emitter.wait_for(1)
    assert tracer.guard.errors == {}
    assert _received(record) == {}


@pytest.mark.parametrize(
    ("call", "more"),
    [
        ("legacy", {}),
        ("legacy", {"num_worst_tokens": 64}),
        ("2.5", {"do_cpu_sync": False}),
        ("low latency", {}),
    ],
)
def test_rows_of_replicas_are_not_taken_for_experts(
    monkeypatch: pytest.MonkeyPatch, call: str, more: dict[str, Any]
) -> None:
    """A rank that holds more than its share of the layer's experts holds some of them twice: missing."""
    monkeypatch.setattr(sys.modules[__name__], "EXPERTS", 5)
    assert _received(_record(monkeypatch, call, "event", **more)) == {}
    monkeypatch.setattr(sys.modules[__name__], "EXPERTS", 4)
    if not more.get("num_worst_tokens"):
        assert _received(_record(monkeypatch, call, "event", **more)) == {}


class Late:
    """An event without a `with` block."""

    event = "an event"

    def current_stream_wait(self) -> None:
        """Nothing to wait for."""


class Named(NamedTuple):
    """What a dispatch with a hook returns."""

    rows: torch.Tensor
    counts: list[int]
    hook: Callable[[], None]


class Sender:
    """A buffer of another version: its dispatch returns a named tuple, or an event for the rest."""

    rank, group_size = RANK, RANKS

    def dispatch(self, x: torch.Tensor, hook: bool = False) -> Any:
        """Nothing moves."""
        return Named(torch.zeros(1), [1, 2, 1], lambda: None) if hook else Late()

    def combine(self, rows: str) -> str:
        """A method that does not say what it takes."""
        return rows

    combine.__signature__ = "unknown"  # type: ignore[attr-defined]


@pytest.fixture
def other_version(monkeypatch: pytest.MonkeyPatch) -> Sender:
    """In the package's place."""
    package = ModuleType("deep_ep")
    package.Buffer, package.EventOverlap = Sender, Late  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_ep", package)
    return Sender()


def test_another_version_does_not_stop_anything(other_version: Sender) -> None:
    """An event without a block, a method without a signature, a result with names: all as they were."""
    before = dict(vars(Sender)), dict(vars(Late))
    tracer = moetrace.init(run_id="deepep", emitters=[], endpoint="", wait_stats=True)
    parts = moetrace.wrap(layer=0, num_experts=EXPERTS, router=lambda: IDS)
    with moetrace.step():
        parts.router()
        result = other_version.dispatch(X, hook=True)
        assert (type(result), result.counts) == (Named, [1, 2, 1])
        result.hook()
        assert other_version.combine("ab") == "ab"
        other_version.dispatch(X).current_stream_wait()
    assert tracer.guard.errors == {}
    moetrace.shutdown()
    assert (dict(vars(Sender)), dict(vars(Late))) == before


def test_an_exchange_in_flight_keeps_no_activations(other_version: Sender) -> None:
    """What counts its rows when it is waited for knows the buffer, and not what was sent."""
    tracer = moetrace.init(run_id="deepep", emitters=[], endpoint="")
    parts = moetrace.wrap(layer=0, num_experts=EXPERTS, router=lambda: IDS)
    with moetrace.step():
        parts.router()
        sent = torch.ones(4)
        reference = weakref.ref(sent)
        event = other_version.dispatch(sent)
        assert tracer.buffer is not None
        assert tracer.buffer.arrivals
        del sent
        assert reference() is None
        buffer = tracer.buffer
    assert not buffer.arrivals
    event.current_stream_wait()
