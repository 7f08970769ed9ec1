-- Which runs are there: model, ranks, hosts, placement epochs, first and last step?
SELECT run_id, model_names, model_versions, length(ranks) AS num_ranks, world_size, hosts, forward_modes, placement_versions,
       first_step, last_step, first_step_time, last_step_time
FROM v_runs
ORDER BY last_step_time DESC
