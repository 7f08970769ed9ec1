"""Where ranks sit and how fast they reach each other. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moetrace_collectors.errors import UsageError
from moetrace_collectors.model import IntArray

NODE_GB_PER_S = 450.0
"""Assumed where not told: NVLink of an H100, one direction."""
LINK_GB_PER_S = 50.0
"""Assumed where not told: one 400 Gb/s network port per rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Ranks of one expert-parallel group on equal nodes; rank r is on node r * nodes / ranks."""

    num_ranks: int
    num_nodes: int = 1
    node_gb_per_s: float = NODE_GB_PER_S
    """Inside a node, per rank and direction, 1e9 bytes per second."""
    link_gb_per_s: float = LINK_GB_PER_S
    """Between nodes, per rank and direction, 1e9 bytes per second."""

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            UsageError: names the field, its value and the fix.
        """
        if self.num_ranks < 1:
            raise UsageError(f"ranks = {self.num_ranks}: 1 or more expected")
        if self.num_nodes < 1 or self.num_ranks % self.num_nodes:
            raise UsageError(
                f"nodes = {self.num_nodes} do not divide ranks = {self.num_ranks}: every node has equally "
                "many ranks, so give a divisor"
            )
        for name in ("node_gb_per_s", "link_gb_per_s"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise UsageError(f"{name} = {getattr(self, name)}: a number above 0 expected")

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node."""
        return self.num_ranks // self.num_nodes

    @property
    def node_of_rank(self) -> IntArray:
        """[R]."""
        return np.arange(self.num_ranks, dtype=np.int64) // self.ranks_per_node
