CREATE OR REPLACE VIEW {database}.v_backward_traffic {on_cluster} AS
WITH
    exchanges AS
    (
        SELECT run_id, step, rank, layer,
               countIf(direction = 'forward' AND phase = 'combine') AS num_passes,
               countIf(direction = 'backward' AND phase = 'dispatch') AS num_dispatch,
               countIf(direction = 'backward' AND phase = 'combine') AS num_combine
        FROM {local:phase_spans} FINAL
        WHERE is_barrier = 1 AND phase IN ('dispatch', 'combine') AND bitAnd(flags, 2) = 0
        GROUP BY run_id, step, rank, layer
    )
SELECT
    traffic.run_id AS run_id,
    traffic.step AS step,
    traffic.step_time AS step_time,
    traffic.layer AS layer,
    if(traffic.phase = 'dispatch', 'combine', 'dispatch') AS phase,
    'backward' AS direction,
    traffic.forward_mode AS forward_mode,
    traffic.source_rank AS source_rank,
    traffic.destination_rank AS destination_rank,
    traffic.destination_ep_rank AS destination_ep_rank,
    traffic.source_host AS source_host,
    traffic.destination_host AS destination_host,
    traffic.scope AS scope,
    traffic.rows AS rows
FROM {local:v_traffic} AS traffic
INNER JOIN exchanges ON exchanges.run_id = traffic.run_id AND exchanges.step = traffic.step
    AND exchanges.rank = traffic.source_rank AND exchanges.layer = traffic.layer
WHERE traffic.direction = 'forward' AND num_passes > 0
  AND if(traffic.phase = 'dispatch', num_combine, num_dispatch) = num_passes
COMMENT 'Rows that backward exchanges carried, derived: the backward of combine sends what dispatch sent, and the other way round. Only where every forward pass of a layer had its backward; bytes are not known. Add it to v_traffic for both directions'
