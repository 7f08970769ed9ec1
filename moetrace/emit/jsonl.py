"""Records as JSON lines, out and in; and the emitter that writes them to a file per rank for offline use."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moetrace.context import RankContext
from moetrace.record.placement import PlacementRecord
from moetrace.record.types import (
    CoactivationRow,
    ExpertRow,
    PhaseRow,
    StepRecord,
    TrafficRecord,
    ViolationRow,
    WaitRow,
)
from moetrace.self_metrics import SelfMetrics
from moetrace_schemas import SCHEMA_VERSION
from moetrace_schemas.enums import (
    CoactivationSpan,
    CountKind,
    Direction,
    ForwardMode,
    Phase,
    RoutingViolation,
)

PHASE_FIELDS = (
    "layer",
    "phase",
    "direction",
    "microbatch",
    "ordinal",
    "stream",
    "flags",
    "start_offset_ns",
    "duration_ns",
    "bytes",
    "rows",
)


class JsonlEmitter:
    """Appends to `<directory>/rank-00003.jsonl`; flushed per record, so a killed process loses none."""

    name = "jsonl"

    def __init__(self, directory: str, context: Callable[[], RankContext], metrics: SelfMetrics) -> None:
        """Create the directory and the file.

        Raises:
            OSError: it cannot be written.
        """
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._context = context
        self._metrics = metrics
        self._file = (Path(directory) / f"rank-{context().rank:05d}.jsonl").open("a", encoding="utf-8")

    def emit(self, record: StepRecord) -> None:
        """Write one line."""
        self._write(to_json(record, self._context()))
        self._metrics.exported[self.name] += 1

    def emit_placement(self, record: PlacementRecord) -> None:
        """Write one line, in front of the first step under the placement."""
        self._write(placement_to_json(record, self._context()))

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self, deadline_monotonic_s: float) -> bool:
        """Close the file."""
        self._file.close()
        return True


def to_json(record: StepRecord, context: RankContext) -> dict[str, Any]:
    """A record as plain JSON types; phase rows as columns of equal length."""
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": context.run_id,
        "step": record.step,
        "rank": context.rank,
        "world_size": context.world_size,
        "ep_rank": context.ep_rank,
        "ep_size": context.ep_size,
        "ep_group": context.ep_group,
        "microbatch": record.microbatch,
        "forward_mode": record.forward_mode,
        "cohort": record.cohort,
        "warmup": record.warmup,
        "placement_version": record.placement_version,
        "clock": record.clock,
        "start_unix_ns": record.start_unix_ns,
        "duration_ns": record.duration_ns,
        "phases": {name: [getattr(row, name) for row in record.phases] for name in PHASE_FIELDS},
        "experts": [{"layer": r.layer, "kind": r.kind, "counts": r.counts} for r in record.experts],
        "traffic": [
            {"layer": r.layer, "phase": r.phase, "row_bytes": r.row_bytes, "rows": r.rows}
            for r in record.traffic
            # As on the wire: what other groups exchange has no place in the expert-parallel one's matrix.
            if len(r.rows) == context.ep_size
        ],
        **_sampled(record),
    }


def placement_to_json(record: PlacementRecord, context: RankContext) -> dict[str, Any]:
    """A placement as plain JSON types; a line of its own kind, told by its field `placement`."""
    terms = record.terms
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": context.run_id,
        "step": record.step,
        "rank": context.rank,
        "world_size": context.world_size,
        "placement_version": record.version,
        "start_unix_ns": record.start_unix_ns,
        "placement": record.map.as_json(),
        "digest": record.map.digest(),
        "terms": {
            "policy_version": terms.policy_version,
            "proposed_by": terms.proposed_by,
            "telemetry_window": None if terms.window is None else list(terms.window),
            "max_slowdown": float(terms.max_slowdown),
            "max_error_rate": float(terms.max_error_rate),
            "rollback_version": terms.rollback_version,
            "count_ids": terms.count_ids,
            "expert_bytes": terms.expert_bytes,
            "memory_bytes": terms.memory_bytes,
            "weight_digests": dict(terms.weight_digests),
        },
    }


def _sampled(record: StepRecord) -> dict[str, Any]:
    """What only some steps have."""
    result: dict[str, Any] = {}
    if record.violations:
        result["violations"] = [
            {"layer": r.layer, "violation": r.violation, "count": r.count} for r in record.violations
        ]
    if record.coactivation:
        result["coactivation"] = [
            {"layer": r.layer, "span": r.span, "pairs": r.pairs} for r in record.coactivation
        ]
    if record.waits:
        result["waits"] = [{"phase": r.phase, "waits": r.waits} for r in record.waits]
    return result


def from_json(data: Mapping[str, Any]) -> StepRecord:
    """The record that `to_json` made this of.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    columns = {name: data["phases"][name] for name in PHASE_FIELDS}
    columns["phase"] = [Phase(value) for value in columns["phase"]]
    columns["direction"] = [Direction(value) for value in columns["direction"]]
    rows = zip(*columns.values(), strict=True)
    return StepRecord(
        step=data["step"],
        microbatch=data["microbatch"],
        forward_mode=ForwardMode(data["forward_mode"]),
        cohort=data["cohort"],
        warmup=data["warmup"],
        placement_version=data["placement_version"],
        clock=data["clock"],
        start_unix_ns=data["start_unix_ns"],
        duration_ns=data["duration_ns"],
        phases=tuple(PhaseRow(**dict(zip(PHASE_FIELDS, row, strict=True))) for row in rows),
        experts=tuple(
            ExpertRow(layer=row["layer"], kind=CountKind(row["kind"]), counts=tuple(row["counts"]))
            for row in data["experts"]
        ),
        traffic=tuple(
            TrafficRecord(
                layer=row["layer"],
                phase=Phase(row["phase"]),
                row_bytes=row["row_bytes"],
                rows=tuple(row["rows"]),
            )
            for row in data["traffic"]
        ),
        violations=tuple(
            ViolationRow(layer=row["layer"], violation=RoutingViolation(row["violation"]), count=row["count"])
            for row in data.get("violations", ())
        ),
        coactivation=tuple(
            CoactivationRow(
                layer=row["layer"],
                span=CoactivationSpan(row["span"]),
                pairs=tuple((first, second, tokens) for first, second, tokens in row["pairs"]),
            )
            for row in data.get("coactivation", ())
        ),
        waits=tuple(
            WaitRow(phase=Phase(row["phase"]), waits=tuple(row["waits"])) for row in data.get("waits", ())
        ),
    )
