"""SGLang's engine: what a batch is for, whose tokens a rank routes, and where it keeps which expert."""

from __future__ import annotations

import sys
from typing import Any

from moetrace.adapters import sglang_gathered
from moetrace.adapters.base import EngineCall, StepFacts
from moetrace_schemas.enums import ForwardMode

RUNNER = "sglang.srt.model_executor.model_runner"
TOP_K = "sglang.srt.layers.moe.topk"
LOCATIONS = "sglang.srt.eplb.expert_location"
BACKENDS = "sglang.srt.layers.moe.utils"
ATTENTION = "sglang.srt.layers.dp_attention"
CONTEXT = "sglang.srt.runtime_context"
MODES = {
    "EXTEND": ForwardMode.PREFILL,
    "SPLIT_PREFILL": ForwardMode.PREFILL,
    "DLLM_EXTEND": ForwardMode.PREFILL,
    "DRAFT_EXTEND": ForwardMode.PREFILL,
    "DRAFT_EXTEND_V2": ForwardMode.PREFILL,
    "DECODE": ForwardMode.DECODE,
    "TARGET_VERIFY": ForwardMode.DECODE,
    "MIXED": ForwardMode.MIXED,
}
"""By the name of SGLang's own forward mode; a verified draft is a few new tokens per sequence."""
CAPTURING = ("init_cuda_graphs", "init_device_graphs")
"""Run dummy batches before there are requests."""


def engine_calls() -> tuple[EngineCall, ...]:
    """Calls of the imported engine; none where only its layers were imported."""
    runner = getattr(sys.modules.get(RUNNER), "ModelRunner", None)
    calls = [("forward", _forward), *((name, _capturing) for name in CAPTURING)]
    return tuple(
        EngineCall(owner=runner, attribute=name, read=read)
        for name, read in calls
        if callable(getattr(runner, name, None))
    )


def _forward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepFacts | None:
    # ModelRunner.forward(self, forward_batch, ..)
    if args and getattr(args[0], "is_draft_worker", False):
        # A draft's forward is a part of the step that it drafts for.
        return None
    batch = kwargs.get("forward_batch", args[1] if len(args) > 1 else None)
    name = getattr(getattr(batch, "forward_mode", None), "name", "")
    if name == "IDLE":
        # A data-parallel rank without requests, among others that decode.
        return StepFacts(forward_mode=ForwardMode.DECODE, dummy=True)
    return StepFacts(forward_mode=MODES[name]) if name in MODES else None


def _capturing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepFacts:
    return StepFacts(dummy=True, warmup=True, is_step=False)


def not_counted() -> str:
    """Why top-k of this rank is not counted; empty where it is, and where the engine does not say.

    Without an exchange of rows between ranks (`moe_a2a_backend` none) all ranks of the tensor-parallel group
    route the very same tokens: counted on each, they would be so many times as many.
    """
    attention = sys.modules.get(ATTENTION)
    try:
        if _routes_own_rows():
            return ""
        if attention.is_dp_attention_enabled():  # type: ignore[union-attr]
            return sglang_gathered.not_told()
        rank = _attention_tp_rank(attention)
    except (AttributeError, RuntimeError, ValueError, AssertionError):
        # Another version, or only its layers were imported.
        return ""
    return (
        "ids are counted by the first rank of the tensor-parallel group: all have its tokens" if rank else ""
    )


def gathers() -> bool:
    """Whether each rank routes the rows of all data-parallel ranks, and is told which are its own."""
    try:
        enabled = sys.modules[ATTENTION].is_dp_attention_enabled()
        return bool(enabled) and not _routes_own_rows() and not sglang_gathered.not_told()
    except (AttributeError, KeyError, RuntimeError, ValueError, AssertionError):
        return False


def _routes_own_rows() -> bool:
    """Whether a rank routes rows of its own only, whatever becomes of them afterwards."""
    backends: Any = sys.modules.get(BACKENDS)
    scattered = getattr(backends, "is_moe_input_scattered_across_dp_ranks", None)
    if scattered is not None:
        return bool(scattered())
    gathers_later = getattr(backends, "should_use_flashinfer_cutlass_moe_fp4_allgather", None)
    return not backends.get_moe_a2a_backend().is_none() or (gathers_later is not None and gathers_later())


def _attention_tp_rank(attention: Any) -> int:
    # Newer versions keep all ranks in one context.
    context = getattr(sys.modules.get(CONTEXT), "get_parallel", None)
    return int(attention.get_attention_tp_rank() if context is None else context().attn_tp_rank)


def locations() -> Any | None:
    """The engine's map of experts, where the ids that kernels run are physical ones; else None."""
    remapped = getattr(sys.modules.get(TOP_K), "is_expert_remapping_enabled", None)
    get = getattr(sys.modules.get(LOCATIONS), "get_global_expert_location_metadata", None)
    if get is None or remapped is None or not remapped():
        return None
    return get()


def logical_ids(physical: Any, layer: int) -> Any:
    """Logical ids [..] of physical ones; -1 for what is none. On the device, no sync."""
    of = locations().physical_to_logical_map[layer]  # type: ignore[union-attr]
    known = (physical >= 0) & (physical < of.shape[0])
    return of[physical.long().clamp(0, of.shape[0] - 1)].where(known, -1)
