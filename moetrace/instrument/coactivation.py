"""Which experts serve the same tokens, counted on the device in sampled steps, in memory that is fixed.

Shapes: T tokens, K slots, E experts.

One accumulator per process: a few layers at a time, the next ones in the next sampled step, so that all
layers have their turn. A sample that comes while the last one has not been read yet is left out.

    cells = | layer l within E*E, 1 | layer l across E*F, 1 | layer l + 1 within .. |

The one cell behind each matrix takes pairs that do not count: padding, and ids that are no expert.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch

from moetrace.record.count_sites import CountSite
from moetrace.record.types import CoactivationRow
from moetrace_schemas.enums import CoactivationSpan, CountKind

logger = logging.getLogger("moetrace")
MOST_CELLS = 1 << 24
"""Cells of 4 bytes (64 MiB)."""


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One matrix in the cells."""

    layer: int
    span: CoactivationSpan
    start: int
    first_experts: int
    second_experts: int

    @property
    def end(self) -> int:
        return self.start + self.first_experts * self.second_experts


@dataclass(frozen=True, slots=True)
class _Turn:
    """The layers of one sample: matrices by count site; `across[i]` is between the site before i and i."""

    within: dict[int, _Matrix]
    across: dict[int, _Matrix]
    kept: frozenset[int]
    """Sites whose ids are kept until the next layer."""
    cells: int


class CoactivationSampler:
    """Counts pairs of experts. `take` to `finish` run on the model's thread, the rest behind it."""

    def __init__(self, sites: Sequence[CountSite], device: torch.device, *, layers: int) -> None:
        """Allocate for `layers` layers at a time, or fewer where they do not fit the memory."""
        order = [index for index, site in enumerate(sites) if site.kind is CountKind.ROUTED]
        order.sort(key=lambda index: sites[index].layer)
        self._turns = _turns(sites, order, layers)
        self._before = {index: before for before, index in pairwise(order)}
        self._taken = 0
        self.busy = False
        """Whether a sample is being counted or waits to be read."""
        self._turn: _Turn | None = None
        self._last: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._partial: set[int] = set()
        """Sites of which replayed graphs ran calls that are not counted."""
        if not self._turns:
            if order:
                logger.warning("moetrace: co-activation is off: one layer needs more than 64 MiB")
            return
        most = max(turn.cells for turn in self._turns)
        with torch.inference_mode(False):
            self._cells = torch.zeros(most, dtype=torch.int32, device=device)
            self._one = torch.ones((), dtype=torch.int32, device=device)
            on_cuda = device.type == "cuda"
            self._host = torch.zeros(most, dtype=torch.int32, pin_memory=True) if on_cuda else self._cells
        self._copied: Any = cast(Any, torch.cuda.Event)() if on_cuda else None

    def take(self) -> CoactivationSampler | None:
        """The sampler, emptied and on its next layers; None where it is in use, or has none."""
        if self.busy or not self._turns:
            return None
        self.busy = True
        self._turn = self._turns[self._taken % len(self._turns)]
        self._taken += 1
        self._last.clear()
        self._partial.clear()
        self._cells.zero_()
        return self

    def add(self, index: int, ids: torch.Tensor, valid: torch.Tensor) -> None:
        """Count ids [T, K], 0 to E - 1 where valid [T, K], of one router call."""
        turn = self._turn
        if turn is None:
            return
        if (matrix := turn.within.get(index)) is not None:
            self._count(matrix, ids, valid, ids, valid)
        if (matrix := turn.across.get(index)) is not None:
            before = self._last.pop(self._before[index], None)
            # Another number of tokens is another forward.
            if before is not None and before[0].shape[0] == ids.shape[0]:
                self._count(matrix, *before, ids, valid)
        if index in turn.kept:
            self._last[index] = (ids, valid)

    def _count(
        self,
        matrix: _Matrix,
        first: torch.Tensor,
        first_valid: torch.Tensor,
        second: torch.Tensor,
        second_valid: torch.Tensor,
    ) -> None:
        at = first.unsqueeze(2) * matrix.second_experts + second.unsqueeze(1)
        both = first_valid.unsqueeze(2) & second_valid.unsqueeze(1)
        at = torch.where(both, at, matrix.end - matrix.start).reshape(-1)
        self._cells[matrix.start : matrix.end + 1].scatter_add_(0, at, self._one.expand(at.shape))

    def pass_by(self, indices: Iterable[int]) -> None:
        """A captured graph ran these layers' routers, whose pairs are not counted in it.

        What is counted of such a layer is a part, which no share of its tokens could be made of: it is
        left out. The ids that were kept for the layer behind it are no longer of the same forward.
        """
        for index in indices:
            self._partial.add(index)
            self._last.pop(index, None)
            if index in self._before:
                self._last.pop(self._before[index], None)

    def finish(self) -> None:
        """Start the copy to the host."""
        self._last.clear()
        if self._copied is not None:
            self._host.copy_(self._cells, non_blocking=True)
            self._copied.record()

    def ready(self) -> bool:
        """Whether `rows` may be read. Never waits."""
        return self._copied is None or bool(self._copied.query())

    def rows(self) -> tuple[CoactivationRow, ...]:
        """Pairs of the sample, once `ready`."""
        turn = self._turn
        if turn is None:
            return ()
        whole = [matrix for index, matrix in turn.within.items() if index not in self._partial]
        whole += [
            matrix
            for index, matrix in turn.across.items()
            if index not in self._partial and self._before[index] not in self._partial
        ]
        result = []
        for matrix in whole:
            cells = self._host[matrix.start : matrix.end].view(matrix.first_experts, matrix.second_experts)
            if matrix.span is CoactivationSpan.WITHIN:
                cells = cells.triu(1)
            at = cells.nonzero()
            pairs = torch.cat((at, cells[at[:, 0], at[:, 1]].long().unsqueeze(1)), dim=1).tolist()
            if pairs:
                found = tuple((first, second, tokens) for first, second, tokens in pairs)
                result.append(CoactivationRow(layer=matrix.layer, span=matrix.span, pairs=found))
        return tuple(sorted(result, key=lambda row: (row.layer, row.span)))

    def release(self) -> None:
        """Let the next sample begin."""
        self._turn = None
        self.busy = False


def _turns(sites: Sequence[CountSite], order: list[int], layers: int) -> list[_Turn]:
    """Layers by sample; empty where not even one layer fits."""
    for size in range(min(layers, len(order)), 0, -1):
        turns = [_turn(sites, order, at, size) for at in range(0, len(order), size)]
        if max(turn.cells for turn in turns) <= MOST_CELLS:
            return turns
    return []


def _turn(sites: Sequence[CountSite], order: list[int], at: int, size: int) -> _Turn:
    within: dict[int, _Matrix] = {}
    across: dict[int, _Matrix] = {}
    kept = set()
    start = 0
    for place in range(at, min(at + size, len(order))):
        site = sites[order[place]]
        spans = [(CoactivationSpan.WITHIN, order[place], within)]
        if place + 1 < len(order):
            spans.append((CoactivationSpan.ACROSS, order[place + 1], across))
            kept.add(order[place])
        for span, index, into in spans:
            into[index] = _Matrix(site.layer, span, start, site.num_experts, sites[index].num_experts)
            start = into[index].end + 1
    return _Turn(within, across, frozenset(kept), start)
