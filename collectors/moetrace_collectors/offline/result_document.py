"""The JSON document of `moetrace analyze --json`.

Its schema is published as moetrace_schemas/json/analyze_result.schema.json; names are added there first,
and never removed or reused. Mappings by rank have the rank as text for a key, because JSON has no other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

import numpy as np

from moetrace_collectors.offline.analysis import Analysis
from moetrace_collectors.offline.collectives import JoinedCollective
from moetrace_collectors.offline.load_recording import LoadRecording
from moetrace_collectors.offline.run_view import run_views
from moetrace_collectors.offline.usage import RankUsage
from moetrace_collectors.views.document import build_document
from moetrace_collectors.views.load_figures import max_mean_ratio
from moetrace_collectors.views.summarise import summarise

SCHEMA_NAME = "analyze_result.schema.json"
DOCUMENT_VERSION = 1


def build_result(analysis: Analysis) -> dict[str, Any]:
    """The document as plain JSON types."""
    return {
        "document_version": DOCUMENT_VERSION,
        "files": [
            {"path": file.path, "format": file.format, "rank": file.rank, "events": file.events}
            for file in analysis.files
        ],
        "ranks": list(analysis.ranks),
        "steps": list(analysis.steps),
        "phases": {str(rank): _phases(usage) for rank, usage in analysis.usage.items()},
        "moe_layers": {str(rank): usage.moe_layers for rank, usage in analysis.usage.items()},
        "busy_us": {str(rank): _us(usage.busy_ns) for rank, usage in analysis.usage.items()},
        "idle_us": {str(rank): _us(usage.idle_ns) for rank, usage in analysis.usage.items()},
        "exposed_communication_us": {
            str(rank): _us(usage.exposed_communication_ns) for rank, usage in analysis.usage.items()
        },
        "collectives": [_collective(one) for one in analysis.collectives],
        "alignment": [
            {
                "rank": rank,
                "offset_ns": fit.offset_ns,
                "drift_ppm": round(fit.drift_ppm, 6),
                "error_ns": fit.error_ns,
            }
            for rank, fit in sorted(analysis.clocks.items())
        ],
        "verdicts": _verdicts(analysis),
        "loads": [_load(recording) for recording in analysis.loads],
        "wait_matrices": [
            {
                "name": finding.name,
                "size": finding.size,
                "rows": list(finding.rows),
                "cols": list(finding.columns),
                "points": [list(point) for point in finding.points],
            }
            for finding in analysis.wait_matrices
        ],
        "warnings": list(analysis.warnings),
    }


def dump_result(document: Mapping[str, Any]) -> str:
    """The text of a document; NaN and infinity, which are no JSON, are our bug and raise ValueError."""
    return json.dumps(document, indent=2, allow_nan=False)


def result_schema() -> dict[str, Any]:
    """The published JSON Schema (draft 2020-12)."""
    text = resources.files("moetrace_schemas.json").joinpath(SCHEMA_NAME).read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def _phases(usage: RankUsage) -> dict[str, Any]:
    return {
        name: {"kernels": time.kernels, "us": _us(time.duration_ns)} for name, time in usage.phases.items()
    }


def _collective(one: JoinedCollective) -> dict[str, Any]:
    durations = one.durations_ns
    return {
        "index": one.index,
        "kind": one.kind,
        "group": one.group[0],
        "duration_us": {str(rank): _us(duration) for rank, duration in durations.items()},
        "wait_us": {str(rank): _us(duration - one.transfer_ns) for rank, duration in durations.items()},
        "transfer_us": _us(one.transfer_ns),
        "releaser": one.releaser,
        "missing_ranks": list(one.missing_ranks),
    }


def _verdicts(analysis: Analysis) -> list[dict[str, Any]]:
    """As in the document of a run, each with its run id."""
    verdicts = []
    for view in run_views(analysis.joined, analysis.verdicts):
        document = build_document(view, summarise(view.steps), store="", report=None)
        verdicts += [{"run_id": view.overview.run_id, **verdict} for verdict in document["verdicts"]]
    return verdicts


def _load(recording: LoadRecording) -> dict[str, Any]:
    totals = recording.totals
    return {
        "source": recording.source,
        "format": recording.format,
        "steps": len(recording.steps),
        "experts": recording.num_experts,
        "top_k": recording.top_k,
        "left_out": dict(recording.left_out),
        "layers": [
            {
                "layer": layer,
                "name": name,
                "pairs": int(counts.sum()),
                "max_mean_ratio": round(max_mean_ratio(counts.tolist()), 6),
                "hot_expert": int(np.argmax(counts)),
                "dead_experts": int((counts == 0).sum()),
            }
            for layer, name, counts in zip(
                recording.layers.tolist(), recording.layer_names, totals, strict=True
            )
        ],
    }


def _us(duration_ns: int) -> float:
    return round(duration_ns / 1000, 3)
