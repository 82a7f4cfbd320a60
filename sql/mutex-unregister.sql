-- Takes a token out of those that wait.
--
-- In:     :mutex, :token.
-- Out:    1 row matched: it stood there. 0 rows: it did not. If the mutex was handed over to it, then before
--         this: passing it on after this misses nothing.
-- Keeps:  the order of the others; an ownership.
UPDATE {table}
SET waiters = REPLACE(waiters, CONCAT(':', :token), ''),
    version = {changed}
WHERE mutex = :mutex
  AND LOCATE(CONCAT(':', :token), waiters) > 0
