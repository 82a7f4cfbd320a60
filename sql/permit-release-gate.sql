-- Locks those of several requests that are still to be released.
--
-- In:     {ids}. Their semaphores are locked.
-- Out:    the ids of those in state ACQUIRED.
SELECT id
FROM permit_request
WHERE id IN ({ids})
  AND state = 'ACQUIRED'
ORDER BY id
FOR UPDATE
