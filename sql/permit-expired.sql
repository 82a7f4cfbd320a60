-- Finds requests that hold permits of some semaphores and can be taken back. Locks nothing.
--
-- In:     {names}, {limit}.
-- Out:    their ids.

SELECT DISTINCT r.id
FROM {request} r FORCE INDEX (reclaim_at)
JOIN {permit} p FORCE INDEX (request) ON p.permit_request_id = r.id AND p.state = 'ACQUIRED'
JOIN {semaphore} s ON s.id = p.semaphore_id
WHERE r.reclaim_at <= SYSDATE(6)
  AND s.name IN ({names})
LIMIT {limit}
