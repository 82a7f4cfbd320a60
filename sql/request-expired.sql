-- Finds requests that hold permits of some semaphores and can be taken back. Locks nothing. NOW, not SYSDATE, with
-- which no index would be used for a range.
--
-- In:     {names}, {limit}; {short}: the semaphore that has too little, {wanted} of it.
-- Out:    their ids; how many microseconds it is until the next request of any semaphore can be; the newest
--         grant of as much on {short}, read from the end of an index.

SELECT DISTINCT r.id
FROM {request} r FORCE INDEX (reclaim_at)
JOIN {permit} p FORCE INDEX (request) ON p.permit_request_id = r.id AND p.state = 'ACQUIRED'
JOIN {semaphore} s ON s.id = p.semaphore_id
WHERE r.reclaim_at <= NOW(6)
  AND s.name IN ({names})
LIMIT {limit};
SELECT TIMESTAMPDIFF(MICROSECOND, SYSDATE(6), MIN(reclaim_at))
FROM {request}
WHERE reclaim_at > NOW(6);
SELECT p.id
FROM {permit} p FORCE INDEX (semaphore_state)
WHERE p.semaphore_id = (SELECT s.id FROM {semaphore} s WHERE s.name = {short})
  AND p.state = 'ACQUIRED'
  AND p.count = {wanted}
ORDER BY p.id DESC
LIMIT 1
