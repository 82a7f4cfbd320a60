-- Reads requests and the permits they hold; of a released one, all those it held, newest last.
--
-- In:     {external_ids}.
-- Out:    one row per permit, or one with NULLs for a request without permits.

SELECT r.external_id, r.id, r.token, r.state, r.owner, r.ttl_seconds,
       TIMESTAMPDIFF(MICROSECOND, SYSDATE(6), r.expires_at),
       p.id, s.name, p.count
FROM {request} r
LEFT JOIN {permit} p ON p.permit_request_id = r.id AND (p.state = 'ACQUIRED' OR r.state = 'RELEASED')
LEFT JOIN {semaphore} s ON s.id = p.semaphore_id
WHERE r.external_id IN ({external_ids})
ORDER BY r.id, s.name, p.id
