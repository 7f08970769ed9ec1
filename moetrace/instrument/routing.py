"""Counts per logical expert, on the device, without a host sync.

Shapes: T tokens, K experts per token, E experts of the layer, L counted layers.

One int64 row per layer holds, for real tokens and then for padding tokens, E + 2 bins: ids below 0,
the E experts, ids of E and above. So every (token, slot) pair lands somewhere, and invalid ids and
padding are counted apart instead of being lost or taken for expert 0. Behind them are the cells of
moetrace.instrument.routing_checks, which are filled in checked steps only.

    row = | <0 | 0 .. E-1 | >=E |  <0 | 0 .. E-1 | >=E | checks |
          |---- real tokens ----|  |---- padding ------|
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

from moetrace.instrument import routing_checks
from moetrace.instrument.coactivation import CoactivationSampler
from moetrace.instrument.wait_stats import WaitReader
from moetrace.record.count_sites import DESTINATION_SIDE, CountSite
from moetrace.record.types import CoactivationRow, ExpertRow, ViolationRow
from moetrace_schemas.enums import CountKind

__all__ = ["CountSite", "StepCounter", "find_expert_ids", "is_recompute", "padding_flags"]

OUT_OF_RANGE_BINS = 2
_SOURCE_SIDE = (CountKind.ROUTED, CountKind.PHYSICAL)
"""Kinds of which rows of padding are left out."""
CHECK_CELLS = len(routing_checks.CELLS)


def find_expert_ids(result: Any) -> torch.Tensor | None:
    """The tensor of chosen expert ids [.., K] in a router's result, found by dtype and not by position.

    transformers 4 and 5 return ids and weights in opposite orders, and logits in some families only;
    an integer tensor with at least one dimension is the ids.
    """
    candidates = result if isinstance(result, (tuple, list)) else (result,)
    for item in candidates:
        if isinstance(item, torch.Tensor) and item.dim() >= 1 and item.dtype in (torch.int64, torch.int32):
            return item
    return None


class StepCounter:
    """Counts of one step. Allocated once per buffer; `add` runs on the model's stream."""

    def __init__(self, sites: list[CountSite], device: torch.device) -> None:
        self.sites = sites
        self._device = device
        # Tensors that are made in inference mode could not be counted into outside of it.
        with torch.inference_mode(False):
            self._allocate()
        self._touched: set[int] = set()
        """Count sites that were counted on the device in this step."""
        self._known: dict[int, list[int]] = {}
        """Rows by count site that came as numbers of the host."""
        self.recompute_pairs: dict[int, int] = {}
        self.padding: torch.Tensor | None = None
        """Per-token padding flag [T] of the running forward (1 = padding), or None."""
        self.checking = False
        """Whether the routing of this step is checked."""
        self.dummy = False
        """Whether the step is a dummy batch: nothing that it routes is load."""
        self.in_dummy = False
        """Whether a dummy batch runs inside the step: it adds what the experts do for others, and no more."""
        self.coactivation: CoactivationSampler | None = None
        """Counts pairs of experts in this step; None in most steps."""
        self._executed_at = {
            site.layer: index for index, site in enumerate(sites) if site.kind is CountKind.EXECUTED
        }
        self.at_exchange = {site.layer: index for index, site in enumerate(sites) if site.at_exchange}
        """Rows by layer of what exchanges themselves say that they received."""
        self.waits = WaitReader()
        """What kernels of exchanges say of their waits."""
        self._executed = frozenset(self._executed_at.values())
        self.unjudged: set[int] = set()
        """Layers of which a replayed graph, or a dummy batch inside the step, counted some kinds only: kinds
        are not held against each other."""

    def _allocate(self) -> None:
        sites, device = self.sites, self._device
        self._starts: list[int] = []
        total = 0
        for site in sites:
            self._starts.append(total)
            total += _width(site) + CHECK_CELLS
        self._counts = torch.zeros(total, dtype=torch.int64, device=device)
        self._rows = [
            self._counts[start : start + _width(site)]
            for start, site in zip(self._starts, sites, strict=True)
        ]
        self._cells = [
            self._counts[start + _width(site) : start + _width(site) + CHECK_CELLS]
            for start, site in zip(self._starts, sites, strict=True)
        ]
        self._one = torch.ones((), dtype=torch.int64, device=device)
        self._ones = self._one
        # Other devices have no pinned copy: the drain thread reads, and waits for, the counts themselves.
        on_cuda = device.type == "cuda"
        self._host = torch.zeros(total, dtype=torch.int64, pin_memory=True) if on_cuda else self._counts
        self._copied: Any = cast(Any, torch.cuda.Event)() if on_cuda else None

    def counts(self, index: int) -> bool:
        """Whether this counter has a row for count site `index`, and it is wanted in this step."""
        if index >= len(self.sites):
            return False
        kind = self.sites[index].kind
        if self.in_dummy and kind not in DESTINATION_SIDE:
            return False
        return self.checking or kind is not CountKind.EXECUTED

    def counted(self, index: int) -> bool:
        """Whether anything was counted at count site `index` in this step."""
        return index in self._touched or index in self._known

    def add(self, index: int, expert_ids: torch.Tensor, padding: torch.Tensor | None = None) -> None:
        """Add the pairs of one router call: ids [.., K]. No host sync; nothing allocated stays.

        `padding`: rows [T] of this call that are no tokens, instead of those that the forward's mask says.
        """
        site = self.sites[index]
        bins = site.num_experts + OUT_OF_RANGE_BINS
        # Integers have no gradient: there is nothing to detach them from.
        ids = self._here(expert_ids)
        if ids.dtype != torch.int64:
            ids = ids.long()
        if site.num_local_experts:
            # An id of no local expert must not become the id of another rank's.
            ids = torch.where((ids >= 0) & (ids < site.num_local_experts), ids + site.offset, -1)
        ids = ids.clamp(-1, site.num_experts).add_(1)
        padding = self.padding if padding is None else padding.reshape(-1).long()
        padding = None if padding is None else self._here(padding)
        sampled = self.checking or self.coactivation is not None
        if sampled and site.kind is CountKind.ROUTED and ids.dim() > 1:
            self._look_at_tokens(index, ids.reshape(-1, ids.shape[-1]), padding)
        if padding is not None and site.kind in _SOURCE_SIDE and padding.numel():
            # Ids without a dimension for the slots are one per token, or those of a token side by side.
            width = ids.shape[-1] if ids.dim() > 1 else ids.numel() // padding.numel()
            if padding.numel() * width == ids.numel():
                ids = ids.reshape(-1, width).add_(padding.unsqueeze(1), alpha=bins)
        flat = ids.reshape(-1)
        self._rows[index].scatter_add_(0, flat, self._ones_like(flat))
        self._touched.add(index)

    def _ones_like(self, flat: torch.Tensor) -> torch.Tensor:
        """A 1 for each of them: one cell, seen so many times. Most layers of a step count as many pairs."""
        ones = self._ones
        if ones.shape != flat.shape:
            ones = self._one.expand(flat.shape)
            # A fake one, of a pass that only looks at shapes, would add nothing for ever after.
            if type(ones) is torch.Tensor:
                self._ones = ones
        return ones

    def add_executed(self, index: int, expert_ids: torch.Tensor) -> None:
        """Add the pairs that the experts of the same layer were called with; in checked steps only."""
        executed = self._executed_at.get(self.sites[index].layer)
        if self.checking and executed is not None:
            self.add(executed, expert_ids)

    def check_weights(self, index: int, weights: torch.Tensor) -> None:
        """Look at the weights [.., K] that go with the ids of one router call; in checked steps only."""
        if not self.checking or self.sites[index].kind is not CountKind.ROUTED:
            return
        weights = self._here(weights.detach())
        weights = weights.reshape(-1, weights.shape[-1])
        sums = self.sites[index].weight_sums
        routing_checks.check_weights(self._cells[index], weights, self._real(weights.shape[0]), sums)
        self._touched.add(index)

    def _look_at_tokens(self, index: int, ids: torch.Tensor, padding: torch.Tensor | None) -> None:
        """Duplicates and pairs of experts in ids [T, K], of which 1 to E are experts."""
        valid = (ids > 0) & (ids <= self.sites[index].num_experts)
        if padding is not None and padding.numel() == ids.shape[0]:
            valid &= (padding == 0).unsqueeze(1)
        if self.checking:
            routing_checks.count_duplicates(self._cells[index], ids, valid)
        if self.coactivation is not None:
            self.coactivation.add(index, ids - 1, valid)

    def _real(self, tokens: int) -> torch.Tensor | None:
        """[T], true for tokens that are no padding; None where all count."""
        if self.padding is None or self.padding.numel() != tokens:
            return None
        return self._here(self.padding) == 0

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the counters' device: layers may be spread over several of one kind.

        Raises:
            ValueError: it is on a device of another kind; to copy it would be a sync.
        """
        device = self._counts.device
        if tensor.device == device:
            return tensor
        if tensor.device.type != device.type:
            raise ValueError(
                f"experts are chosen on {tensor.device}, but counted on {device}: "
                "move the model first, then call instrument()"
            )
        return tensor.to(device, non_blocking=True)

    def add_mask(self, index: int, mask: torch.Tensor, pairs: int) -> None:
        """Add the pairs of one router call as a mask [.., E], non-zero where chosen."""
        site, row = self.sites[index], self._rows[index]
        chosen = self._here(mask.detach()).reshape(-1, mask.shape[-1])
        if chosen.dtype.is_floating_point:
            chosen = chosen != 0
        if self.coactivation is not None and site.slots and site.kind is CountKind.ROUTED:
            # As ids, so that layers of both kinds can follow each other.
            held, ids = chosen.to(torch.uint8).topk(min(site.slots, chosen.shape[1]), dim=-1)
            valid = held > 0
            if (real := self._real(chosen.shape[0])) is not None:
                valid &= real.unsqueeze(1)
            self.coactivation.add(index, ids, valid)
        total = chosen.sum(0)
        padding = None if self.padding is None else self._here(self.padding)
        if padding is not None and site.kind is CountKind.ROUTED and padding.numel() == chosen.shape[0]:
            padded = (chosen * padding.unsqueeze(1)).sum(0)
            at = site.num_experts + OUT_OF_RANGE_BINS + 1
            row[at : at + site.num_experts].add_(padded)
            total = total - padded
        row[1 : 1 + site.num_experts].add_(total)
        self._touched.add(index)

    def add_counts(self, index: int, counts: torch.Tensor | list[int], pairs: int) -> None:
        """Add pairs per expert [E], or per local expert [e] of a `received` row."""
        site = self.sites[index]
        if isinstance(counts, torch.Tensor) and counts.device.type == "cpu" != self._device.type:
            counts = counts.tolist()  # a framework that has them on the host already
        if isinstance(counts, torch.Tensor):
            first = 1 + site.offset
            self._rows[index][first : first + counts.numel()].add_(counts.detach().reshape(-1))
            self._touched.add(index)
            return
        for expert, rows in enumerate(counts, site.offset):
            self.add_rows(index, expert, rows)

    def add_local_counts(self, index: int, counts: torch.Tensor | list[int], rank: int) -> None:
        """Add rows per expert [e] that rank `rank` of those with e experts each received.

        Raises:
            ValueError: e experts are no share of the layer's, and so none that lie in order of rank.
        """
        size = len(counts)
        if (
            not size
            or self.sites[index].num_experts % size
            or (rank + 1) * size > self.sites[index].num_experts
        ):
            raise ValueError(f"rank {rank} with {size} experts: {self.sites[index].num_experts} in the layer")
        if isinstance(counts, torch.Tensor):
            first = 1 + rank * size
            self._rows[index][first : first + size].add_(self._here(counts.detach()))
            self._touched.add(index)
            return
        for expert, rows in enumerate(counts, rank * size):
            self.add_rows(index, expert, rows)

    def add_local_ids(self, index: int, expert_ids: torch.Tensor, first: int) -> None:
        """Add pairs by ids [.., K] that count from expert `first`; ids below 0 are none of this rank's."""
        self.add(index, torch.where(expert_ids >= 0, expert_ids + first, -1))

    def add_rows(self, index: int, expert: int, rows: int) -> None:
        """Add pairs of one expert that the host knows."""
        known = self._known.setdefault(index, [0] * self.sites[index].num_experts)
        known[expert] += rows

    def add_recompute_pairs(self, index: int, pairs: int) -> None:
        """Note a number of pairs that activation recompute routed again."""
        layer = self.sites[index].layer
        self.recompute_pairs[layer] = self.recompute_pairs.get(layer, 0) + pairs

    def add_recompute(self, index: int, expert_ids: torch.Tensor) -> None:
        """Note pairs that activation recompute routed again; they are counted apart, as one total."""
        layer = self.sites[index].layer
        self.recompute_pairs[layer] = self.recompute_pairs.get(layer, 0) + expert_ids.numel()

    def finish(self) -> None:
        """Start the copy to the host; called by the model thread at the end of the step."""
        self.padding = None
        self.waits.finish()
        if self.coactivation is not None:
            self.coactivation.finish()
        if self._touched and self._copied is not None:
            self._host.copy_(self._counts, non_blocking=True)
            self._copied.record()

    def ready(self) -> bool:
        """Whether `rows` may be read. Never waits."""
        if self.coactivation is not None and not self.coactivation.ready():
            return False
        if not self.waits.ready():
            return False
        return self._copied is None or not self._touched or bool(self._copied.query())

    def rows(self) -> tuple[ExpertRow, ...]:
        """Counts by layer and kind, of layers that were counted; for the drain thread, once `ready`."""
        # A step without counts on the device was not copied to the host either.
        numbers = self._host.tolist() if self._touched else [0] * self._host.numel()
        for index, known in self._known.items():
            start = self._starts[index] + 1
            for expert, rows in enumerate(known):
                numbers[start + expert] += rows
        result: list[ExpertRow] = []
        for index, (site, start) in enumerate(zip(self.sites, self._starts, strict=True)):
            # A layer that nobody counted is missing; it is not zero.
            if index in self._touched or index in self._known:
                result.extend(_site_rows(site, numbers, start))
        for layer, pairs in sorted(self.recompute_pairs.items()):
            result.append(ExpertRow(layer=layer, kind=CountKind.RECOMPUTE, counts=(pairs,)))
        return tuple(result)

    def seal(self) -> None:
        """For a captured graph's counter, once its capture has ended: note what replays leave uncounted.

        Numbers of the host were those of the capture, and what the experts are called with is counted
        only where the graph was captured with checks.
        """
        halves = self._known.keys() if self.checking else self._touched | self._known.keys()
        self.unjudged = {self.sites[index].layer for index in halves}

    def zero(self) -> None:
        """Zero what is on the device; for a captured graph's counter, whose adds run with every replay.

        One fill in front of a replay that is recorded. A flag on the device that adds are multiplied with
        would be two fills around it, a further operation per mask, size and check in every replay,
        recorded or not, and would still need this zero, since the step takes the sum of each replay apart.
        """
        self._counts.zero_()

    def begin_dummy(self) -> None:
        """A dummy batch begins inside the step. Its rows are on one side only: sides are not compared."""
        self.in_dummy = True
        self.unjudged.update(site.layer for site in self.sites)

    def merge(self, other: StepCounter) -> None:
        """Add one replay's counts: `other`, of the same sites, sealed, was zeroed before it. No host sync."""
        if other.sites != self.sites:
            # Captured before more was instrumented: its rows lie elsewhere, and stay missing.
            return
        # These were zeroed when the step began: every replay of it has added.
        self.waits.used.update(other.waits.used)
        if self.in_dummy:
            for index in filter(self.counts, other._touched):
                self._rows[index].add_(other._rows[index])
                self._touched.add(index)
            return
        if other._touched:
            self._counts.add_(other._counts)
            # Executed rows are of checked steps only; the cells of others are not read.
            self._touched |= other._touched if self.checking else other._touched - self._executed
        self.unjudged |= other.unjudged
        for layer, pairs in other.recompute_pairs.items():
            # A number of pairs is a shape: the same in every replay.
            self.recompute_pairs[layer] = self.recompute_pairs.get(layer, 0) + pairs
        if self.coactivation is not None:
            self.coactivation.pass_by(other._touched)

    def violations(self) -> list[ViolationRow]:
        """What was found on the device; for the drain thread, once `ready`."""
        if not self.checking or self.dummy or not self._touched:
            return []
        numbers = self._host.tolist()
        result: list[ViolationRow] = []
        for site, start in zip(self.sites, self._starts, strict=True):
            cells = start + _width(site)
            result += routing_checks.violations(site.layer, numbers[cells : cells + CHECK_CELLS])
        return result

    def coactivation_rows(self) -> tuple[CoactivationRow, ...]:
        """Pairs of experts of this step, once `ready`; the sampler is free for another step then."""
        sampler, self.coactivation = self.coactivation, None
        if sampler is None:
            return ()
        rows = sampler.rows()
        sampler.release()
        return rows

    def begin(
        self,
        *,
        checking: bool,
        dummy: bool = False,
        coactivation: CoactivationSampler | None = None,
    ) -> None:
        """Zero the counts for the next step; called by the model thread when it takes the buffer."""
        self.clear()
        self.waits.begin()
        self.checking, self.dummy, self.coactivation = checking, dummy, coactivation

    def clear(self) -> None:
        """Zero the counts."""
        if self.coactivation is not None:
            # A step that was dropped before it was read.
            self.coactivation.release()
            self.coactivation = None
        if self._touched:
            self._counts.zero_()
        self._touched.clear()
        self._known.clear()
        self.recompute_pairs.clear()
        self.unjudged.clear()
        self.in_dummy = False
        self.padding = None


def _width(site: CountSite) -> int:
    """Bins of one site, real and padding tokens."""
    return 2 * (site.num_experts + OUT_OF_RANGE_BINS)


def _site_rows(site: CountSite, numbers: list[int], start: int) -> Iterable[ExpertRow]:
    bins = site.num_experts + OUT_OF_RANGE_BINS
    real = numbers[start : start + bins]
    padding = numbers[start + bins : start + 2 * bins]
    yield ExpertRow(layer=site.layer, kind=site.kind, counts=tuple(real[1:-1]))
    if site.kind is not CountKind.ROUTED:
        return
    if any(padding[1:-1]):
        yield ExpertRow(layer=site.layer, kind=CountKind.PADDING, counts=tuple(padding[1:-1]))
    invalid = real[0] + real[-1] + padding[0] + padding[-1]
    if invalid:
        yield ExpertRow(layer=site.layer, kind=CountKind.INVALID, counts=(invalid,))


def padding_flags(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Padding flag per token [B * S], int64, from a [B, S] mask of 1 = real, 0 = padding."""
    if attention_mask is None or attention_mask.dim() != 2:
        return None
    return (attention_mask == 0).reshape(-1).long()


def is_recompute(graph_task: Callable[[], int]) -> bool:
    """Whether the running forward is activation recompute inside backward."""
    return graph_task() != -1
