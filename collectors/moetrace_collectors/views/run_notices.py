"""What a reader of a run's figures must know first: contradictions, missed calls, and changes of placement.

Reads a store into records; all reads are bounded, by small tables or by naming the steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from moetrace_collectors.number_format import count
from moetrace_collectors.views.store_reader import member
from moetrace_collectors.views.store_rows import Parameters, Row, Store
from moetrace_schemas.enums import PlacementEvent

MAX_EPOCHS = 20
"""Newest placement epochs that are listed."""
_MAX_LEDGER_ROWS = 8 * MAX_EPOCHS
MAX_COVERAGE_ROWS = 200_000
"""Rank steps whose coverage is looked at."""

VIOLATIONS = """
SELECT
    toString(violation) AS violation, sum(count) AS total, uniqExact(step) AS num_steps, max(step) AS newest
FROM {database:Identifier}.routing_violations FINAL
WHERE run_id = {run:String}
GROUP BY violation ORDER BY total DESC, violation
"""
VIOLATION_ROWS = """
SELECT step, layer, violation, forward_mode, scope, rank, count
FROM routing_violations FINAL WHERE run_id = {run:String}
ORDER BY step DESC, layer, rank LIMIT 1000
"""
_PARTLY_SEEN = "run_id = {run:String} AND step >= {first_step:UInt64} AND seen_sites < expected_sites"
COVERAGE = f"""
SELECT
    count() AS num_rank_steps, uniqExact(rank) AS num_ranks,
    argMin(rank, seen_sites / expected_sites) AS lowest_rank,
    argMin(seen_sites, seen_sites / expected_sites) AS lowest_seen,
    argMin(expected_sites, seen_sites / expected_sites) AS lowest_expected
FROM {{database:Identifier}}.rank_steps FINAL
WHERE {_PARTLY_SEEN}
"""
COVERAGE_ROWS = f"""
SELECT step, rank, microbatch, seen_sites, expected_sites, seen_sites / expected_sites AS coverage
FROM rank_steps FINAL WHERE {_PARTLY_SEEN}
ORDER BY coverage, step DESC, rank LIMIT 1000
"""
"""What a person is led to: read by whoever follows the link, from the collector's own database."""
EPOCHS = """
SELECT
    version, previous_version, rollback_version, toString(event) AS event, step,
    toUnixTimestamp64Milli(time) AS unix_ms, toString(policy_version) AS policy, experts_copied,
    toString(verdict) AS verdict
FROM {database:Identifier}.placement_ledger
WHERE run_id = {run:String}
ORDER BY sequence DESC LIMIT {limit:UInt64}
"""


class NoticeKind(StrEnum):
    """What a notice is about."""

    ROUTING_VIOLATIONS = "routing_violations"
    COVERAGE = "coverage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One sentence, and the SQL that shows the rows behind it."""

    kind: NoticeKind
    text: str
    sql: str
    parameters: Mapping[str, str]
    """Of the SQL, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementEpoch:
    """One epoch of the placement ledger."""

    version: int
    previous_version: int
    """0 where it is not known."""
    rollback_version: int
    step: int | None
    """Its first step, where known."""
    state: PlacementEvent
    """The furthest that it got."""
    verdict: str
    """Of the newest judgement; empty before one."""
    event_unix_ms: Mapping[PlacementEvent, int]
    policy_version: str
    experts_copied: int | None


def read_notices(store: Store, run_id: str, *, first_step: int) -> tuple[Notice, ...]:
    """What contradicts or is missing; coverage since `first_step`."""
    run: Parameters = {"run": run_id}
    notices = []
    found = store.rows(VIOLATIONS, run)
    if found:
        parts = [
            f"{row['violation']} {int(row['total']):,} in {count(int(row['num_steps']), 'step')}"
            for row in found
        ]
        newest = max(int(row["newest"]) for row in found)
        notices.append(
            Notice(
                kind=NoticeKind.ROUTING_VIOLATIONS,
                text=f"Routing receipts contradict each other: {'; '.join(parts)}; newest in step {newest}.",
                sql=VIOLATION_ROWS.strip(),
                parameters={"run": run_id},
            )
        )
    seen = store.rows(COVERAGE, {**run, "first_step": first_step})[0]
    if int(seen["num_rank_steps"]):
        notices.append(
            Notice(
                kind=NoticeKind.COVERAGE,
                text=(
                    f"Wrapped calls were missed in {count(int(seen['num_rank_steps']), 'rank step')} of "
                    f"{count(int(seen['num_ranks']), 'rank')} since step {first_step}: at the least, rank "
                    f"{seen['lowest_rank']} saw {seen['lowest_seen']} of {seen['lowest_expected']} sites. "
                    "Figures of such steps leave out what was not seen."
                ),
                sql=COVERAGE_ROWS.strip(),
                parameters={"run": run_id, "first_step": str(first_step)},
            )
        )
    return tuple(notices)


def read_epochs(store: Store, run_id: str) -> tuple[PlacementEpoch, ...]:
    """The newest placement epochs of a run, newest first."""
    by_version: dict[int, list[Row]] = {}
    for row in store.rows(EPOCHS, {"run": run_id, "limit": _MAX_LEDGER_ROWS}):
        by_version.setdefault(int(row["version"]), []).append(row)
    return tuple(_epoch(version, rows) for version, rows in list(by_version.items())[:MAX_EPOCHS])


def _epoch(version: int, rows: list[Row]) -> PlacementEpoch:
    """Rows of one epoch, newest first."""
    times: dict[PlacementEvent, int] = {}
    for row in rows:
        times.setdefault(member(PlacementEvent, row["event"]), int(row["unix_ms"]))
    applied = [row for row in rows if row["event"] == PlacementEvent.APPLIED]
    steps = [int(row["step"]) for row in (*applied, *rows) if row["step"] is not None]
    copied = [int(row["experts_copied"]) for row in rows if row["experts_copied"] is not None]
    return PlacementEpoch(
        version=version,
        previous_version=next((int(row["previous_version"]) for row in rows if row["previous_version"]), 0),
        rollback_version=next((int(row["rollback_version"]) for row in rows if row["rollback_version"]), 0),
        step=steps[0] if steps else None,
        state=max(times, key=list(PlacementEvent).index),
        verdict=next((str(row["verdict"]) for row in rows if row["verdict"]), ""),
        event_unix_ms=times,
        policy_version=next((str(row["policy"]) for row in rows if row["policy"]), ""),
        experts_copied=copied[0] if copied else None,
    )
