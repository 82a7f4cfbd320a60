-- Brings the counters of semaphores up to date, in the transaction that changes their permits.
--
-- In:     {ids} and {changes}, a WHEN id THEN change for each.
-- Keeps:  used = the sum of the permits in state ACQUIRED.
UPDATE semaphore
SET used = used + CASE id {changes} ELSE 0 END
WHERE id IN ({ids})
