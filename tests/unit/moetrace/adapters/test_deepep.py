"""DeepEP against a fake buffer with the signatures of deep_ep.Buffer: events, receive hooks, plain calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import moetrace
from moetrace.adapters import deepep
from moetrace.testing import FakeTime, MemoryEmitter
from moetrace.timing.clock import HostClock
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import Phase

SEND_NS, RECEIVE_NS, GEMM_NS = 10, 100, 50


class EventOverlap:
    """As deep_ep.utils.EventOverlap: without an event the call has ended."""

    def __init__(self, time: FakeTime, event: object | None) -> None:
        self.time, self.event = time, event

    def current_stream_wait(self) -> None:
        """The current stream waits."""
        self.time.advance(RECEIVE_NS)


class Buffer:
    """Sends at once; receives in the call, at the event or in the hook."""

    def __init__(self, time: FakeTime) -> None:
        self.time = time

    def dispatch(
        self, x: torch.Tensor, handle: Any = None, topk_idx: Any = None, async_finish: bool = False
    ) -> Any:
        """(recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert_list, handle, event)."""
        return x, None, None, [2, 3], ("handle",), self._event(async_finish)

    def combine(self, x: torch.Tensor, handle: Any, async_finish: bool = False) -> Any:
        """(combined_x, combined_topk_weights, event)."""
        return x, None, self._event(async_finish)

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: Any,
        max_tokens: int,
        num_experts: int,
        return_recv_hook: bool = False,
    ) -> Any:
        """(recv_x, recv_count, handle, event, hook)."""
        return x, torch.ones(2), ("handle",), EventOverlap(self.time, None), self._hook(return_recv_hook)

    def low_latency_combine(
        self, x: torch.Tensor, topk_idx: Any, topk_weights: Any, handle: Any, return_recv_hook: bool = False
    ) -> Any:
        """(combined_x, event, hook)."""
        return x, EventOverlap(self.time, None), self._hook(return_recv_hook)

    def _event(self, async_finish: bool) -> EventOverlap:
        self.time.advance(SEND_NS if async_finish else SEND_NS + RECEIVE_NS)
        return EventOverlap(self.time, object() if async_finish else None)

    def _hook(self, return_recv_hook: bool) -> Callable[[], None] | None:
        self.time.advance(SEND_NS if return_recv_hook else SEND_NS + RECEIVE_NS)
        return (lambda: self.time.advance(RECEIVE_NS)) if return_recv_hook else None


class Layer(nn.Module):
    """One MoE layer that exchanges by a buffer; `overlap` computes between sending and receiving."""

    def __init__(self, buffer: Buffer, style: str, overlap: bool) -> None:
        super().__init__()
        self.buffer, self.style, self.overlap = buffer, style, overlap

    def experts(self, x: torch.Tensor) -> torch.Tensor:
        """The experts."""
        self.buffer.time.advance(GEMM_NS)
        return x

    def shared(self) -> None:
        """Work that hides the exchange."""
        self.buffer.time.advance(GEMM_NS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Dispatch, experts, combine."""
        if self.style == "low latency":
            x, _, handle, _, hook = self.buffer.low_latency_dispatch(x, None, 8, 4, return_recv_hook=True)
            self._between()
            hook()
            x, _, hook = self.buffer.low_latency_combine(
                self.experts(x), None, None, handle, return_recv_hook=True
            )
            hook()
            return x
        later = self.style == "event"
        x, _, _, _, handle, event = self.buffer.dispatch(x, async_finish=later)
        self._between()
        self._wait(event, later)
        x, _, event = self.buffer.combine(self.experts(x), handle, async_finish=later)
        self._wait(event, later)
        return x

    def _between(self) -> None:
        if self.overlap:
            self.shared()

    def _wait(self, event: EventOverlap, later: bool) -> None:
        if later:
            event.current_stream_wait()


def _rows(
    monkeypatch: pytest.MonkeyPatch, style: str, overlap: bool = False
) -> list[tuple[Phase, bool, int]]:
    package: Any = ModuleType("deep_ep")
    package.Buffer, package.EventOverlap = Buffer, EventOverlap
    monkeypatch.setitem(sys.modules, "deep_ep", package)
    before = {name: vars(Buffer).get(name) for name in deepep.METHODS}
    time, emitter = FakeTime(), MemoryEmitter()
    layer = Layer(Buffer(time), style, overlap)
    moetrace.init(run_id="deepep", emitters=[emitter], endpoint="", clock=HostClock(time.now_ns))
    parts = moetrace.wrap(layer=0, experts=layer.experts, shared_expert=layer.shared)
    layer.experts, layer.shared = parts.experts, parts.shared_expert  # type: ignore[method-assign]
    with moetrace.step(), moetrace.phase("fused", layer=0):
        layer(torch.ones(2, 2))
    (record,) = emitter.wait_for(1)
    moetrace.shutdown()
    assert {name: vars(Buffer).get(name) for name in deepep.METHODS} == before
    return [
        (row.phase, bool(row.flags & RowFlag.BARRIER), row.duration_ns)
        for row in record.phases
        if row.layer == 0
    ]


@pytest.mark.parametrize("style", ["plain", "event", "low latency"])
def test_an_exchange_lasts_until_its_rows_are_there(monkeypatch: pytest.MonkeyPatch, style: str) -> None:
    """In the call, at the event, or in the hook: send and receive are one barrier."""
    rows = _rows(monkeypatch, style)
    barriers = [(phase, ns) for phase, barrier, ns in rows if barrier]
    assert barriers == [(Phase.DISPATCH, SEND_NS + RECEIVE_NS), (Phase.COMBINE, SEND_NS + RECEIVE_NS)]


@pytest.mark.parametrize("style", ["event", "low latency"])
def test_work_between_send_and_receive_is_not_part_of_the_exchange(
    monkeypatch: pytest.MonkeyPatch, style: str
) -> None:
    """Only the time that the receive is waited for is exposed."""
    rows = _rows(monkeypatch, style, overlap=True)
    barriers = [(phase, ns) for phase, barrier, ns in rows if barrier]
    assert barriers == [(Phase.DISPATCH, RECEIVE_NS), (Phase.COMBINE, SEND_NS + RECEIVE_NS)]
    assert (Phase.SHARED_EXPERT, False, GEMM_NS) in rows
