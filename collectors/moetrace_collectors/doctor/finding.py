"""One line of the checklist and what was found. Frozen."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """Of a line."""

    PASS = "pass"
    FAIL = "fail"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check says about its figure."""

    status: Status
    figure: str
    reason: str
    fix: str | None = None
    """What to do; None where it passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the checklist, answered."""

    name: str
    title: str
    finding: Finding
    query: str
    query_language: str
    """sql, or http for what only Prometheus knows."""


def passed(figure: str, reason: str) -> Finding:
    """It is as it must be."""
    return Finding(status=Status.PASS, figure=figure, reason=reason)


def failed(figure: str, reason: str, fix: str) -> Finding:
    """It is not, and this helps."""
    return Finding(status=Status.FAIL, figure=figure, reason=reason, fix=fix)


def unknown(figure: str, reason: str, fix: str) -> Finding:
    """It cannot be told, and this would tell."""
    return Finding(status=Status.UNKNOWN, figure=figure, reason=reason, fix=fix)
