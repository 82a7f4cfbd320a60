-- Compares every counter with the permits that it counts.
--
-- Out:    name, counter and sum of each semaphore where they differ.

SELECT s.name, s.used, COALESCE(held.total, 0)
FROM {semaphore} s
LEFT JOIN (SELECT semaphore_id, SUM(count) AS total
           FROM {permit} WHERE state = 'ACQUIRED' GROUP BY semaphore_id) held ON held.semaphore_id = s.id
WHERE s.used <> COALESCE(held.total, 0)
ORDER BY s.name
