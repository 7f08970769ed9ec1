"""What happens to rows on their way to a join over the store; each case in a database of its own.

`python -m join_cases STORE_PATH` prints what each case saw as JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from clickhouse_connect.driver.exceptions import OperationalError

from ledger_builders import report
from moetrace_collectors.errors import UsageError
from moetrace_collectors.ledger.client_store import ClientLedgerStore
from moetrace_collectors.ledger.recorder import Recorder
from moetrace_collectors.migrate import migrate
from moetrace_collectors.model import ExpertCounts, JoinedStep, RankStep
from moetrace_collectors.roll_ups.roll_up import RollUp, RollUpSettings
from moetrace_collectors.roll_ups.thread import RollUpThread
from moetrace_collectors.sinks.base import StepResult
from moetrace_collectors.sinks.clickhouse import ClickHouseSink
from moetrace_collectors.sinks.clickhouse_rows import unjoined_rows
from moetrace_collectors.store import embedded_dsn, open_client, parse_store
from moetrace_collectors.store_join.lease import JoinLease, StandIn
from moetrace_collectors.store_join.store_joiner import STEPS_AT_ONCE, JoinSettings, StoreJoiner
from moetrace_collectors.testing import SyntheticRun
from moetrace_collectors.verdict.engine import VerdictEngine
from moetrace_schemas.enums import COUNT_KIND_CODE, ClosedBy, CountIds, CountKind

RUN = SyntheticRun(run_id="r", world_size=2, num_layers=1)
SECOND = 1_000_000_000
HOUR_MS = 3_600_000
SLOTS = (0, 1, 2, 0)


class Case:
    """One database and who says what about it."""

    def __init__(self, client: Any, database: str) -> None:
        self.client, self.database = client, database
        migrate(client, database=database)
        self.said: list[str] = []
        self.judged: list[int] = []
        self.grown: list[tuple[str, int]] = []

    def store(self, rank_steps: Iterable[RankStep], *, waited_ms: int = 0) -> None:
        """A collector stores rows that it has had for so long."""
        now_ms = time.time_ns() // 1_000_000
        for rows in unjoined_rows(list(rank_steps), received_unix_ms=now_ms - waited_ms):
            if not len(rows):
                continue
            if hasattr(rows, "arrow"):
                self.client.insert_arrow(rows.table, rows.arrow, database=self.database)
                continue
            self.client.insert(
                rows.table, list(rows.columns), column_names=list(rows.names), database=self.database,
                column_oriented=True,
            )  # fmt: skip

    def join(self, *, timeout_s: float = 600.0) -> StoreJoiner:
        """A join that has just begun."""
        return StoreJoiner(
            self.client,
            JoinSettings(database=self.database, timeout_s=timeout_s),
            on_written=lambda results: self.judged.extend(result.joined.step for result in results),
            on_grown=self.grown.extend,
            on_reused=lambda notice: self.said.append(notice.reason),
        )

    def rows(self, sql: str) -> list[list[Any]]:
        """Rows of a query about the case's tables."""
        return [
            list(row) for row in self.client.query(sql.replace("FROM ", f"FROM {self.database}.")).result_rows
        ]

    def reasons(self) -> dict[str, str]:
        """Evidence and reason by step; JSON has texts as keys."""
        found = self.rows("SELECT step, evidence, reason FROM step_verdicts FINAL ORDER BY step")
        return {str(step): f"{evidence}: {reason}" for step, evidence, reason in found}

    def told(self) -> list[list[Any]]:
        """Events about run ids."""
        return self.rows(
            "SELECT reason, detail FROM collector_events WHERE kind = 'run_id_reused' ORDER BY time"
        )


def at(step: int, start_ns: int, *, run: SyntheticRun = RUN) -> list[RankStep]:
    """All ranks of a step, begun so much later than the run."""
    return [replace(one, start_unix_ns=run.start_unix_ns + start_ns) for one in run.step(step)]


def delayed(case: Case) -> Any:
    """A store was away from one collector for hours, while the join went on."""
    join = case.join()
    case.store(RUN.step(0))
    turns = [join.turn()]
    case.store(RUN.step(1), waited_ms=5 * HOUR_MS)
    turns.append(join.turn())
    # One rank through each of two collectors: the second one gets through a moment later.
    case.store(RUN.step(2)[:1], waited_ms=5 * HOUR_MS)
    turns.append(join.turn())
    case.store(RUN.step(2)[1:], waited_ms=5 * HOUR_MS)
    turns += [join.turn(), join.turn(), case.join().turn()]
    missing = case.rows("SELECT step, missing_ranks FROM step_verdicts FINAL ORDER BY step")
    return {"turns": turns, "judged": case.judged, "missing": missing}


def two_jobs(case: Case) -> Any:
    """Two jobs, the second a third of a second behind, a step each second; then one of them alone."""
    join = case.join()
    for step in range(20):
        for job in range(2 if step < 12 else 1):
            start_ns = step * SECOND + job * SECOND // 3 + (90 * SECOND if step >= 16 else 0)
            case.store(at(step, start_ns))
            if step % 3 == 2:
                join.turn()
    join.turn()
    again = case.join()
    again.turn()
    return {"reasons": case.reasons(), "said": case.said, "told": case.told()}


def started_again(case: Case) -> Any:
    """A job that was killed in step 5 goes on from step 3, ten minutes later; then the join begins anew."""
    join = case.join()
    for step in range(5):
        case.store(at(step, step * SECOND))
    join.turn()
    case.store(at(5, 5 * SECOND)[:1])
    join.turn()
    for step in range(3, 10):
        case.store(at(step, (600 + step) * SECOND))
    join.turn()
    case.join().turn()
    return {"reasons": case.reasons(), "said": case.said, "told": case.told()}


def resent(case: Case) -> Any:
    """Rows come twice, from two collectors: nothing is said, and nothing is judged again."""
    join = case.join()
    turns = []
    for _ in range(2):
        for step in range(3):
            case.store(at(step, step * SECOND))
        turns.append(join.turn())
    return {"turns": turns, "said": case.said, "told": case.told(), "reasons": case.reasons()}


def unfolded(case: Case) -> Any:
    """Counts by slot of a collector that did not know the map: of a step, and after its verdict."""
    record(case, 1)
    counts = ExpertCounts(layer=0, kind=COUNT_KIND_CODE[CountKind.ROUTED], counts=np.array([5, 1, 2, 7]))
    ranks = [replace(one, placement_version=1, experts=(), unfolded=(counts,)) for one in RUN.step(0)]
    join = case.join(timeout_s=0.0)
    case.store(ranks[:1])
    turns = [join.turn()]
    case.store(ranks[1:])
    turns.append(join.turn())
    # A version that nobody has announced.
    case.store([replace(one, step=1, placement_version=9) for one in ranks])
    turns.append(join.turn())
    # Behind the verdict, and read by a join that began after that.
    later = [replace(one, step=2) for one in ranks]
    case.store(later[:1])
    turns.append(join.turn())
    case.store(later[1:])
    turns.append(case.join(timeout_s=0.0).turn())
    # The map of another version comes between the two.
    latest = [replace(one, step=3, placement_version=3) for one in ranks]
    case.store(latest[:1])
    turns.append(join.turn())
    record(case, 3)
    case.store(latest[1:])
    turns.append(join.turn())
    return {"turns": turns, "loads": loads_of(case)}


def nothing_dropped(case: Case) -> Any:
    """Counts that wait for their map, and are zero of one kind throughout; then a join begins anew."""
    kinds = ((CountKind.ROUTED, [5, 1, 2, 7]), (CountKind.DROPPED, [0, 0, 0, 0]))
    counts = tuple(
        ExpertCounts(layer=0, kind=COUNT_KIND_CODE[kind], counts=np.array(numbers)) for kind, numbers in kinds
    )
    case.store(replace(one, placement_version=1, experts=(), unfolded=counts) for one in RUN.step(0))
    turns = [case.join().turn(), case.join().turn()]
    return {"turns": turns, "marked": case.rows("SELECT count() FROM rolled_up_minutes")}


def rolled_up(case: Case) -> Any:
    """Rows that waited for the store longer than roll-ups look back; a rank's come behind the verdict."""
    now_ns = time.time_ns() - HOUR_MS * 1_000_000
    ranks = [replace(one, start_unix_ns=now_ns) for one in RUN.step(0)]
    join = case.join(timeout_s=0.0)
    roll_up = RollUp(case.client, RollUpSettings(database=case.database, settle_s=0.0))
    counted = "SELECT rank_steps FROM rolled_up_minutes FINAL"
    case.store(ranks[:1], waited_ms=HOUR_MS)
    turns, minutes = [join.turn()], []
    roll_up.turn(everything=True)
    minutes.append(case.rows(counted))
    case.store(ranks[1:], waited_ms=HOUR_MS)
    case.grown.clear()
    turns.append(join.turn())
    threaded = RollUpThread(roll_up)
    threaded.touch(case.grown)
    roll_up.turn(touched=threaded.take_touched(), everything=True)
    minutes.append(case.rows(counted))
    return {"turns": turns, "minutes": minutes}


def rolled_up_before_folded(case: Case) -> Any:
    """Counts come behind a verdict while nobody joins; the minute is rolled up before they are folded."""
    record(case, 1)
    counts = ExpertCounts(layer=0, kind=COUNT_KIND_CODE[CountKind.ROUTED], counts=np.array([5, 1, 2, 7]))
    began_ns = time.time_ns() - HOUR_MS * 1_000_000
    ranks = [
        replace(one, placement_version=1, experts=(), unfolded=(counts,), start_unix_ns=began_ns)
        for one in RUN.step(0)
    ]
    roll_up = RollUp(case.client, RollUpSettings(database=case.database, settle_s=0.0))
    case.store(ranks[:1])
    turns = [case.join(timeout_s=0.0).turn()]
    case.store(ranks[1:])
    roll_up.turn(everything=True)
    sums = "SELECT sum(count) FROM expert_load_minutes WHERE count_kind = 'routed'"
    told = case.rows(sums)
    case.grown.clear()
    turns.append(case.join(timeout_s=0.0).turn())
    threaded = RollUpThread(roll_up)
    threaded.touch(case.grown)
    roll_up.turn(touched=threaded.take_touched(), everything=True)
    told += case.rows(sums)
    return {"turns": turns, "sums": told, "left": roll_up.turn(everything=True)}


def waited_for_days(case: Case) -> Any:
    """Counts behind a verdict, of a step and an arrival before the look back of the join that comes then."""
    record(case, 1)
    counts = ExpertCounts(layer=0, kind=COUNT_KIND_CODE[CountKind.ROUTED], counts=np.array([5, 1, 2, 7]))
    began_ns = time.time_ns() - 72 * HOUR_MS * 1_000_000
    ranks = [
        replace(one, placement_version=1, experts=(), unfolded=(counts,), start_unix_ns=began_ns)
        for one in RUN.step(0)
    ]
    case.store(ranks[:1], waited_ms=48 * HOUR_MS)
    turns = [case.join(timeout_s=0.0).turn()]
    case.store(ranks[1:], waited_ms=48 * HOUR_MS)
    moved = (
        f"INSERT INTO {case.database}.rank_step_arrivals SELECT * REPLACE (stored_at - toIntervalHour(48) AS "
        f"stored_at) FROM {case.database}.rank_step_arrivals"
    )
    case.client.command(moved)
    recent = "DELETE WHERE stored_at > now64(3) - 3600 SETTINGS mutations_sync = 1"
    case.client.command(f"ALTER TABLE {case.database}.rank_step_arrivals {recent}")
    join = case.join(timeout_s=0.0)
    turns += [join.turn(), join.turn()]
    return {"turns": turns, "loads": loads_of(case)}


def loads_of(case: Case) -> dict[str, list[int]]:
    """Counts of experts 0, 1, ... in the store."""
    found = case.rows("SELECT step, rank, expert, count FROM expert_loads FINAL ORDER BY step, rank, expert")
    loads: dict[str, list[int]] = {}
    for step, rank, _, number in found:
        loads.setdefault(f"step {step} rank {rank}", []).append(number)
    return loads


class FailingClient:
    """A client whose store goes away before some inserts of verdicts: as if the process were killed."""

    def __init__(self, client: Any, *, fails: Callable[[int], bool] = lambda number: number % 2 == 1) -> None:
        self._client, self._number, self._fails = client, 0, fails

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def insert(self, table: str, *values: Any, **named: Any) -> None:
        """Insert or fail."""
        if table == "step_verdicts":
            self._number += 1
            if self._fails(self._number):
                raise OperationalError("gone")
        self._client.insert(table, *values, **named)


def killed(case: Case) -> Any:
    """A join that is killed between the ledger and the verdicts of every batch, and begun anew each time."""
    for step in range(160):
        run = RUN if step < 80 else replace(RUN, slow_rank=1)
        case.store(replace(one, placement_version=1 + step // 80) for one in run.step(step))
    case.client = FailingClient(case.client)
    failures = 0
    while len(case.judged) < 160:
        try:
            case.join().turn()
        except UsageError:
            failures += 1
    ledger = case.rows("SELECT event, version, step, verdict FROM placement_ledger ORDER BY sequence")
    return {"failures": failures, "judged": len(set(case.judged)), "ledger": ledger}


def switched(case: Case) -> Any:
    """A site whose collector joined changes to --join=store: steps of before have verdicts and no arrival."""
    sink = ClickHouseSink(
        case.client,
        database=case.database,
        batch_bytes=1 << 30,
        on_stored=lambda *_: None,
        on_lost=lambda *_: None,
    )
    engine = VerdictEngine()
    for step in range(3):
        ranks = RUN.step(step)
        joined = JoinedStep(
            run_id="r",
            step=step,
            world_size=2,
            rank_steps=ranks,
            missing_ranks=(),
            closed_by=ClosedBy.COMPLETE,
        )
        sink.take_step(StepResult(joined=joined, verdict=engine.judge(joined), loads=()))
    sink.flush()
    arrived = case.rows("SELECT count() FROM rank_step_arrivals")
    join = case.join()
    turns = [join.turn()]
    for step in range(3, 5):
        case.store(RUN.step(step))
    turns.append(join.turn())
    # One of before whose verdict did not get through, found by a join that begins.
    case.client.command(
        f"ALTER TABLE {case.database}.step_verdicts DELETE WHERE step = 1 SETTINGS mutations_sync = 1"
    )
    turns += [join.turn(), case.join().turn(), case.join(timeout_s=0.0).turn()]
    return {"arrived": arrived, "turns": turns, "judged": case.judged}


def killed_once(case: Case) -> Any:
    """A join that is killed once: a placement's first steps are in the ledger, and no verdict is."""
    for step in range(160):
        run = RUN if step < 80 else replace(RUN, slow_rank=1)
        case.store(replace(one, placement_version=1 + step // 80) for one in run.step(step))
    client = case.client
    case.client = FailingClient(client, fails=lambda number: number == 80 // STEPS_AT_ONCE + 1)
    failures = 0
    while len(case.judged) < 160:
        try:
            case.join().turn()
        except UsageError:
            failures += 1
    ledger = case.rows("SELECT event, version, step, verdict FROM placement_ledger ORDER BY sequence")
    return {"failures": failures, "judged": len(case.judged), "ledger": ledger}


def standing_by(case: Case) -> Any:
    """Who is at work of several that join."""
    clock = [0.0]

    def lease(run_id: str = "") -> JoinLease:
        return JoinLease(case.client, database=case.database, run_id=run_id, clock_s=lambda: clock[0])

    dead = "INSERT INTO %s.join_leases SELECT 'dead', '', now64(6) - 3600, now64(6) - 61, 0"
    case.client.command(dead % case.database)
    # Before the store's clock was put back.
    ahead = "INSERT INTO %s.join_leases SELECT 'ahead', '', now64(6) - 3600, now64(6) + 3600, 0"
    case.client.command(ahead % case.database)
    first, second = lease(), lease()
    told = {"first": first.holds(), "second": second.holds(), "first again": first.holds()}
    third = lease("r")
    told["another run only"] = third.holds()
    third.leave()
    # The first does not get through for half a minute: the second may be at work.
    clock[0] += 20.0
    second.holds()
    clock[0] += 11.0
    told["second after a gap"] = [first.holds(), second.holds(), first.holds()]
    second.leave()
    told["first when the second has left"] = first.holds()
    said: list[str] = []
    stand_in = StandIn(second, case.join, on_standing_by=lambda is_shown: said.append("standing by"))
    case.store(RUN.step(0))
    told["turns standing by"] = [stand_in.turn(), stand_in.turn()]
    first.leave()
    told["turn when alone"] = stand_in.turn()
    told["said"] = said
    return told


def record(case: Case, version: int) -> None:
    """Announce a map of four slots."""
    recorder = Recorder(ClientLedgerStore(case.client, database=case.database), unix_ms=lambda: 1)
    recorder.record(report(version, (SLOTS,), run_id="r", ranks=2, count_ids=CountIds.PHYSICAL))


def main(path: str) -> None:
    """Every case."""
    logging.basicConfig(level=logging.WARNING)
    client = open_client(parse_store(embedded_dsn(Path(path))))
    cases = (
        delayed,
        two_jobs,
        started_again,
        resent,
        unfolded,
        nothing_dropped,
        rolled_up,
        rolled_up_before_folded,
        waited_for_days,
        switched,
        killed,
        killed_once,
        standing_by,
    )
    told = {case.__name__: case(Case(client, f"case_{case.__name__}")) for case in cases}
    client.close()
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
