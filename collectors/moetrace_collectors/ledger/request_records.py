"""Serving records from a CSV or JSON file: time to first token, time per output token, failures. I/O only.

One record per request; names of columns, all but one of the first two optional::

    time_unix_s         when it was answered, unix seconds     } which side a record is on
    placement_version   under which it was answered            }
    ttft_ms, tpot_ms    empty where not known
    failed              0, 1, true or false
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moetrace_collectors.errors import UsageError
from moetrace_collectors.ledger.samples import RequestSamples

_TRUE = {"1": 1.0, "true": 1.0, "0": 0.0, "false": 0.0, "": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request."""

    time_s: float | None
    version: int | None
    ttft_ms: float
    tpot_ms: float
    failed: float


def read_requests(path: Path) -> tuple[RequestRecord, ...]:
    """All records, in order of time where they tell it.

    Raises:
        UsageError: the file cannot be read, or a record is wrong; names its place and the fix.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    rows: Any
    if path.suffix == ".csv":
        rows = list(csv.DictReader(text.splitlines()))
    else:
        try:
            told = json.loads(text)
        except ValueError as error:
            raise UsageError(f"{path}: neither JSON nor named .csv: {error}") from error
        rows = told.get("requests") if isinstance(told, dict) else told
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise UsageError(f"{path}: a list of records with time_unix_s or placement_version expected")
    records = [_record(row, f"{path}: record {at}") for at, row in enumerate(rows)]
    return tuple(sorted(records, key=lambda record: record.time_s or 0.0))


def samples_of(records: Sequence[RequestRecord]) -> RequestSamples | None:
    """Arrays of some records; None where there are none."""
    if not records:
        return None
    return RequestSamples(
        ttft_ms=np.array([record.ttft_ms for record in records]),
        tpot_ms=np.array([record.tpot_ms for record in records]),
        failed=np.array([record.failed for record in records]),
    )


def of_version(
    records: Sequence[RequestRecord], version: int, *, first_ns: int, last_ns: int
) -> list[RequestRecord]:
    """Records of an epoch: by the version that they name, else by the time of its steps."""
    return [
        record
        for record in records
        if record.version == version
        or (
            record.version is None
            and record.time_s is not None
            and first_ns <= record.time_s * 1e9 <= last_ns
        )
    ]


def _record(row: Mapping[str, Any], place: str) -> RequestRecord:
    version = _number(row, "placement_version", place)
    time_s = _number(row, "time_unix_s", place)
    if math.isnan(version) and math.isnan(time_s):
        raise UsageError(f"{place} has neither time_unix_s nor placement_version: give one of them")
    failed = row.get("failed", "")
    told = _TRUE.get(str("" if failed is None else failed).strip().lower())
    if told is None:
        raise UsageError(f"{place} failed={failed!r}: 0, 1, true or false expected")
    return RequestRecord(
        time_s=None if math.isnan(time_s) else time_s,
        version=None if math.isnan(version) else int(version),
        ttft_ms=_number(row, "ttft_ms", place),
        tpot_ms=_number(row, "tpot_ms", place),
        failed=told,
    )


def _number(row: Mapping[str, Any], name: str, place: str) -> float:
    value = row.get(name)
    if value is None or value == "":
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0.0 <= number < math.inf:
        raise UsageError(f"{place} {name}={value!r}: a number of 0 or more expected, or nothing")
    return number
