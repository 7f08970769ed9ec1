"""Minutes that must be rolled up again although they hold no more rank steps than before. Pure.

Counts that were folded behind a verdict belong to rank steps that may have been rolled up without them::

    rank steps of 12:00 stored | 12:00 rolled up | their counts folded | 12:00: nothing is rolled up
                                                                         `-> rolled up again

They are marked before the counts are written, in case that the process is killed behind that, and again when
they are in the store: who summed in between may have missed them.
"""

from __future__ import annotations

from collections.abc import Collection

from moetrace_collectors.roll_ups.minutes import MINUTE_S
from moetrace_collectors.sinks.clickhouse_rows import TableRows

NS_PER_MINUTE = MINUTE_S * 1_000_000_000


def not_rolled_up(starts: Collection[tuple[str, int]], *, now_ms: int) -> TableRows:
    """Rows of `rolled_up_minutes` which say that nothing of the minutes of these rank steps is summed.

    Args:
        starts: (run, unix ns) at which rank steps began.
        now_ms: the store's clock.
    """
    minutes = sorted({(run_id, start_ns // NS_PER_MINUTE * MINUTE_S) for run_id, start_ns in starts})
    nothing = [0] * len(minutes)
    return TableRows(
        table="rolled_up_minutes",
        names=("run_id", "minute", "rank_steps", "verdicts", "rolled_up_at"),
        # Of two rows with one time the store keeps either.
        columns=(
            [run_id for run_id, _ in minutes],
            [minute_s for _, minute_s in minutes],
            nothing,
            nothing,
            [now_ms + 1] * len(minutes),
        ),
    )
