"""The dead letter keeps the newest rejections in bounded space."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moetrace_collectors.dead_letter import DeadLetter
from moetrace_collectors.errors import UsageError
from moetrace_collectors.events import Rejection
from moetrace_schemas.enums import RejectReason


def rejection(detail: str) -> Rejection:
    """A rejection of rank 3 of step 7."""
    return Rejection(
        reason=RejectReason.MALFORMED_COLUMNS, detail=detail, run_id="r", step=7, rank=3, payload=b"\x00\xff"
    )


def test_a_line_says_who_why_and_what(tmp_path: Path) -> None:
    """One JSON object a line, with the payload in base64."""
    path = tmp_path / "dead_letter.jsonl"
    letter = DeadLetter(path, max_bytes=10_000)
    letter.write(rejection("why"), time_unix_ms=5)
    letter.close()
    assert json.loads(path.read_text()) == {
        "time_unix_ms": 5,
        "reason": "malformed_columns",
        "detail": "why",
        "run_id": "r",
        "step": 7,
        "rank": 3,
        "payload_base64": "AP8=",
    }


def test_two_files_are_the_most_there_can_be(tmp_path: Path) -> None:
    """A full file becomes .1 and the newest rejection is always in the current one."""
    path = tmp_path / "dead_letter.jsonl"
    letter = DeadLetter(path, max_bytes=400)
    for number in range(50):
        letter.write(rejection(f"number {number}"), time_unix_ms=number)
    letter.close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["dead_letter.jsonl", "dead_letter.jsonl.1"]
    assert all(entry.stat().st_size <= 400 for entry in tmp_path.iterdir())
    assert "number 49" in path.read_text()


def test_a_directory_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    """The collector does not start where it cannot write its dead letter."""
    with pytest.raises(UsageError, match="cannot write"):
        DeadLetter(tmp_path / "missing" / "file", max_bytes=1_000)
