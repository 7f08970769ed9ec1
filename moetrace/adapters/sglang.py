"""SGLang: fused MoE layers with a dispatcher of their own, beside a `gate` and a `topk` in the block.

Dispatchers that split each exchange in two (issue, then receive) are wrapped in both halves, since
two-batch overlap calls the halves and not `dispatch` and `combine`; what is a barrier is the receiving
half. Where top-k is left to the kernel (bypassed), nothing is counted; where the model routes by itself,
always or where a kernel of its own can, the ids that it calls the experts with are; where all ranks of a
tensor-parallel group route the same tokens (no exchange backend), the first one counts; where rows of
data-parallel ranks are gathered before that, each counts its own (moetrace.adapters.sglang_gathered). With
experts that are replicated or moved the ids in a top-k output are physical: they are counted as such, and by
the engine's map as logical.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from moetrace.adapters.base import (
    ExpertParallel,
    LayerMatch,
    ModelMatch,
    RouteCounter,
    Target,
    layer_numbers,
)
from moetrace.adapters.sglang_engine import engine_calls, gathers, locations, logical_ids, not_counted
from moetrace.adapters.sglang_gathered import add_own
from moetrace.adapters.sglang_gathered import notes as gathered_notes
from moetrace.adapters.targets import count, experts_call, layer_forward, phase
from moetrace_schemas.enums import CountKind, Phase

HALVES = (
    ("dispatch_a", Phase.PERMUTE),
    ("dispatch_b", Phase.DISPATCH),
    ("combine_a", Phase.UNPERMUTE),
    ("combine_b", Phase.COMBINE),
)
MOST_CHOSEN = 192
"""Tensors that one layer's top-k gave and that are remembered, some three for each of its results."""
Add = Callable[[RouteCounter, int, Any], None]
SHARED_NAMES = ("shared_experts", "shared_expert")


class SGLangAdapter:
    """Modules with `run_moe_core` and a dispatcher."""

    name = "sglang"
    looks_for = (
        "modules with the method `run_moe_core` and a `dispatcher` with dispatch and combine, as in SGLang"
    )

    def match(self, model: Any) -> ModelMatch:
        """Layers in module order."""
        modules = dict(model.named_modules())
        found = [
            (path, module, modules.get(path.rpartition(".")[0]) if path else None)
            for path, module in modules.items()
            if callable(getattr(module, "run_moe_core", None))
            and all(
                callable(getattr(getattr(module, "dispatcher", None), m, None))
                for m in ("dispatch", "combine")
            )
        ]
        own = [getattr(module, "layer_id", None) for _, module, _ in found]
        numbers = [number for number in own if isinstance(number, int)]
        if len(set(numbers)) != len(found):
            numbers = layer_numbers([path for path, *_ in found])
        layers = (_layer(*each, number) for each, number in zip(found, numbers, strict=True))
        return ModelMatch(layers=tuple(layers), engine_calls=engine_calls() if found else ())


def _layer(path: str, experts: Any, around: Any, layer: int) -> LayerMatch:
    children = dict(around.named_children()) if around is not None else {}
    top_k = children.get("topk")
    is_block = top_k is not None
    here = f"{path}." if path else ""
    above = f"{path.rpartition('.')[0]}." if "." in path else ""
    parallel, moved = _parallel(experts), locations()
    targets = [layer_forward(around if is_block else experts, layer, f"{above if is_block else here}forward")]
    phases = {Phase.OUTSIDE, Phase.ROUTER, Phase.EXPERT_GEMM}
    notes: list[str] = []
    elsewhere = not_counted()
    counted = not elsewhere and (top_k is not None or moved is None)
    if "gate" in children:
        targets.append(phase(children["gate"], "forward", layer, f"{above}gate.forward", Phase.ROUTER))
    if top_k is not None:
        targets.append(phase(top_k, "forward", layer, f"{above}topk.forward", Phase.ROUTER))
        if elsewhere:
            notes.append(elsewhere)
        else:
            gathered = gathers()
            notes += gathered_notes() if gathered else ()
            name = f"{above}topk.forward"
            targets += _counts(top_k, experts, layer, (name, f"{here}forward"), gathered, own=moved is None)
        if moved is not None and not elsewhere:
            notes.append("counted by physical expert, and by logical one as the engine's map says")
    elif counted:
        phases -= set() if "gate" in children else {Phase.ROUTER}
        gathered = gathers()
        add = add_own if gathered else _add_all
        notes += gathered_notes() if gathered else ()
        notes.append("no top-k beside the experts: counted by the ids that they are called with")
        targets.append(count(experts, "forward", layer, f"{here}forward", partial(_count_given, add)))
    else:
        phases -= set() if "gate" in children else {Phase.ROUTER}
        # Whether ids that the model has made are logical or physical, nothing says.
        notes.append(elsewhere or "no top-k beside the experts, and experts are moved: ids are not counted")
    for name in SHARED_NAMES:
        if children.get(name) is not None:
            phases.add(Phase.SHARED_EXPERT)
            # Which of several forwards a batch takes is decided per call.
            targets.append(
                phase(
                    children[name],
                    "forward",
                    layer,
                    f"{above}{name}.forward",
                    Phase.SHARED_EXPERT,
                    per_step=False,
                )
            )
    targets += _dispatcher(experts.dispatcher, layer, f"{here}dispatcher", parallel)
    targets.append(experts_call(experts, "run_moe_core", layer, f"{here}run_moe_core"))
    phases |= {Phase.PERMUTE, Phase.UNPERMUTE}
    if parallel is None:
        notes.append("no expert parallelism: no exchange to time")
    else:
        phases |= {Phase.DISPATCH, Phase.COMBINE}
        look = partial(_count_received, experts, None if moved is None else (layer, parallel.rank))
        name = f"{here}run_moe_core"
        targets.append(count(experts, "run_moe_core", layer, name, look, CountKind.RECEIVED))
    return LayerMatch(
        layer=layer,
        path=path,
        adapter=SGLangAdapter.name,
        num_experts=int(experts.num_experts if moved is None else moved.num_logical_experts),
        num_physical=0 if moved is None else int(moved.num_physical_experts),
        received_logical=moved is not None,
        num_local_experts=int(experts.num_local_experts),
        targets=tuple(targets),
        phases=tuple(known for known in Phase if known in phases),
        counted=counted,
        sentinels=True,
        exact_rows=False,
        parallel=parallel,
        notes=tuple(notes),
    )


def _dispatcher(dispatcher: Any, layer: int, name: str, parallel: ExpertParallel | None) -> list[Target]:
    if all(callable(getattr(dispatcher, half, None)) for half, _ in HALVES):
        return [phase(dispatcher, half, layer, f"{name}.{half}", kind) for half, kind in HALVES]
    to, back = (Phase.PERMUTE, Phase.UNPERMUTE) if parallel is None else (Phase.DISPATCH, Phase.COMBINE)
    return [
        phase(dispatcher, "dispatch", layer, f"{name}.dispatch", to),
        phase(dispatcher, "combine", layer, f"{name}.combine", back),
    ]


def _parallel(experts: Any) -> ExpertParallel | None:
    size, rank = int(getattr(experts, "moe_ep_size", 1)), int(getattr(experts, "moe_ep_rank", 0))
    if size == 1:
        return None
    import torch.distributed as dist

    # Ranks of one group are neighbours, unless tensor parallelism inside experts lies between them.
    here = dist.get_rank() if dist.is_available() and dist.is_initialized() else rank
    return ExpertParallel(rank=rank, size=size, group=here - rank)


def _counts(
    top_k: Any, experts: Any, layer: int, names: tuple[str, str], gathered: bool, *, own: bool
) -> list[Target]:
    """`own`: ids are logical ones; `gathered`: of rows that are not all this rank's."""
    add = add_own if gathered else _add_all
    name, experts_name = names
    if own:
        choice = _Choice(add)
        return [
            count(top_k, "forward", layer, name, choice.chosen),
            count(experts, "forward", layer, experts_name, choice.given),
        ]
    return [
        count(top_k, "forward", layer, name, partial(_count_logical, add, layer)),
        count(top_k, "forward", layer, name, partial(_count_ids, add), CountKind.PHYSICAL),
    ]


class _Choice:
    """Counts what a layer's top-k chose; where a model went past it, what the experts are called with.

    By the tensors themselves and not by turns: halves of a batch may be routed before either's experts run,
    and experts may run more than once, or behind another function than their forward. By any of them, for a
    model may append its shared experts to ids and weights (srt/models/qwen2_moe.py) and leave the logits.
    """

    def __init__(self, add: Add) -> None:
        self._add = add
        self._chosen: dict[int, weakref.ref[Any]] = {}
        """What top-k gave in this step, by its identity; not kept alive, for it is the device's memory."""

    def _begin(self, counter: RouteCounter, index: int) -> None:
        if not counter.counted(index):
            self._chosen.clear()

    def chosen(
        self, counter: RouteCounter, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Of forward(hidden_states, router_logits, ..)."""
        self._begin(counter, index)
        for tensor in _tensors(result):
            if len(self._chosen) >= MOST_CHOSEN:
                del self._chosen[next(iter(self._chosen))]
            self._chosen[id(tensor)] = weakref.ref(tensor)
        _count_ids(self._add, counter, index, args, kwargs, result)

    def given(
        self, counter: RouteCounter, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Of forward(hidden_states, topk_output, ..)."""
        self._begin(counter, index)
        if not any(map(self._is_chosen, _tensors(_top_k_output(args, kwargs)))):
            _count_given(self._add, counter, index, args, kwargs, result)

    def _is_chosen(self, tensor: Any) -> bool:
        known = self._chosen.get(id(tensor))
        # The number of one that is gone may be another's by now.
        return known is not None and known() is tensor


def _add_all(counter: RouteCounter, index: int, ids: Any) -> None:
    counter.add(index, ids)


def _count_ids(
    add: Add, counter: RouteCounter, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> None:
    # Rows of padding have ids of -1. The last columns of weights may be those of shared experts.
    ids = _ids(result)
    if ids is not None:
        add(counter, index, ids)


def _count_given(
    add: Add, counter: RouteCounter, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> None:
    _count_ids(add, counter, index, args, kwargs, _top_k_output(args, kwargs))


def _top_k_output(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of the experts' forward(hidden_states, topk_output, ..)."""
    return args[1] if len(args) > 1 else kwargs.get("topk_output")


def _tensors(top_k_output: Any) -> list[Any]:
    """Ids, packed or not, and what comes with them; nothing where the kernel chooses them."""
    ids, *others = (
        getattr(top_k_output, name, None)
        for name in ("topk_ids", "packed_topk_ids", "topk_weights", "router_logits")
    )
    if ids is None and others[0] is None:
        return []
    return [tensor for tensor in (ids, *others) if hasattr(tensor, "shape")]


def _ids(top_k_output: Any) -> Any | None:
    """Ids [rows, K] of a top-k output; None where its kernel chooses them."""
    ids = getattr(top_k_output, "topk_ids", None)
    packed = getattr(top_k_output, "packed_topk_ids", None)
    # In the upper half of 32 bits, with the weight in the lower one.
    return ids if ids is not None or packed is None else packed >> 16


def _count_logical(
    add: Add,
    layer: int,
    counter: RouteCounter,
    index: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
) -> None:
    ids = _ids(result)
    if ids is not None:
        add(counter, index, logical_ids(ids, layer))


def _count_received(
    experts: Any,
    moved: tuple[int, int] | None,
    counter: RouteCounter,
    index: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
) -> None:
    """`moved`: layer and ep_rank where local experts are slots."""
    # run_moe_core(dispatch_output)
    dispatched = args[0] if args else kwargs["dispatch_output"]
    rows, ids = _received(dispatched), _received_ids(experts, dispatched)
    if moved is None:
        if rows is not None:
            counter.add_counts(index, rows, 0)
        elif ids is not None:
            counter.add(index, ids)
        return
    layer, rank = moved
    places: Any = locations()
    local = places.num_physical_experts // places.ep_size
    slots = places.physical_to_logical_map[layer, rank * local : (rank + 1) * local].long()
    if rows is not None:
        counts = slots.new_zeros(places.num_logical_experts)
        counter.add_counts(index, counts.scatter_add_(0, slots, rows.to(slots.dtype)), 0)
    elif ids is not None:
        here = (ids >= 0) & (ids < local)
        counter.add(index, slots[ids.long().clamp(0, local - 1)].where(here, -1))


def _received_ids(experts: Any, dispatched: Any) -> Any | None:
    """Local ids of the rows that experts get, others below 0; None where nothing says them."""
    if not hasattr(dispatched, "topk_output"):
        return getattr(dispatched, "topk_ids", None)
    # Without an exchange each rank has all rows, and its experts take theirs.
    dispatcher, ids = experts.dispatcher, getattr(dispatched.topk_output, "topk_ids", None)
    if ids is None or int(getattr(dispatcher, "num_local_shared_experts", 0)):
        return None
    mapped = (
        getattr(dispatcher, "local_expert_mapping", None) is not None
        and not getattr(dispatcher, "skip_local_expert_mapping", False)
        and not getattr(dispatcher, "use_aiter_moe_runner", False)
    )
    # Some kernels take the ids of all ranks' experts.
    return ids if mapped else ids - experts.moe_ep_rank * experts.num_local_experts


def _received(dispatched: Any) -> Any | None:
    """Rows per local expert on the device; None where ids of rows say it, or nothing does."""
    if isinstance(getattr(dispatched, "num_recv_tokens_per_expert", None), list):
        # Normal kernels: rounded up to what the GEMM wants, beside exact local ids of the rows.
        return None
    for name in ("num_recv_tokens_per_expert", "masked_m"):
        if (rows := getattr(dispatched, name, None)) is not None:
            return rows
    ends = getattr(dispatched, "psum_num_recv_tokens_per_expert", None)
    if ends is None or not getattr(dispatched, "is_expanded", False):
        return None
    # Each expert's rows begin at the next multiple of the alignment behind those of the one before it.
    alignment = dispatched.expert_alignment
    starts = ends.roll(1).add(alignment - 1).div(alignment, rounding_mode="floor").mul(alignment)
    starts[0] = 0
    return ends - starts
