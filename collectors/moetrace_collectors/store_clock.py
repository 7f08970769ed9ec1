"""Time as a store tells it."""

from __future__ import annotations

NOW = "SELECT toUnixTimestamp64Milli(now64(3))"
"""The store's clock: the only one that all writers' rows are compared with."""
HOUR_MS = 3_600_000
