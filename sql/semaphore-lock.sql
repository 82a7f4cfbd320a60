-- Locks semaphores, in the order of their names.
--
-- In:     {names}, sorted.
-- Out:    id, name, capacity, used, and the step between the ids of one INSERT.
-- Invariant: all transactions lock in this order, so no two wait for each other. Without the index named, the
--   optimiser may read, and lock, the whole table in another one.

SELECT id, name, capacity, used, @@auto_increment_increment
FROM {semaphore} FORCE INDEX (name)
WHERE name IN ({names})
ORDER BY name
FOR UPDATE
