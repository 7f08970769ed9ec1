"""Transfers against their own history: slow links, and what missing ranks leave open.

The shortest duration of an exchange over its ranks is its transfer only if the last rank to arrive is among
those that reported. If it is not, everybody who did report waited, and the transfer looks too long::

    rank 0  |= work =|~~~~ wait ~~~~|transfer|      reported: shortest duration = transfer, as ever
    rank 1  |==== work ====|~ wait ~|transfer|      reported: too long for this exchange's history,
    rank 2  |====== work (missing) =|transfer|      so somebody who is missing released it

The same excess in a step where nobody is missing is a slow link. It is the same for every rank of the group,
so durations alone cannot tell whose link it is.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from moetrace_collectors.model import FloatArray, IntArray
from moetrace_collectors.verdict.frontier import GroupFrontier
from moetrace_collectors.verdict.history import MAD_TO_SIGMA, MIN_STEPS
from moetrace_collectors.verdict.sequence import EXCHANGE_CODES, UNKNOWN, BoolArray
from moetrace_schemas.enums import PHASE_BY_CODE, Phase

WINDOW = 64
"""Steps kept."""
REFRESH = 8
"""Steps after which the medians are taken anew."""
REBASE = 256
"""Slow steps in a row after which the longer transfer counts as normal."""
MAX_SEQUENCES = 256
"""Different (group, sequence of exchanges) remembered per run and forward mode."""
SPREADS = 6.0
"""Scaled median absolute deviations that an excess must exceed to be none of the usual."""
SLACK = 0.2
"""Part of the usual transfer that is never an excess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkExcess:
    """How far the transfers of one phase of one group exceed their own history in this step."""

    ep_group: int
    phase: Phase
    layer: int | None
    """The layer that holds half of the excess or more."""
    excess_ns: int

    def sentence(self, step_ns: int) -> str:
        """What is slow, by how much and against what; without an end."""
        where = "" if self.layer is None else f" of layer {self.layer}"
        part = f"{self.excess_ns / step_ns:.1%} of the step"
        return f"{self.phase} transfers{where} are {part} above their own history on all ranks alike"


@dataclass(frozen=True, slots=True, kw_only=True)
class UsualTransfers:
    """Medians over the remembered steps of one group."""

    transfer_ns: FloatArray
    """[K]"""
    size: FloatArray
    """[K]: bytes of the busiest rank; not above 0 where they are not told."""


class TransferHistory:
    """Past transfers of one group with one sequence of exchanges."""

    def __init__(self, keys: IntArray) -> None:
        num_barriers = len(keys)
        _, place = np.unique(keys[:, [0, 2, 3]], axis=0, return_inverse=True)
        self._place = place.reshape(-1)  # numpy 2.0 gives it a second axis
        self._transfer = np.zeros((WINDOW, num_barriers))
        self._size = np.zeros((WINDOW, num_barriers))
        self._count = 0
        self._slow_in_a_row = 0
        self._usual = np.zeros(num_barriers)
        self._usual_size = np.zeros(num_barriers)
        self._spread = np.zeros(num_barriers)
        self._spread_by_phase: dict[int, float] = {}

    def __len__(self) -> int:
        return min(self._count, WINDOW)

    def add(self, frontier: GroupFrontier, *, slow: bool) -> None:
        """Keep one step of a complete group; slow steps are left out until they have become the rule."""
        self._slow_in_a_row = self._slow_in_a_row + 1 if slow else 0
        if self._slow_in_a_row > REBASE:
            self._count = self._slow_in_a_row = 0
        elif slow:
            return
        row = self._count % WINDOW
        self._transfer[row], self._size[row] = frontier.transfer_ns, self._largest_payload(frontier)
        self._count += 1
        # Medians over a window change little from step to step, and there may be hundreds of groups.
        if self._count % REFRESH == 0 or self._count == MIN_STEPS:
            self._refresh(frontier.sequence.keys[:, 1])

    def _refresh(self, phases: IntArray) -> None:
        past = self._transfer[: len(self)]
        self._usual, self._usual_size = np.median(past, axis=0), np.median(self._size[: len(self)], axis=0)
        self._spread = MAD_TO_SIGMA * np.median(np.abs(past - self._usual), axis=0)
        for code in EXCHANGE_CODES:
            sums = past[:, phases == code].sum(axis=1)
            self._spread_by_phase[code] = MAD_TO_SIGMA * float(np.median(np.abs(sums - np.median(sums))))

    def _largest_payload(self, frontier: GroupFrontier) -> IntArray:
        """[K]: the most bytes that one rank sent in the exchange or in its counterpart of the same layer.

        What a rank received in a dispatch goes back in the combine, so the two together say how much moved
        at the busiest rank in either way.
        """
        largest = np.full(len(self._place), UNKNOWN, dtype=np.int64)
        np.maximum.at(largest, self._place, frontier.sequence.sent_bytes.max(axis=0))
        return largest[self._place]

    def excess_ns(self, frontier: GroupFrontier) -> FloatArray:
        """[K]: transfer minus its median past transfer, scaled up for a larger payload than usual."""
        size = self._largest_payload(frontier)
        larger = (self._usual_size > 0) & (size > self._usual_size)
        scale = np.where(larger, size / np.maximum(self._usual_size, 1.0), 1.0)
        excess: FloatArray = frontier.transfer_ns - self._usual * scale
        return excess

    @property
    def usual(self) -> UsualTransfers:
        """The medians; of zeros before `MIN_STEPS` steps."""
        return UsualTransfers(transfer_ns=self._usual, size=self._usual_size)

    def spread_ns(self, code: int) -> float:
        """Scaled median absolute deviation of the past sums over the exchanges of a phase."""
        return self._spread_by_phase[code]

    def told(self, frontier: GroupFrontier) -> BoolArray:
        """[K]: exchanges whose transfer is as usual, so that a rank that reported must have released them."""
        allowed = np.maximum(SPREADS * self._spread, SLACK * self._usual)
        as_usual: BoolArray = self.excess_ns(frontier) <= allowed
        as_usual[-1] = False  # the tail ends in no exchange: nobody waited for whoever is missing
        return as_usual


class RunTransfers:
    """Transfer histories of the groups of one run and forward mode."""

    def __init__(self) -> None:
        self._histories: OrderedDict[tuple[int, bytes], TransferHistory] = OrderedDict()

    def told(self, frontier: GroupFrontier) -> tuple[BoolArray, float]:
        """For a group with missing ranks: [K] exchanges that a present rank released, and what is hidden, ns.

        Hidden is the summed excess of the other exchanges' transfers: what a missing rank may have cost.
        """
        history = self._histories.get(_key(frontier))
        if history is None or len(history) < MIN_STEPS:
            return np.zeros(len(frontier.transfer_ns), dtype=np.bool_), 0.0
        told = history.told(frontier)
        return told, float(np.maximum(history.excess_ns(frontier), 0.0)[~told].sum())

    def usual(self, frontier: GroupFrontier) -> UsualTransfers | None:
        """What this group's exchanges usually cost; None while too few steps are known."""
        history = self._histories.get(_key(frontier))
        return history.usual if history is not None and len(history) >= MIN_STEPS else None

    def usual_of_others(self, frontier: GroupFrontier) -> list[tuple[int, UsualTransfers]]:
        """The same of the other groups that run the same exchanges, with their numbers."""
        group, exchanges = _key(frontier)
        return [
            (other, history.usual)
            for (other, theirs), history in self._histories.items()
            if other != group and theirs == exchanges and len(history) >= MIN_STEPS
        ]

    def observe(self, frontier: GroupFrontier, material_ns: float) -> tuple[LinkExcess, ...]:
        """Excesses of a complete group's step of at least `material_ns`; the step joins the history."""
        key = _key(frontier)
        history = self._histories.setdefault(key, TransferHistory(frontier.sequence.keys))
        self._histories.move_to_end(key)
        while len(self._histories) > MAX_SEQUENCES:
            self._histories.popitem(last=False)
        found = _link_excesses(frontier, history, material_ns) if len(history) >= MIN_STEPS else ()
        history.add(frontier, slow=bool(found))
        return found


def _link_excesses(
    frontier: GroupFrontier, history: TransferHistory, material_ns: float
) -> tuple[LinkExcess, ...]:
    excess = history.excess_ns(frontier)
    keys = frontier.sequence.keys
    found = []
    for code in EXCHANGE_CODES:
        chosen = keys[:, 1] == code
        chosen[-1] = False
        total = float(excess[chosen].sum())
        if total >= max(material_ns, SPREADS * history.spread_ns(code)) and total > 0:
            found.append(
                LinkExcess(
                    ep_group=frontier.sequence.ep_group,
                    phase=PHASE_BY_CODE[code],
                    layer=layer_with_half(keys[chosen, 0], excess[chosen], total),
                    excess_ns=int(total),
                )
            )
    return tuple(found)


def layer_with_half(layers: IntArray, excess: FloatArray, total: float) -> int | None:
    """The layer that holds half of a summed excess or more."""
    values, index = np.unique(layers, return_inverse=True)
    by_layer = np.bincount(index, excess)
    largest = int(by_layer.argmax())
    return int(values[largest]) if 2 * by_layer[largest] >= total else None


def _key(frontier: GroupFrontier) -> tuple[int, bytes]:
    return frontier.sequence.ep_group, frontier.sequence.keys.tobytes()
