"""Counts per logical expert, on the device, without a host sync.

Shapes: T tokens, K experts per token, E experts of the layer, L counted layers.

One int64 row per layer holds, for real tokens and then for padding tokens, E + 2 bins: ids below 0,
the E experts, ids of E and above. So every (token, slot) pair lands somewhere, and invalid ids and
padding are counted apart instead of being lost or taken for expert 0.

    row = | <0 | 0 .. E-1 | >=E |  <0 | 0 .. E-1 | >=E |
          |---- real tokens ----|  |---- padding ------|
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from moetrace.record.types import ExpertRow
from moetrace_schemas.enums import CountKind

OUT_OF_RANGE_BINS = 2


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


@dataclass(frozen=True, slots=True)
class CountSite:
    """One counted layer."""

    layer: int
    num_experts: int
    kind: CountKind = CountKind.ROUTED
    offset: int = 0
    """Added to every id: the first expert that lives on this rank, where ids are local."""


class StepCounter:
    """Counts of one step. Allocated once per buffer; `add` runs on the model's stream."""

    def __init__(self, sites: list[CountSite], device: torch.device) -> None:
        self.sites = sites
        self._device = device
        self._starts: list[int] = []
        total = 0
        for site in sites:
            self._starts.append(total)
            total += 2 * (site.num_experts + OUT_OF_RANGE_BINS)
        self._counts = torch.zeros(total, dtype=torch.int64, device=device)
        self._rows = [
            self._counts[start : start + 2 * (site.num_experts + OUT_OF_RANGE_BINS)]
            for start, site in zip(self._starts, sites, strict=True)
        ]
        self._one = torch.ones((), dtype=torch.int64, device=device)
        on_device = device.type != "cpu"
        self._host = (
            torch.zeros(total, dtype=torch.int64, pin_memory=on_device) if on_device else self._counts
        )
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call, unused-ignore]
        self._used = False
        self.recompute_pairs: dict[int, int] = {}
        self.padding: torch.Tensor | None = None
        """Per-token padding flag [T] of the running forward (True = padding), or None."""

    def add(self, index: int, expert_ids: torch.Tensor) -> None:
        """Add the pairs of one router call: ids [.., K]. No host sync, no allocation that outlives the call."""
        site = self.sites[index]
        bins = site.num_experts + OUT_OF_RANGE_BINS
        ids = expert_ids.detach()
        if ids.dtype != torch.int64:
            ids = ids.long()
        if site.offset:
            ids = ids + site.offset
        ids = ids.clamp(-1, site.num_experts).add_(1)
        padding = self.padding
        if padding is not None and site.kind is CountKind.ROUTED:
            width = ids.shape[-1]
            if padding.numel() * width == ids.numel():
                ids = ids.reshape(-1, width) + padding.unsqueeze(1) * bins
        flat = ids.reshape(-1)
        self._rows[index].scatter_add_(0, flat, self._one.expand(flat.shape))
        self._used = True

    def add_recompute(self, index: int, expert_ids: torch.Tensor) -> None:
        """Note pairs that activation recompute routed again; they are counted apart, as one total."""
        layer = self.sites[index].layer
        self.recompute_pairs[layer] = self.recompute_pairs.get(layer, 0) + expert_ids.numel()

    def finish(self) -> None:
        """Start the copy to the host; called by the model thread at the end of the step."""
        self.padding = None
        if self._used and self._copied is not None:
            self._host.copy_(self._counts, non_blocking=True)
            self._copied.record()

    def ready(self) -> bool:
        """Whether `rows` may be read. Never waits."""
        return self._copied is None or not self._used or bool(self._copied.query())

    def rows(self) -> tuple[ExpertRow, ...]:
        """Counts by layer and kind; for the drain thread, once `ready`."""
        if not self._used and not self.recompute_pairs:
            return ()
        numbers = self._host.tolist()
        result = []
        for site, start in zip(self.sites, self._starts, strict=True):
            result.extend(_site_rows(site, numbers, start))
        for layer, pairs in sorted(self.recompute_pairs.items()):
            result.append(ExpertRow(layer=layer, kind=CountKind.RECOMPUTE, counts=(pairs,)))
        return tuple(result)

    def clear(self) -> None:
        """Zero the counts for the next step; called by the model thread when it takes the buffer."""
        if self._used:
            self._counts.zero_()
        self._used = False
        self.recompute_pairs.clear()
        self.padding = None


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
