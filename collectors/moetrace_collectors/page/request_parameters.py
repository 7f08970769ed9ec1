"""Query parameters of the page's requests, checked one by one; every refusal names the parameter."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import TypeVar

from moetrace_collectors.errors import UsageError

MAX_TEXT = 500
MAX_RANKS = 64

Member = TypeVar("Member", bound=StrEnum)


class BadRequestError(UsageError):
    """A parameter is missing or wrong; the message says which and what is expected."""


class RequestParameters:
    """Of one request; unknown names are ignored, so that the page can keep its own state in a link."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values

    def text(self, name: str, default: str | None = None) -> str:
        """Free text; required without a default."""
        value = self._values.get(name) or default
        if value is None:
            raise BadRequestError(f"{name} is missing")
        if len(value) > MAX_TEXT:
            raise BadRequestError(f"{name} is longer than {MAX_TEXT} characters")
        return value

    def integer(self, name: str, default: int | None = None, *, low: int, high: int) -> int:
        """A whole number within limits; required without a default."""
        text = self._values.get(name, "")
        if not text and default is not None:
            return default
        value = _whole(text)
        if value is None or not low <= value <= high:
            raise BadRequestError(f"{name} = {text!r}: a whole number from {low} to {high} expected")
        return value

    def milliseconds(self, name: str) -> int:
        """A duration given in ms, as ns; 0 where it is not given."""
        text = self._values.get(name, "")
        try:
            value = float(text or 0)
        except ValueError:
            value = -1.0
        if not 0 <= value <= 1e9:
            raise BadRequestError(f"{name} = {text!r}: milliseconds expected, as in 12.5")
        return round(value * 1e6)

    def one_of(self, name: str, words: Collection[str], default: str) -> str:
        """One word of a list."""
        value = self._values.get(name) or default
        if value not in words and value != default:
            raise BadRequestError(f"{name} = {value!r}: one of {', '.join(sorted(words))} expected")
        return value

    def member(self, name: str, kind: type[Member]) -> Member | None:
        """A member of a closed set; None where it is not given."""
        value = self.one_of(name, [str(item) for item in kind], "")
        return kind(value) if value else None

    def ranks(self, name: str) -> tuple[int, ...] | None:
        """Ranks as in 0,3,17; None where it is not given."""
        text = self._values.get(name, "")
        if not text:
            return None
        ranks = [_whole(part) for part in text.split(",")]
        wrong = any(rank is None or rank >= 2**32 for rank in ranks)
        if wrong or len(ranks) > MAX_RANKS:
            raise BadRequestError(f"{name} = {text!r}: at most {MAX_RANKS} ranks expected, as in 0,3,17")
        return tuple(rank for rank in ranks if rank is not None)

    def span(self, name: str) -> tuple[int, int] | None:
        """First and last rank as in 64-71; None where it is not given."""
        text = self._values.get(name, "")
        if not text:
            return None
        first, last = (_whole(part) for part in text.partition("-")[::2])
        if first is None or last is None or not first <= last < 2**32:
            raise BadRequestError(f"{name} = {text!r}: a first and a last rank expected, as in 64-71")
        return first, last


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
