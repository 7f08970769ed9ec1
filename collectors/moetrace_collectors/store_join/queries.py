"""SQL of the join over the store. Values travel beside the text, as ClickHouse's own placeholders.

Steps are found by when their rows were stored (`rank_step_arrivals`), back to `{since_ms}`, and then named;
tables replace rows by key, so every read of rows says FINAL.
"""

from __future__ import annotations

ARRIVED = """
SELECT run_id, step, uniqExact(rank, microbatch, start_time) AS arrivals,
       toUnixTimestamp64Milli(min(stored_at)) AS first_ms, toUnixTimestamp64Milli(max(stored_at)) AS last_ms
FROM {database:Identifier}.rank_step_arrivals
WHERE stored_at >= fromUnixTimestamp64Milli({since_ms:Int64}) AND ({run:String} = '' OR run_id = {run:String})
GROUP BY run_id, step
"""
"""Steps of which rows were stored since a time. A row that came twice counts once, or a step would have fewer
when the store merges them."""

WRITTEN = """
SELECT run_id, step,
       toUnixTimestamp64Milli(min(received_at)) AS first_ms,
       toUnixTimestamp64Milli(max(received_at)) AS last_ms
FROM {database:Identifier}.rank_steps
WHERE late = 0 AND received_at >= fromUnixTimestamp64Milli({since_ms:Int64})
  AND ({run:String} = '' OR run_id = {run:String})
GROUP BY run_id, step
"""
"""The same by the clocks of the collectors: rows of older versions, and those that expired there, have no
arrival."""

STEPS = """
SELECT
    step, sum(num_records) AS records, max(of_rank.world_size) AS world_size,
    uniqExact(of_rank.world_size) AS world_sizes,
    length(groupUniqArrayArray(arrayPushBack(of_rank.microbatches, 0))) AS num_microbatches
FROM
(
    SELECT step, rank, count() AS num_records, max(source.world_size) AS world_size,
           groupUniqArray(microbatch) AS microbatches
    FROM {database:Identifier}.rank_steps AS source FINAL
    WHERE late = 0 AND run_id = {run:String} AND step IN {steps:Array(UInt64)}
    GROUP BY step, rank
) AS of_rank
GROUP BY step
"""
"""Who is there of each step."""

EXECUTED_AGAIN = """
SELECT step, tupleElement(slot, 1) AS rank, tupleElement(slot, 2) AS microbatch,
       tupleElement(slot, 3) AS starts
FROM
(
    SELECT step, min((rank, microbatch, starts)) AS slot
    FROM
    (
        SELECT step, rank, microbatch, arraySort(groupUniqArray(toUnixTimestamp64Nano(start_time))) AS starts
        FROM {database:Identifier}.rank_step_arrivals
        WHERE run_id = {run:String} AND step IN {steps:Array(UInt64)}
        GROUP BY step, rank, microbatch
        HAVING length(starts) > 1
    )
    GROUP BY step
)
ORDER BY starts[1], step
"""
"""Steps that a rank executed more than once, and when, on the first such rank."""

TOLD = """
SELECT count() AS told
FROM {database:Identifier}.collector_events
WHERE kind = 'run_id_reused' AND run_id = {run:String} AND reason = {reason:String}
  AND time >= fromUnixTimestamp64Milli({since_ms:Int64})
"""
"""Whether it has been said of a run id since a time."""

JUDGED = """
SELECT run_id, step
FROM {database:Identifier}.step_verdicts FINAL
WHERE run_id = {run:String} AND step IN {steps:Array(UInt64)}
"""

STARTS = """
SELECT min(toUnixTimestamp64Nano(start_time)) AS start_unix_ns
FROM {database:Identifier}.rank_steps
WHERE late = 0 AND run_id = {run:String} AND step IN {steps:Array(UInt64)}
GROUP BY toStartOfMinute(toDateTime(start_time))
"""
"""One start in each minute in which ranks began steps."""

RANK_STEPS = """
SELECT
    run_id, step, rank, microbatch, world_size, ep_group, ep_rank, ep_size,
    toString(forward_mode) AS forward_mode, toString(cohort) AS cohort,
    toString(model_name) AS model_name, toString(model_version) AS model_version,
    toString(host_name) AS host_name, toString(clock) AS clock, sample_period, placement_version, warmup,
    anchor_error_ns, tracer_ns, expected_sites, seen_sites,
    toUnixTimestamp64Nano(start_time) AS start_unix_ns, duration_ns
FROM {database:Identifier}.rank_steps FINAL
WHERE late = 0 AND run_id = {run:String} AND step IN {steps:Array(UInt64)}
ORDER BY step, rank, microbatch
"""

PHASES = """
SELECT
    step, rank, record_microbatch,
    groupArray(layer) AS layer, groupArray(toString(phase)) AS phase,
    groupArray(toString(direction)) AS direction,
    groupArray(microbatch) AS microbatch, groupArray(ordinal) AS ordinal, groupArray(stream) AS stream,
    groupArray(flags) AS flags, groupArray(toUnixTimestamp64Nano(start_time)) AS start_unix_ns,
    groupArray(duration_ns) AS duration_ns, groupArray(bytes) AS bytes, groupArray(rows) AS rows
FROM
(
    SELECT *
    FROM {database:Identifier}.phase_spans FINAL
    WHERE run_id = {run:String} AND step IN {steps:Array(UInt64)}
    ORDER BY step, rank, record_microbatch, start_time, position, duration_ns
)
GROUP BY step, rank, record_microbatch
SETTINGS max_threads = 1
"""
"""One row per rank step, its columns in the order of the wire; one thread keeps that order."""

_COUNTS = """
SELECT step, rank, microbatch, layer, toString(count_kind) AS kind,
       groupArray(expert) AS experts, groupArray(count) AS counts
FROM {database:Identifier}.TABLE FINAL
WHERE run_id = {run:String} AND step IN {steps:Array(UInt64)}
GROUP BY step, rank, microbatch, layer, kind
ORDER BY step, rank, microbatch, layer, kind
"""
EXPERTS = _COUNTS.replace("TABLE", "expert_loads")
UNFOLDED = _COUNTS.replace("TABLE", "unfolded_expert_loads")
"""Counts of collectors that did not know the map of their placement."""

HAS_UNFOLDED = """
SELECT DISTINCT step
FROM {database:Identifier}.unfolded_expert_loads
WHERE run_id = {run:String} AND step IN {steps:Array(UInt64)}
"""

UNTOLD = """
SELECT DISTINCT step
FROM {database:Identifier}.unfolded_expert_loads
WHERE run_id = {run:String} AND step IN {steps:Array(UInt64)}
  AND (count != 0 OR count_kind IN ('routed', 'received'))
  AND (step, rank, microbatch, layer, count_kind) GLOBAL NOT IN
  (
      SELECT step, rank, microbatch, layer, count_kind
      FROM {database:Identifier}.expert_loads
      WHERE run_id = {run:String} AND step IN {steps:Array(UInt64)}
  )
"""
"""Steps with counts that `expert_loads` has not; zeros of other kinds have no row there either. GLOBAL: the
inner rows of all shards, on each shard."""

WAITING = """
SELECT DISTINCT run_id, step
FROM {database:Identifier}.unfolded_expert_loads
WHERE step_time < fromUnixTimestamp64Milli({before_ms:Int64}) AND ({run:String} = '' OR run_id = {run:String})
ORDER BY run_id, step
"""
"""Steps with such counts that began before a time."""

TRAFFIC = """
SELECT step, source_rank AS rank, microbatch, layer, toString(phase) AS phase,
       toString(direction) AS direction, groupArray(destination_ep_rank) AS destinations,
       groupArray(source.rows) AS sent, sum(source.bytes) AS sent_bytes
FROM {database:Identifier}.rank_traffic AS source FINAL
WHERE run_id = {run:String} AND step IN {steps:Array(UInt64)}
GROUP BY step, rank, microbatch, layer, phase, direction
ORDER BY step, rank, microbatch, layer, phase, direction
"""

VIOLATIONS = """
SELECT step, rank, microbatch, layer, toString(violation) AS violation, count
FROM {database:Identifier}.routing_violations FINAL
WHERE run_id = {run:String} AND step IN {steps:Array(UInt64)} AND scope = 'rank'
ORDER BY step, rank, microbatch, layer, violation
"""

WAITS = """
SELECT step, ep_group, ep_rank, microbatch, toString(phase) AS phase,
       groupArray(waited_for) AS others, groupArray(cycles) AS cycles
FROM {database:Identifier}.rank_waits FINAL
WHERE run_id = {run:String} AND step IN {steps:Array(UInt64)}
GROUP BY step, ep_group, ep_rank, microbatch, phase
ORDER BY step, ep_group, ep_rank, microbatch, phase
"""
