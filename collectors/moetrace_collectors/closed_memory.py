"""What the joiner remembers of closed steps and of runs, so that none is judged a second time. Pure.

Bounded twice: by a number of closed steps and by a number of runs. What is forgotten leaves a trace: the
highest forgotten step of each run, so that a straggler of it is late and does not open the step again.
The memory goes into the write-ahead log as JSON, whole or as what changed, and comes back at a start.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

StepKey = tuple[str, int]
"""(run id, step)"""
Slot = tuple[int, int]
"""(rank, microbatch)"""

MAX_RUNS = 1_024
FORMAT = 2
READABLE_FORMATS = (1, FORMAT)
"""Format 1 does not say when a step's first rank step started."""


@dataclass(slots=True, kw_only=True)
class ClosedStep:
    """One closed step."""

    full_world_size: int
    """World size where every slot of `microbatches` had arrived; 0 where some were missing."""
    microbatches: set[int]
    max_start_unix_ns: int
    """Latest start over its rank steps, by their own clocks: a resend never starts later."""
    min_start_unix_ns: int = 0
    """Earliest start: nor does a resend start earlier. 0 where it is not known."""
    seen: set[Slot] = field(default_factory=set)
    """Slots that arrived, where the step did not close complete, and all that arrived since.

    Holds what came and not what is missing: what is missing is as large as a forged world size.
    """

    def has(self, slot: Slot) -> bool:
        """Whether this slot arrived before."""
        rank, microbatch = slot
        return slot in self.seen or (rank < self.full_world_size and microbatch in self.microbatches)


@dataclass(slots=True)
class _Run:
    forgotten_step: int = -1
    last_start_unix_ns: int = 0
    num_microbatches: int = 1


class ClosedMemory:
    """Not thread-safe: the joiner owns it."""

    def __init__(self, *, max_steps: int) -> None:
        self._max_steps = max_steps
        self._steps: OrderedDict[StepKey, ClosedStep] = OrderedDict()
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        self._changed_steps: dict[StepKey, None] = {}
        self._changed_runs: dict[str, None] = {}

    def find(self, key: StepKey) -> ClosedStep | None:
        """The closed step, as far as it is remembered."""
        return self._steps.get(key)

    def close(self, key: StepKey, step: ClosedStep) -> None:
        """Remember one more; the oldest gives way."""
        self._steps[key] = step
        run = self._run(key[0])
        run.last_start_unix_ns = max(run.last_start_unix_ns, step.max_start_unix_ns)
        self._touch(key)
        while len(self._steps) > self._max_steps:
            (run_id, number), _ = self._steps.popitem(last=False)
            forgetful = self._run(run_id)
            forgetful.forgotten_step = max(forgetful.forgotten_step, number)
            self._changed_runs[run_id] = None

    def take_late(self, key: StepKey, slot: Slot, start_unix_ns: int) -> None:
        """A slot of a remembered step has arrived late."""
        step = self._steps[key]
        step.seen.add(slot)
        # What is known of this slot is this start: it may come once more.
        step.max_start_unix_ns = max(step.max_start_unix_ns, start_unix_ns)
        step.min_start_unix_ns = min(step.min_start_unix_ns, start_unix_ns)
        self.expect_microbatches(key[0], len(step.microbatches | {microbatch for _, microbatch in step.seen}))
        self._touch(key)

    def is_forgotten(self, key: StepKey) -> bool:
        """Whether the step is not after the newest that was forgotten; asked only where `find` has none."""
        run = self._runs.get(key[0])
        return run is not None and key[1] <= run.forgotten_step

    def last_start_unix_ns(self, run_id: str) -> int:
        """Latest start of any closed step of a run; 0 where there is none."""
        run = self._runs.get(run_id)
        return 0 if run is None else run.last_start_unix_ns

    def num_microbatches(self, run_id: str) -> int:
        """How many microbatches a step of this run is expected to have."""
        run = self._runs.get(run_id)
        return 1 if run is None else run.num_microbatches

    def expect_microbatches(self, run_id: str, count: int, *, at_least: bool = True) -> None:
        """A step showed so many; `at_least=False` also lowers what is expected."""
        run = self._run(run_id)
        count = max(run.num_microbatches, count) if at_least else count
        if count != run.num_microbatches:
            run.num_microbatches = count
            self._changed_runs[run_id] = None

    def take_changes(self, incarnations: dict[str, list[int]]) -> bytes | None:
        """What changed since the last call, for `load`; None where nothing did.

        Args:
            incarnations: as of `Incarnations.dump`, of all runs.
        """
        if not self._changed_steps and not self._changed_runs:
            return None
        payload = self._dump(self._changed_steps, self._changed_runs, incarnations)
        self._changed_steps, self._changed_runs = {}, {}
        return payload

    def dump(self, incarnations: dict[str, list[int]]) -> bytes:
        """All of it, for `load`."""
        return self._dump(self._steps, self._runs, incarnations)

    def load(self, payload: bytes) -> dict[str, list[int]]:
        """Add what an earlier process remembered; gives its incarnations back.

        Raises:
            ValueError: not a payload of `dump`, or of a newer version.
        """
        try:
            document = json.loads(payload)
            if document["format"] not in READABLE_FORMATS:
                raise ValueError(
                    f"closed steps in format {document['format']!r}, {FORMAT} is the newest known"
                )
            for run_id, (forgotten, last_start, microbatches) in document["runs"].items():
                run = self._run(run_id)
                run.forgotten_step = max(run.forgotten_step, int(forgotten))
                run.last_start_unix_ns = max(run.last_start_unix_ns, int(last_start))
                run.num_microbatches = int(microbatches)
            for run_id, number, world, microbatches, seen, max_start, *min_start in document["steps"]:
                self.close(
                    (run_id, int(number)),
                    ClosedStep(
                        full_world_size=int(world),
                        microbatches=set(map(int, microbatches)),
                        max_start_unix_ns=int(max_start),
                        min_start_unix_ns=int(min_start[0]) if min_start else 0,
                        seen=_slots(seen),
                    ),
                )
            incarnations = {
                str(run): [int(cut) for cut in cuts] for run, cuts in document["incarnations"].items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"closed steps do not read: {type(error).__name__} {error}") from error
        self._changed_steps, self._changed_runs = {}, {}
        return incarnations

    def _run(self, run_id: str) -> _Run:
        run = self._runs.get(run_id)
        if run is None:
            run = self._runs[run_id] = _Run()
            if len(self._runs) > MAX_RUNS:
                self._runs.popitem(last=False)
        return run

    def _touch(self, key: StepKey) -> None:
        self._changed_steps[key] = None
        self._changed_runs[key[0]] = None

    def _dump(
        self, keys: Iterable[StepKey], run_ids: Iterable[str], incarnations: dict[str, list[int]]
    ) -> bytes:
        steps: list[list[Any]] = []
        for key in keys:
            step = self._steps.get(key)
            if step is not None:
                microbatches = sorted(step.microbatches)
                starts = (step.max_start_unix_ns, step.min_start_unix_ns)
                steps.append([*key, step.full_world_size, microbatches, _ranges(step.seen), *starts])
        runs = {
            run_id: [run.forgotten_step, run.last_start_unix_ns, run.num_microbatches]
            for run_id in run_ids
            if (run := self._runs.get(run_id)) is not None
        }
        document = {"format": FORMAT, "runs": runs, "incarnations": incarnations, "steps": steps}
        return json.dumps(document, separators=(",", ":")).encode()


def _ranges(slots: Iterable[Slot]) -> dict[str, str]:
    """Ranks of each microbatch, runs of them as first-last: 0-6,8-255."""
    ranks_of: dict[int, list[int]] = {}
    for rank, microbatch in sorted(slots):
        ranks_of.setdefault(microbatch, []).append(rank)
    texts: dict[str, str] = {}
    for microbatch, ranks in ranks_of.items():
        spans: list[list[int]] = []
        for rank in ranks:
            if spans and rank == spans[-1][1] + 1:
                spans[-1][1] = rank
            else:
                spans.append([rank, rank])
        texts[str(microbatch)] = ",".join(f"{first}-{last}" for first, last in spans)
    return texts


def _slots(texts: dict[str, str]) -> set[Slot]:
    slots: set[Slot] = set()
    for microbatch, text in texts.items():
        for part in text.split(","):
            first, _, last = part.partition("-")
            slots.update((rank, int(microbatch)) for rank in range(int(first), int(last) + 1))
    return slots
