"""What is counted of a layer, and what its model promises about its routing. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from moetrace_schemas.enums import CountKind

DESTINATION_SIDE = frozenset({CountKind.RECEIVED, CountKind.EXECUTED})
"""Kinds that are work of this rank's experts, whoever's tokens it is for; all others are of its routers."""


@dataclass(frozen=True, slots=True)
class CountSite:
    """One kind of count of one layer. What the model promises is said at kind `routed`."""

    layer: int
    num_experts: int
    kind: CountKind = CountKind.ROUTED
    offset: int = 0
    """Added to every id: the first expert that lives on this rank, where ids are local."""
    num_local_experts: int = 0
    """Experts of this rank, where ids are local; 0 where they are global."""
    weight_sums: tuple[float, ...] = ()
    """What the weights of a token may add up to; empty where the model does not say."""
    slots: int = 0
    """Most experts that a token gets, for routers that show a mask; 0 where that is not known."""
    sentinels: bool = False
    """Ids that are no expert stand for "none" in this framework, and are no fault."""
    ep_size: int = 1
    """Ranks of the expert-parallel group."""
    exact_rows: bool = True
    """The dispatcher sends a row per pair, to the rank of its expert, no more and no less; False where it
    pads to a capacity or sends one copy per rank."""
    at_exchange: bool = False
    """Rows received are counted where the exchange hands them over, since the layer does not show them."""

    @property
    def notes_recompute(self) -> bool:
        """Whether pairs that activation recompute sees again are noted here, apart from those of the forward.

        Each pair once, where it is routed; every other kind is of the same pairs and leaves them out.
        """
        return self.kind is CountKind.ROUTED
