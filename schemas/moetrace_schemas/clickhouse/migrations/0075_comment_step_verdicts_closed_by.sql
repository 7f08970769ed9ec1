ALTER TABLE {database}.step_verdicts {on_cluster}
    COMMENT COLUMN IF EXISTS closed_by 'Closed set ClosedBy: complete, timeout, evicted, shutdown, watermark, quorum'
