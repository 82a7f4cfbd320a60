-- Locks semaphores and reads them as they are now.
--
-- In:     {names}, sorted.
-- Out:    a row for each that there is; the step between ids of one INSERT in the last column.
-- Keeps:  everybody locks in the order of the names. Without FORCE INDEX a small table is scanned, and
--         locked in the order of its primary key.
SELECT id, name, capacity, used, @@auto_increment_increment
FROM semaphore FORCE INDEX (name)
WHERE name IN ({names})
ORDER BY name
FOR UPDATE
