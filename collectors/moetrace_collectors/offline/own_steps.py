"""moetrace's own files -> rank steps: JSON lines of the library's file emitter, and OTLP/JSON exports.

A line of the file emitter holds a rank's step as plain JSON. It is packed into the wire's columns and
decoded from there, so a file is checked exactly as what comes over the network is. OTLP/JSON is an export
request, or one request per line as the OpenTelemetry Collector's file exporter writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetrace_collectors.decode_columns import decode_experts, decode_phases, decode_traffic
from moetrace_collectors.errors import UsageError
from moetrace_collectors.model import JoinedStep, RankStep
from moetrace_collectors.offline.source import bad_file, json_lines, open_bytes, read_head
from moetrace_schemas import SCHEMA_VERSION
from moetrace_schemas.columns import EXPERTS, PHASES, TRAFFIC, ColumnsError, pack
from moetrace_schemas.enums import (
    COUNT_KIND_CODE,
    DIRECTION_CODE,
    PHASE_CODE,
    ClosedBy,
    CountIds,
    CountKind,
    Direction,
    ForwardMode,
    Phase,
)

JSONL_FORMAT = "moetrace_jsonl"
OTLP_FORMAT = "otlp_json"
MAX_WORLD_SIZE = 65_536
MAX_INDEX = 2**31 - 1
MAX_NS = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSteps:
    """What one file held."""

    source: str
    format: str
    rank_steps: tuple[RankStep, ...]
    warnings: tuple[str, ...] = ()


def looks_like_own(record: Mapping[str, Any]) -> bool:
    """Whether a JSON object is a line of the file emitter."""
    return "schema_version" in record and "run_id" in record and ("phases" in record or _is_placement(record))


def _is_placement(record: Mapping[str, Any]) -> bool:
    """Whether a line announces a placement; it holds no step."""
    return isinstance(record.get("placement"), dict) and "placement_version" in record


def looks_like_otlp(record: Mapping[str, Any]) -> bool:
    """Whether a JSON object is an OTLP export request."""
    return "resourceSpans" in record


def read_own(path: Path) -> OwnSteps:
    """Steps in a file of the library's file emitter, or of the spool of a rank that had no collector.

    Lines that announce a placement are passed over; one whose counts are of slots is warned of. A last line
    that a killed process did not finish is left out, with a warning.

    Raises:
        UsageError: a line that is not one of its records.
    """
    rank_steps: list[RankStep] = []
    warnings: list[str] = []
    good = 0
    try:
        for number, record in json_lines(path):
            if not _is_placement(record):
                rank_steps.append(_rank_step(record, path, f"line {number}"))
            elif not warnings and _counts_slots(record):
                warnings.append(
                    f"{path}: from step {record.get('step')} on, counts are of slots of placement version "
                    f"{record.get('placement_version')} and not of experts; a collector maps them back"
                )
            good += 1
    except UsageError:
        if not good or not _is_cut_short(path, good):
            raise
        warnings.append(f"{path}: the last line is cut short and left out")
    return OwnSteps(
        source=str(path), format=JSONL_FORMAT, rank_steps=tuple(rank_steps), warnings=tuple(warnings)
    )


def _counts_slots(record: Mapping[str, Any]) -> bool:
    terms = record.get("terms")
    return isinstance(terms, dict) and terms.get("count_ids") == CountIds.PHYSICAL


def _is_cut_short(path: Path, num_good: int) -> bool:
    """Whether behind so many lines there is only one more, without its end."""
    with open_bytes(path) as stream:
        rest = [line for line in stream if line.strip()][num_good:]
    return len(rest) == 1 and not rest[0].endswith(b"\n")


def read_otlp(path: Path, requests: Iterator[tuple[str, Mapping[str, Any]]]) -> OwnSteps:
    """Steps in OTLP/JSON export requests; spans of others are passed over and counted.

    Args:
        path: The file, for errors.
        requests: Place and object of each request.

    Raises:
        UsageError: a request that is not OTLP/JSON.
    """
    # Here and not above: protobuf takes longer to import than most files take to read.
    from moetrace_collectors.decode import decode
    from moetrace_collectors.receivers.otlp_body import JSON, BodyError, parse

    rank_steps: list[RankStep] = []
    foreign, rejected = 0, []
    for place, request in requests:
        try:
            parsed = parse(json.dumps(request).encode(), content_type=JSON)
        except BodyError as error:
            raise bad_file(path, place, str(error)) from error
        decoded = decode(parsed, max_world_size=MAX_WORLD_SIZE)
        rank_steps += decoded.rank_steps
        foreign += decoded.num_foreign_spans
        rejected += [f"{rejection.reason}: {rejection.detail}" for rejection in decoded.rejected]
    warnings = []
    if foreign:
        warnings.append(f"{path}: {foreign} spans of other instrumentation are passed over")
    if rejected:
        warnings.append(f"{path}: {len(rejected)} spans are rejected, the first for {rejected[0][:200]}")
    return OwnSteps(
        source=str(path), format=OTLP_FORMAT, rank_steps=tuple(rank_steps), warnings=tuple(warnings)
    )


def first_object(path: Path) -> Mapping[str, Any] | None:
    """The object on a file's first line that is not blank; None where that is no whole JSON object."""
    head = read_head(path).lstrip(b"\xef\xbb\xbf \t\r\n").split(b"\n", 1)[0]
    try:
        value = json.loads(head)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def join(rank_steps: Sequence[RankStep]) -> tuple[tuple[JoinedStep, ...], tuple[str, ...]]:
    """Rank steps of any number of files by run and step; a second one of the same key is left out."""
    by_step: dict[tuple[str, int], dict[tuple[int, int], RankStep]] = {}
    duplicates = 0
    for one in rank_steps:
        known = by_step.setdefault((one.run_id, one.step), {})
        if (one.rank, one.microbatch) in known:
            duplicates += 1
        known.setdefault((one.rank, one.microbatch), one)
    joined = []
    for (run_id, step), ones in sorted(by_step.items()):
        ordered = tuple(ones[key] for key in sorted(ones))
        world_size = max(one.world_size for one in ordered)
        present = {one.rank for one in ordered}
        joined.append(
            JoinedStep(
                run_id=run_id,
                step=step,
                world_size=world_size,
                rank_steps=ordered,
                missing_ranks=tuple(rank for rank in range(world_size) if rank not in present),
                closed_by=ClosedBy.COMPLETE if len(present) == world_size else ClosedBy.SHUTDOWN,
            )
        )
    warnings = (f"{duplicates} rank steps that were already there are left out",) if duplicates else ()
    return tuple(joined), warnings


def _rank_step(record: Mapping[str, Any], path: Path, place: str) -> RankStep:
    version = record.get("schema_version")
    if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
        raise bad_file(path, f"{place}, schema_version", f"1 to {SCHEMA_VERSION} expected, got {version!r}")
    run_id = record.get("run_id")
    if not isinstance(run_id, str) or not run_id:
        raise bad_file(path, f"{place}, run_id", "text expected")
    world_size = _number(record, "world_size", 1, MAX_WORLD_SIZE, path, place)
    ep_size = _number(record, "ep_size", 1, world_size, path, place)
    try:
        mode = ForwardMode(str(record.get("forward_mode")))
        blocks = _packed(record)
        phases = decode_phases(blocks[0])
        experts = decode_experts(blocks[1])
        traffic = decode_traffic(blocks[2], ep_size=ep_size) if blocks[2] else ()
    except ColumnsError as error:
        raise bad_file(path, place, str(error)) from error
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise bad_file(
            path, place, f"rank step with phases in columns expected ({type(error).__name__}: {error})"
        ) from error
    return RankStep(
        run_id=run_id,
        step=_number(record, "step", 0, MAX_NS, path, place),
        rank=_number(record, "rank", 0, world_size - 1, path, place),
        microbatch=_number(record, "microbatch", 0, 65_535, path, place),
        world_size=world_size,
        ep_rank=_number(record, "ep_rank", 0, ep_size - 1, path, place),
        ep_size=ep_size,
        ep_group=_number(record, "ep_group", 0, MAX_INDEX, path, place),
        forward_mode=mode,
        sample_period=1,
        warmup=record.get("warmup") is True,
        clock=str(record.get("clock", ""))[:16],
        duration_ns=_number(record, "duration_ns", 0, MAX_NS, path, place),
        start_unix_ns=_number(record, "start_unix_ns", 0, MAX_NS, path, place),
        cohort=str(record.get("cohort", ""))[:256],
        host_name=str(record.get("host_name", ""))[:256],
        model_name=str(record.get("model_name", ""))[:256],
        model_version=str(record.get("model_version", ""))[:256],
        placement_version=_number(record, "placement_version", 0, MAX_NS, path, place, otherwise=0),
        phases=phases,
        experts=experts,
        traffic=traffic,
    )


def _packed(record: Mapping[str, Any]) -> tuple[bytes, bytes, bytes]:
    columns = dict(record["phases"])
    columns["phase"] = [PHASE_CODE[Phase(name)] for name in columns["phase"]]
    columns["direction"] = [DIRECTION_CODE[Direction(name)] for name in columns["direction"]]
    phases = pack(PHASES, [columns[column.name] for column in PHASES.columns])
    counts = record.get("experts") or []
    experts = pack(
        EXPERTS,
        [
            [row["layer"] for row in counts],
            [COUNT_KIND_CODE[CountKind(row["kind"])] for row in counts],
            [len(row["counts"]) for row in counts],
        ],
        [count for row in counts for count in row["counts"]],
    )
    sent = record.get("traffic") or []
    if not sent:
        return phases, experts, b""
    traffic = pack(
        TRAFFIC,
        [
            [row["layer"] for row in sent],
            [PHASE_CODE[Phase(row["phase"])] for row in sent],
            [row["row_bytes"] for row in sent],
            [len(row["rows"]) for row in sent],
        ],
        [count for row in sent for count in row["rows"]],
    )
    return phases, experts, traffic


def _number(
    record: Mapping[str, Any],
    name: str,
    low: int,
    high: int,
    path: Path,
    place: str,
    *,
    otherwise: int | None = None,
) -> int:
    value = record.get(name, otherwise)
    if type(value) is not int or not low <= value <= high:
        raise bad_file(path, f"{place}, {name}", f"number from {low} to {high} expected, got {value!r}"[:200])
    return value
