"""The JSON document of a comparison, and its text for people. Pure.

Its schema is published as moetrace_schemas/json/placement_comparison.schema.json; names are added there
first.
"""

from __future__ import annotations

from typing import Any

from moetrace_collectors.ledger.comparison import Comparison, Figure, ModeComparison
from moetrace_collectors.number_format import count
from moetrace_schemas.enums import ChangeVerdict

DOCUMENT_VERSION = 1


def comparison_document(comparison: Comparison, *, run_id: str) -> dict[str, Any]:
    """The document as plain JSON types."""
    limits = comparison.thresholds
    return {
        "document_version": DOCUMENT_VERSION,
        "run_id": run_id,
        "before": comparison.before,
        "after": comparison.after,
        "verdict": comparison.verdict.value,
        "sentence": comparison.sentence,
        "rollback_version": comparison.rollback_version,
        "thresholds": {
            "max_slowdown": float(limits.max_slowdown),
            "max_error_rate": float(limits.max_error_rate),
            "confidence": limits.confidence,
        },
        "modes": [_mode(mode) for mode in comparison.modes],
        "notes": list(comparison.notes),
    }


def _mode(mode: ModeComparison) -> dict[str, Any]:
    return {
        "name": mode.name,
        "verdict": mode.verdict.value,
        "reason": mode.reason,
        "steps_before": mode.steps_before,
        "steps_after": mode.steps_after,
        "matched_before": mode.matched_before,
        "matched_after": mode.matched_after,
        "figures": [_figure(figure) for figure in mode.figures],
    }


def _figure(figure: Figure) -> dict[str, Any]:
    return {
        "name": figure.name,
        "unit": figure.unit,
        "before": figure.before,
        "after": figure.after,
        "change": figure.change.estimate,
        "low": figure.change.low,
        "high": figure.change.high,
        "change_is": "relative" if figure.is_relative else "absolute",
        "threshold": figure.threshold,
        "verdict": None if figure.verdict is None else figure.verdict.value,
    }


def comparison_text(comparison: Comparison) -> str:
    """Tables for a terminal, the sentence last."""
    lines = [
        f"{comparison.after} against {comparison.before}",
        *(f"Figures: {label}, {counted.sentence()}" for label, counted in comparison.counted),
    ]
    for mode in comparison.modes:
        lines += [
            "",
            f"{mode.name}: {mode.matched_after:,} of {count(mode.steps_after, _unit(mode))} after, "
            f"{mode.matched_before:,} of {mode.steps_before:,} before are of like size",
        ]
        if mode.figures:
            lines.append(f"  {'figure':<18}{'before':>12}{'after':>12}  {'change':>8}  interval")
        lines += [_line(figure) for figure in mode.figures]
        if mode.verdict is ChangeVerdict.NOT_ENOUGH_EVIDENCE or not mode.figures:
            lines.append(f"  {mode.reason}")
    lines += ["", *(f"note: {note}" for note in comparison.notes), comparison.sentence]
    return "\n".join(lines) + "\n"


def _unit(mode: ModeComparison) -> str:
    return "request" if mode.name == "requests" else "step"


def _line(figure: Figure) -> str:
    sign = "%" if figure.is_relative else " points"
    change = figure.change
    interval = f"{change.low * 100:+.1f} to {change.high * 100:+.1f}{sign}"
    scale = 100.0 if figure.unit == "share" else 1.0
    unit = "%" if figure.unit == "share" else figure.unit
    limit = "" if figure.threshold is None else f"  (limit {figure.threshold * 100:+.1f}{sign})"
    return (
        f"  {figure.name + ' ' + unit:<18}{figure.before * scale:>12.4g}{figure.after * scale:>12.4g}  "
        f"{change.estimate * 100:>+7.1f}{sign}  {interval}{limit}"
    )
