CREATE OR REPLACE VIEW {database}.v_runs {on_cluster} AS
SELECT
    run_id,
    arraySort(groupUniqArrayArray(source.model_names)) AS model_names,
    arraySort(groupUniqArrayArray(source.model_versions)) AS model_versions,
    max(source.world_size) AS world_size,
    arraySort(groupUniqArrayArray(source.ranks)) AS ranks,
    max(source.ep_size) AS ep_size,
    arraySort(groupUniqArrayArray(source.hosts)) AS hosts,
    arraySort(groupUniqArrayArray(source.forward_modes)) AS forward_modes,
    arraySort(groupUniqArrayArray(source.cohorts)) AS cohorts,
    arraySort(groupUniqArrayArray(source.clocks)) AS clocks,
    arraySort(groupUniqArrayArray(source.placement_versions)) AS placement_versions,
    max(source.sample_period) AS sample_period,
    min(source.first_step) AS first_step,
    max(source.last_step) AS last_step,
    min(source.first_step_time) AS first_step_time,
    max(source.last_step_time) AS last_step_time
FROM {database}.runs AS source
GROUP BY run_id
COMMENT 'One row per run, merged from runs'
