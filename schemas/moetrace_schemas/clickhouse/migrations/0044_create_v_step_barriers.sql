CREATE OR REPLACE VIEW {database}.v_step_barriers {on_cluster} AS
SELECT
    run_id,
    step,
    step_time,
    ep_group,
    barrier,
    layer,
    phase,
    direction,
    microbatch,
    ordinal,
    multiIf(num_ranks < 2, toNullable(toInt32(-1)), judged AND NOT whole, NULL, doubtful AND phase != 'outside', toInt32(least_waiting_rank), toInt32(critical_rank)) AS releaser_rank,
    work_phase,
    transfer_ns,
    max_work_ns,
    mean_work_ns,
    extension_ns,
    wait_sum_ns,
    if(doubtful = 0 AND judged AND NOT whole, NULL, doubtful) AS ambiguous,
    num_ranks,
    ep_size
FROM {local:v_step_exchanges}
COMMENT 'What step_barriers holds, computed from phase_spans and rank_steps. releaser_rank and ambiguous are NULL where ranks of the group are missing: only the history of transfers tells'
