-- Reads requests by external id, with their permits. Locks nothing.
--
-- In:     {external_ids}.
-- Out:    a row for each permit, in the order in which they were granted; one row without a permit for
--         a tombstone.
SELECT r.external_id, r.id, r.state, r.owner, r.ttl_seconds,
       TIMESTAMPDIFF(MICROSECOND, NOW(6), r.expires_at),
       p.id, p.semaphore_id, s.name, p.count
FROM permit_request r
LEFT JOIN permit p ON p.permit_request_id = r.id
LEFT JOIN semaphore s ON s.id = p.semaphore_id
WHERE r.external_id IN ({external_ids})
ORDER BY r.id, p.id
