-- Sets counters to what the permits add up to.
--
-- In:     {names}; this transaction has these semaphores locked, so their permits stay as they are.

UPDATE {semaphore} s
SET s.used = (SELECT COALESCE(SUM(p.count), 0) FROM {permit} p
              WHERE p.semaphore_id = s.id AND p.state = 'ACQUIRED')
WHERE s.name IN ({names})
