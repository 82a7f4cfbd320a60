-- Gives a request to another call: its permits are released here, and as many new ones granted in the same
-- transaction.
--
-- In:     {id}, {token}, {ttl}.
-- Invariant: this transaction has its semaphores locked, so no other can end it.

UPDATE {permit} SET state = 'RELEASED' WHERE permit_request_id = {id} AND state = 'ACQUIRED';
UPDATE {request}
SET token = {token}, ttl_seconds = {ttl}, updated_at = SYSDATE(6),
    expires_at = SYSDATE(6) + INTERVAL {ttl} SECOND,
    reclaim_at = SYSDATE(6) + INTERVAL {ttl} * 1.25 SECOND
WHERE id = {id}
