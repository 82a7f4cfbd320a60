-- Gives back a part of what a request holds, and lowers the counter.
--
-- In:     {id} of the permit, {request_id}, its {token}, the {count} that it has, the count that is {left}.
-- Out:    no row matched: it was not held by that grant, or the part was given back before.

SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
UPDATE {permit} p
JOIN {request} r ON r.id = p.permit_request_id
JOIN {semaphore} s ON s.id = p.semaphore_id
SET s.used = s.used - ({count} - {left}),
    p.state = IF({left} = 0, 'RELEASED', 'ACQUIRED'),
    p.count = IF({left} = 0, {count}, {left})
WHERE p.id = {id}
  AND p.state = 'ACQUIRED'
  AND p.count = {count}
  AND r.id = {request_id}
  AND r.token = {token}
  AND r.state = 'ACQUIRED'
