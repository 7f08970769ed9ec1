"""SGLang's engine: what a batch that it runs is for, and where it keeps which expert."""

from __future__ import annotations

import sys
from typing import Any

from moetrace.adapters.base import EngineCall, StepFacts
from moetrace_schemas.enums import ForwardMode

RUNNER = "sglang.srt.model_executor.model_runner"
TOP_K = "sglang.srt.layers.moe.topk"
LOCATIONS = "sglang.srt.eplb.expert_location"
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
