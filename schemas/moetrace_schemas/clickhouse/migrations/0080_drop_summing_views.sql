DROP TABLE IF EXISTS {database}.expert_load_minutes_mv, {database}.phase_minutes_mv, {database}.exchange_minutes_mv {on_cluster}
