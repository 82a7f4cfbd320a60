-- Locks requests that are to be released, where they are held and no other transaction has them locked, and reads
-- what they hold. The semaphores are locked already.
--
-- In:     {requests}: a condition on r that names them, {which}: one that must still be true.
-- Out:    id, token, external id, owner; then external id of the request, id, semaphore, its name and count of each
--         of their permits.

SELECT r.id, r.token, r.external_id, r.owner
FROM {request} r
WHERE {requests}
  AND r.state = 'ACQUIRED'
  AND {which}
ORDER BY r.id
FOR UPDATE SKIP LOCKED;
SELECT r.external_id, p.id, p.semaphore_id, s.name, p.count
FROM {request} r
JOIN {permit} p FORCE INDEX (request) ON p.permit_request_id = r.id AND p.state = 'ACQUIRED'
JOIN {semaphore} s ON s.id = p.semaphore_id
WHERE {requests}
