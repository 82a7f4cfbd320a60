-- Reads a mutex.
--
-- In:     :mutex; :id and :token, of the contender that asks.
-- Out:    at most one row: its columns, whether that contender could acquire now, and the server's clock.
-- Keeps:  everything; a consistent read, which waits for no row lock.
SELECT owner_id, acquired_at, ttl_at, transition_at, fencing_token, waiters, version, run_at, {takeable}, {clock}
FROM {table}
WHERE mutex = :mutex
