"""Placements to record, from JSON files: a planner's own, or what `moetrace replay --json` printed. I/O only.

The first form is published as moetrace_schemas/json/placement_record.schema.json; it is that of the
placement files that other commands read and write, with the terms beside the map.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetrace_collectors.errors import UsageError
from moetrace_collectors.offline.source import read_json
from moetrace_schemas.enums import CountIds
from moetrace_schemas.placement import PlacementError, PlacementMap, PlacementTerms

TERM_FIELDS = {
    "policy_version": "policy_version",
    "proposed_by": "proposed_by",
    "telemetry_window": "window",
    "max_slowdown": "max_slowdown",
    "max_error_rate": "max_error_rate",
    "rollback_version": "rollback_version",
    "count_ids": "count_ids",
    "expert_bytes": "expert_bytes",
    "memory_bytes": "memory_bytes",
    "weight_digests": "weight_digests",
}
"""Name in the file -> name in PlacementTerms."""
MAP_FIELDS = ("ranks", "experts", "layers", "physical_to_logical")
OTHER_FIELDS = ("run_id", "version", "in_force_from_step")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFile:
    """What a file says; None where it does not."""

    mapping: PlacementMap
    terms: PlacementTerms
    run_id: str | None
    version: int | None
    in_force_from_step: int | None
    """Set: the mapping is in force from that step; else it is proposed."""


def read_record(path: Path, *, planner: str | None) -> RecordFile:
    """The placement of a file.

    Args:
        path: JSON, of either form.
        planner: which planner's, of a replay document; default the recommended one.

    Raises:
        UsageError: not such a file, or a value in it is wrong; names field, value and fix.
    """
    document = read_json(path)
    if not isinstance(document, dict):
        raise UsageError(f"{path}: a JSON object with physical_to_logical, ranks and version expected")
    if "planners" in document:
        return _of_replay(path, document, planner)
    if planner is not None:
        raise UsageError(f"{path} is no document of moetrace replay --json: leave --planner out")
    unknown = sorted(set(document) - {*MAP_FIELDS, *TERM_FIELDS, *OTHER_FIELDS})
    if unknown:
        listed = ", ".join((*MAP_FIELDS, *OTHER_FIELDS, *TERM_FIELDS))
        raise UsageError(f"{path}: {unknown[0]} is no field of a placement; known are {listed}")
    return RecordFile(
        mapping=_mapping(path, document),
        terms=_terms(path, document),
        run_id=_text(path, document, "run_id"),
        version=_whole(path, document, "version"),
        in_force_from_step=_whole(path, document, "in_force_from_step"),
    )


def _of_replay(path: Path, document: Mapping[str, Any], planner: str | None) -> RecordFile:
    recommended = document.get("recommendation", {}).get("planner")
    wanted = planner or recommended
    if wanted is None:
        raise UsageError(
            f"{path} recommends no move ({document['recommendation'].get('sentence', 'no reason given')}): "
            "give --planner to take one all the same"
        )
    found = next((item for item in document["planners"] if item.get("planner") == wanted), None)
    if found is None or "physical_to_logical" not in found:
        listed = ", ".join(str(item.get("planner")) for item in document["planners"])
        raise UsageError(f"{path} holds no mapping of planner {wanted!r}: it holds {listed}")
    told = {
        "ranks": document["ranks"],
        "experts": document["experts"],
        "layers": document["layers"],
        "physical_to_logical": found["physical_to_logical"],
    }
    folds, source = document.get("folds") or [], str(document.get("source", ""))
    window = [folds[0]["planned_on"][0], folds[-1]["scored_on"][1]] if folds else None
    terms = {
        "policy_version": f"moetrace-replay/{wanted}",
        "proposed_by": "moetrace replay",
        "telemetry_window": window,
        "expert_bytes": document.get("costs", {}).get("expert_bytes"),
    }
    terms = {name: value for name, value in terms.items() if value is not None}
    return RecordFile(
        mapping=_mapping(path, told),
        terms=_terms(path, terms),
        run_id=source.removeprefix("run ") if source.startswith("run ") else None,
        version=None,
        in_force_from_step=None,
    )


def _mapping(path: Path, document: Mapping[str, Any]) -> PlacementMap:
    rows = document.get("physical_to_logical")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) and row for row in rows):
        raise UsageError(f"{path} physical_to_logical: [layers][slots] of logical experts expected")
    for layer, row in enumerate(rows):
        bad = next((expert for expert in row if type(expert) is not int), None)
        if bad is not None:
            raise UsageError(f"{path} physical_to_logical[{layer}]: a whole number expected, got {bad!r}")
    ranks = _whole(path, document, "ranks")
    if ranks is None:
        raise UsageError(f"{path} ranks: missing; give the ranks of an expert-parallel group")
    layers = document.get("layers", list(range(len(rows))))
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise UsageError(f"{path} layers: a list of whole numbers expected, got {layers!r}")
    experts = _whole(path, document, "experts")
    try:
        return PlacementMap(
            layers=tuple(layers),
            physical_to_logical=tuple(map(tuple, rows)),
            num_experts=1 + max(max(row) for row in rows) if experts is None else experts,
            num_ranks=ranks,
        )
    except PlacementError as error:
        raise UsageError(f"{path}: {error}") from error


def _terms(path: Path, document: Mapping[str, Any]) -> PlacementTerms:
    told = {field: document[name] for name, field in TERM_FIELDS.items() if document.get(name) is not None}
    try:
        if "count_ids" in told:
            told["count_ids"] = CountIds(told["count_ids"])
        if "window" in told:
            told["window"] = tuple(told["window"])
        if "expert_bytes" in told and isinstance(told["expert_bytes"], float):
            told["expert_bytes"] = round(told["expert_bytes"])
        return PlacementTerms(**told)
    except (PlacementError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path}: {error}") from error


def _whole(path: Path, document: Mapping[str, Any], name: str) -> int | None:
    value = document.get(name)
    if value is not None and (type(value) is not int or value < 0):
        raise UsageError(f"{path} {name}={value!r}: a whole number of 0 or more expected")
    return value


def _text(path: Path, document: Mapping[str, Any], name: str) -> str | None:
    value = document.get(name)
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{path} {name}={value!r}: a text expected")
    return value
