"""Stand-in for the package deep_ep: its classes with the parameters, attributes and results of the real ones.

As read in the public repository deepseek-ai/DeepEP in November 2026:
`Buffer` and `EventOverlap1` of release 1.2.1 (deep_ep/buffer.py, deep_ep/utils.py; 2.0 to 2.2 keep that
buffer as deep_ep/buffers/legacy.py), `ElasticBuffer` of 2.x (deep_ep/buffers/elastic.py at 0297fc8),
`EPBuffer` and `EventOverlap2` of 2.5.0 (deep_ep/buffers/ep.py at 13b3aba, deep_ep/utils/event.py at
def8651; the same in the wheel sgl-deep-ep-v25 0.1.0rc0, package deep_ep_v25), `HybridEPBuffer` of branch
hybrid-ep (deep_ep/hybrid_ep_buffer.py at 098da2a).

The wheel sgl-deep-ep 0.1.2.post1 has `Buffer` and `ElasticBuffer` as these, with more parameters between them
(`x_global_scale`, `use_nvfp4`, `overlap`): all are read by name.

What calls do, and how buffers are made, is ours: a fake clock moves on, and the rows of `Arriving` arrive,
whose numbers hold garbage until they are there.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from moetrace.testing import FakeTime

SEND_NS, RECEIVE_NS, LAYOUT_NS = 10, 100, 5
GARBAGE = 999


class Arriving:
    """Rows that every dispatch brings to a rank: local expert ids [rows, K], -1 for other ranks' experts."""

    def __init__(self, ids: list[list[int]], num_local_experts: int, rank: int, ranks: int) -> None:
        self.ids = torch.tensor(ids)
        self.num_local_experts, self.rank, self.ranks = num_local_experts, rank, ranks

    @property
    def counts(self) -> torch.Tensor:
        """Rows per local expert."""
        return torch.bincount(self.ids[self.ids >= 0], minlength=self.num_local_experts).int()

    def aligned(self, alignment: int) -> list[int]:
        """The same, each rounded up."""
        return [-(-int(count) // alignment) * alignment for count in self.counts]


class Exchange:
    """One exchange in flight: fills tensors when its rows are there."""

    def __init__(self, time: FakeTime) -> None:
        self.time = time
        self.late: list[tuple[torch.Tensor, torch.Tensor]] = []

    def later(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor that holds garbage until then."""
        tensor = torch.full_like(value, GARBAGE)
        self.late.append((tensor, value))
        return tensor

    def current_stream_wait(self) -> None:
        """As EventHandle: the current stream waits; the rows are there."""
        self.time.advance(RECEIVE_NS)
        for tensor, value in self.late:
            tensor.copy_(value)
        self.late.clear()

    def start(self, later: bool) -> Exchange:
        """Send; receive too, unless that comes later."""
        self.time.advance(SEND_NS)
        if not later:
            self.current_stream_wait()
        return self


class EventOverlap1:
    """deep_ep.utils.EventOverlap of 1.x; its `with` block waits for `event` itself."""

    def __init__(self, event: Any = None, extra_tensors: tuple[torch.Tensor, ...] | None = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self) -> None:
        """The current stream waits."""
        assert self.event is not None
        self.event.current_stream_wait()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        if self.event is not None:
            self.event.current_stream_wait()


class EventOverlap2:
    """deep_ep.utils.event.EventOverlap of 2.5: can be called, and waiting may return the call's results."""

    def __init__(self, event: Any = None, extra_tensors: tuple[torch.Tensor, ...] | None = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors
        self._release_handle_by_call = False
        self.hook_after_wait: Callable[[], Any] | None = None

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """The current stream waits; returns what the registered hook returns."""
        assert self.event is not None
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if release_handle:
            self.event = None
        return hook() if hook is not None else None

    def wait(self) -> Any:
        """The same."""
        return self.current_stream_wait()

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """For the next wait."""
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap2:
        """For a `with` block."""
        self._release_handle_by_call = release_handle
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        if self.event is not None:
            self.current_stream_wait(release_handle=self._release_handle_by_call)
        self._release_handle_by_call = False


class Buffer:
    """deep_ep.Buffer of 1.2.1."""

    def __init__(self, time: FakeTime, arriving: Arriving) -> None:
        self.time, self.arriving = time, arriving
        self.rank, self.group_size = arriving.rank, arriving.ranks
        self.wait_stats: list[torch.Tensor | None] = []
        """Tensors that calls were given to sum waits in."""
        self.waits = torch.zeros(arriving.ranks, dtype=torch.int64)
        """What a dispatch adds to them; a combine adds the double."""

    @staticmethod
    def capture() -> EventOverlap1:
        """An event of the current stream."""
        return EventOverlap1(SimpleNamespace(current_stream_wait=lambda: None))

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap1 | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap1]:
        """(tokens per rank, per RDMA rank, per expert, token in rank, event)."""
        self.time.advance(LAYOUT_NS)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        in_rank = torch.ones(len(topk_idx), self.group_size, dtype=torch.bool)
        event = EventOverlap1(Exchange(self.time) if async_finish else None)
        return in_rank.sum(0).int(), None, per_expert, in_rank, event

    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Any = None,
        previous_event: EventOverlap1 | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        """(rows, ids, weights, rows per local expert, handle, event); rows and event with a handle."""
        exchange = Exchange(self.time)
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            return x, None, None, None, None, self._event(exchange, async_finish)
        assert num_tokens_per_rank is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        ids = exchange.later(self.arriving.ids)
        numbers = [] if num_worst_tokens else self.arriving.aligned(expert_alignment)
        return x, ids, topk_weights, numbers, ("handle",), self._event(exchange, async_finish)

    def combine(
        self,
        x: torch.Tensor,
        handle: tuple[Any, ...],
        topk_weights: torch.Tensor | None = None,
        bias: Any = None,
        config: Any = None,
        previous_event: EventOverlap1 | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap1]:
        """(rows, weights, event)."""
        return x, topk_weights, self._event(Exchange(self.time), async_finish)

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, torch.Tensor, tuple[Any, ...], EventOverlap1, Callable[[], None] | None]:
        """(rows, rows per local expert, handle, event, hook)."""
        self._add(dispatch_wait_recv_cost_stats, 1)
        exchange = Exchange(self.time)
        counts = exchange.later(self.arriving.counts)
        return x, counts, ("handle", use_fp8), *self._low_latency(exchange, async_finish, return_recv_hook)

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap1, Callable[[], None] | None]:
        """(rows, event, hook)."""
        self._add(combine_wait_recv_cost_stats, 2)
        return x, *self._low_latency(Exchange(self.time), async_finish, return_recv_hook)

    def _event(self, exchange: Exchange, async_finish: bool) -> EventOverlap1:
        exchange.start(async_finish)
        return EventOverlap1(exchange if async_finish else None)

    def _low_latency(
        self, exchange: Exchange, async_finish: bool, return_recv_hook: bool
    ) -> tuple[EventOverlap1, Callable[[], None] | None]:
        assert not (async_finish and return_recv_hook)
        exchange.start(async_finish or return_recv_hook)
        event = EventOverlap1(exchange if async_finish else None)
        return event, exchange.current_stream_wait if return_recv_hook else None

    def _add(self, stats: torch.Tensor | None, times: int) -> None:
        # The kernels' host code asks for one dimension, whatever the package's own docstring says.
        self.wait_stats.append(stats)
        if stats is not None:
            shape = (self.arriving.ranks,)
            assert (stats.dtype, stats.shape, stats.is_contiguous()) == (torch.int64, shape, True)
            stats += self.waits * times


class EPHandle:
    """What EPBuffer.dispatch returns for the combine, as far as it tells of rows."""

    def __init__(self, arriving: Arriving, exchange: Exchange, alignment: int, synced: bool, expand: bool):
        self.do_expand, self.expert_alignment = expand, alignment
        self.num_recv_tokens_per_expert_list = arriving.aligned(alignment) if synced else []
        aligned = torch.tensor(arriving.aligned(alignment), dtype=torch.int32)
        self.psum_num_recv_tokens_per_expert = exchange.later(aligned.cumsum(0, dtype=torch.int32))
        # Filled in expand mode only.
        counts = arriving.counts if expand else torch.full((arriving.num_local_experts,), GARBAGE)
        self.num_unaligned_recv_tokens_per_expert = exchange.later(counts)


class EPBuffer:
    """deep_ep.EPBuffer of 2.5.0."""

    def __init__(self, time: FakeTime, arriving: Arriving) -> None:
        self.time, self.arriving = time, arriving
        self.rank_idx, self.num_ranks = arriving.rank, arriving.ranks

    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = False,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        defer_epilogue: bool = False,
    ) -> Any:
        """(rows, ids, weights, handle, event); deferred: the event, whose wait returns the first four."""
        exchange = Exchange(self.time)
        synced = handle is None and do_cpu_sync is not False
        made = handle or EPHandle(self.arriving, exchange, expert_alignment or 1, synced, do_expand)
        ids = self.arriving.ids
        if not synced:
            # Behind the received rows lies what an earlier batch has left.
            ids = torch.cat([ids, torch.zeros_like(ids)])
        results = x, None if do_expand else exchange.later(ids), topk_weights, made
        exchange.start(async_with_compute_stream)
        event = EventOverlap2(exchange if async_with_compute_stream else None)
        if not defer_epilogue:
            return *results, event
        assert async_with_compute_stream
        event.register_hook_after_wait(lambda: results)
        return event

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        defer_epilogue: bool = False,
    ) -> Any:
        """(rows, weights, event); deferred: the event, whose wait returns the first two."""
        exchange = Exchange(self.time).start(async_with_compute_stream)
        event = EventOverlap2(exchange if async_with_compute_stream else None)
        if not defer_epilogue:
            return x, topk_weights, event
        event.register_hook_after_wait(lambda: (x, topk_weights))
        return event


class ElasticBuffer:
    """deep_ep.ElasticBuffer of 2.x; `group_size` is `num_ranks` there."""

    def __init__(self, time: FakeTime, arriving: Arriving) -> None:
        self._buffer = EPBuffer(time, arriving)
        self.rank_idx, self.num_ranks = arriving.rank, arriving.ranks

    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> Any:
        """(rows, ids, weights, handle, event)."""
        return EPBuffer.dispatch(
            self._buffer,
            x,
            topk_idx,
            topk_weights,
            expert_alignment=expert_alignment,
            async_with_compute_stream=async_with_compute_stream,
            handle=handle,
            do_cpu_sync=do_cpu_sync,
            do_expand=do_expand,
        )

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        """(rows, weights, event)."""
        exchange = Exchange(self._buffer.time).start(async_with_compute_stream)
        return x, topk_weights, EventOverlap2(exchange if async_with_compute_stream else None)


class HybridEPBuffer:
    """deep_ep.HybridEPBuffer: every call ends when it returns."""

    def __init__(self, time: FakeTime, arriving: Arriving) -> None:
        self.time, self.arriving = time, arriving
        self.rank, self.group_size = arriving.rank, arriving.ranks

    def dispatch_with_permute(
        self,
        *,
        hidden: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        scaling_factor: torch.Tensor | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        handle: tuple[Any, ...] | None = None,
        non_blocking: bool = False,
    ) -> tuple[Any, ...]:
        """(rows, probabilities, scales, rows per local expert, handle)."""
        Exchange(self.time).start(False)
        return hidden, probs, scaling_factor, self.arriving.counts, ("handle",)

    def combine_with_unpermute(
        self,
        *,
        hidden: torch.Tensor,
        probs: torch.Tensor | None = None,
        handle: tuple[Any, ...] | None = None,
        pad_multiple: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(rows, probabilities)."""
        Exchange(self.time).start(False)
        return hidden, probs


def package(*buffers: type, event: type = EventOverlap1) -> Any:
    """A module deep_ep that holds these buffers and this event."""
    module: Any = ModuleType("deep_ep")
    for buffer in buffers:
        setattr(module, buffer.__name__, buffer)
    module.EventOverlap = event
    return module
