-- The requests that hold permits of a semaphore, oldest grant first.
--
-- In:     {name}.
-- Out:    external id, owner, count, fence, microseconds since the request was made and until it expires.

SELECT r.external_id, r.owner, p.count, p.id,
       TIMESTAMPDIFF(MICROSECOND, r.created_at, SYSDATE(6)),
       TIMESTAMPDIFF(MICROSECOND, SYSDATE(6), r.expires_at)
FROM {semaphore} s
JOIN {permit} p ON p.semaphore_id = s.id AND p.state = 'ACQUIRED'
JOIN {request} r ON r.id = p.permit_request_id
WHERE s.name = {name}
ORDER BY p.id
