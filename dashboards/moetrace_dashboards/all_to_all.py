"""What exchanges cost: the transfer itself or the wait for a slow rank, and how far rows travel."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from moetrace_dashboards.config import Config
from moetrace_dashboards.frame import assemble, link_to
from moetrace_dashboards.panels import lines, matrix, rows
from moetrace_dashboards.queries import promql, sql


def build(config: Config) -> Dashboard:
    """The dashboard."""
    panels = (
        lines(
            "Transfer and wait",
            "Transfer is the shortest duration over ranks; wait is the rest, summed over ranks. Much wait "
            "and little "
            "transfer is a slow rank, not a slow network.",
            "s",
            promql.TRANSFER_AND_WAIT,
            links=[link_to("critical_path", "the rank that is waited for")],
        ),
        lines(
            "Transfer of one exchange",
            "p50, p95 and p99 by phase. The line is the budget of MoeAllToAllOverBudget.",
            "s",
            promql.EXCHANGE_SECONDS,
            limit=config.all_to_all_p99_budget_s,
        ),
        lines(
            "Share of the step",
            "Dispatch and combine on the critical path over the whole of it. The line is the alert for "
            "decode.",
            "percentunit",
            [promql.ALL_TO_ALL_SHARE],
            limit=config.all_to_all_decode_share,
        ),
        lines(
            "How far rows travel",
            "Share of rows that stay on their rank, stay inside their node, or cross nodes. The line is "
            "the alert "
            "for cross-node rows.",
            "percentunit",
            [promql.ROWS_BY_SCOPE],
            limit=config.cross_node_ratio,
        ),
        matrix(
            "Rows from rank to rank",
            "Rows sent from a rank to each rank of its expert-parallel group. A bright column is a busy "
            "receiver.",
            "short",
            sql.RANK_BY_RANK,
            row="source",
            column="destination",
            value="rows_sent",
        ),
        rows(
            "Bytes by size of exchange",
            "What one rank sends in one exchange, in powers of two: small ones are latency, large ones "
            "bandwidth.",
            "s",
            sql.BYTES_BY_SIZE,
            width=12,
        ),
        lines(
            "Overlap",
            "Share of the exchanges' time, waits included, that other work of the same rank hides. Zero on "
            "one stream: nothing runs beside an exchange.",
            "percentunit",
            [promql.HIDDEN_SHARE],
        ),
        rows(
            "Slowest exchanges by layer",
            "p50 and p99 of the transfer and the summed wait, by layer and phase.",
            "s",
            sql.SLOWEST_EXCHANGES,
            width=12,
        ),
        lines(
            "Transfer by group",
            "Mean transfer of an exchange by expert-parallel group, the ten slowest. An exchange is one "
            "measurement for its group: with two hosts that is their link, with more a set of links.",
            "s",
            [promql.GROUP_TRANSFER],
            width=24,
        ),
    )
    return assemble(
        "all_to_all",
        "moetrace: all-to-all and topology",
        "Transfer against wait, budgets, and how far rows travel.",
        panels,
        config,
    )
