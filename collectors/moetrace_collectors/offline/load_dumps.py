"""Expert-load dumps of any known kind -> LoadRecording. `moetrace load` and analyze both come in here.

Known kinds: SGLang's expert distribution as JSON (`logical_count`, or `records` of single passes), JSON
lines of routes (vLLM-style loggers, Megatron's router trace), JSON with `counts`, CSV, Parquet and NPZ
with named columns, and the counts in the JSON lines of moetrace's own file emitter. The kind is told by
content, not by the name of the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moetrace_collectors.errors import UsageError
from moetrace_collectors.offline.load_arrays import COUNT_FIELDS, integers, recording_from_array
from moetrace_collectors.offline.load_recording import (
    CountBuilder,
    LoadRecording,
    check_size,
    decoder_layer,
    merge,
)
from moetrace_collectors.offline.load_routes import looks_like_routes, read_routes
from moetrace_collectors.offline.load_tables import read_csv, read_npz, read_parquet
from moetrace_collectors.offline.own_steps import first_object, looks_like_own, read_own
from moetrace_collectors.offline.source import bad_file, parse_json, read_head, read_json
from moetrace_schemas.enums import COUNT_KIND_CODE, CountKind

__all__ = ["LoadRecording", "holds_counts", "merge", "read_load_dump", "read_load_dumps", "recordings_in"]

ZIP_MAGIC = b"PK\x03\x04"
PARQUET_MAGIC = b"PAR1"
_ROUTED = COUNT_KIND_CODE[CountKind.ROUTED]


def read_load_dump(path: Path | str, *, num_experts: int | None = None) -> LoadRecording:
    """The one recording in a file.

    Args:
        path: The dump.
        num_experts: Logical experts per layer, for routes that do not tell it.

    Raises:
        UsageError: not a load dump, or it holds several recordings.
    """
    recordings = read_load_dumps(path, num_experts=num_experts)
    if len(recordings) != 1:
        names = ", ".join(recording.source for recording in recordings[:8])
        raise bad_file(Path(path), "", f"one recording expected, got {len(recordings)}: {names}")
    return recordings[0]


def read_load_dumps(path: Path | str, *, num_experts: int | None = None) -> tuple[LoadRecording, ...]:
    """Every recording in a file: one, or several by name where a JSON object holds more than one.

    Raises:
        UsageError: not a load dump.
    """
    path = Path(path)
    head = read_head(path)
    if head.startswith(ZIP_MAGIC):
        return (read_npz(path, num_experts=num_experts),)
    if head.startswith(PARQUET_MAGIC):
        return (read_parquet(path, num_experts=num_experts),)
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not text:
        raise bad_file(path, "", "load dump expected, got an empty file")
    if text[:1] not in b"{[":
        if b"\x00" in head:
            raise bad_file(path, "", "load dump (JSON, JSON lines, CSV, NPZ or Parquet) expected, got binary")
        return (read_csv(path, num_experts=num_experts),)
    if is_json_lines(text):
        return (read_routes(path, num_experts=num_experts),)
    first = first_object(path)
    if first is not None and looks_like_own(first):
        return (_from_own_steps(path, num_experts),)
    document = read_json(path)
    recordings = recordings_in(document, path)
    if not recordings:
        raise bad_file(
            path, "", f"counts under one of {', '.join(COUNT_FIELDS)}, records of passes, or routes expected"
        )
    return recordings


def _from_own_steps(path: Path, num_experts: int | None) -> LoadRecording:
    """Routed counts of the library's own file; warm-up steps are counted apart."""
    builder = CountBuilder(path)
    widest = 0
    own = read_own(path)
    for one in own.rank_steps:
        for row in one.experts:
            if row.kind != _ROUTED:
                continue
            widest = max(widest, len(row.counts))
            if one.warmup:
                builder.left_out["warmup"] += int(row.counts.sum())
                continue
            for expert, count in enumerate(row.counts.tolist()):
                builder.add_count((one.step, one.forward_mode), decoder_layer(row.layer), expert, count)
    return builder.build(
        source=str(path),
        format="moetrace_jsonl",
        num_experts=num_experts or widest or None,
        top_k=None,
        warnings=own.warnings,
    )


def is_json_lines(text: bytes) -> bool:
    """Whether the first line is a JSON object by itself that carries a route or heads a file of routes."""
    first = text.split(b"\n", 1)[0]
    if not first.rstrip().endswith(b"}"):
        return False
    try:
        value = parse_json(first, Path("-"), place="")
    except UsageError:
        return False
    return isinstance(value, dict) and looks_like_routes(value)


def holds_counts(document: object) -> bool:
    """Whether a JSON document is a dump of counts (its values are not checked)."""
    if not isinstance(document, dict):
        return False
    if _is_passes(document) or any(_is_nested(document.get(name)) for name in COUNT_FIELDS):
        return True
    values = list(document.values())
    return bool(values) and all(
        isinstance(value, dict) and any(_is_nested(value.get(name)) for name in COUNT_FIELDS)
        for value in values
    )


def recordings_in(document: object, path: Path) -> tuple[LoadRecording, ...]:
    """Recordings of a parsed JSON document; none where it is something else.

    Raises:
        UsageError: it is a dump of counts and broken.
    """
    if isinstance(document, list):
        return (
            recording_from_array(document, path, source=str(path), format="json_counts", place="document"),
        )
    if not isinstance(document, dict) or not holds_counts(document):
        return ()
    if _is_passes(document):
        return (_from_passes(document, path),)
    if any(_is_nested(document.get(name)) for name in COUNT_FIELDS):
        return (_from_counts(document, path, source=str(path), prefix=""),)
    return tuple(
        _from_counts(value, path, source=f"{path}#{name}", prefix=f"{name}.")
        for name, value in document.items()
    )


def _is_nested(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], list)


def _is_passes(document: Mapping[str, Any]) -> bool:
    records = document.get("records")
    return (
        isinstance(records, list)
        and bool(records)
        and isinstance(records[0], dict)
        and "global_physical_count" in records[0]
    )


def _from_counts(document: Mapping[str, Any], path: Path, *, source: str, prefix: str) -> LoadRecording:
    name = next(name for name in COUNT_FIELDS if _is_nested(document.get(name)))
    axes = document.get("axes")
    expected = ["step", "layer", "expert"]
    if isinstance(axes, list) and [_axis(axis) for axis in axes] not in (expected, expected[1:]):
        raise bad_file(path, f"{prefix}axes", "step, layer, expert (or layer, expert) expected")
    top_k = document.get("top_k")
    recording = recording_from_array(
        document[name],
        path,
        source=source,
        format="sglang_expert_distribution" if name == "logical_count" else "json_counts",
        place=f"{prefix}{name}",
        layers=_list_or_none(document.get("layers"), path, f"{prefix}layers"),
        steps=_list_or_none(document.get("steps"), path, f"{prefix}steps"),
        top_k=top_k if type(top_k) is int else None,
        model_name=str(document.get("model", document.get("model_id", "")))[:200],
    )
    told = document.get("num_experts")
    if type(told) is int and told != recording.num_experts:
        raise bad_file(
            path, f"{prefix}num_experts", f"{recording.num_experts} as in {name} expected, got {told}"
        )
    return recording


def _axis(name: object) -> str:
    text = str(name).lower()
    return next((axis for axis in ("step", "layer", "expert") if axis in text), text)


def _list_or_none(value: object, path: Path, place: str) -> Sequence[int] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise bad_file(path, place, "list of numbers expected")
    return value


def _from_passes(document: Mapping[str, Any], path: Path) -> LoadRecording:
    """SGLang's per-pass (or per-token) dump: physical counts of each pass, mapped back to logical experts.

    The dump keeps only the last mapping. Where replicas moved while it was recorded, earlier passes are
    attributed to the wrong experts; nothing in the dump tells, so a warning says what was assumed.
    """
    mapping = document.get("last_physical_to_logical_map")
    warnings = []
    by_pass: dict[int, list[Any]] = {}
    for index, record in enumerate(document["records"]):
        place = f"records[{index}]"
        if not isinstance(record, dict) or "global_physical_count" not in record:
            raise bad_file(path, place, "object with global_physical_count expected")
        pass_id = record.get("forward_pass_id", index)
        if type(pass_id) is not int or not 0 <= pass_id < 2**62:
            raise bad_file(path, f"{place}.forward_pass_id", "number of 0 or more expected")
        counts = integers(record["global_physical_count"], path, f"{place}.global_physical_count")
        if counts.ndim != 2 or 0 in counts.shape or int(counts.min()) < 0:
            raise bad_file(path, f"{place}.global_physical_count", "[layers][experts] of counts expected")
        by_pass.setdefault(pass_id, []).append(counts)
    first = next(iter(by_pass.values()))[0]
    if any(counts.shape != first.shape for parts in by_pass.values() for counts in parts):
        raise bad_file(path, "records", f"counts of shape {first.shape} in every record expected")
    check_size(path, steps=len(by_pass), layers=first.shape[0], experts=first.shape[1])
    physical = np.stack([np.sum(by_pass[key], axis=0) for key in sorted(by_pass)])
    if mapping is None:
        warnings.append(f"{path}: no physical_to_logical map; experts are physical slots here")
        logical = physical
    else:
        logical_of = integers(mapping, path, "last_physical_to_logical_map")
        if logical_of.shape != first.shape or int(logical_of.min()) < 0:
            raise bad_file(path, "last_physical_to_logical_map", f"shape {first.shape} expected")
        num_experts = int(logical_of.max()) + 1
        check_size(path, steps=len(by_pass), layers=first.shape[0], experts=num_experts)
        logical = np.zeros((*physical.shape[:2], num_experts), dtype=np.int64)
        for layer, experts in enumerate(logical_of):
            np.add.at(logical[:, layer].T, experts, physical[:, layer].T)
        warnings.append(f"{path}: the last placement is taken for every pass")
    return recording_from_array(
        logical,
        path,
        source=str(path),
        format="sglang_expert_distribution",
        place="records",
        steps=sorted(by_pass),
        warnings=warnings,
    )
