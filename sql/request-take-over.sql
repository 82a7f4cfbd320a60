-- Gives a request to another call: its permits are released here, and as many new ones granted in the same
-- transaction.
--
-- In:     {id}, {token}, {ttl}, {expires_at}, {reclaim_at}.
-- Invariant: this transaction has its semaphores locked, so no other can end it.

UPDATE {permit} SET state = 'RELEASED' WHERE permit_request_id = {id} AND state = 'ACQUIRED';
UPDATE {request}
SET token = {token}, ttl_seconds = {ttl}, expires_at = {expires_at}, reclaim_at = {reclaim_at},
    updated_at = SYSDATE(6)
WHERE id = {id}
