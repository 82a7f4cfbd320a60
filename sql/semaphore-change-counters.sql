-- Changes the counters of semaphores that this transaction has locked.
--
-- In:     {changes}: WHEN id THEN change, {ids}.

UPDATE {semaphore}
SET used = used + CASE id {changes} ELSE 0 END
WHERE id IN ({ids})
