-- Releases requests that this transaction has locked.
--
-- In:     {ids}.

UPDATE {request}
SET state = 'RELEASED', expires_at = NULL, reclaim_at = NULL, updated_at = SYSDATE(6)
WHERE id IN ({ids});
UPDATE {permit} SET state = 'RELEASED' WHERE permit_request_id IN ({ids}) AND state = 'ACQUIRED'
