"""With a spool nothing is dropped while the collector is away: it waits on disk and goes in order."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from moetrace.config import Config
from moetrace.context import RankContext
from moetrace.emit import otlp
from moetrace.emit.jsonl import from_json, to_json
from moetrace.emit.otlp import BATCH, OtlpEmitter
from moetrace.emit.spool import Sent, Spool, open_spool
from moetrace.errors import ConfigError
from moetrace.guard import Guard
from moetrace.self_metrics import SelfMetrics
from moetrace_schemas.enums import DropReason

from .otlp_server import FakeCollector
from .records import CONTEXT, step_record

MIB = 2**20


@dataclass
class Collector(SpanExporter):
    """Takes batches while it is there; remembers steps and run ids in order."""

    is_there: bool = True
    steps: list[int] = field(default_factory=list)
    run_ids: list[str] = field(default_factory=list)
    tries: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """One request."""
        with self.changed:
            self.tries += 1
            if self.is_there:
                for span in spans:
                    assert span.attributes is not None
                    self.steps.append(int(span.attributes["moetrace.step.index"]))  # type: ignore[arg-type]
                    self.run_ids.append(str(span.attributes["moetrace.run.id"]))
            self.changed.notify_all()
            return SpanExportResult.SUCCESS if self.is_there else SpanExportResult.FAILURE

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until a condition on what was seen holds."""
        with self.changed:
            assert self.changed.wait_for(condition, 20)


@dataclass
class Sender:
    """What the emitter asks the tracer for."""

    config: Config
    context: RankContext = CONTEXT
    guard: Guard = field(default_factory=Guard)
    model_name: str = "olmoe"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are milliseconds."""
    monkeypatch.setattr(otlp, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(otlp, "LONGEST_BACKOFF_S", 0.004)
    monkeypatch.setattr(otlp, "LINGER_S", 0.001)


class Rank:
    """An emitter with a spool in front of a collector."""

    def __init__(
        self,
        directory: Path,
        collector: Collector | None = None,
        *,
        context: RankContext = CONTEXT,
        endpoint: str = "",
    ) -> None:
        """A collector of the test's, or a server at an endpoint."""
        config = Config(spool_dir=str(directory), queue_steps=10_000, endpoint=endpoint)
        self.sender = Sender(config, context)
        self.metrics = SelfMetrics()
        self.spool = open_spool(self.sender.config, context, self.metrics)
        self.emitter = OtlpEmitter(
            lambda: self.sender, self.metrics, self.sender.config, collector, spool=self.spool
        )

    def emit(self, *steps: int) -> None:
        """Queue steps."""
        for step in steps:
            self.emitter.emit(step_record(step))

    def close(self) -> bool:
        """Close within ten seconds."""
        return self.emitter.close(time.monotonic() + 10)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of the spool."""
    return tmp_path / "spool"


def test_a_record_comes_back_from_json_as_it_was() -> None:
    """What the spool reads is what was recorded, types and all."""
    for record in (step_record(5), step_record(6, experts=(), traffic=(), phases=())):
        assert from_json(json.loads(json.dumps(to_json(record, CONTEXT)))) == record


def test_what_was_recorded_while_the_collector_was_away_arrives_in_order(directory: Path) -> None:
    """Nothing is dropped, everything arrives once and in order, and the disk is empty afterwards."""
    collector = Collector(is_there=False)
    rank = Rank(directory, collector)
    rank.emit(*range(100))
    collector.wait_for(lambda: collector.tries >= 5)
    rank.emit(*range(100, 150))
    collector.is_there = True
    collector.wait_for(lambda: len(collector.steps) >= 150)
    assert rank.close() is True
    assert collector.steps == list(range(150))
    assert rank.metrics.exported == {"otlp": 150}
    assert not rank.metrics.dropped
    assert rank.metrics.spooled_steps == 0
    assert list(directory.iterdir()) == []


def test_a_healthy_collector_costs_no_disk(directory: Path) -> None:
    """Without an outage no file is made."""
    collector = Collector()
    rank = Rank(directory, collector)
    rank.emit(*range(10))
    assert rank.close() is True
    assert collector.steps == list(range(10))
    assert list(directory.iterdir()) == []


def test_a_rank_that_ends_while_the_collector_is_away_leaves_its_steps_for_the_next(directory: Path) -> None:
    """Closing drops nothing; the same rank of the same run sends them when it starts again, and only it."""
    away = Collector(is_there=False)
    rank = Rank(directory, away)
    rank.emit(*range(40))
    assert rank.close() is True
    assert not rank.metrics.dropped
    other = Collector()
    stranger = Rank(directory, other, context=replace(CONTEXT, run_id="run-8"))
    stranger.emit(0)
    assert stranger.close()
    assert other.run_ids == ["run-8"]
    back = Collector()
    again = Rank(directory, back)
    assert again.metrics.spooled_steps == 40
    again.emit(40)
    back.wait_for(lambda: len(back.steps) >= 41)
    assert again.close()
    assert back.steps == list(range(41))


def test_closing_sends_what_waits_on_disk_without_waiting_for_the_next_try(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short process sends what the one before it left, its own steps behind, if the collector is there."""
    first = Rank(directory, Collector(is_there=False))
    first.emit(*range(40))
    assert first.close()
    monkeypatch.setattr(otlp, "FIRST_BACKOFF_S", 1000.0)
    monkeypatch.setattr(otlp, "LONGEST_BACKOFF_S", 1000.0)
    collector = Collector(is_there=False)
    second = Rank(directory, collector)
    collector.wait_for(lambda: collector.tries == 1)
    collector.is_there = True
    second.emit(40, 41)
    assert second.close()
    assert collector.steps == list(range(42))
    assert list(directory.iterdir()) == []


def test_closing_says_what_waits_on_disk(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """How many steps, and where; nothing where none wait."""
    rank = Rank(directory, Collector(is_there=False))
    rank.emit(*range(3))
    with caplog.at_level(logging.WARNING):
        assert rank.close()
    (said,) = [message for message in caplog.messages if str(directory) in message]
    assert "3 steps wait" in said
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert Rank(directory, Collector()).close()
    assert caplog.messages == []


def test_a_request_that_hangs_at_the_end_is_kept_too(directory: Path) -> None:
    """Who closes puts the batch in flight on disk; that it may arrive twice is the collector's to see."""
    go_on = threading.Event()

    class Hanging(Collector):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            with self.changed:
                self.tries += 1
                self.changed.notify_all()
            go_on.wait(20)
            return SpanExportResult.FAILURE

    collector = Hanging()
    rank = Rank(directory, collector)
    rank.emit(0)
    collector.wait_for(lambda: collector.tries >= 1)
    rank.emit(1, 2)
    assert rank.emitter.close(time.monotonic() + 0.2) is True
    go_on.set()
    rank.emitter._thread.join(10)
    assert rank.spool is not None
    assert [sent.record.step for sent in rank.spool.oldest(BATCH)] == [0, 1, 2]
    assert not rank.metrics.dropped


def sent(step: int) -> Sent:
    """A record as the spool takes it."""
    return Sent(
        record=step_record(step), context=CONTEXT, sample_period=10, model_name="m", model_version="v"
    )


def test_disk_space_is_bounded_and_the_oldest_steps_give_way(directory: Path) -> None:
    """Beyond the bound whole files go, counted; what is left is the newest, in order."""
    dropped: list[tuple[DropReason, int]] = []
    spool = Spool(
        str(directory), CONTEXT, max_bytes=20_000, drop=lambda reason, count: dropped.append((reason, count))
    )
    for step in range(100):
        spool.append([sent(step)])
    assert sum(path.stat().st_size for path in directory.iterdir()) <= 20_000
    lost = sum(count for _, count in dropped)
    assert {reason for reason, _ in dropped} == {DropReason.SPOOL_FULL}
    assert 0 < lost < 100
    assert len(spool) == 100 - lost
    left = []
    while found := spool.oldest(7):
        left += [one.record.step for one in found]
        spool.sent(len(found))
    assert left == list(range(lost, 100))
    assert len(spool) == 0


def test_a_disk_that_refuses_is_counted_and_does_not_raise(directory: Path) -> None:
    """Each record that could not be kept is a drop with its own reason; later ones are kept again."""
    metrics = SelfMetrics()
    spool = Spool(str(directory), CONTEXT, max_bytes=MIB, drop=metrics.drop)
    directory.rmdir()
    spool.append([sent(0), sent(1)])
    assert metrics.dropped == {DropReason.SPOOL_FAILED: 2}
    directory.mkdir()
    spool.append([sent(2)])
    assert [one.record.step for one in spool.oldest(5)] == [2]


class _Full:
    """A file of a disk that takes names and no bytes."""

    def __init__(self, stream: IO[Any]) -> None:
        self._stream = stream

    def __enter__(self) -> _Full:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def write(self, data: bytes) -> int:
        """Half of it fits."""
        self._stream.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_gets_no_file_for_each_step(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names fit where bytes do not; and what was written of a line is in the way of none that comes after."""
    metrics = SelfMetrics()
    spool = Spool(str(directory), CONTEXT, max_bytes=MIB, drop=metrics.drop)
    spool.append([sent(0)])
    opened = Path.open

    def open_full(path: Path, mode: str = "r") -> Any:
        stream = opened(path, mode)
        return stream if mode == "rb" else _Full(stream)

    with monkeypatch.context() as full:
        full.setattr(Path, "open", open_full)
        for step in range(1, 50):
            spool.append([sent(step)])
    assert metrics.dropped == {DropReason.SPOOL_FAILED: 49}
    assert len(list(directory.iterdir())) == 2
    spool.append([sent(50), sent(51)])
    steps = []
    while found := spool.oldest(10):
        steps += [one.record.step for one in found]
        spool.sent(len(found))
    assert steps == [0, 50, 51]
    assert list(directory.iterdir()) == []
    assert metrics.dropped == {DropReason.SPOOL_FAILED: 49}


def test_a_file_that_cannot_be_deleted_does_not_end_the_export(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that has become read-only: what is sent counts, and what comes later is sent too."""
    collector = Collector(is_there=False)
    rank = Rank(directory, collector)
    rank.emit(0)
    collector.wait_for(lambda: collector.tries >= 3)

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", refuse)
    collector.is_there = True
    collector.wait_for(lambda: collector.steps == [0])
    rank.emit(1)
    assert rank.close() is True
    assert collector.steps == [0, 1]
    assert rank.metrics.exported == {"otlp": 2}


def test_what_is_too_large_for_a_request_blocks_nothing_behind_it(directory: Path) -> None:
    """Requests from disk become smaller until they pass; a step that is too large alone is given up."""
    collector = FakeCollector()
    collector.too_large = lambda steps: len(steps) > 10 or 5 in steps
    collector.statuses = [403] * 2
    rank = Rank(directory, endpoint=collector.endpoint)
    rank.emit(*range(40))
    collector.wait_for(39)
    assert rank.close()
    collector.close()
    assert collector.steps() == [step for step in range(40) if step != 5]
    assert rank.metrics.dropped == {DropReason.EXPORT_FAILED: 1}
    assert rank.metrics.exported == {"otlp": 39}
    assert list(directory.iterdir()) == []


def test_a_record_that_the_wire_cannot_hold_is_counted_once(directory: Path) -> None:
    """Not with every try of the request that it would have been in."""
    collector = Collector(is_there=False)
    rank = Rank(directory, collector)
    rank.emit(0)
    collector.wait_for(lambda: collector.tries >= 3)
    bad = step_record(1)
    phases = tuple(row._replace(ordinal=70_000) for row in bad.phases)
    rank.emitter.emit(replace(bad, phases=phases))
    rank.emit(2)
    seen = collector.tries
    collector.wait_for(lambda: collector.tries >= seen + 10)
    collector.is_there = True
    collector.wait_for(lambda: collector.steps == [0, 2])
    assert rank.close()
    assert rank.metrics.dropped == {DropReason.INTERNAL_ERROR: 1}
    assert rank.sender.guard.errors == {"encode": 1}


def test_lines_that_do_not_read_are_counted_and_do_not_block(directory: Path) -> None:
    """A torn or foreign line costs itself."""
    metrics = SelfMetrics()
    first = Spool(str(directory), CONTEXT, max_bytes=MIB, drop=metrics.drop)
    first.append([sent(0), sent(1), sent(2)])
    (path,) = directory.iterdir()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"{}\n" + lines[0] + b"garbage\n" + lines[2] + lines[1][:50])
    spool = Spool(str(directory), CONTEXT, max_bytes=MIB, drop=metrics.drop)
    steps = []
    while found := spool.oldest(10):
        steps += [one.record.step for one in found]
        spool.sent(len(found))
    assert steps == [0, 2]
    assert metrics.dropped == {DropReason.SPOOL_FAILED: 2}


def test_a_spool_of_no_size_is_refused() -> None:
    """The bound is checked where it is set."""
    with pytest.raises(ConfigError, match="spool_max_bytes=5: 1048576 or more expected"):
        Config(spool_max_bytes=5)
