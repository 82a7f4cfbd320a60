-- Locks requests that are to be renewed, where no other transaction has them locked, and reads which are held.
--
-- In:     {external_ids}.
-- Out:    external id and token of those that are locked now; then those of all, and whether they are held.
-- Invariant: one that another transaction has locked does not hold up the others.

SET wait_timeout = 5;
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
BEGIN;
SELECT external_id, token FROM {request} WHERE external_id IN ({external_ids}) AND state = 'ACQUIRED'
ORDER BY id FOR UPDATE SKIP LOCKED;
SELECT external_id, token, state = 'ACQUIRED' FROM {request} WHERE external_id IN ({external_ids})
