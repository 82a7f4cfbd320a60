-- Locks semaphores, in the order of their names.
--
-- In:     {names}, sorted.
-- Out:    id, name, capacity, used, and the step between the ids of one INSERT.
-- Invariant: everybody locks in this order, so nobody waits for each other. Without the index named, the
--   optimiser may read, and lock, the whole table in another one.

SELECT id, name, capacity, used, @@auto_increment_increment
FROM {semaphore} FORCE INDEX (name)
WHERE name IN ({names})
ORDER BY name
FOR UPDATE
