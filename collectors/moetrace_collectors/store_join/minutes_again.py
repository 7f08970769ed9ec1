"""Minutes that must be rolled up again although they hold no more rank steps than before. Pure.

Counts that were folded behind a verdict belong to rank steps that may have been rolled up without them::

    rank steps of 12:00 stored | 12:00 rolled up | their counts folded | 12:00: nothing is rolled up
                                                                         `-> rolled up again
"""

from __future__ import annotations

from collections.abc import Sequence

from moetrace_collectors.model import RankStep
from moetrace_collectors.roll_ups.minutes import MINUTE_S
from moetrace_collectors.sinks.clickhouse_rows import TableRows

NS_PER_MINUTE = MINUTE_S * 1_000_000_000


def not_rolled_up(rank_steps: Sequence[RankStep], *, now_ms: int) -> TableRows:
    """Rows of `rolled_up_minutes` which say that nothing of the minutes of these rank steps is summed.

    Args:
        rank_steps: of one run, whose counts are in the store.
        now_ms: the store's clock, asked after that: who began to sum a minute before may have missed them.
    """
    minutes = sorted({one.start_unix_ns // NS_PER_MINUTE * MINUTE_S for one in rank_steps})
    nothing = [0] * len(minutes)
    return TableRows(
        table="rolled_up_minutes",
        names=("run_id", "minute", "rank_steps", "verdicts", "rolled_up_at"),
        # Of two rows with one time the store keeps either.
        columns=(
            [rank_steps[0].run_id] * len(minutes),
            minutes,
            nothing,
            nothing,
            [now_ms + 1] * len(minutes),
        ),
    )
