"""Steps that were not judged, as where two jobs send under one run id: no reader takes their length for 0."""

from __future__ import annotations

import json
from pathlib import Path

from integration.collector_process import run_script


def test_steps_without_a_verdict_are_in_no_length(tmp_path: Path) -> None:
    """Neither where placements are compared or planned, nor in lists and percentiles; it is said."""
    told = json.loads(run_script("unjudged_steps", tmp_path / "store"))
    [length] = told["compared"]
    assert length > 1_000_000
    assert told["notes"] == ["run r: 7 steps without a length, in no figure"]
    # What the ranks themselves took is known all the same.
    assert told["of a pool"] == 8
    assert min(told["medians"]) > 1_000_000
    [[steps, p50_ms]] = told["percentiles"]
    assert steps == 5
    assert p50_ms > 1
