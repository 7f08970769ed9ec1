CREATE MATERIALIZED VIEW IF NOT EXISTS {database}.rank_step_arrivals_mv {on_cluster} TO {local:rank_step_arrivals} AS
SELECT run_id, step, rank, microbatch, start_time, now64(3) AS stored_at
FROM {local:rank_steps}
WHERE late = 0
COMMENT 'Fills rank_step_arrivals from rank_steps'
