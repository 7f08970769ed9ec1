"""Closed sets, attributes and metrics: generated from one source, and consistent with each other."""

from __future__ import annotations

import re
import subprocess
import sys
from enum import StrEnum
from pathlib import Path

import pytest

from moetrace_schemas import attributes, enums, metrics

ROOT = Path(__file__).resolve().parents[3]
PAIRS = [
    (name.removesuffix("_BY_CODE"), value)
    for name, value in vars(enums).items()
    if name.endswith("_BY_CODE") and isinstance(next(iter(value)), int)
]


def test_generated_files_are_up_to_date() -> None:
    """What is committed is what the sources say; the generator's own check agrees."""
    result = subprocess.run(
        [sys.executable, "schemas/generate.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(("name", "by_code"), PAIRS, ids=[name for name, _ in PAIRS])
def test_wire_codes_and_members_are_one_to_one(name: str, by_code: dict[int, object]) -> None:
    """Every member has a code that fits a byte, and comes back from it."""
    kind = type(next(iter(by_code.values())))
    assert issubclass(kind, StrEnum)
    assert set(by_code.values()) == set(kind)
    assert all(0 <= code < 256 for code in by_code)
    assert getattr(enums, f"{name}_CODE") == {member: code for code, member in by_code.items()}


def test_phase_codes_are_frozen() -> None:
    """Codes are never reused: stored columns would change their meaning."""
    assert {code: phase.value for code, phase in enums.PHASE_BY_CODE.items()} == {
        0: "outside",
        1: "router",
        2: "permute",
        3: "dispatch",
        4: "expert_gemm",
        5: "combine",
        6: "unpermute",
        7: "shared_expert",
        8: "fused",
        9: "schedule",
        10: "accept",
    }


def test_count_kind_codes_are_frozen() -> None:
    """As phases are."""
    assert {code: kind.value for code, kind in enums.COUNT_KIND_BY_CODE.items()} == {
        0: "routed",
        1: "padding",
        2: "invalid",
        3: "dropped",
        4: "received",
        5: "recompute",
        6: "executed",
        7: "dummy",
        8: "physical",
    }


def test_attributes_are_ours_and_typed() -> None:
    """Dotted names under our own namespace, with a type that OTLP has; required ones exist."""
    for name, kind in attributes.TYPES.items():
        assert re.fullmatch(r"moetrace(\.[a-z]+)+", name)
        assert kind in ("string", "int", "bool", "bytes", "double")
    assert set(attributes.REQUIRED) <= set(attributes.TYPES)


def test_metrics_are_named_by_the_rules() -> None:
    """Base units, `_total` for counters only, bounded label sets, no label that grows without end."""
    assert len({spec.name for spec in metrics.ALL}) == len(metrics.ALL)
    for spec in metrics.ALL:
        assert re.fullmatch(r"moetrace_[a-z0-9_]+", spec.name), spec.name
        assert spec.name.endswith("_total") == (spec.kind == "counter"), spec.name
        assert not re.search(r"_(ms|us|ns|milliseconds|mb|kb|percent)(_|$)", spec.name), spec.name
        assert spec.side in ("library", "collector"), spec.name
        assert spec.max_series > 0, spec.name
        assert not {"step", "token", "request", "user"} & set(spec.labels), spec.name
        assert spec.help.endswith("."), spec.name
