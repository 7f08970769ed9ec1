-- Has the network become slower: mean and p95 transfer and waits per minute, from the roll-up?
-- param hours = 24
-- The p95 is the middle of a bucket of an eighth of an octave, within 4.5 %.
-- Steps: all of that time, warm-up with them: the roll-up by minute does not tell it apart.
WITH sumMap(by_transfer) AS buckets, arraySort(mapKeys(buckets)) AS keys
SELECT minute, phase, direction, sum(exchanges) AS number, round(sum(transfer_ns) / number / 1e3, 1) AS mean_us,
       round(max(longest_transfer_ns) / 1e3, 1) AS longest_us, round(sum(wait_ns) / number / 1e3, 1) AS mean_wait_us,
       round(exp2((keys[arrayFirstIndex(total -> total >= 0.95 * number, arrayCumSum(arrayMap(key -> buckets[key], keys)))] + 0.5) / 8) / 1e3, 1) AS p95_us
FROM exchange_minutes
WHERE run_id = {run:String} AND minute > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {hours:UInt32} HOUR
GROUP BY minute, phase, direction
ORDER BY minute, phase, direction
