CREATE TABLE IF NOT EXISTS {database}.runs {on_cluster}
(
    run_id LowCardinality(String) COMMENT 'Run',
    model_names SimpleAggregateFunction(groupUniqArrayArray, Array(String)) COMMENT 'Models',
    model_versions SimpleAggregateFunction(groupUniqArrayArray, Array(String)) COMMENT 'Model versions',
    world_size SimpleAggregateFunction(max, UInt32) COMMENT 'Ranks of the run',
    ranks SimpleAggregateFunction(groupUniqArrayArray, Array(UInt32)) COMMENT 'Ranks that have reported',
    ep_size SimpleAggregateFunction(max, UInt32) COMMENT 'Ranks of the largest expert-parallel group',
    hosts SimpleAggregateFunction(groupUniqArrayArray, Array(String)) COMMENT 'Hosts',
    forward_modes SimpleAggregateFunction(groupUniqArrayArray, Array(String)) COMMENT 'Forward modes seen',
    cohorts SimpleAggregateFunction(groupUniqArrayArray, Array(String)) COMMENT 'Traffic cohorts seen',
    clocks SimpleAggregateFunction(groupUniqArrayArray, Array(String)) COMMENT 'Clocks that durations come from',
    placement_versions SimpleAggregateFunction(groupUniqArrayArray, Array(UInt32)) COMMENT 'Placement epochs seen; 0 = unknown',
    sample_period SimpleAggregateFunction(max, UInt32) COMMENT 'One in this many steps is sampled',
    first_step SimpleAggregateFunction(min, UInt64) COMMENT 'Lowest step number',
    last_step SimpleAggregateFunction(max, UInt64) COMMENT 'Highest step number',
    first_step_time SimpleAggregateFunction(min, DateTime64(3)) COMMENT 'Earliest start of a rank step (UTC)',
    last_step_time SimpleAggregateFunction(max, DateTime64(3)) COMMENT 'Latest start of a rank step (UTC)'
)
ENGINE = {engine:AggregatingMergeTree}
ORDER BY run_id
TTL toDateTime(last_step_time) + INTERVAL 400 DAY
COMMENT 'One row per run, filled from rank_steps; read it through v_runs. Only sets, minima and maxima: a row delivered twice changes nothing'
