-- Puts the token of a process at the end of those that wait.
--
-- In:     :mutex, :token.
-- Out:    0 rows: it stands there already, the mutex is handed over to it, the list is full, or there is
--         no such row. The look that follows tells which.
-- Keeps:  no token stands in the list twice, and none that the mutex is handed over to. First the process
--         holds the name of its token, then it registers: else it would be passed over as dead.
UPDATE {table}
SET waiters = CONCAT(waiters, ':', :token)
WHERE mutex = :mutex
  AND LENGTH(waiters) <= {room}
  AND LOCATE(CONCAT(':', :token), waiters) = 0
  AND owner_id <> CONCAT('~', :token)
