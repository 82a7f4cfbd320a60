-- Reads the names of the mutexes that have an owner or a waiter, sorted.
--
-- Out:    one name per row. A token counts while its process holds its named lock: tokens of dead
--         processes stay in the row until its next release.
-- Keeps:  everything; a consistent read.
SELECT mutex
FROM {table}
WHERE (owner_id <> '' AND transition_at >= {clock})
   OR (waiters <> '' AND IS_USED_LOCK(CONCAT('contend:', SUBSTRING(waiters, 2, 12))) IS NOT NULL)
ORDER BY mutex
