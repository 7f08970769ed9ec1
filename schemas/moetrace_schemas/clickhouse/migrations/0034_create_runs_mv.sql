CREATE MATERIALIZED VIEW IF NOT EXISTS {database}.runs_mv {on_cluster} TO {local:runs} AS
SELECT
    run_id,
    groupUniqArrayIf(toString(model_name), model_name != '') AS model_names,
    groupUniqArrayIf(toString(model_version), model_version != '') AS model_versions,
    max(world_size) AS world_size,
    groupUniqArray(rank) AS ranks,
    max(ep_size) AS ep_size,
    groupUniqArrayIf(toString(host_name), host_name != '') AS hosts,
    groupUniqArray(toString(forward_mode)) AS forward_modes,
    groupUniqArrayIf(toString(cohort), cohort != '') AS cohorts,
    groupUniqArray(toString(clock)) AS clocks,
    groupUniqArray(placement_version) AS placement_versions,
    max(sample_period) AS sample_period,
    min(step) AS first_step,
    max(step) AS last_step,
    toDateTime64(min(start_time), 3) AS first_step_time,
    toDateTime64(max(start_time), 3) AS last_step_time
FROM {local:rank_steps}
GROUP BY run_id
COMMENT 'Fills runs from rank_steps'
