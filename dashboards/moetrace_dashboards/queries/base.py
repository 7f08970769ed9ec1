"""A query of a panel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PromQuery:
    """PromQL with Grafana's variables in it."""

    expr: str
    legend: str
    instant: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlQuery:
    """SQL of the ClickHouse data source: its macros and Grafana's variables are expanded before it runs."""

    sql: str


Query = PromQuery | SqlQuery
