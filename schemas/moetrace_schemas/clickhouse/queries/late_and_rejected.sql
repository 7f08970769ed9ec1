-- What came late, twice or was rejected, and from whom?
SELECT kind, reason, rank, count() AS events, max(time) AS last_time, any(detail) AS example
FROM collector_events
WHERE run_id IN ({run:String}, '') AND kind NOT IN ('started', 'stopped')
GROUP BY kind, reason, rank
ORDER BY events DESC
LIMIT 50
