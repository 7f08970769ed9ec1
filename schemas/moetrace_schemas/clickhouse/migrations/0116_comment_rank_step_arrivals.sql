ALTER TABLE {database}.rank_step_arrivals {on_cluster}
    MODIFY COMMENT 'When rank steps were stored, written behind them by collectors with --join=store: where moetrace join finds steps, however long their rows waited before. A row per execution of a step on a rank, also where a later one has replaced it in rank_steps'
