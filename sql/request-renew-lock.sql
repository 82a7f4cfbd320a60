-- Locks requests that are to be renewed, where nobody else has them locked, and reads which are held.
--
-- In:     {ids}.
-- Out:    the ids and tokens of those that are locked now; then those of all that are held.
-- Invariant: one that somebody has locked does not hold up the others.

SET wait_timeout = 5;
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
BEGIN;
SELECT id, token FROM {request} WHERE id IN ({ids}) AND state = 'ACQUIRED'
ORDER BY id FOR UPDATE SKIP LOCKED;
SELECT id, token FROM {request} WHERE id IN ({ids}) AND state = 'ACQUIRED'
