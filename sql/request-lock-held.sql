-- Locks held requests and their permits, and reads them. Passes over what another transaction has locked. The
-- semaphores are locked already.
--
-- In:     {which}: a condition on r.
-- Out:    as request-read.sql, without the end of the ttl.
-- Invariant: a release by itself locks the request first, so a request is locked with all its permits or not at all.

SELECT STRAIGHT_JOIN r.external_id, r.id, r.token, r.state, r.owner, r.ttl_seconds, NULL, p.id, s.name, p.count
FROM {request} r
JOIN {permit} p FORCE INDEX (request) ON p.permit_request_id = r.id AND p.state = 'ACQUIRED'
JOIN {semaphore} s ON s.id = p.semaphore_id
WHERE ({which})
  AND r.state = 'ACQUIRED'
ORDER BY r.id, s.name
FOR UPDATE SKIP LOCKED
