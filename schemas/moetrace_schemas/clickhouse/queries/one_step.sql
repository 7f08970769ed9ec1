-- What happened in one step, exchange by exchange: who released it, after which work?
-- param step = 10
-- worst_steps and steps_of_rank have numbers of steps that are worth it. Only sampled steps are there.
SELECT ep_group, barrier, layer, phase, direction, releaser_rank, work_phase, round(max_work_ns / 1e3, 1) AS longest_work_us,
       round(extension_ns / 1e3, 1) AS extension_us, round(transfer_ns / 1e3, 1) AS transfer_us,
       round(wait_sum_ns / 1e3, 1) AS waits_us, ambiguous
FROM v_step_barriers
WHERE run_id = {run:String} AND step = {step:UInt64}
ORDER BY ep_group, barrier
