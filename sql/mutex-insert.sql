-- Makes the row of a mutex, free, unless it is there.
--
-- In:     :mutex.
-- Out:    0 rows: it is there already.
-- Keeps:  one row per mutex: of two that try at once, one makes it and both can go on.
INSERT IGNORE INTO {table} (mutex, acquired_at, ttl_at, transition_at, owner_id, version)
VALUES (:mutex, 0, 0, 0, '', 0)
