"""What a token may be used for, and which scope a route asks for."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Scope(StrEnum):
    """A right that a token gives."""

    INGEST = "ingest"
    """Send spans."""
    READ = "read"
    """SQL, pages and metrics: placement, loads, cohorts."""
    ADMIN = "admin"
    """Everything, and what steers the collector."""


RouteScopes = Mapping[str, Scope | None]
"""Scope by path. None is open to anyone. A path that is not named asks for `read`."""


def scope_of(path: str, scopes: RouteScopes) -> Scope | None:
    """The scope of a path: `read` unless its route says otherwise, so that nothing is open by mistake."""
    return scopes.get(path, Scope.READ)


def covers(granted: frozenset[Scope], wanted: Scope) -> bool:
    """Whether these rights are enough; admin is enough for all."""
    return wanted in granted or Scope.ADMIN in granted
