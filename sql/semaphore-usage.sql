-- How full semaphores are. NOW, not SYSDATE, with which no index would be used for a range.
--
-- In:     {which}: a condition on s.
-- Out:    name, capacity, used, by how many permits, and how much of that has expired.

SELECT s.name, s.capacity, s.used,
       (SELECT COUNT(*) FROM {permit} p WHERE p.semaphore_id = s.id AND p.state = 'ACQUIRED'),
       CAST(COALESCE(expired.total, 0) AS UNSIGNED)
FROM {semaphore} s
LEFT JOIN (SELECT p.semaphore_id, SUM(p.count) AS total
           FROM {request} r FORCE INDEX (reclaim_at)
           JOIN {permit} p FORCE INDEX (request) ON p.permit_request_id = r.id AND p.state = 'ACQUIRED'
           WHERE r.reclaim_at <= NOW(6)
           GROUP BY p.semaphore_id) expired ON expired.semaphore_id = s.id
WHERE {which}
ORDER BY s.name
