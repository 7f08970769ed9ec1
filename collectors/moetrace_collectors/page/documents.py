"""Records -> the JSON of the page's endpoints. Pure; shapes: moetrace_schemas/json/page_api.schema.json.

Durations are integer nanoseconds. What is long comes as rows of numbers beside the names of their columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from moetrace_collectors.counted_steps import counted_steps
from moetrace_collectors.model import Suspect
from moetrace_collectors.views.browse_records import (
    LoadSums,
    RunCosts,
    RunEntry,
    StepPage,
    StepView,
    TrafficBlocks,
)
from moetrace_collectors.views.findings import Summary
from moetrace_collectors.views.run_notices import Notice, PlacementEpoch
from moetrace_collectors.views.run_records import BarrierRow, LoadMatrix, StepRow
from moetrace_collectors.views.step_sentence import runner_up_sentence, suspect_sentence
from moetrace_collectors.views.summarise import summarise
from moetrace_collectors.views.svg_heat_map import EXPERT_EDGES, RANK_EDGES
from moetrace_collectors.views.timeline import MarkKind, Timeline, costliest_window
from moetrace_schemas.enums import Phase

MAX_COST_RANKS = 12
MAX_EXCHANGES = 8
MIN_WINDOW_STRETCHES = 6
"""Stretches of a critical path from which on a closer look is offered."""
MARK_COLUMNS = (
    "kind",
    "phase",
    "layer",
    "start_ns",
    "duration_ns",
    "side_stream",
    "error",
    "rows",
    "backward",
)
PHASES = tuple(Phase)
"""The code of a phase in rows of numbers is its place here."""


def runs_document(entries: Iterable[RunEntry]) -> dict[str, Any]:
    """GET api/runs."""
    return {"runs": [run_entry(entry) for entry in entries]}


def run_entry(entry: RunEntry) -> dict[str, Any]:
    """One run."""
    return {
        "run_id": entry.run_id,
        "model": " ".join(part for part in (entry.model_name, entry.model_version) if part),
        "ranks": entry.ranks,
        "hosts": entry.hosts,
        "sample_period": entry.sample_period,
        "forward_modes": [str(mode) for mode in entry.forward_modes],
        "steps": entry.steps,
        "warmup_steps": entry.warmup_steps,
        "last_step": entry.last_step,
        "first_unix_ms": entry.first_unix_ns // 1_000_000,
        "last_unix_ms": entry.last_unix_ns // 1_000_000,
        "clear_steps": entry.clear_steps,
        "ambiguous_steps": entry.ambiguous_steps,
        "step_median_ns": entry.step_median_ns,
        "step_p95_ns": entry.step_p95_ns,
    }


def overview_document(
    costs: RunCosts,
    summary: Summary,
    *,
    notices: Iterable[Notice],
    epochs: Iterable[PlacementEpoch],
    strip: int,
) -> dict[str, Any]:
    """GET api/overview; `strip` is how many of the newest steps are drawn as bars."""
    return {
        "run": run_entry(costs.entry),
        "headline": summary.headline,
        "remark": summary.remark,
        "next_steps": list(summary.next_steps),
        "notices": [
            {
                "kind": str(notice.kind),
                "text": notice.text,
                "sql": notice.sql,
                "parameters": dict(notice.parameters),
            }
            for notice in notices
        ],
        "epochs": [_epoch(epoch) for epoch in epochs],
        "read_steps": len(costs.steps),
        "counted": summary.counted.sentence(),
        "counted_steps": summary.counted_steps,
        "partial_steps": summary.partial_steps,
        "evidence": {str(member): count for member, count in summary.evidence.items()},
        "extension_median_ns": summary.extension_median_ns,
        "outstanding": [
            {
                "rank": place.rank,
                "phase": str(place.phase),
                "layer": place.layer,
                "worth_median_ns": place.worth_median_ns,
            }
            for place in summary.outstanding
        ],
        "modes": _modes(costs.steps),
        "by_rank": _by_rank(costs),
        "by_layer": _by_layer(costs.by_layer),
        "strip": [step_entry(row) for row in costs.steps[-strip:]],
    }


def _epoch(epoch: PlacementEpoch) -> dict[str, Any]:
    return {
        "version": epoch.version,
        "previous_version": epoch.previous_version,
        "rollback_version": epoch.rollback_version,
        "step": epoch.step,
        "state": str(epoch.state),
        "verdict": epoch.verdict,
        "event_unix_ms": {str(event): unix_ms for event, unix_ms in epoch.event_unix_ms.items()},
        "policy_version": epoch.policy_version,
        "experts_copied": epoch.experts_copied,
    }


def _modes(steps: Iterable[StepRow]) -> list[dict[str, Any]]:
    """Medians per forward mode: one figure over prefill and decode together would say nothing."""
    by_mode: dict[str, list[StepRow]] = defaultdict(list)
    for row in steps:
        if not row.warmup:
            by_mode[str(row.forward_mode)].append(row)
    modes = []
    for mode, rows in sorted(by_mode.items()):
        summary = summarise(rows)
        modes.append(
            {
                "forward_mode": mode,
                "steps": len(rows),
                "median_ns": summary.step_median_ns,
                "p95_ns": summary.step_p95_ns,
                "phase_median_ns": {
                    str(phase): value for phase, value in summary.phase_median_ns.items() if value
                },
                "headline": summary.headline,
                "remark": summary.remark,
                "next_steps": list(summary.next_steps),
            }
        )
    return modes


def _by_rank(costs: RunCosts) -> dict[str, Any]:
    """The costliest ranks by phase, and what is left of the others."""
    cells: dict[int, dict[str, int]] = defaultdict(dict)
    ambiguous_ns = 0
    for item in costs.by_rank:
        cells[item.rank][str(item.phase)] = item.extension_ns
        ambiguous_ns += item.ambiguous_ns
    totals = {rank: sum(row.values()) for rank, row in cells.items()}
    ranked = sorted(cells, key=lambda rank: (-totals[rank], rank))
    return {
        "ranks": [
            {
                "rank": rank,
                "layer": costs.layer_of_rank.get(rank),
                "phases": cells[rank],
                "total_ns": totals[rank],
            }
            for rank in ranked[:MAX_COST_RANKS]
        ],
        "other_ranks": max(0, len(ranked) - MAX_COST_RANKS),
        "other_ns": sum(totals[rank] for rank in ranked[MAX_COST_RANKS:]),
        "ambiguous_ns": ambiguous_ns,
    }


def _by_layer(extensions: Mapping[tuple[int, Phase], int]) -> list[dict[str, Any]]:
    cells: dict[int, dict[str, int]] = defaultdict(dict)
    for (layer, phase), total in extensions.items():
        cells[layer][str(phase)] = total
    # The step's tail, layer -1, comes behind the layers.
    return [{"layer": layer, "phases": cells[layer]} for layer in sorted(cells, key=lambda n: (n < 0, n))]


def steps_document(
    page: StepPage, *, epochs: Iterable[PlacementEpoch], number: int, size: int
) -> dict[str, Any]:
    """GET api/steps."""
    return {
        "rows": [step_entry(row) for row in page.rows],
        "total": page.total,
        "page": number,
        "pages": max(1, -(-page.total // size)),
        "last_step": page.last_step,
        "newest_step": page.newest_step,
        "epochs": [_epoch(epoch) for epoch in epochs if epoch.step is not None],
        "facets": {
            "evidence": list(page.facets.evidences),
            "cause": list(page.facets.causes),
            "phase": list(page.facets.phases),
            "mode": list(page.facets.forward_modes),
        },
    }


def step_entry(row: StepRow) -> dict[str, Any]:
    """One step and its verdict."""
    return {
        "step": row.step,
        "start_unix_ms": row.start_unix_ns // 1_000_000,
        "forward_mode": str(row.forward_mode),
        "evidence": str(row.evidence),
        "cause": str(row.cause),
        "reason": row.reason,
        "suspect": _suspect(row.suspect),
        "runner_up": _suspect(row.runner_up),
        "step_ns": row.step_ns,
        "extension_ns": row.extension_ns,
        "missing_ranks": list(row.missing_ranks[:MAX_COST_RANKS]),
        "num_missing": len(row.missing_ranks),
        "warmup": row.warmup,
    }


def _suspect(suspect: Suspect | None) -> dict[str, Any] | None:
    if suspect is None:
        return None
    return {
        "rank": suspect.rank,
        "phase": str(suspect.phase),
        "layer": suspect.layer,
        "worth_ns": suspect.worth_ns,
        "share": round(suspect.share, 4),
    }


def step_document(view: StepView) -> dict[str, Any]:
    """GET api/step."""
    row = view.row
    costliest = sorted(view.barriers, key=lambda barrier: -barrier.extension_ns)[:MAX_EXCHANGES]
    return {
        "step": step_entry(row),
        "sentence": suspect_sentence(row),
        "why": row.reason[:1].upper() + row.reason[1:],
        "next": runner_up_sentence(row),
        "phase_ns": {str(phase): value for phase, value in row.phase_ns.items() if value},
        "before": view.before,
        "behind": view.behind,
        "budget_columns": ["rank", "ep_group", "work_ns", "transfer_ns", "wait_ns"],
        "budgets": [
            [item.rank, item.ep_group, item.work_ns, item.transfer_ns, item.wait_ns] for item in view.budgets
        ],
        "exchanges": [_exchange(barrier) for barrier in costliest if barrier.extension_ns > 0],
    }


def _exchange(barrier: BarrierRow) -> dict[str, Any]:
    return {
        "layer": barrier.layer,
        "phase": str(barrier.phase),
        "rank": barrier.releaser_rank,
        "work_phase": str(barrier.work_phase),
        "extension_ns": barrier.extension_ns,
        "transfer_ns": barrier.transfer_ns,
        "ambiguous": barrier.ambiguous,
    }


def timeline_document(timeline: Timeline) -> dict[str, Any]:
    """GET api/timeline."""
    codes = {phase: code for code, phase in enumerate(PHASES)}
    kinds = {kind: code for code, kind in enumerate(MarkKind)}
    window = costliest_window(timeline, at_least=MIN_WINDOW_STRETCHES)
    return {
        "end_ns": timeline.end_ns,
        "window": None if window is None else list(window),
        "hidden_ranks": timeline.hidden_ranks,
        "phases": [str(phase) for phase in PHASES],
        "kinds": [str(kind) for kind in MarkKind],
        "mark_columns": list(MARK_COLUMNS),
        "lanes": [
            {
                "rank": lane.rank,
                "marks": [
                    [
                        kinds[mark.kind],
                        codes[mark.phase],
                        mark.layer,
                        mark.start_ns,
                        mark.duration_ns,
                        int(mark.side_stream),
                        int(mark.error),
                        mark.rows,
                        int(mark.direction == "backward"),
                    ]
                    for mark in lane.marks
                ],
            }
            for lane in timeline.lanes
        ],
        "critical": [
            {
                "rank": stretch.rank,
                "barrier": stretch.barrier,
                "start_ns": stretch.start_ns,
                "end_ns": stretch.end_ns,
                "layer": stretch.layer,
                "phase": str(stretch.phase),
                "extension_ns": stretch.extension_ns,
                "certain": stretch.certain,
            }
            for stretch in timeline.critical
        ],
    }


def loads_document(sums: LoadSums) -> dict[str, Any]:
    """GET api/loads."""
    return {
        "forward_modes": [str(mode) for mode in sums.forward_modes],
        "forward_mode": str(sums.forward_mode),
        "cohorts": list(sums.cohorts),
        "cohort": sums.cohort,
        "steps": list(sums.steps),
        "counted": counted_steps(sums.steps, kind=str(sums.forward_mode)).sentence(),
        "experts": _matrix(sums.experts, EXPERT_EDGES),
        "ranks": _matrix(sums.ranks, RANK_EDGES),
        "imbalance": [
            {
                "layer": layer.layer,
                "pairs": layer.pairs,
                "experts": layer.experts,
                "max_mean_ratio": round(layer.max_mean_ratio, 4),
                "cv": round(layer.cv, 4),
                "rank_max_mean_ratio": None
                if layer.rank_max_mean_ratio is None
                else round(layer.rank_max_mean_ratio, 4),
                "hot_expert": layer.hot_expert,
                "dead_experts": layer.dead_experts,
            }
            for layer in sums.imbalance
        ],
    }


def _matrix(matrix: LoadMatrix | None, edges: tuple[float, ...]) -> dict[str, Any] | None:
    if matrix is None:
        return None
    return {
        "layers": list(matrix.layers),
        "columns": list(matrix.columns),
        "counts": [list(row) for row in matrix.counts],
        "means": [
            round(fmean([value for value in row if value is not None] or [0]), 3) for row in matrix.counts
        ],
        "edges": list(edges),
    }


def traffic_document(traffic: TrafficBlocks) -> dict[str, Any]:
    """GET api/traffic."""
    sent = [value for row in traffic.bytes for value in row]
    return {
        "forward_modes": [str(mode) for mode in traffic.forward_modes],
        "forward_mode": str(traffic.forward_mode),
        "steps": list(traffic.steps),
        "counted": counted_steps(traffic.steps, kind=str(traffic.forward_mode)).sentence(),
        "ranks": traffic.ranks,
        "block": traffic.block,
        "sources": list(traffic.sources),
        "destinations": list(traffic.destinations),
        "rows": [list(row) for row in traffic.rows],
        "bytes": [list(row) for row in traffic.bytes],
        # Groups that never send to each other would only thin the mean of those that do.
        "mean_bytes": round(fmean([value for value in sent if value] or [0]), 1),
        "edges": list(RANK_EDGES),
    }
