"""SQL of panels, for Grafana's ClickHouse data source: its macros and Grafana's variables are in the text.

The numbers of a table share one unit, so ids and counts beside seconds are text.

Tables replace rows by key in the background, so everything reads FINAL, within one run and the time shown.
"""

from __future__ import annotations

from moetrace_dashboards.queries.base import SqlQuery

_RUN = "run_id = '${run}'"
_MODE = "forward_mode IN (${forward_mode:singlequote})"


def _filtered(table: str, columns: str, where: str) -> str:
    # Filters are in a query of their own: in ClickHouse an alias of the SELECT hides the column in WHERE.
    return f"(SELECT {columns} FROM moetrace.{table} FINAL WHERE {_RUN} AND {where})"


def _loads(columns: str, kind: str, more: str = "") -> str:
    return _filtered(
        "expert_loads",
        columns,
        f"{_MODE} AND layer IN (${{layer:csv}}) AND $__timeFilter(step_time) AND count_kind = '{kind}'{more}",
    )


_VERDICTS_WHERE = f"{_MODE} AND $__timeFilter(step_time) AND warmup = 0"
_JUDGED_WHERE = f"{_VERDICTS_WHERE} AND step_ns > 0"
"""Steps that have a length: one without a verdict has none."""
_STEP = f"""if('${{step}}' = '',
       (SELECT argMax(step, step_ns) FROM {_filtered("step_verdicts", "step, step_ns", _VERDICTS_WHERE)}),
       toUInt64OrZero('${{step}}'))"""
"""The step typed in, or the slowest one shown."""
_OVER_MEAN = "sum(count) / (sum(sum(count)) OVER (PARTITION BY layer) / count() OVER (PARTITION BY layer))"
"""Over the mean of its layer."""
_PLACEMENT_OF_STEP = (
    "(SELECT step, max(placement_version) AS placement_version FROM "
    + _filtered("rank_steps", "step, placement_version", "$__timeFilter(start_time)")
    + " GROUP BY step)"
)

TOP_SUSPECTS = SqlQuery(
    sql=f"""SELECT toString(rank) AS rank, phase, toString(layer) AS layer, cause, toString(count()) AS steps,
       concat(toString(round(100 * avg(share), 1)), ' %') AS share_of_extension,
       sum(worth_ns) / 1e9 AS worth
FROM {_filtered("step_verdicts", "*", f"{_VERDICTS_WHERE} AND evidence = 'clear' AND rank IS NOT NULL")}
GROUP BY rank, phase, layer, cause
ORDER BY worth DESC LIMIT 10"""
)
WORST_STEPS = SqlQuery(
    sql=f"""SELECT v.step_time AS time, toString(v.step) AS step, v.step_ns / 1e9 AS duration,
       toString(v.rank) AS rank, toString(v.layer) AS layer, v.phase AS phase, v.cause AS cause,
       v.evidence AS evidence, v.worth_ns / 1e9 AS worth, v.reason AS reason, r.trace_id AS trace_id
FROM (SELECT * FROM {_filtered("step_verdicts", "*", _VERDICTS_WHERE)} ORDER BY worth_ns DESC LIMIT 50) AS v
LEFT JOIN (SELECT step, any(trace_id) AS trace_id
           FROM {_filtered("rank_steps", "step, trace_id", "$__timeFilter(start_time)")}
           GROUP BY step) AS r ON r.step = v.step
ORDER BY worth DESC"""
)
EXTENSION_BY_LAYER_AND_PHASE = SqlQuery(
    sql=f"""SELECT toString(layer) AS layer, work_phase AS phase, sum(extension_ns) / 1e9 AS extension
FROM {_filtered("step_barriers", "layer, work_phase, extension_ns", "$__timeFilter(step_time)")}
GROUP BY layer, phase ORDER BY toInt16(layer), phase"""
)
STEP_RANK_BY_PHASE = SqlQuery(
    sql=f"""SELECT toString(rank) AS rank, concat(phase, if(is_barrier = 1, ' (exchange)', '')) AS part,
       sum(duration_ns) / 1e9 AS duration
FROM {
        _filtered(
            "phase_spans",
            "rank, phase, is_barrier, duration_ns",
            f"step = {_STEP} AND $__timeFilter(start_time)",
        )
    }
GROUP BY rank, part ORDER BY toUInt32(rank), part"""
)
LAYER_BY_EXPERT = SqlQuery(
    sql=f"""SELECT toString(layer) AS layer, toString(expert) AS expert, {_OVER_MEAN} AS load
FROM {_loads("layer, expert, count", "routed")}
GROUP BY layer, expert ORDER BY toInt16(layer), toUInt32(expert)"""
)
LAYER_BY_RANK = SqlQuery(
    sql=f"""SELECT toString(layer) AS layer, toString(rank) AS rank, {_OVER_MEAN} AS load
FROM {_loads("layer, rank, count", "received")}
GROUP BY layer, rank ORDER BY toInt16(layer), toUInt32(rank)"""
)
HOT_AND_DEAD = SqlQuery(
    sql=f"""SELECT layer, forward_mode, count() AS experts, countIf(pairs = 0) AS dead,
       argMax(expert, pairs) AS hottest, max(pairs) / avg(pairs) AS max_mean,
       stddevPop(pairs) / avg(pairs) AS cv
FROM (SELECT layer, forward_mode, expert, sum(count) AS pairs
      FROM {_loads("layer, forward_mode, expert, count", "routed")}
      GROUP BY layer, forward_mode, expert)
GROUP BY layer, forward_mode HAVING sum(pairs) > 0 ORDER BY layer, forward_mode"""
)
ACTIVATED_EXPERTS = SqlQuery(
    sql=f"""SELECT $__timeInterval(started) AS time, toString(rank) AS rank, avg(experts) AS activated
FROM (SELECT step, any(step_time) AS started, rank, layer, countIf(count > 0) AS experts
      FROM {_loads("step, step_time, rank, layer, count", "received")}
      GROUP BY step, rank, layer)
GROUP BY time, rank ORDER BY time, toUInt32(rank)"""
)
BYTES_BY_SIZE = SqlQuery(
    sql=f"""SELECT formatReadableSize(exp2(power)) AS at_least, phase, toString(count()) AS exchanges,
       formatReadableSize(sum(bytes)) AS sent, quantile(0.5)(duration_ns) / 1e9 AS median_duration
FROM {
        _filtered(
            "phase_spans",
            "phase, bytes, duration_ns, floor(log2(bytes)) AS power",
            f"{_MODE} AND $__timeFilter(start_time) AND is_barrier = 1 AND bytes > 0",
        )
    }
GROUP BY power, phase ORDER BY power, phase"""
)
RANK_BY_RANK = SqlQuery(
    sql=f"""SELECT toString(source_rank) AS source, toString(destination_ep_rank) AS destination,
       sum(rows) AS rows_sent
FROM {
        _filtered(
            "rank_traffic",
            "source_rank, destination_ep_rank, rows",
            f"{_MODE} AND $__timeFilter(step_time)",
        )
    }
GROUP BY source, destination ORDER BY toUInt32(source), toUInt32(destination)"""
)
SLOWEST_EXCHANGES = SqlQuery(
    sql=f"""SELECT toString(layer) AS layer, phase, quantile(0.5)(transfer_ns) / 1e9 AS p50,
       quantile(0.99)(transfer_ns) / 1e9 AS p99, sum(wait_sum_ns) / 1e9 AS wait
FROM {
        _filtered(
            "step_barriers",
            "layer, phase, transfer_ns, wait_sum_ns",
            "$__timeFilter(step_time) AND phase IN ('dispatch', 'combine')",
        )
    }
GROUP BY layer, phase ORDER BY p99 DESC LIMIT 20"""
)
PLACEMENTS = SqlQuery(
    sql=f"""SELECT toString(r.placement_version) AS placement, v.forward_mode AS forward_mode,
       min(v.step_time) AS first_step, toString(count()) AS steps,
       quantile(0.5)(v.step_ns) / 1e9 AS p50, quantile(0.95)(v.step_ns) / 1e9 AS p95
FROM {_filtered("step_verdicts", "step, step_time, step_ns, forward_mode", _JUDGED_WHERE)} AS v
INNER JOIN {_PLACEMENT_OF_STEP} AS r ON r.step = v.step
GROUP BY placement, forward_mode ORDER BY first_step"""
)
MIGRATIONS = SqlQuery(
    sql=f"""SELECT placement_version AS placement, layer,
       arrayCount(pair -> NOT has(before, pair), pairs) AS replicas_that_appeared
FROM (SELECT placement_version, layer, pairs, lagInFrame(pairs, 1, pairs) OVER
             (PARTITION BY layer ORDER BY placement_version
              ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS before
      FROM (SELECT placement_version, layer, groupUniqArray((expert, rank)) AS pairs
            FROM {_loads("placement_version, layer, expert, rank", "received", " AND count > 0")}
            GROUP BY placement_version, layer))
ORDER BY placement, layer"""
)
REPLICA_USE = SqlQuery(
    sql=f"""SELECT layer, expert, count() AS replicas, sum(received) AS rows_received,
       max(received) / avg(received) AS max_mean
FROM (SELECT layer, expert, rank, sum(count) AS received
      FROM {_loads("layer, expert, rank, count", "received", " AND count > 0")}
      GROUP BY layer, expert, rank)
GROUP BY layer, expert ORDER BY max_mean DESC, rows_received DESC LIMIT 50"""
)
PLACEMENT_LEDGER = SqlQuery(
    sql=f"""SELECT time, toString(sequence) AS row, event, toString(version) AS placement,
       toString(step) AS from_step, toString(previous_version) AS before, verdict,
       toString(rollback_version) AS rollback_to, toString(experts_copied) AS experts_copied, memory,
       proposed_by, policy_version, left(digest, 12) AS mapping
FROM moetrace.placement_ledger
WHERE {_RUN}
ORDER BY sequence DESC LIMIT 50"""
)
RECENT_EVENTS = SqlQuery(
    sql="""SELECT time, run_id, kind, reason, step, rank, detail
FROM moetrace.collector_events
WHERE $__timeFilter(time)
ORDER BY time DESC LIMIT 100"""
)
PLACEMENT_EPOCHS = """SELECT e.run_id AS run_id, e.placement AS placement, e.time_ms AS time_ms,
       l.announced > 0 AS is_announced, l.before AS before, l.copied AS experts_copied,
       l.copied_bytes AS copied_bytes, l.replicas AS replicas_added, l.sentence AS sentence
FROM (SELECT run_id, placement_version AS placement,
             toString(toUnixTimestamp64Milli(min(start_time))) AS time_ms
      FROM moetrace.rank_steps FINAL
      WHERE placement_version > 0
      GROUP BY run_id, placement) AS e
LEFT JOIN (SELECT run_id, version, countIf(event = 'announced') AS announced,
                  argMaxIf(previous_version, sequence, event = 'announced') AS before,
                  sumIf(experts_copied, event = 'announced') AS copied,
                  sumIf(copied_bytes, event = 'announced') AS copied_bytes,
                  sumIf(replicas_added, event = 'announced') AS replicas,
                  argMaxIf(JSONExtractString(document, 'sentence'), sequence, event = 'judged') AS sentence
           FROM moetrace.placement_ledger
           GROUP BY run_id, version) AS l ON l.run_id = e.run_id AND l.version = e.placement
ORDER BY run_id, time_ms"""
"""For annotations that a push makes; no variables. Stages of a pipeline announce apart: their copies add."""
