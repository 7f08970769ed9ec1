ALTER TABLE {database}.phase_spans {on_cluster}
    ADD INDEX IF NOT EXISTS start_time_range start_time TYPE minmax GRANULARITY 1
