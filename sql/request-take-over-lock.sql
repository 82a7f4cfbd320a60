-- Locks the requests that are to be taken over, where nobody else has them locked.
--
-- In:     {external_ids}.
-- Out:    the ids of those that are locked now.
-- Invariant: one that somebody has locked holds up nobody but whoever wants it.

SELECT id
FROM {request}
WHERE external_id IN ({external_ids})
FOR UPDATE SKIP LOCKED
