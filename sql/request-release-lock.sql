-- Locks requests that are to be released, where they are held and nobody else has them locked, and reads
-- what they hold. The semaphores are locked already.
--
-- In:     {ids}, {which}: a condition that must still be true.
-- Out:    id, token, external id, owner; then id of the request, id, semaphore, its name and count of each
--         of their permits.

SELECT r.id, r.token, r.external_id, r.owner
FROM {request} r
WHERE r.id IN ({ids})
  AND r.state = 'ACQUIRED'
  AND {which}
ORDER BY r.id
FOR UPDATE SKIP LOCKED;
SELECT p.permit_request_id, p.id, p.semaphore_id, s.name, p.count
FROM {permit} p
JOIN {semaphore} s ON s.id = p.semaphore_id
WHERE p.permit_request_id IN ({ids})
  AND p.state = 'ACQUIRED'
