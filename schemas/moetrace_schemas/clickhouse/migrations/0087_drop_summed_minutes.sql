DROP TABLE IF EXISTS {database}.expert_load_minutes, {database}.phase_minutes, {database}.exchange_minutes,
    {local:expert_load_minutes}, {local:phase_minutes}, {local:exchange_minutes} {on_cluster}
