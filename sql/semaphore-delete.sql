-- Deletes a semaphore of which no permits are held.
--
-- In:     {name}.
-- Out:    no row matched: it is held, or not there.
-- Invariant: not the counter alone decides: no repair could correct this.

SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
DELETE FROM {semaphore}
WHERE name = {name} AND used = 0
  AND NOT EXISTS (SELECT 1 FROM {permit} p WHERE p.semaphore_id = {semaphore}.id AND p.state = 'ACQUIRED')
