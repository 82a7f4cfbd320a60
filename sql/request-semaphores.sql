-- Which semaphores some requests hold permits of, to lock them in order. Locks nothing.
--
-- In:     {ids}.
-- Out:    their names, sorted.

SELECT DISTINCT s.name
FROM {permit} p FORCE INDEX (request)
JOIN {semaphore} s ON s.id = p.semaphore_id
WHERE p.permit_request_id IN ({ids})
  AND p.state = 'ACQUIRED'
ORDER BY s.name
