"""The JSON document of `moetrace demo --json` and `moetrace report --json`.

Its schema is published as moetrace_schemas/json/demo_result.schema.json; names are added there
first, and never removed or reused. Durations are milliseconds (float), shares are 0 to 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from moetrace_collectors.model import Suspect
from moetrace_collectors.views.findings import Finding, Summary
from moetrace_collectors.views.run_records import Accounting, LayerImbalance, RunView, StepRow

SCHEMA_NAME = "demo_result.schema.json"
DOCUMENT_VERSION = 1


def build_document(
    view: RunView,
    summary: Summary,
    *,
    store: str,
    report: str | None,
    tracer_drops: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The document as plain JSON types.

    Args:
        view: The run as read from its store.
        summary: What `summarise` made of its steps.
        store: Where the rows lie: a path, DSN or URL.
        report: Path of the HTML report; None where none was written.
        tracer_drops: Steps that the model processes dropped, by reason, where the caller knows
            (the store does not hold it).
    """
    overview = view.overview
    return {
        "document_version": DOCUMENT_VERSION,
        "run_id": overview.run_id,
        "model": {"name": overview.model_name, "version": overview.model_version},
        "ranks": overview.world_size,
        "hosts": list(overview.hosts),
        "forward_modes": [str(mode) for mode in overview.forward_modes],
        "sample_period": overview.sample_period,
        "steps": overview.steps,
        "warmup_steps": overview.warmup_steps,
        "verdicts": [_verdict(row) for row in view.steps],
        "summary": _summary(summary, view),
        "imbalance": [_imbalance(layer) for layer in view.imbalance],
        "store": store,
        "report": report,
        "accounting": _accounting(view.accounting, tracer_drops),
    }


def dump_document(document: Mapping[str, Any]) -> str:
    """The text of a document; NaN and infinity, which are no JSON, are our bug and raise ValueError."""
    return json.dumps(document, indent=2, allow_nan=False)


def document_schema() -> dict[str, Any]:
    """The published JSON Schema (draft 2020-12)."""
    text = resources.files("moetrace_schemas.json").joinpath(SCHEMA_NAME).read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def _verdict(row: StepRow) -> dict[str, Any]:
    suspect = row.suspect
    return {
        "step": row.step,
        "forward_mode": str(row.forward_mode),
        "warmup": row.warmup,
        "evidence": str(row.evidence),
        "reason": row.reason,
        "rank": suspect.rank if suspect else None,
        "layer": suspect.layer if suspect else None,
        "phase": str(suspect.phase) if suspect else None,
        "cause": str(row.cause),
        "worth_ms": _ms(row.worth_ns),
        "share": _share(suspect.share if suspect else 0.0),
        "runner_up": _runner_up(row.runner_up),
        "step_ms": _ms(row.step_ns) if row.has_length else None,
        "extension_ms": _ms(row.extension_ns),
        "missing_ranks": list(row.missing_ranks),
        "closed_by": str(row.closed_by),
    }


def _runner_up(suspect: Suspect | None) -> dict[str, Any] | None:
    if suspect is None:
        return None
    return {
        "rank": suspect.rank,
        "layer": suspect.layer,
        "phase": str(suspect.phase),
        "worth_ms": _ms(suspect.worth_ns),
        "share": _share(suspect.share),
    }


def _summary(summary: Summary, view: RunView) -> dict[str, Any]:
    has_length = summary.step_median_ns > 0
    return {
        "headline": summary.headline,
        "remark": summary.remark,
        "stands_out": bool(summary.outstanding),
        "next_steps": list(summary.next_steps),
        "counted_steps": summary.counted_steps,
        "evidence": {str(member): count for member, count in summary.evidence.items()},
        "partial_steps": summary.partial_steps,
        "step_ms_median": _ms(summary.step_median_ns) if has_length else None,
        "step_ms_p95": _ms(summary.step_p95_ns) if has_length else None,
        "extension_ms_median": _ms(summary.extension_median_ns) if has_length else None,
        "phase_ms_median": {str(phase): _ms(value) for phase, value in summary.phase_median_ns.items()},
        "worst_step": view.detail.step if view.detail else None,
        "findings": [_finding(finding) for finding in summary.findings],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "rank": finding.rank,
        "layer": finding.layer,
        "phase": str(finding.phase),
        "cause": str(finding.cause),
        "steps": finding.steps,
        "clear_steps": finding.clear_steps,
        "ambiguous_steps": finding.ambiguous_steps,
        "steps_share": _share(finding.steps_share),
        "worth_ms_total": _ms(finding.worth_total_ns),
        "worth_ms_median": _ms(finding.worth_median_ns),
        "share_median": _share(finding.share_median),
    }


def _imbalance(layer: LayerImbalance) -> dict[str, Any]:
    return {
        "forward_mode": str(layer.view.forward_mode),
        "cohort": layer.view.cohort,
        "layer": layer.layer,
        "pairs": layer.pairs,
        "experts": layer.experts,
        "max_mean_ratio": _share(layer.max_mean_ratio),
        "step_p95_max_mean_ratio": (
            None if layer.step_p95_max_mean_ratio is None else _share(layer.step_p95_max_mean_ratio)
        ),
        "cv": _share(layer.cv),
        "rank_max_mean_ratio": None
        if layer.rank_max_mean_ratio is None
        else _share(layer.rank_max_mean_ratio),
        "hot_expert": layer.hot_expert,
        "dead_experts": layer.dead_experts,
    }


def _accounting(accounting: Accounting, tracer_drops: Mapping[str, int] | None) -> dict[str, Any]:
    return {
        "rank_steps": accounting.rank_steps,
        "late": accounting.late,
        "duplicate": accounting.events_of("duplicate"),
        "rejected": accounting.events_of("rejected"),
        "rejected_without_run": accounting.unattributed_rejects,
        "events": [
            {"kind": kind, "reason": reason, "count": count}
            for (kind, reason), count in sorted(accounting.events.items())
        ],
        "steps_by_closed_by": {str(key): value for key, value in accounting.steps_by_closed_by.items()},
        "missing_steps_by_rank": [
            {"rank": rank, "steps": steps} for rank, steps in sorted(accounting.missing_by_rank.items())
        ],
        "pairs_by_kind": dict(accounting.pairs_by_kind),
        "tracer_drops": None if tracer_drops is None else dict(tracer_drops),
    }


def _ms(duration_ns: int) -> float:
    return round(duration_ns / 1e6, 6)


def _share(value: float) -> float:
    return round(value, 6)
