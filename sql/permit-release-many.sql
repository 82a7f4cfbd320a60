-- Releases requests that passed permit-release-gate.sql, in its transaction; the counters follow.
--
-- In:     {ids}.
UPDATE permit_request SET state = 'RELEASED', expires_at = NULL, updated_at = NOW(6) WHERE id IN ({ids});
UPDATE permit SET state = 'RELEASED' WHERE permit_request_id IN ({ids})
