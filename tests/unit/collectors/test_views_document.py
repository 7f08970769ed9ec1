"""The JSON document of a run, against its published schema."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from moetrace_collectors.views.document import build_document, document_schema
from moetrace_collectors.views.summarise import summarise
from run_view_builders import run_view, step_row


@pytest.mark.parametrize(("step_ms", "expected"), [(0, None), (50, 50.0)])
def test_a_run_of_which_no_step_was_judged_has_no_lengths(step_ms: int, expected: float | None) -> None:
    """Null, not 0 ms, where no step has a length; a length where one has."""
    lengths_ms = (0, 0, 0, step_ms)
    view = run_view(*(step_row(step, step_ms=length_ms) for step, length_ms in enumerate(lengths_ms)))
    document: dict[str, Any] = build_document(view, summarise(view.steps), store="", report=None)
    Draft202012Validator(document_schema()).validate(document)
    summary = document["summary"]
    assert (summary["step_ms_median"], summary["step_ms_p95"]) == (expected, expected)
    assert (summary["extension_ms_median"] is None) is (expected is None)
    assert [verdict["step_ms"] for verdict in document["verdicts"]] == [None, None, None, expected]
