-- Lowers the count of one permit, and the counter by as much. Its end is `COMMIT`.
--
-- In:     {id} of the permit, {semaphore_id}, {request_id}, its {token}, the count that is {left}.
-- Out:    the last statement matches no row: it is not held by that grant, or was that low.
-- Invariant: a count only falls, so that repeating this, or an earlier one that comes late, does nothing.
--   The request is locked before its permit and its semaphore, as a release does.

SET wait_timeout = 5;
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
BEGIN;
SET @freed = 0;
SELECT p.count - {left} INTO @freed
FROM {request} r
STRAIGHT_JOIN {permit} p ON p.permit_request_id = r.id AND p.id = {id}
WHERE r.id = {request_id}
  AND r.token = {token}
  AND r.state = 'ACQUIRED'
  AND p.state = 'ACQUIRED'
  AND p.count > {left}
FOR UPDATE;
UPDATE {semaphore} SET used = used - @freed WHERE id = {semaphore_id} AND @freed > 0;
UPDATE {permit}
SET state = IF({left} = 0, 'RELEASED', state), count = IF({left} = 0, count, {left})
WHERE id = {id} AND @freed > 0
