ALTER TABLE {database}.rank_traffic {on_cluster}
    COMMENT COLUMN IF EXISTS direction 'forward: what ranks tell; what goes back is derived, in v_backward_traffic'
