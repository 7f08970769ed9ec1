"""The SQL of loads: every table and column name that this package reads is spelled here.

Tables are ReplacingMergeTree, so every read says FINAL. Warm-up steps are in no figure, and steps are those
of one placement epoch. Cells come as arrays, one row per entry and layer, because a collector's HTTP endpoint
limits rows and not their width.
"""

from __future__ import annotations


def _read(name: str) -> str:
    return f"{{database:Identifier}}.{name} FINAL WHERE run_id = {{run:String}}"


_WARMUP = f"SELECT step FROM {_read('step_verdicts')} AND warmup = 1"
_EPOCH = (
    "arrayExists((first, last) -> step BETWEEN first AND last, {firsts:Array(UInt64)}, {lasts:Array(UInt64)})"
)
_ANY_EPOCH = f"step NOT IN ({_WARMUP})"
_COUNTED = f"{_EPOCH} AND {_ANY_EPOCH}"
_MODE = "forward_mode = {mode:String}"
_COHORT = "({cohort:String} = '*' OR cohort = {cohort:String})"
_ENTRY = "intDiv(step - {first:UInt64}, {width:UInt64})"

VIEWS = f"""
SELECT
    toString(forward_mode) AS forward_mode, toString(cohort) AS cohort,
    min(step) AS first_step, max(step) AS last_step, uniqExact(step) AS steps,
    arraySort(groupUniqArray(layer)) AS layers, max(expert) + 1 AS experts
FROM {_read("expert_loads")} AND count_kind = 'routed' AND {_COUNTED}
GROUP BY forward_mode, cohort
"""

EPOCHS = f"""
SELECT placement_version AS version, max(expert) + 1 AS experts
FROM {_read("expert_loads")} AND count_kind = 'routed' AND {_ANY_EPOCH}
GROUP BY version ORDER BY version
"""

STAYS = f"""
SELECT version, groupArray(first_step) AS firsts, groupArray(last_step) AS lasts
FROM
(
    SELECT any(version) AS version, min(step) AS first_step, max(step) AS last_step
    FROM
    (
        SELECT step, version, sum(is_new) OVER (ORDER BY step) AS stay
        FROM
        (
            SELECT
                step, version, version != lagInFrame(version, 1, toInt64(-1)) OVER
                    (ORDER BY step ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS is_new
            FROM
            (
                SELECT
                    step, max(placement_version) AS newest,
                    minIf(placement_version, placement_version > 0) AS oldest,
                    if(oldest = newest, toInt64(newest), toInt64(-2)) AS version
                FROM {_read("rank_steps")}
                GROUP BY step
            )
        )
    )
    GROUP BY stay
    ORDER BY first_step
)
WHERE version >= 0
GROUP BY version
"""
"""Runs of steps under one version; a step whose ranks tell different ones is in none."""

LOADS = f"""
SELECT entry, layer, groupArray(column) AS columns, groupArray(total) AS totals
FROM
(
    SELECT {_ENTRY} AS entry, layer, expert AS column, sum(count) AS total
    FROM {_read("expert_loads")} AND count_kind = 'routed' AND {_MODE} AND {_COHORT} AND {_COUNTED}
    GROUP BY entry, layer, column
)
GROUP BY entry, layer
"""

ENTRIES = f"""
SELECT
    {_ENTRY} AS entry, min(step) AS first_step, uniqExact(step) AS steps,
    toUnixTimestamp64Milli(min(step_time)) AS start_ms
FROM {_read("expert_loads")} AND count_kind = 'routed' AND {_MODE} AND {_COHORT} AND {_COUNTED}
GROUP BY entry ORDER BY entry
"""

RECEIVED = f"""
SELECT entry, layer, groupArray(column) AS columns, groupArray(total) AS totals
FROM
(
    SELECT {_ENTRY} AS entry, layer, rank AS column, sum(count) AS total
    FROM {_read("expert_loads")} AND count_kind = 'received' AND {_MODE} AND {_COHORT} AND {_COUNTED}
    GROUP BY entry, layer, column
)
GROUP BY entry, layer
"""

SOURCES = f"""
SELECT layer, rank, groupArray(column) AS columns, groupArray(total) AS totals
FROM
(
    SELECT layer, rank, expert AS column, sum(count) AS total
    FROM {_read("expert_loads")} AND count_kind = 'routed' AND {_MODE} AND {_COHORT} AND {_COUNTED}
    GROUP BY layer, rank, column
)
GROUP BY layer, rank
"""

TRAFFIC = f"""
SELECT layer, source_rank, destination_ep_rank, sum(rows) AS total_rows, sum(bytes) AS total_bytes
FROM {_read("rank_traffic")} AND phase = 'dispatch' AND {_MODE} AND {_COUNTED}
GROUP BY layer, source_rank, destination_ep_rank
"""

REMOTE = f"""
SELECT entry, layer, groupArray(column) AS columns, groupArray(total) AS totals
FROM
(
    SELECT {_ENTRY} AS entry, layer, destination_ep_rank AS column, sum(rows) AS total
    FROM {_read("rank_traffic")} AND phase = 'dispatch' AND {_MODE} AND {_COUNTED}
        AND transform(source_rank, {{ranks:Array(UInt32)}}, {{places:Array(UInt32)}}, toUInt32(4294967295))
            != destination_ep_rank
    GROUP BY entry, layer, column
)
GROUP BY entry, layer
"""

RANKS = f"""
SELECT
    rank, anyLast(ep_group) AS ep_group, anyLast(ep_rank) AS ep_rank, anyLast(ep_size) AS ep_size,
    anyLast(toString(host_name)) AS host
FROM {_read("rank_steps")}
GROUP BY rank ORDER BY rank
"""

GEMM = f"""
SELECT rows, duration_ns
FROM {_read("phase_spans")} AND phase = 'expert_gemm' AND direction = 'forward' AND rows > 0 AND {_MODE}
    AND {_COUNTED}
ORDER BY cityHash64(step, layer, rank, microbatch)
LIMIT {{limit:UInt64}}
"""

STEP_TIME = f"""
SELECT count() AS steps, quantileExact(0.5)(step_ns) AS median_ns
FROM {_read("step_verdicts")} AND {_MODE} AND {_EPOCH} AND warmup = 0 AND step_ns > 0
"""

COACTIVATION = f"""
SELECT layer, span, groupArray(first) AS firsts, groupArray(second) AS seconds, groupArray(total) AS totals
FROM
(
    SELECT layer, toString(span) AS span, first, second, sum(tokens) AS total
    FROM {_read("expert_coactivation")} AND {_MODE} AND {_COHORT} AND {_COUNTED}
    GROUP BY layer, span, first, second
)
GROUP BY layer, span
"""
