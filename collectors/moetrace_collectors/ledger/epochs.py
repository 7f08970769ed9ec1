"""Counts of physical experts -> logical ones, each under the placement of its own epoch.

An engine that replicates experts routes to slots, and counts what it routes to: slot 5 is one expert before a
change and another one after it. Such counts are folded as steps are joined, so that nothing behind it ever
sees a slot for an expert, and no figure mixes two epochs' slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from moetrace_collectors.model import ExpertCounts, IntArray, JoinedStep, PlacementReport, RankStep
from moetrace_schemas.enums import COUNT_KIND_CODE, CountIds, CountKind, PlacementEvent
from moetrace_schemas.placement import EMPTY, PlacementMap

MAX_EPOCHS = 256
"""(run, version) whose mapping is kept at hand."""
FIRST_ASK_NS = 1_000_000_000
LONGEST_ASK_NS = 60_000_000_000
"""Between two looks into the ledger for a mapping that it has not had so far."""
_INVALID = COUNT_KIND_CODE[CountKind.INVALID]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochMap:
    """What folds counts of one epoch: the experts in the slots of each layer."""

    slots: Mapping[int, IntArray]
    """Layer -> [S] logical experts."""
    num_experts: int
    physical: bool
    """Whether counts were said to be numbered by slots; else they are only where their length says so."""


class Epochs:
    """Knows the mappings of the epochs that are being counted."""

    def __init__(
        self,
        load: Callable[[str, int], tuple[PlacementMap, CountIds] | None],
        *,
        clock_ns: Callable[[], int] = lambda: 0,
    ) -> None:
        """Nothing is known yet.

        Args:
            load: asked once for a (run, version) that nobody has announced to this process: after a restart
                it is in the ledger. OSError: the ledger cannot be read now, so the step is left as it
                came and the next one asks again.
            clock_ns: monotonic; says when `settled` asks again for what the ledger has not had.
        """
        self._load = load
        self._clock_ns = clock_ns
        self._known: OrderedDict[tuple[str, int], EpochMap | None] = OrderedDict()
        self._next_ask: OrderedDict[tuple[str, int], tuple[int, int]] = OrderedDict()
        """When to ask again for what is not known whole, and how long to wait after that, ns."""

    def learn(self, report: PlacementReport) -> None:
        """A mapping was announced."""
        if report.event is not PlacementEvent.ANNOUNCED:
            return
        self._add((report.run_id, report.version), epoch_map(report.mapping, report.terms.count_ids))

    def _add(self, key: tuple[str, int], made: EpochMap) -> None:
        before = self._known.get(key)
        if before is not None:
            made = replace(made, slots={**before.slots, **made.slots})
        self._keep(key, made)

    def logical(self, joined: JoinedStep) -> JoinedStep:
        """The step with every count numbered by logical experts, as far as mappings are known."""
        folded = tuple(self._fold(rank_step) for rank_step in joined.rank_steps)
        if all(new is old for new, old in zip(folded, joined.rank_steps, strict=True)):
            return joined
        return replace(joined, rank_steps=folded)

    def settled(self, rank_step: RankStep) -> RankStep:
        """The rank step of a collector that does not join, each of its counts folded or among `unfolded`.

        Others may be told of a placement, or of further layers of it, before this collector is: what it does
        not know is not final, unlike in `logical`, and it asks again.
        """
        if not rank_step.placement_version or not rank_step.experts:
            return rank_step
        key = (rank_step.run_id, rank_step.placement_version)
        epoch = self._known.get(key)
        if epoch is None or any(_is_open(entry, epoch) for entry in rank_step.experts):
            epoch = self._asked_again(key)
        unfolded = tuple(entry for entry in rank_step.experts if _is_open(entry, epoch))
        if unfolded:
            told = tuple(entry for entry in rank_step.experts if not _is_open(entry, epoch))
            rank_step = replace(rank_step, experts=told, unfolded=unfolded)
        return rank_step if epoch is None else fold(rank_step, epoch)

    def _asked_again(self, key: tuple[str, int]) -> EpochMap | None:
        now_ns = self._clock_ns()
        due_ns, wait_ns = self._next_ask.pop(key, (now_ns, FIRST_ASK_NS))
        known = self._known.get(key)
        if now_ns < due_ns:
            self._next_ask[key] = (due_ns, wait_ns)
            return known
        self._next_ask[key] = (now_ns + wait_ns, min(2 * wait_ns, LONGEST_ASK_NS))
        while len(self._next_ask) > MAX_EPOCHS:
            self._next_ask.popitem(last=False)
        try:
            told = self._load(*key)
        except OSError:
            return known
        if told is not None:
            self._add(key, epoch_map(*told))
        return self._known.get(key)

    def _fold(self, rank_step: RankStep) -> RankStep:
        if not rank_step.placement_version or not rank_step.experts:
            return rank_step
        key = (rank_step.run_id, rank_step.placement_version)
        if key not in self._known:
            try:
                told = self._load(*key)
            except OSError:
                return rank_step
            self._keep(key, None if told is None else epoch_map(*told))
        epoch = self._known[key]
        return rank_step if epoch is None else fold(rank_step, epoch)

    def _keep(self, key: tuple[str, int], epoch: EpochMap | None) -> None:
        self._known[key] = epoch
        self._known.move_to_end(key)
        while len(self._known) > MAX_EPOCHS:
            self._known.popitem(last=False)


def epoch_map(mapping: PlacementMap, count_ids: CountIds) -> EpochMap:
    """Arrays of a mapping."""
    return EpochMap(
        slots={
            layer: np.array(row, dtype=np.int64)
            for layer, row in zip(mapping.layers, mapping.physical_to_logical, strict=True)
        },
        num_experts=mapping.num_experts,
        physical=count_ids is CountIds.PHYSICAL,
    )


def _is_open(entry: ExpertCounts, epoch: EpochMap | None) -> bool:
    """Whether it takes a map that is not known to say what an entry counts."""
    return entry.kind != _INVALID and (epoch is None or entry.layer not in epoch.slots)


def fold(rank_step: RankStep, epoch: EpochMap) -> RankStep:
    """The rank step with physical counts summed to logical ones; itself where there are none."""
    folded = tuple(_fold_counts(entry, epoch) for entry in rank_step.experts)
    if all(new is old for new, old in zip(folded, rank_step.experts, strict=True)):
        return rank_step
    return replace(rank_step, experts=folded)


def _fold_counts(entry: ExpertCounts, epoch: EpochMap) -> ExpertCounts:
    slots = epoch.slots.get(entry.layer)
    if slots is None or len(entry.counts) != len(slots):
        return entry  # one total, or counts of another kind of number
    if len(slots) == epoch.num_experts and not epoch.physical:
        return entry
    counts = np.zeros(epoch.num_experts, dtype=np.int64)
    held = slots != EMPTY
    np.add.at(counts, slots[held], entry.counts[held])
    return ExpertCounts(layer=entry.layer, kind=entry.kind, counts=counts)
