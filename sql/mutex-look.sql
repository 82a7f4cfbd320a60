-- Reads a mutex. A consistent read: it locks nothing and waits for no row lock.
--
-- In:     :mutex.
-- Out:    at most one row, the server's clock in its last column.
SELECT owner_id, acquired_at, ttl_at, transition_at, fencing_token, waiters, version, run_at, {clock}
FROM {table}
WHERE mutex = :mutex
