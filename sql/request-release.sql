-- Releases what a request holds, and lowers the counters: one statement, one transaction.
--
-- In:     {which}: a condition on r, that names the request, and its token unless it is any grant's.
-- Out:    no row matched: it was not held, or not by that grant.
-- Invariant: ACQUIRED to RELEASED, once: the transaction that makes this change lowers the counters.

SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
UPDATE {request} r
LEFT JOIN {permit} p FORCE INDEX (request) ON p.permit_request_id = r.id AND p.state = 'ACQUIRED'
LEFT JOIN {semaphore} s ON s.id = p.semaphore_id
SET r.state = 'RELEASED', r.expires_at = NULL, r.reclaim_at = NULL, r.updated_at = SYSDATE(6),
    p.state = 'RELEASED',
    s.used = s.used - p.count
WHERE {which}
  AND r.state = 'ACQUIRED'
