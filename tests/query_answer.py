"""What a clickhouse-connect client returns, for stores that tests make up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Answer:
    """What a query returns."""

    rows: list[dict[str, Any]]

    @property
    def result_rows(self) -> list[list[Any]]:
        """Rows without names."""
        return [list(row.values()) for row in self.rows]

    def named_results(self) -> list[dict[str, Any]]:
        """Rows by name."""
        return self.rows
