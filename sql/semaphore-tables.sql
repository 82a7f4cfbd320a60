-- Checks that the tables have the columns that are used. Reads nothing.
--
-- Invariant: the first error is about the first table that is missing or another program's, so that no table is made
--   beside tables of the latter.

SELECT id, name, capacity, used, created_at, updated_at FROM {semaphore} LIMIT 0;
SELECT id, external_id, token, owner, state, ttl_seconds, expires_at, reclaim_at, created_at, updated_at
FROM {request} LIMIT 0;
SELECT id, semaphore_id, permit_request_id, count, state FROM {permit} LIMIT 0;
SELECT id, semaphore_id, semaphore_name, changed_by, changed_at, old_capacity, new_capacity FROM {history} LIMIT 0
