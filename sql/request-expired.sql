-- Finds requests that hold permits of some semaphores and can be taken back. Locks nothing. NOW, not SYSDATE, with
-- which no index would be used for a range.
--
-- In:     {names}, {limit}.
-- Out:    their ids.

SELECT DISTINCT r.id
FROM {request} r FORCE INDEX (reclaim_at)
JOIN {permit} p FORCE INDEX (request) ON p.permit_request_id = r.id AND p.state = 'ACQUIRED'
JOIN {semaphore} s ON s.id = p.semaphore_id
WHERE r.reclaim_at <= NOW(6)
  AND s.name IN ({names})
LIMIT {limit}
