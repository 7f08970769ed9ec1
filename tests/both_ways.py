"""One run through a collector that joins, and through two that do not with a join over their store.

`python -m both_ways STORE_PATH` prints, for each way, the ledger, the loads and the series as JSON.
Placements change twice: a mapping with replicas, announced by two pipeline stages through different
collectors, one of them late; then one like it. Counts are numbered by slots.
The join begins anew in the middle of everything.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ledger_builders import report
from moetrace_collectors.dead_letter import DeadLetter
from moetrace_collectors.intake import Intake
from moetrace_collectors.joiner import Joiner, JoinWindow
from moetrace_collectors.ledger import ledger_rows as names
from moetrace_collectors.ledger.chain import link, verify_links
from moetrace_collectors.ledger.epochs import Epochs
from moetrace_collectors.migrate import migrate
from moetrace_collectors.model import ExpertCounts, PlacementReport, RankStep
from moetrace_collectors.self_metrics import SelfMetrics
from moetrace_collectors.series import SeriesBook
from moetrace_collectors.sinks.base import RetryPolicy
from moetrace_collectors.sinks.clickhouse import ClickHouseSink
from moetrace_collectors.sinks.placement_ledger import LedgerSink
from moetrace_collectors.sinks.prometheus import PrometheusSink
from moetrace_collectors.stateless_joiner import StatelessJoiner
from moetrace_collectors.store import embedded_dsn, open_client, parse_store
from moetrace_collectors.store_join.join_metrics import JoinMetrics
from moetrace_collectors.store_join.store_joiner import JoinSettings, StoreJoiner
from moetrace_collectors.summary import layer_loads
from moetrace_collectors.testing import SyntheticRun
from moetrace_collectors.verdict.engine import VerdictEngine
from moetrace_collectors.worker import Clocks, Worker
from moetrace_schemas.enums import COUNT_KIND_CODE, CountIds, CountKind

RUN = SyntheticRun(run_id="moved", world_size=4, num_layers=2, num_experts=8, jitter_ns=200_000)
SLOWER = replace(RUN, slow_rank=1, slow_ns=1_500_000)
SECOND_AT, THIRD_AT, END = 90, 260, 340
ANNOUNCED_LATE = 40
"""Steps of the second epoch that are stored before its second stage has announced."""
CHUNK = 10
"""Steps between two turns of the join."""
RESTARTS = (30, 95, 130, 200, 250, 265)
"""Steps before which the join begins anew."""
SLOTS = {
    1: ((0, 1, 2, 3, 4, 5, 6, 7, 0, 0, 7, -1), (7, 6, 5, 4, 3, 2, 1, 0, 1, 2, 3, -1)),
    2: ((3, 1, 2, 0, 4, 5, 6, 7, 5, 5, 5, -1), (0, 1, 2, 3, 4, 5, 6, 7, 2, 2, 2, 2)),
    3: ((3, 1, 2, 0, 4, 5, 7, 6, 5, 5, 5, -1), (0, 1, 2, 3, 4, 5, 6, 7, 2, 2, 2, 2)),
}
"""By version and layer."""
KINDS = (CountKind.ROUTED, CountKind.RECEIVED, CountKind.DROPPED)


def version_of(step: int) -> int:
    """The placement version that a step ran under."""
    return 1 + (step >= SECOND_AT) + (step >= THIRD_AT)


def ranks_of(step: int) -> list[RankStep]:
    """One step; the second epoch is slower."""
    run = SLOWER if version_of(step) == 2 else RUN
    return [counted(rank, version_of(step)) for rank in run.step(step)]


def counted(rank: RankStep, version: int) -> RankStep:
    """The rank with counts per slot; those that were dropped end in slots that nothing was dropped of."""
    random = np.random.default_rng(rank.step * 16 + rank.rank)
    entries = []
    for layer in range(RUN.num_layers):
        for kind in KINDS:
            slots = random.integers(0, 50, 12)
            if kind is CountKind.DROPPED:
                slots[5:] = 0
            entries.append(ExpertCounts(layer=layer, kind=COUNT_KIND_CODE[kind], counts=slots))
    invalid = ExpertCounts(layer=0, kind=COUNT_KIND_CODE[CountKind.INVALID], counts=np.array([3]))
    return replace(rank, placement_version=version, experts=(*entries, invalid))


def announcement(version: int, step: int, layer: int) -> PlacementReport:
    """What the first rank of a pipeline stage sends."""
    return report(
        version,
        (SLOTS[version][layer],),
        run_id=RUN.run_id,
        step=step,
        layers=(layer,),
        count_ids=CountIds.PHYSICAL,
        max_slowdown=0.05,
    )


@dataclass
class Collector:
    """A collector's worker without its thread."""

    worker: Worker
    intake: Intake
    book: SeriesBook
    sinks: tuple[ClickHouseSink, LedgerSink]

    def send(self, *rank_steps: RankStep, placements: tuple[PlacementReport, ...] = ()) -> None:
        """Receive one request and deal with it."""
        assert self.intake.offer(rank_steps, (), size_bytes=1, placements=placements) is not None
        self.worker.turn(timeout_s=0)

    def store(self) -> None:
        """Write what is buffered."""
        for sink in self.sinks:
            sink.flush()


class AtTheEnd(ClickHouseSink):
    """Writes in the worker's own thread, when that ends."""

    num_waiting_steps = num_taken = num_written = 0

    def is_due(self, now_ns: int) -> bool:
        """Never."""
        return False


def collector(
    client: Any, database: str, joiner: Joiner | StatelessJoiner, clock: Callable[[], int]
) -> Collector:
    """Wire one to a database."""
    book = SeriesBook()
    clickhouse = AtTheEnd(
        client,
        database=database,
        batch_bytes=1 << 40,
        on_stored=lambda table, rows: None,
        on_lost=lambda table, rows: None,
    )
    ledger = LedgerSink(
        client,
        database=database,
        book=book,
        unix_ms=lambda: time.time_ns() // 1_000_000,
        on_conflict=lambda told: None,
        on_lost=lambda table, rows: None,
    )
    intake = Intake(max_requests=100, max_bytes=10**12, clock_ns=clock)
    worker = Worker(
        intake=intake,
        joiner=joiner,
        judge=VerdictEngine(),
        layer_loads=layer_loads,
        sinks=(PrometheusSink(book, series_budget=20_000), ledger, clickhouse),
        dead_letter=DeadLetter(Path(tempfile.mkdtemp()) / "dead_letter.jsonl", max_bytes=1),
        metrics=SelfMetrics(book),
        clocks=Clocks(monotonic_ns=clock, unix_ns=time.time_ns, sleep=lambda seconds: None),
        retry=RetryPolicy(),
        shutdown_timeout_s=1,
        on_runs=lambda runs: None,
        placements=ledger.take_placement,
        epochs=Epochs(ledger.mapping, clock_ns=clock),
    )
    return Collector(worker, intake, book, (clickhouse, ledger))


def announcements(step: int) -> Iterator[tuple[int, PlacementReport]]:
    """What is announced before a step, and through which of two collectors."""
    for version, first in ((1, 0), (2, SECOND_AT), (3, THIRD_AT)):
        if step == first:
            yield 0, announcement(version, first, 0)
        if step == first + (ANNOUNCED_LATE if version == 2 else 0):
            yield 1, announcement(version, first, 1)


def online(client: Any) -> tuple[Any, dict[str, float]]:
    """A collector that joins; it is told of a placement before its steps, as all ranks send to it."""
    migrate(client, database="online")
    window = JoinWindow(timeout_ns=10**12, max_steps=64, max_bytes=2**34, max_closed_steps=1024)
    one = collector(client, "online", Joiner(window), lambda: 0)
    for step in range(END):
        for version, first in ((1, 0), (2, SECOND_AT), (3, THIRD_AT)):
            if step == first:
                for layer in range(RUN.num_layers):
                    one.send(placements=(announcement(version, first, layer),))
        one.send(*ranks_of(step))
        if step % CHUNK == CHUNK - 1:
            one.store()
    return read(client, "online"), samples(one.book)


def in_store(client: Any) -> tuple[Any, dict[str, float]]:
    """Two collectors that do not join, ranks on both by turns, and a join that is often begun anew."""
    migrate(client, database="in_store")
    seconds = itertools.count()
    clock: Callable[[], int] = lambda: next(seconds) * 10**8  # noqa: E731
    both = [collector(client, "in_store", StatelessJoiner(), clock) for _ in range(2)]
    metrics = JoinMetrics(series_budget=20_000)

    def begun() -> StoreJoiner:
        settings = JoinSettings(database="in_store", timeout_s=60.0)
        return StoreJoiner(client, settings, on_written=metrics.take, book=metrics.book)

    joiner = begun()
    num_unfolded = 0
    for step in range(END):
        if step in RESTARTS:
            joiner = begun()
        late = SECOND_AT <= step < SECOND_AT + ANNOUNCED_LATE
        for through, told in announcements(step):
            both[through].send(placements=(told,))
        for number, rank_step in enumerate(ranks_of(step)):
            both[(step + number) % 2].send(rank_step)
        if step % CHUNK == CHUNK - 1:
            for one in both:
                one.store()
            if late:
                continue  # the join comes when the map does, as it waits longer for ranks than collectors do
            joiner.turn()
    [[num_unfolded]] = client.query("SELECT count() FROM in_store.unfolded_expert_loads").result_rows
    assert num_unfolded > 1_000, "some counts must have had to wait"
    return read(client, "in_store"), samples(metrics.book)


def read(client: Any, database: str) -> Any:
    """The ledger, checked, and every load."""
    found = client.query(
        names.PAGE, parameters={"database": database, "run": RUN.run_id, "first": 0}
    ).named_results()
    ledger = [names.ledger_row(row) for row in found]
    faults = verify_links(map(link, ledger))
    assert faults == (), faults
    loads = client.query(
        "SELECT step, layer, toString(count_kind), rank, expert, count, placement_version "
        f"FROM {database}.expert_loads FINAL ORDER BY step, layer, count_kind, rank, expert"
    ).result_rows
    layers = client.query(
        f"SELECT step, layer, tokens, max_mean_ratio, hot_expert FROM {database}.v_layer_loads "
        "ORDER BY step, layer"
    ).result_rows
    verdicts = client.query(
        "SELECT step, toString(evidence), reason, rank, step_ns FROM "
        f"{database}.step_verdicts FINAL ORDER BY step"
    ).result_rows
    return {
        "ledger": [
            {
                "event": row.event,
                "version": row.version,
                "previous_version": row.previous_version,
                "rollback_version": row.rollback_version,
                "step": row.step,
                "digest": row.digest,
                "experts_copied": row.experts_copied,
                "verdict": row.verdict,
                "document": json.loads(row.document),
            }
            for row in ledger
        ],
        "loads": [list(row) for row in loads],
        "layers": [list(row) for row in layers],
        "verdicts": [list(row) for row in verdicts],
    }


def samples(book: SeriesBook) -> dict[str, float]:
    """Series of steps and of the ledger."""
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in book.collect()
        for sample in family.samples
        if not sample.name.startswith("moetrace_collector_") and not sample.name.endswith("_created")
    }


def main(path: str) -> None:
    """Both ways in one engine."""
    client = open_client(parse_store(embedded_dsn(Path(path))))
    told = {}
    for name, way in (("online", online), ("in_store", in_store)):
        rows, series = way(client)
        told[name] = {**rows, "series": series}
    client.close()
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
