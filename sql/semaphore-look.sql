-- Looks whether a wish has a chance, without locking anything.
--
-- In:     {names}.
-- Out:    name, capacity, used; then how many microseconds it is until something can be taken back.

SELECT name, capacity, used FROM {semaphore} WHERE name IN ({names});
SELECT TIMESTAMPDIFF(MICROSECOND, SYSDATE(6), MIN(reclaim_at)) FROM {request}
