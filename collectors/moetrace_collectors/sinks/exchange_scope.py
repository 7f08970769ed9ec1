"""How far rows travel in an exchange: to the rank itself, inside its host, or across hosts (pure)."""

from __future__ import annotations

from collections import defaultdict

from moetrace_collectors.model import RankStep
from moetrace_schemas.enums import PHASE_BY_CODE

SAME_RANK = "same_rank"
SAME_NODE = "same_node"
CROSS_NODE = "cross_node"
UNKNOWN = "unknown"
"""The receiver did not arrive, or a host has no name."""


def rows_by_scope(rank_steps: tuple[RankStep, ...]) -> dict[tuple[str, str], int]:
    """(phase, scope) -> rows sent in one joined step."""
    hosts = {(step.ep_group, step.ep_rank): step.host_name for step in rank_steps}
    total: defaultdict[tuple[str, str], int] = defaultdict(int)
    for step in rank_steps:
        for sent in step.traffic:
            phase = PHASE_BY_CODE[sent.phase].value
            for ep_rank, rows in enumerate(sent.rows.tolist()):
                if rows:
                    total[phase, _scope(step, ep_rank, hosts)] += rows
    return dict(total)


def _scope(step: RankStep, ep_rank: int, hosts: dict[tuple[int, int], str]) -> str:
    if ep_rank == step.ep_rank:
        return SAME_RANK
    host = hosts.get((step.ep_group, ep_rank), "")
    if not host or not step.host_name:
        return UNKNOWN
    return SAME_NODE if host == step.host_name else CROSS_NODE
