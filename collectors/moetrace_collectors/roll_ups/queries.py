"""SQL of the roll-ups. Values travel beside the text, as ClickHouse's own placeholders.

Times are bounded by `{first:Int64}` and `{end:Int64}`, unix seconds, so that parts and granules of other
times are passed over. Repeats are dropped by `uniqExact` where only keys are counted and by FINAL elsewhere.
"""

from __future__ import annotations

NEWEST = (
    "SELECT count(), toUnixTimestamp64Milli(max(rolled_up_at)) FROM {database:Identifier}.rolled_up_minutes"
)
"""When somebody rolled up last."""

WRITTEN = """
SELECT DISTINCT run_id, toUnixTimestamp(toStartOfMinute(toDateTime(start_time))) AS minute
FROM {database:Identifier}.rank_steps
WHERE received_at >= fromUnixTimestamp64Milli({since_ms:Int64})
  AND ({run:String} = '' OR run_id = {run:String})
"""
"""Minutes of rank steps that were written since a time."""

RANK_STEPS = """
SELECT run_id, toUnixTimestamp(toStartOfMinute(toDateTime(start_time))) AS minute,
       uniqExact(step, rank, microbatch) AS number, min(step) AS first_step, max(step) AS last_step
FROM {database:Identifier}.rank_steps
WHERE start_time >= toDateTime64({first:Int64}, 9) AND start_time < toDateTime64({end:Int64}, 9)
  AND run_id IN {runs:Array(String)}
GROUP BY run_id, minute
"""

VERDICTS = """
SELECT run_id, toUnixTimestamp(toStartOfMinute(toDateTime(step_time))) AS minute, uniqExact(step) AS number
FROM {database:Identifier}.step_verdicts
WHERE step_time >= toDateTime64({first:Int64}, 9) AND step_time < toDateTime64({end:Int64}, 9)
  AND run_id IN {runs:Array(String)}
GROUP BY run_id, minute
"""

ROLLED_UP = """
SELECT run_id, toUnixTimestamp(minute) AS minute_s, rank_steps, verdicts
FROM {database:Identifier}.rolled_up_minutes FINAL
WHERE minute >= toDateTime({first:Int64}) AND minute < toDateTime({end:Int64})
  AND run_id IN {runs:Array(String)}
"""

PHASE_MINUTES = """
SELECT DISTINCT toUnixTimestamp(toStartOfMinute(toDateTime(start_time))) AS minute
FROM {database:Identifier}.phase_spans
WHERE run_id = {run:String} AND step BETWEEN {first_step:UInt64} AND {last_step:UInt64}
"""
"""A phase counts into the minute in which it begins itself, which may be a later one than its step's."""

_BOUNDS = (
    "run_id = {run:String} AND {time} >= toDateTime64({first:Int64}, 9) "
    "AND {time} < toDateTime64({end:Int64}, 9)"
)


def _bounds(time: str) -> str:
    return _BOUNDS.replace("{time}", time)


ROLL_UP_EXPERT_LOADS = f"""
INSERT INTO {{database:Identifier}}.expert_load_minute_rows
    (run_id, minute, layer, count_kind, forward_mode, cohort, placement_version, rank, expert, count,
     source_rows)
SELECT run_id, toStartOfMinute(toDateTime(step_time)) AS minute, layer, count_kind, forward_mode, cohort,
       placement_version, if(count_kind = 'received', toInt32(source.rank), -1) AS of_rank, expert,
       sum(source.count), count()
FROM {{database:Identifier}}.expert_loads AS source FINAL
WHERE {_bounds("step_time")}
GROUP BY run_id, minute, layer, count_kind, forward_mode, cohort, placement_version, of_rank, expert
"""

ROLL_UP_PHASES = f"""
INSERT INTO {{database:Identifier}}.phase_minute_rows
    (run_id, minute, layer, phase, direction, is_barrier, forward_mode, intervals, duration_ns, shortest_ns,
     longest_ns, by_duration, source_rows)
SELECT run_id, toStartOfMinute(toDateTime(start_time)) AS minute, layer, phase, direction, is_barrier,
       forward_mode, count(), sum(source.duration_ns), min(source.duration_ns), max(source.duration_ns),
       sumMap(map(toUInt16(floor(8 * log2(greatest(source.duration_ns, 1)))), toUInt64(1))), count()
FROM {{database:Identifier}}.phase_spans AS source FINAL
WHERE {_bounds("start_time")}
GROUP BY run_id, minute, layer, phase, direction, is_barrier, forward_mode
"""

ROLL_UP_EXCHANGES = f"""
INSERT INTO {{database:Identifier}}.exchange_minute_rows
    (run_id, minute, layer, phase, direction, exchanges, transfer_ns, longest_transfer_ns, wait_ns,
     extension_ns, ambiguous, by_transfer, source_rows)
SELECT run_id, toStartOfMinute(toDateTime(step_time)) AS minute, layer, phase, direction, count(),
       sum(source.transfer_ns), max(source.transfer_ns), sum(source.wait_sum_ns), sum(source.extension_ns),
       sum(toUInt64(source.ambiguous)),
       sumMap(map(toUInt16(floor(8 * log2(greatest(source.transfer_ns, 1)))), toUInt64(1))), count()
FROM {{database:Identifier}}.step_barriers AS source FINAL
WHERE {_bounds("step_time")} AND phase IN ('dispatch', 'combine')
GROUP BY run_id, minute, layer, phase, direction
"""
