-- Lets the ttl of held requests begin anew.
--
-- In:     {external_ids}; this transaction has them locked.
-- Invariant: SYSDATE, not NOW: a statement that waited for a lock must not set an end that lies in the
--   past, or before one that was set meanwhile.

UPDATE {request}
SET updated_at = SYSDATE(6),
    expires_at = SYSDATE(6) + INTERVAL ttl_seconds SECOND,
    reclaim_at = SYSDATE(6) + INTERVAL ttl_seconds * 1.25 SECOND
WHERE external_id IN ({external_ids})
  AND state = 'ACQUIRED'
