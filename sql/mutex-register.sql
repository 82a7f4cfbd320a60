-- Puts a token at the end of those that wait.
--
-- In:     :mutex, :token.
-- Out:    0 rows: it stands there already, the mutex is handed over to it, the list is full, or there is
--         no such row. The look that follows tells which.
-- Keeps:  no token stands in the list twice, and none that the mutex is handed over to. The process holds
--         its named lock before it registers a token: otherwise the token would count as dead.
UPDATE {table}
SET waiters = CONCAT(waiters, ':', :token)
WHERE mutex = :mutex
  AND LENGTH(waiters) <= {room}
  AND LOCATE(CONCAT(':', :token), waiters) = 0
  AND owner_id <> CONCAT('~', :token)
