-- Which semaphores some requests hold permits of, to lock them in order. Locks nothing.
--
-- In:     {look}: a statement that finds the requests.
-- Out:    for each permit, the id of its request and the name of its semaphore.

SELECT found.id, s.name
FROM ({look}) found
JOIN {permit} p FORCE INDEX (request) ON p.permit_request_id = found.id AND p.state = 'ACQUIRED'
JOIN {semaphore} s ON s.id = p.semaphore_id
