-- Which rank pairs should carry rows, by what routers chose and where experts lie, and what did dispatchers say?
-- param minutes = 15
-- param limit = 20
-- Expected rows are (token, expert) pairs: a dispatcher that sends a token once per rank sends fewer. Empty where a
-- dispatcher does not say what it sent.
-- Steps: all of that time, warm-up left out.
WITH
    steps AS
    (
        SELECT DISTINCT step FROM rank_steps
        WHERE run_id = {run:String}
          AND start_time > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {minutes:UInt32} MINUTE
          AND step NOT IN (SELECT step FROM step_verdicts FINAL WHERE run_id = {run:String} AND warmup = 1)
    ),
    expected AS
    (
        SELECT layer, source_rank, destination_ep_rank, scope, sum(rows) AS num_rows
        FROM v_expected_traffic
        WHERE run_id = {run:String} AND step IN (SELECT step FROM steps)
        GROUP BY layer, source_rank, destination_ep_rank, scope
    ),
    told AS
    (
        SELECT layer, source_rank, destination_ep_rank, toNullable(sum(rows)) AS num_rows
        FROM v_traffic
        WHERE run_id = {run:String} AND step IN (SELECT step FROM steps) AND phase = 'dispatch'
        GROUP BY layer, source_rank, destination_ep_rank
    )
SELECT expected.layer AS layer, expected.source_rank AS source_rank,
       expected.destination_ep_rank AS destination_ep_rank, expected.scope AS scope,
       round(expected.num_rows, 1) AS expected_rows, told.num_rows AS told_rows,
       round(told.num_rows / expected.num_rows, 4) AS told_of_expected
FROM expected
LEFT JOIN told ON told.layer = expected.layer AND told.source_rank = expected.source_rank
    AND told.destination_ep_rank = expected.destination_ep_rank
ORDER BY expected_rows DESC, layer, source_rank, destination_ep_rank
LIMIT {limit:UInt32}
