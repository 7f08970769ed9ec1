ALTER TABLE {database}.rank_step_arrivals {on_cluster}
    MODIFY COLUMN stored_at SimpleAggregateFunction(min, DateTime64(3)) DEFAULT now64(3)
