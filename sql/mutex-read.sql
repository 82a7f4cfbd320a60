-- Reads a mutex. A consistent read: it locks nothing and waits for no row lock.
--
-- In:     :mutex.
-- Out:    at most one row, the server's clock in its last column. On a table whose collation is not
--         exact it may be the row of another name: the reader compares.
SELECT mutex, owner_id, acquired_at, ttl_at, transition_at, version, {now}
FROM {table}
WHERE {mutex_like}
