ALTER TABLE {database}.rank_traffic {on_cluster}
    ADD INDEX IF NOT EXISTS step_time_range step_time TYPE minmax GRANULARITY 1
