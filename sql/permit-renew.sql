-- Renews requests: the ttl and the time after which they are stale begin anew.
--
-- In:     {external_ids}.
-- Out:    rows matched: how many of them are held.
-- Keeps:  no end moves backwards: NOW() stands still while the statement waits for a lock.
UPDATE permit_request
SET updated_at = GREATEST(updated_at, NOW(6)),
    expires_at = GREATEST(expires_at, NOW(6) + INTERVAL ttl_seconds SECOND)
WHERE external_id IN ({external_ids})
  AND state = 'ACQUIRED'
