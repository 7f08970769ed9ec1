"""The SQL of what a judge of changes had seen before its process ended: steps of an epoch, their samples.

As the judge takes them: whole steps that are no warm-up and have a frontier, all ranks under one version.
"""

from __future__ import annotations

_CLEAN = """
FROM
(
    SELECT step, toUnixTimestamp64Nano(min(start_time)) AS begun_ns
    FROM {database:Identifier}.rank_steps FINAL
    WHERE run_id = {run:String} AND step >= {first:UInt64} AND step < {end:UInt64} AND late = 0
    GROUP BY step
    HAVING min(placement_version) = {version:UInt32} AND max(placement_version) = {version:UInt32}
) AS r
INNER JOIN
(
    SELECT step, toString(forward_mode) AS mode, step_ns
    FROM {database:Identifier}.step_verdicts FINAL
    WHERE run_id = {run:String} AND step >= {first:UInt64} AND step < {end:UInt64}
      AND warmup = 0 AND empty(missing_ranks) AND step_ns > 0
) AS v ON v.step = r.step
"""

FIRST = f"SELECT count() AS steps, min(r.step) AS first_step {_CLEAN}"
"""The first step of an epoch."""

STEPS = f"""
SELECT mode, r.step AS step, r.begun_ns AS begun_ns, v.step_ns AS step_ns,
       count() OVER (PARTITION BY mode) AS steps_of_mode
{_CLEAN}
ORDER BY step DESC
LIMIT {{limit:UInt64}} BY mode
"""
"""The newest of each forward mode, and how many there are."""

WORKED = """
SELECT step, sum(rows) AS worked_rows
FROM {database:Identifier}.phase_spans FINAL
WHERE run_id = {run:String} AND step IN {steps:Array(UInt64)} AND phase = 'expert_gemm' AND rows > 0
GROUP BY step
"""

PAIRS = """
SELECT step, sumIf(count, count_kind = 'routed') AS pairs,
       sumIf(count, count_kind IN ('dropped', 'invalid')) AS lost_pairs
FROM {database:Identifier}.expert_loads FINAL
WHERE run_id = {run:String} AND step IN {steps:Array(UInt64)}
GROUP BY step
"""
