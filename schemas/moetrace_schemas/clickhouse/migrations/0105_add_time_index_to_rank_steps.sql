ALTER TABLE {database}.rank_steps {on_cluster}
    ADD INDEX IF NOT EXISTS start_time_range start_time TYPE minmax GRANULARITY 1
