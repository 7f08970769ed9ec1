"""The SQL of samples: every table and column that a comparison reads is spelled here.

Warm-up steps, partial steps, and steps in which ranks ran under different versions are in no figure.
"""

from __future__ import annotations


def _read(name: str) -> str:
    return f"{{database:Identifier}}.{name} FINAL WHERE run_id = {{run:String}}"


_POOL = "(empty({ranks:Array(UInt32)}) OR has({ranks:Array(UInt32)}, rank))"
_VERSION = "({version:Int64} < 0 OR version = {version:Int64})"

RANKS = f"""
SELECT rank, anyLast(toString(host_name)) AS host, anyLast(toString(model_version)) AS model_version
FROM {_read("rank_steps")}
GROUP BY rank ORDER BY rank
"""

EPOCHS = f"""
SELECT version, min(step) AS first_step, max(step) AS last_step, count() AS steps,
    toUnixTimestamp64Nano(min(begun)) AS first_ns, toUnixTimestamp64Nano(max(begun)) AS last_ns
FROM
(
    SELECT step, max(placement_version) AS version, min(start_time) AS begun
    FROM {_read("rank_steps")} AND warmup = 0
    GROUP BY step HAVING min(placement_version) = version
)
GROUP BY version ORDER BY first_step
"""

_HOSTS = f"""
SELECT rank, any(ep_group) AS ep_group, any(ep_rank) AS ep_rank, anyLast(toString(host_name)) AS host
FROM {_read("rank_steps")} GROUP BY rank
"""

STEPS = f"""
SELECT
    r.step AS step, r.begun_ns AS time_ns, v.mode AS forward_mode, r.version AS version,
    if(empty({{ranks:Array(UInt32)}}), v.step_ns, r.longest_ns) AS step_ns,
    p.worked_rows AS rows, e.pairs AS pairs, e.lost_pairs AS lost_pairs,
    t.sent_rows AS sent_rows, t.cross_rows AS cross_rows
FROM
(
    SELECT step, max(placement_version) AS version, max(duration_ns) AS longest_ns,
        toUnixTimestamp64Nano(min(start_time)) AS begun_ns
    FROM {_read("rank_steps")} AND warmup = 0 AND {_POOL}
    GROUP BY step HAVING min(placement_version) = version
) AS r
INNER JOIN
(
    SELECT step, toString(forward_mode) AS mode, step_ns
    FROM {_read("step_verdicts")} AND warmup = 0 AND empty(missing_ranks)
        AND (step_ns > 0 OR notEmpty({{ranks:Array(UInt32)}}))
) AS v ON v.step = r.step
LEFT JOIN
(
    SELECT step, sum(rows) AS worked_rows
    FROM {_read("phase_spans")} AND phase = 'expert_gemm' AND rows > 0 AND {_POOL}
    GROUP BY step
) AS p ON p.step = r.step
LEFT JOIN
(
    SELECT step, sumIf(count, count_kind = 'routed') AS pairs,
        sumIf(count, count_kind IN ('dropped', 'invalid')) AS lost_pairs
    FROM {_read("expert_loads")} AND {_POOL}
    GROUP BY step
) AS e ON e.step = r.step
LEFT JOIN
(
    SELECT s.step AS step, sum(s.rows) AS sent_rows, sumIf(s.rows, o.host != d.host) AS cross_rows
    FROM
    (
        SELECT step, source_rank AS rank, destination_ep_rank, rows
        FROM {_read("rank_traffic")} AND phase = 'dispatch'
    ) AS s
    INNER JOIN ({_HOSTS}) AS o ON o.rank = s.rank
    INNER JOIN ({_HOSTS}) AS d ON d.ep_group = o.ep_group AND d.ep_rank = s.destination_ep_rank
    WHERE (empty({{ranks:Array(UInt32)}}) OR has({{ranks:Array(UInt32)}}, s.rank))
        AND o.host != '' AND d.host != ''
    GROUP BY step
) AS t ON t.step = r.step
WHERE {_VERSION}
ORDER BY step DESC
LIMIT {{limit:UInt64}} BY forward_mode
"""

LEFT_OUT = f"""
SELECT countIf(notEmpty(missing_ranks)) AS partial, countIf(empty(missing_ranks) AND step_ns <= 0) AS unjudged
FROM {_read("step_verdicts")} AND warmup = 0
"""
"""Steps that are in no figure: without some ranks, and, but for pools of ranks, without a length, as where
they were not judged."""
