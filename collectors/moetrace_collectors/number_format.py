"""Numbers for people: one way to write a duration, a share and a count in every view."""

from __future__ import annotations

from moetrace_schemas.wording import count

__all__ = ["count", "duration_text", "length_text", "percent", "plain"]


def duration_text(duration_ns: float) -> str:
    """A duration for people, three significant digits: us below a tenth of a ms, s from ten seconds on."""
    if abs(duration_ns) >= 10e9:
        return f"{_three_digits(duration_ns / 1e9)} s"
    if abs(duration_ns) < 100_000 and duration_ns != 0:
        return f"{_three_digits(duration_ns / 1e3)} us"
    return f"{_three_digits(duration_ns / 1e6)} ms"


def _three_digits(value: float) -> str:
    decimals = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{decimals}f}"


def percent(share: float) -> str:
    """A share for people: whole percent, but never 0 % or 100 % where it is not exactly that."""
    value = 100 * share
    if 0 < value < 1:
        return "<1 %"
    if 99 < value < 100:
        return ">99 %"
    return f"{value:.0f} %"


def plain(text: str) -> str:
    """Untrusted text (a run id, a model or host name) without the characters that a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in text)


def length_text(duration_ns: int) -> str:
    """The length of a step; a dash where it has none, because it was not judged."""
    return duration_text(duration_ns) if duration_ns > 0 else "-"
