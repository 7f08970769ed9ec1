"""How far rows travel in an exchange: to the rank itself, inside its host, or across hosts (pure)."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from moetrace_collectors.model import IntArray, RankStep
from moetrace_schemas.enums import PHASE_BY_CODE

SAME_RANK = "same_rank"
SAME_NODE = "same_node"
CROSS_NODE = "cross_node"
UNKNOWN = "unknown"
"""The receiver did not arrive, or a host has no name."""
_NO_HOST = -1


def rows_by_scope(rank_steps: tuple[RankStep, ...]) -> dict[tuple[str, str], int]:
    """(phase, scope) -> rows sent in one joined step; only what is not zero."""
    hosts = _HostCodes(rank_steps)
    total: defaultdict[tuple[str, str], int] = defaultdict(int)
    for step in rank_steps:
        own = hosts.code(step.host_name)
        for phase, rows in _sent(step).items():
            receivers = hosts.of_group(step.ep_group, len(rows))
            itself = np.arange(len(rows)) == step.ep_rank
            unknown = ~itself & ((receivers == _NO_HOST) | (own == _NO_HOST))
            near = ~itself & ~unknown & (receivers == own)
            for scope, mask in (
                (SAME_RANK, itself),
                (UNKNOWN, unknown),
                (SAME_NODE, near),
                (CROSS_NODE, ~(itself | unknown | near)),
            ):
                total[phase, scope] += int(rows[mask].sum())
    return {key: rows for key, rows in total.items() if rows}


def _sent(step: RankStep) -> dict[str, IntArray]:
    """Rows per destination, summed over layers; whole arrays, because layers x ranks x ranks is a lot."""
    by_phase: defaultdict[int, list[IntArray]] = defaultdict(list)
    for sent in step.traffic:
        by_phase[sent.phase].append(sent.rows)
    summed = {}
    for code, arrays in by_phase.items():
        rows = np.zeros(max(map(len, arrays)), dtype=np.int64)
        for array in arrays:
            rows[: len(array)] += array
        summed[PHASE_BY_CODE[code].value] = rows
    return summed


class _HostCodes:
    """Host names as numbers, by group and ep_rank."""

    def __init__(self, rank_steps: tuple[RankStep, ...]) -> None:
        self._codes: dict[str, int] = {}
        self._by_group: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._arrays: dict[tuple[int, int], IntArray] = {}
        for step in rank_steps:
            self._by_group[step.ep_group][step.ep_rank] = self.code(step.host_name)

    def code(self, host_name: str) -> int:
        return self._codes.setdefault(host_name, len(self._codes)) if host_name else _NO_HOST

    def of_group(self, ep_group: int, size: int) -> IntArray:
        """Host of each ep_rank of a group."""
        key = (ep_group, size)
        if key not in self._arrays:
            hosts = np.full(size, _NO_HOST, dtype=np.int64)
            for ep_rank, code in self._by_group[ep_group].items():
                if ep_rank < size:
                    hosts[ep_rank] = code
            self._arrays[key] = hosts
        return self._arrays[key]
