"""The JSON document of `moetrace replay --json`. Pure.

Its schema is published as moetrace_schemas/json/replay_result.schema.json; names are added there first, and
never removed or reused. `in_sample` and `held_out` are balancedness_sum, times beside them are milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moetrace_collectors.load.document import number, whole
from moetrace_collectors.placement.alternatives import Alternative
from moetrace_collectors.placement.migration import Migration
from moetrace_collectors.placement.recommendation import Recommendation
from moetrace_collectors.placement.replay import PlannerResult, ReplayCase, Score, folds

SCHEMA_NAME = "replay_result.schema.json"
DOCUMENT_VERSION = 1


def build_document(
    case: ReplayCase,
    results: Sequence[PlannerResult],
    options: Sequence[Alternative],
    recommendation: Recommendation,
    *,
    assumptions: Sequence[str],
    warnings: Sequence[str],
) -> dict[str, Any]:
    """The document as plain JSON types."""
    series, cost = case.series, case.cost
    topology = cost.topology
    return {
        "document_version": DOCUMENT_VERSION,
        "source": series.source,
        "forward_mode": str(series.forward_mode) if series.forward_mode else None,
        "cohort": series.cohort,
        "steps": int(series.steps_in_entry.sum()),
        "layers": [int(layer) for layer in series.layers],
        "experts": int(series.loads.shape[2]),
        "placement_version": series.placement_version,
        "slots": case.num_slots,
        "ranks": topology.num_ranks,
        "nodes": topology.num_nodes,
        "groups": case.num_groups,
        "folds": [
            {
                "planned_on": [int(series.steps[0]), int(series.steps[fold.plan.stop - 1])],
                "scored_on": [int(series.steps[fold.score.start]), int(series.steps[fold.score.stop - 1])],
            }
            for fold in folds(len(series.loads), case.windows)
        ],
        "costs": {
            "times": str(cost.gemm.basis),
            "gemm_start_us": cost.gemm.start_us,
            "gemm_us_per_row": cost.gemm.us_per_row,
            "row_bytes": cost.row_bytes,
            "copies": str(cost.copies),
            "coactivation": case.coactivation is not None and cost.top_k is not None,
            "node_gb_per_s": topology.node_gb_per_s,
            "link_gb_per_s": topology.link_gb_per_s,
            "expert_bytes": case.memory.expert_bytes,
            "step_ms": series.step_ms,
            "horizon_s": case.horizon_s,
        },
        "memory": {
            "memory_gb": case.memory.memory_gb,
            "reserved_gb": case.memory.reserved_gb,
            "experts_gb": case.memory.experts_gb(case.num_slots // topology.num_ranks),
            "most_slots_per_rank": case.memory.most_slots_per_rank,
        },
        "planners": [_planner(case, result) for result in results],
        "alternatives": [_alternative(option) for option in options],
        "recommendation": {
            "action": str(recommendation.action),
            "planner": recommendation.planner,
            "slots": recommendation.slots,
            "saved": recommendation.saved,
            "net_saved": recommendation.net_saved,
            "break_even_s": recommendation.break_even_s,
            "reasons": list(recommendation.reasons),
            "sentence": recommendation.sentence,
        },
        "assumptions": list(assumptions),
        "warnings": list(warnings),
    }


def _planner(case: ReplayCase, result: PlannerResult) -> dict[str, Any]:
    fullest = result.rank_loads.max(axis=1)
    held_out, in_sample = result.held_out, result.in_sample
    return {
        "planner": result.planner,
        "replica_counts": result.placement.replica_counts.tolist(),
        "physical_to_logical": result.placement.physical_to_logical.tolist(),
        "rank_loads": [[whole(load) for load in layer] for layer in result.rank_loads.tolist()],
        "max_rank_load": whole(float(fullest.max())),
        "max_rank_loads": [whole(load) for load in fullest.tolist()],
        "balancedness_sum": number(result.balancedness),
        "balancedness_per_step": number(result.per_step),
        "in_sample": _balance(in_sample),
        "held_out": _balance(held_out),
        "held_out_loss": (
            number(in_sample.balancedness - held_out.balancedness) if in_sample and held_out else None
        ),
        "in_sample_per_step": number(in_sample.per_step) if in_sample else None,
        "held_out_per_step": number(held_out.per_step) if held_out else None,
        "predicted_step_ms": result.step_ms,
        "in_sample_step_ms": in_sample.step_ms if in_sample else None,
        "held_out_step_ms": held_out.step_ms if held_out else None,
        "better_folds": held_out.better_folds if held_out else None,
        "saved": result.saved,
        "migration_copies": result.migration.copies,
        "migration_bytes": whole(result.migration.bytes),
        "migration_s": result.migration.seconds,
        "break_even_s": result.break_even_s,
        "pays": result.break_even_s is not None
        and result.break_even_s <= case.horizon_s
        and result.saved > 0.0,
    }


def _balance(score: Score | None) -> float | None:
    return None if score is None else number(score.balancedness)


def _alternative(option: Alternative) -> dict[str, Any]:
    return {
        "option": str(option.option),
        "possible": option.possible,
        "planner": option.result.planner if option.result else None,
        "slots": option.result.placement.num_slots if option.result else None,
        "step_ms": option.step_ms,
        "saved": option.saved,
        **_migration(option.migration),
        "break_even_s": option.break_even_s,
        "memory_gb_per_rank": option.memory_gb,
        "sync_bytes_per_step": whole(option.sync_bytes),
        "throughput": option.throughput,
        "note": option.note,
    }


def _migration(cost: Migration | None) -> dict[str, Any]:
    return {
        "migration_bytes": None if cost is None else whole(cost.bytes),
        "migration_s": None if cost is None else cost.seconds,
    }
