DROP TABLE IF EXISTS {database}.rank_step_arrivals_mv {on_cluster}
