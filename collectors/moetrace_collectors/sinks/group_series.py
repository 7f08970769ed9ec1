"""Exchanges by expert-parallel group, and what the tracers cost: series of the Prometheus sink.

An exchange is measured once for its whole group: the shortest duration over its ranks. Which pair of hosts
made it slow cannot be told from it, so the series are per group, and `moetrace_group_info` says which hosts
a group spans: two hosts are one link, one host is its inside, more are a set of links.
"""

from __future__ import annotations

from collections import defaultdict

from moetrace_collectors.model import RankStep
from moetrace_collectors.series import SeriesBook
from moetrace_collectors.sinks.base import StepResult
from moetrace_schemas import metrics
from moetrace_schemas.enums import PHASE_BY_CODE, Phase

NS_PER_S = 1e9
LISTED_HOSTS = 4
"""Hosts that the label names; of more it says how many."""
_EXCHANGES = (Phase.DISPATCH, Phase.COMBINE)


class GroupSeries:
    """Updates the series of joined steps."""

    def __init__(self, book: SeriesBook) -> None:
        """Make the metrics in `book`."""
        self._transfer = book.counter(metrics.GROUP_TRANSFER_SECONDS_TOTAL)
        self._exchanges = book.counter(metrics.GROUP_EXCHANGES_TOTAL)
        self._bytes = book.counter(metrics.GROUP_EXCHANGE_BYTES_TOTAL)
        self._info = book.gauge(metrics.GROUP_INFO)
        self._tracer = book.counter(metrics.TRACER_SECONDS_TOTAL)
        self._traced = book.counter(metrics.TRACED_RANK_SECONDS_TOTAL)
        self._members: dict[tuple[str, str], tuple[int, str]] = {}

    def take(self, result: StepResult) -> None:
        """Add one joined step."""
        run_id, mode = result.verdict.run_id, result.verdict.forward_mode.value
        for barrier in result.verdict.barriers:
            if barrier.phase in _EXCHANGES:
                labels = (run_id, str(barrier.ep_group), barrier.phase.value, mode)
                self._transfer.add(barrier.transfer_ns / NS_PER_S, labels)
                self._exchanges.add(labels=labels)
        for (group, phase), sent in bytes_by_group(result.joined.rank_steps).items():
            self._bytes.add(sent, (run_id, str(group), phase, mode))
        if not result.joined.missing_ranks:
            self._take_info(run_id, result.joined.rank_steps)
        for one in result.joined.rank_steps:
            if one.tracer_ns >= 0:
                self._tracer.add(one.tracer_ns / NS_PER_S, (run_id,))
                self._traced.add(one.duration_ns / NS_PER_S, (run_id,))

    def forget_run(self, run_id: str) -> None:
        """Another run takes its place."""
        self._members = {key: value for key, value in self._members.items() if key[0] != run_id}

    def _take_info(self, run_id: str, rank_steps: tuple[RankStep, ...]) -> None:
        for group, (ranks, hosts) in members_of(rank_steps).items():
            # A second set of hosts for a group would double every series that is joined with it.
            if self._members.setdefault((run_id, str(group)), (ranks, hosts)) == (ranks, hosts):
                self._info.set(1, (run_id, str(group), str(ranks), hosts))


def bytes_by_group(rank_steps: tuple[RankStep, ...]) -> dict[tuple[int, str], int]:
    """(group, phase) -> bytes sent to other ranks in one joined step; only where ranks say it."""
    total: defaultdict[tuple[int, str], int] = defaultdict(int)
    for one in rank_steps:
        for sent in one.traffic:
            elsewhere = int(sent.rows.sum()) - int(sent.rows[one.ep_rank])
            total[one.ep_group, PHASE_BY_CODE[sent.phase].value] += elsewhere * sent.row_bytes
    return dict(total)


def members_of(rank_steps: tuple[RankStep, ...]) -> dict[int, tuple[int, str]]:
    """Group -> its number of ranks, and its hosts as text."""
    ranks: defaultdict[int, set[int]] = defaultdict(set)
    hosts: defaultdict[int, set[str]] = defaultdict(set)
    for one in rank_steps:
        ranks[one.ep_group].add(one.rank)
        hosts[one.ep_group].add(one.host_name or "unknown")
    return {group: (len(ranks[group]), _hosts_text(sorted(hosts[group]))) for group in ranks}


def _hosts_text(hosts: list[str]) -> str:
    listed = ",".join(hosts[:LISTED_HOSTS])
    return listed if len(hosts) <= LISTED_HOSTS else f"{listed} and {len(hosts) - LISTED_HOSTS} more"
