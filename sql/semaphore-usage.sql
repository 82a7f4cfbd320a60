-- How full semaphores are.
--
-- In:     {which}: a condition on s.
-- Out:    name, capacity, used, and by how many permits.

SELECT s.name, s.capacity, s.used,
       (SELECT COUNT(*) FROM {permit} p WHERE p.semaphore_id = s.id AND p.state = 'ACQUIRED')
FROM {semaphore} s
WHERE {which}
ORDER BY s.name
