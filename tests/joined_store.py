"""Three awkward runs in the embedded engine and what the collector said of them, for the join in SQL.

`python -m joined_store STORE_PATH TRUTH_PATH [unjoined]` fills a store as a collector does, or as
collectors do that leave the join to the store, and pickles the truth. The runs:

- `missing`: 8 ranks in two groups, ranks missing, late or sent twice, warm-up steps, wrong clocks;
- `ties`: 4 ranks whose work is equal to the nanosecond, and one slow rank;
- `odd`: microbatches, overlapping streams, zero-length rows that start together, senders without BARRIER
  flags, and a step in which a rank has lost an exchange.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moetrace_collectors.joiner import Duplicate, Joiner, JoinWindow, Late
from moetrace_collectors.model import JoinedStep, LayerLoad, PhaseColumns, RankStep, StepVerdict
from moetrace_collectors.simulate import Clocks, Injection, Noise, SimulatedRun, arrivals
from moetrace_collectors.sinks.base import StepResult
from moetrace_collectors.sinks.clickhouse import ClickHouseSink
from moetrace_collectors.summary import layer_loads
from moetrace_collectors.testing import SyntheticRun
from moetrace_collectors.verdict.engine import VerdictEngine
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import Cause, ClosedBy
from store_sink import roll_up, sink_into

NUM_STEPS = 200
MISSING = SimulatedRun(
    run_id="missing",
    num_ranks=8,
    ep_size=4,
    ranks_per_node=2,
    num_layers=3,
    num_experts=16,
    num_tokens=512,
    num_steps=NUM_STEPS,
    warmup_steps=3,
    noise=Noise(spread=0.05),
    clocks=Clocks(offset_ns=1e6, jitter_ns=1e4),
    missing_chance=0.01,
    late_chance=0.01,
    injections=(
        Injection(cause=Cause.DEVICE, rank=5, extension=0.1, layer=1, every=3),
        Injection(cause=Cause.LINK, rank=1, extension=0.2, first_step=120, every=7),
    ),
)
TIES = SyntheticRun(run_id="ties", world_size=4, num_layers=2, jitter_ns=0, slow_rank=2)
ODD = replace(MISSING, run_id="odd", missing_chance=0.0, late_chance=0.0, seed=3, num_steps=60, injections=())
LOST_EXCHANGE = 41
"""Step of `odd` in which rank 6 has one exchange less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a collector found out about one step."""

    joined: JoinedStep
    verdict: StepVerdict
    loads: tuple[LayerLoad, ...]


def received() -> Iterator[RankStep]:
    """Rank steps in the order in which they come; some come twice."""
    chance = random.Random(7)
    for rank_step in arrivals(MISSING):
        yield rank_step
        if chance.random() < 0.05:
            yield rank_step
    for step in range(20):
        yield from TIES.step(step)
    for rank_step in arrivals(ODD):
        yield from odd_records(rank_step)


def odd_records(rank_step: RankStep) -> tuple[RankStep, ...]:
    """One rank step, bent in the way that its step number says."""
    phases = rank_step.phases
    kind = rank_step.step % 5
    if rank_step.step == LOST_EXCHANGE and rank_step.rank == 6:
        kept = np.ones(len(phases), dtype=np.bool_)
        kept[np.flatnonzero(phases.flags)[2]] = False
        return (replace(rank_step, phases=take(phases, kept)),)
    if kind == 1:  # two microbatches, the second one after the first
        second = replace(
            rank_step,
            microbatch=1,
            start_unix_ns=rank_step.start_unix_ns + rank_step.duration_ns,
            phases=replace(phases, microbatch=np.ones(len(phases), dtype=np.int64)),
            experts=(),
            traffic=(),
        )
        return (rank_step, second)
    if kind == 2:  # exchanges on a stream of their own begin while the work before them is still running
        exchange = phases.flags != 0
        early = np.where(exchange, 5_000 * (1 + rank_step.rank % 3), 0)
        bent = replace(
            phases,
            stream=np.where(exchange, 1, 0),
            start_offset_ns=phases.start_offset_ns - early,
            duration_ns=phases.duration_ns + early,
        )
        order = np.argsort(bent.start_offset_ns, kind="stable")
        return (replace(rank_step, phases=take(bent, order)),)
    if kind == 3:  # zero-length rows: several start together, and the order of the wire counts
        duration = phases.duration_ns.copy()
        duration[rank_step.rank % 4 :: 4] = 0
        start = np.concatenate([[0], np.cumsum(duration)[:-1]])
        return (replace(rank_step, phases=replace(phases, duration_ns=duration, start_offset_ns=start)),)
    if kind == 4:  # a foreign sender that does not flag exchanges, and has no row of its own around them
        launch = np.isin(phases.phase, (3, 5)) & (phases.flags == 0)
        bare = take(phases, ~launch)
        return (replace(rank_step, phases=replace(bare, flags=bare.flags & ~int(RowFlag.BARRIER))),)
    return (rank_step,)


def take(phases: PhaseColumns, chosen: np.ndarray) -> PhaseColumns:
    """Some of the rows, or all in another order."""
    return PhaseColumns(**{name: getattr(phases, name)[chosen] for name in PhaseColumns.__slots__})


def fill(sink: ClickHouseSink) -> dict[tuple[str, int], Told]:
    """Join, judge and store everything; returns what was found out by (run, step)."""
    engine = VerdictEngine()
    joiner = Joiner(JoinWindow(timeout_ns=24, max_steps=64, max_bytes=2**34, max_closed_steps=1024))
    told: dict[tuple[str, int], Told] = {}

    def close(joined: JoinedStep) -> None:
        verdict, loads = engine.judge(joined), layer_loads(joined)
        told[joined.run_id, joined.step] = Told(joined=joined, verdict=verdict, loads=loads)
        sink.take_step(StepResult(joined=joined, verdict=verdict, loads=loads))

    for now, rank_step in enumerate(received()):
        for joined in joiner.tick(now_ns=now):
            close(joined)
        for outcome in joiner.add(rank_step, now_ns=now):
            if isinstance(outcome, JoinedStep):
                close(outcome)
            elif isinstance(outcome, Late):
                sink.take_late(outcome.rank_step)
            else:
                assert isinstance(outcome, Duplicate), outcome
    for joined in joiner.flush():
        close(joined)
    counts = joiner.counts
    assert min(counts.late, counts.duplicate) > 0, "the run must have what the test is about"
    sink.flush()
    return told


def repeat(sink: ClickHouseSink, found: dict[tuple[str, int], Told]) -> None:
    """A collector that was killed before it could say so is sent the same again; `ties` is left alone."""
    for entry in [entry for (run, _), entry in found.items() if run != TIES.run_id][::3]:
        sink.take_step(StepResult(joined=entry.joined, verdict=entry.verdict, loads=entry.loads))
    sink.flush()


def read_truth(path: Path) -> dict[tuple[str, int], Told]:
    """What `main` wrote."""
    pickled = pickle.loads(path.read_bytes())
    return {
        key: Told(joined=joined, verdict=verdict, loads=loads)
        for key, (joined, verdict, loads) in pickled.items()
    }


def fill_unjoined(sink: ClickHouseSink) -> dict[tuple[str, int], Told]:
    """The same rank steps as stateless collectors write them, and what an engine says in step order."""
    engine = VerdictEngine()
    joined: dict[tuple[str, int], dict[tuple[int, int], RankStep]] = {}
    for rank_step in received():
        sink.take_unjoined(rank_step)
        slots = joined.setdefault((rank_step.run_id, rank_step.step), {})
        slots[rank_step.rank, rank_step.microbatch] = rank_step
    sink.flush()
    told = {}
    for key in sorted(joined):
        records = [joined[key][slot] for slot in sorted(joined[key])]
        microbatches = {record.microbatch for record in records}
        missing = tuple(
            rank
            for rank in range(records[0].world_size)
            if any((rank, microbatch) not in joined[key] for microbatch in microbatches)
        )
        step = JoinedStep(
            run_id=key[0],
            step=key[1],
            world_size=records[0].world_size,
            rank_steps=tuple(records),
            missing_ranks=missing,
            closed_by=ClosedBy.TIMEOUT if missing else ClosedBy.COMPLETE,
        )
        told[key] = Told(joined=step, verdict=engine.judge(step), loads=layer_loads(step))
    return told


def main(path: str, truth_path: str, how: str = "joined") -> None:
    """Migrate the store at `path`, fill it, and write the truth."""
    sink = sink_into(Path(path))
    if how == "unjoined":
        found = fill_unjoined(sink)
    else:
        found = fill(sink)
        repeat(sink, found)
    roll_up(Path(path))
    sink.close()
    plain = {key: (told.joined, told.verdict, told.loads) for key, told in found.items()}
    Path(truth_path).write_bytes(pickle.dumps(plain))


if __name__ == "__main__":
    main(*sys.argv[1:])
