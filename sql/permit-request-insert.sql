-- Writes granted requests down.
--
-- In:     {rows}: (external_id, owner, state, ttl_seconds, expires_at).
-- Out:    the first new id; error 1062 where an external id is taken, after waiting for whoever is
--         taking it to commit or roll back.
INSERT INTO permit_request (external_id, owner, state, ttl_seconds, expires_at)
VALUES {rows}
