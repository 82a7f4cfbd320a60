-- How full semaphores are. Locks nothing.
--
-- In:     {which}, a condition.
-- Out:    name, capacity, held, and the number of requests that hold.
SELECT s.name, s.capacity, s.used,
       (SELECT COUNT(*) FROM permit p WHERE p.semaphore_id = s.id AND p.state = 'ACQUIRED')
FROM semaphore s
WHERE {which}
ORDER BY s.name
