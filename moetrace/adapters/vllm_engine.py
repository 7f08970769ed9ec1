"""vLLM's engine: calls around the model that say what a forward is for.

A worker's runner gets what the scheduler put together, of which every request says whether it has produced
tokens yet. Dummy runs keep an idle data-parallel rank in step with the others, measure memory, tune
kernels and capture graphs; their tokens are nobody's.
"""

from __future__ import annotations

import sys
from typing import Any

from moetrace.adapters.base import EngineCall, StepFacts
from moetrace_schemas.enums import ForwardMode

RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
"""Modules with a GPUModelRunner; runners for other devices derive from it."""
WORKER = "vllm.v1.worker.gpu_worker"
PREPARING = ("profile_run", "capture_model", "warming_up_model")
"""Run dummy batches before there are requests."""


def engine_calls() -> tuple[EngineCall, ...]:
    """Calls of the imported engine; none where only its layers were imported."""
    found = []
    worker = getattr(sys.modules.get(WORKER), "Worker", None)
    if callable(getattr(worker, "execute_dummy_batch", None)):
        found.append(EngineCall(owner=worker, attribute="execute_dummy_batch", read=_dummy_batch))
    for module in RUNNERS:
        runner = getattr(sys.modules.get(module), "GPUModelRunner", None)
        calls = [("execute_model", _execute), ("_dummy_run", _dummy_run)]
        calls += [(name, _preparing) for name in PREPARING]
        found += [
            EngineCall(owner=runner, attribute=name, read=read)
            for name, read in calls
            if callable(getattr(runner, name, None))
        ]
    return tuple(found)


def _execute(args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepFacts | None:
    # execute_model(self, scheduler_output, ..); one of the two runners makes dummy runs with it as well.
    if kwargs.get("dummy_run", False):
        return StepFacts(dummy=True, warmup=True)
    scheduled = kwargs.get("scheduler_output", args[1] if len(args) > 1 else None)
    if not getattr(scheduled, "total_num_scheduled_tokens", 0):
        # Nothing to run, or a dummy run for the sake of the other ranks.
        return StepFacts(dummy=True, is_step=False)
    return StepFacts(forward_mode=mode_of_batch(scheduled))


def mode_of_batch(scheduled: Any) -> ForwardMode | None:
    """Prefill, decode or mixed by what a SchedulerOutput says; requests without an output are in prefill."""
    produced = getattr(scheduled.scheduled_cached_reqs, "num_output_tokens", None)
    if produced is None:
        return None
    decodes = sum(number > 0 for number in produced)
    prefills = len(scheduled.scheduled_new_reqs) + len(produced) - decodes
    if decodes and prefills:
        return ForwardMode.MIXED
    return ForwardMode.DECODE if decodes else ForwardMode.PREFILL


def _dummy_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepFacts:
    # The batch is shaped as one of decodes, so that the step fits those of the other ranks.
    return StepFacts(forward_mode=ForwardMode.DECODE, dummy=True)


def _dummy_run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepFacts:
    return StepFacts(dummy=True, warmup=True)


def _preparing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepFacts:
    return StepFacts(dummy=True, warmup=True, is_step=False)
