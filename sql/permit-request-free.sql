-- Makes sure that nobody is just about to take these external ids, and fails at once if somebody is:
-- the INSERT would wait for them, with the semaphores locked, and everybody else would wait with it.
--
-- In:     {external_ids}. The semaphores are locked.
-- Out:    error 1205 (MySQL: 3572) where another transaction has inserted or is changing one of them.
SELECT id
FROM permit_request
WHERE external_id IN ({external_ids})
FOR UPDATE NOWAIT
