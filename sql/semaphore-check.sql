-- Compares every counter with the permits that it counts.
--
-- Out:    id, name, counter and sum of each semaphore where they differ.
--
-- One statement sees one state of both tables, and a commit changes both or neither: what differs here
-- is wrong. Locks nothing; it reads every acquired permit, so it is not for every minute.
SELECT s.id, s.name, s.used, COALESCE(held.total, 0)
FROM semaphore s
LEFT JOIN (SELECT semaphore_id, SUM(count) AS total
           FROM permit WHERE state = 'ACQUIRED' GROUP BY semaphore_id) held ON held.semaphore_id = s.id
WHERE s.used <> COALESCE(held.total, 0)
ORDER BY s.name
