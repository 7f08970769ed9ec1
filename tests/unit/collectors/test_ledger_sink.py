"""The ledger's sink: nothing is lost or written twice, and metrics follow."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from ledger_builders import EVEN, SWAPPED, MemoryLedger, report
from moetrace_collectors.errors import SinkError
from moetrace_collectors.ledger.chain import LedgerRow, link, verify_links
from moetrace_collectors.model import JoinedStep, PlacementReport, StepVerdict
from moetrace_collectors.series import SeriesBook
from moetrace_collectors.sinks import placement_ledger
from moetrace_collectors.sinks.base import StepResult
from moetrace_collectors.sinks.placement_ledger import MAX_WAITING, LedgerSink
from moetrace_collectors.testing import SyntheticRun
from moetrace_schemas.enums import Cause, ClosedBy, Evidence
from moetrace_schemas.placement import PlacementMap


class StoreError(Exception):
    """What the store's client raises; `code` as ClickHouse gives it."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


@dataclass
class FlakyLedger(MemoryLedger):
    """A ledger in memory that fails as often as told, before or after it wrote."""

    error: type[Exception] = StoreError
    fail_insert: list[Exception] = field(default_factory=list)
    fail_slots: list[Exception] = field(default_factory=list)

    def insert(self, row: LedgerRow) -> None:
        """Fail or append."""
        if self.fail_insert:
            raise self.fail_insert.pop(0)
        super().insert(row)

    def insert_slots(self, run_id: str, version: int, mapping: PlacementMap) -> None:
        """Fail or keep."""
        if self.fail_slots:
            raise self.fail_slots.pop(0)
        super().insert_slots(run_id, version, mapping)


@dataclass
class Setting:
    """A sink and what it was given."""

    sink: LedgerSink
    store: FlakyLedger
    book: SeriesBook
    conflicts: list[PlacementReport]
    lost: list[tuple[str, int]]

    def value(self, name: str) -> float:
        """Sum over the label sets of a metric."""
        family = next(
            each for each in self.book.collect() if each.name in (name, name.removesuffix("_total"))
        )
        return sum(sample.value for sample in family.samples)


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Setting:
    """A sink over a ledger in memory."""
    store, book = FlakyLedger(), SeriesBook()
    conflicts: list[PlacementReport] = []
    lost: list[tuple[str, int]] = []
    monkeypatch.setattr(placement_ledger, "ClientLedgerStore", lambda client, database: store)
    sink = LedgerSink(
        None,
        database="moetrace",
        book=book,
        unix_ms=lambda: 1_900_000_000_000,
        on_conflict=conflicts.append,
        on_lost=lambda table, rows: lost.append((table, rows)),
    )
    return Setting(sink=sink, store=store, book=book, conflicts=conflicts, lost=lost)


def result(step: int, version: int) -> StepResult:
    """A joined step under a version."""
    run = SyntheticRun(run_id="run", world_size=2, num_layers=1)
    joined = JoinedStep(
        run_id="run",
        step=step,
        world_size=2,
        rank_steps=tuple(replace(rank, placement_version=version) for rank in run.step(step)),
        missing_ranks=(),
        closed_by=ClosedBy.COMPLETE,
    )
    verdict: dict[str, Any] = {"suspect": None, "runner_up": None, "step_ns": 10**7, "extension_ns": 0}
    return StepResult(
        joined=joined,
        verdict=StepVerdict(
            run_id="run",
            step=step,
            forward_mode=run.forward_mode,
            evidence=Evidence.INSUFFICIENT,
            reason="",
            cause=Cause.UNKNOWN,
            **verdict,
        ),
        loads=(),
    )


def test_changes_are_due_at_once_and_steps_are_not(setting: Setting) -> None:
    """A step without a change costs the store nothing."""
    setting.sink.take_step(result(0, 0))
    assert not setting.sink.is_due(0)
    setting.sink.take_placement(report(1, EVEN))
    assert setting.sink.is_due(0)
    setting.sink.flush()
    setting.sink.take_step(result(0, 1))
    setting.sink.flush()
    setting.sink.take_step(result(1, 1))
    assert not setting.sink.is_due(0)
    assert [row.event for row in setting.store.rows] == ["announced", "applied"]


@pytest.mark.parametrize("error", [OSError("away"), StoreError("no answer"), StoreError("memory", 241)])
def test_while_the_store_is_away_everything_waits_in_order(setting: Setting, error: Exception) -> None:
    """The flush can be tried again, and then the chain is whole."""
    setting.store.fail_insert = [error, error]
    for version, rows in ((1, EVEN), (2, SWAPPED)):
        setting.sink.take_placement(report(version, rows))
    for _ in range(2):
        with pytest.raises(SinkError) as caught:
            setting.sink.flush()
        assert caught.value.retryable
    setting.sink.flush()
    assert [row.version for row in setting.store.rows] == [1, 2]
    assert verify_links(map(link, setting.store.rows)) == ()
    assert setting.lost == []


def test_a_row_that_was_written_before_the_error_is_not_written_again(setting: Setting) -> None:
    """The retry finds it by version and digest, and makes up for what was cut off."""
    setting.store.fail_slots = [OSError("cut")]
    setting.sink.take_placement(report(1, EVEN))
    with pytest.raises(SinkError):
        setting.sink.flush()
    setting.sink.flush()
    assert len(setting.store.rows) == 1
    assert list(setting.store.slots) == [("run", 1)]


def test_what_the_store_refuses_for_good_is_lost_and_counted(setting: Setting) -> None:
    """It does not hold up what comes behind it."""
    setting.store.fail_insert = [StoreError("no such column", 16)]
    setting.sink.take_placement(report(1, EVEN))
    setting.sink.take_placement(report(2, SWAPPED))
    with pytest.raises(SinkError) as caught:
        setting.sink.flush()
    assert not caught.value.retryable
    setting.sink.flush()
    assert [row.version for row in setting.store.rows] == [2]
    assert setting.lost == [("placement_ledger", 1)]


@pytest.mark.parametrize("document", ["", "null", "[]", "{}", '{"placement": {"layers": 3}}'])
def test_a_row_that_somebody_changed_ends_no_thread(setting: Setting, document: str) -> None:
    """What needs it is lost and counted; other runs go on."""
    setting.sink.take_placement(report(1, EVEN))
    setting.sink.flush()
    setting.store.rows[0] = replace(setting.store.rows[0], document=document)
    setting.sink.take_placement(report(1, SWAPPED))
    setting.sink.take_placement(replace(report(1, EVEN), run_id="other"))
    with pytest.raises(SinkError, match="ledger row 0 of run run ") as caught:
        setting.sink.flush()
    assert not caught.value.retryable
    setting.sink.flush()
    assert [row.run_id for row in setting.store.rows] == ["run", "other"]
    assert setting.lost == [("placement_ledger", 1)]
    assert setting.sink.mapping("run", 1) is None


def test_the_queue_is_bounded(setting: Setting) -> None:
    """A flood of announcements costs the oldest, counted."""
    for version in range(MAX_WAITING + 3):
        setting.sink.take_placement(report(version, EVEN))
    assert setting.lost == [("placement_ledger", 1)] * 3
    setting.sink.abandon()
    assert len(setting.lost) == MAX_WAITING + 3


def test_metrics_follow_the_ledger(setting: Setting) -> None:
    """Recorded, repeated, conflicting; copies and bytes; the rollback target."""
    for told in (
        report(1, EVEN),
        report(1, EVEN),
        report(1, SWAPPED),
        report(2, SWAPPED, expert_bytes=7, step=4),
    ):
        setting.sink.take_placement(told)
    setting.sink.flush()
    assert len(setting.conflicts) == 1
    assert setting.value("moetrace_collector_placements_total") == 4
    assert setting.value("moetrace_placement_rows_total") == 2
    assert setting.value("moetrace_placement_experts_copied_total") == 2
    assert setting.value("moetrace_placement_copied_bytes_total") == 14
    assert setting.value("moetrace_placement_rollback_version") == 1
    assert setting.value("moetrace_placement_replicas") == 0
