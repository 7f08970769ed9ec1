"""Words that the model process, the collector and the dashboards put before people alike."""

from __future__ import annotations


def count(value: int, noun: str, plural: str | None = None) -> str:
    """A count with its noun: 1 step, 1,234 steps, 2 processes."""
    return f"{value:,} {noun if value == 1 else plural or noun + 's'}"
