-- Makes requests.
--
-- In:     {rows}: external id, token, owner, state, ttl, end, and when it can be taken back.
-- Out:    the id of the first; the others follow at the server's step.

INSERT INTO {request} (external_id, token, owner, state, ttl_seconds, expires_at, reclaim_at)
VALUES {rows}
