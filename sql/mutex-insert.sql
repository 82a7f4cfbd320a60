-- Makes the row of a mutex that nobody owns.
--
-- In:     :mutex.
-- Out:    error 1062 where it is there already: of two that try, both can go on.
INSERT INTO {table} (mutex, acquired_at, ttl_at, transition_at, owner_id, version)
VALUES (:mutex, 0, 0, 0, '', 0)
