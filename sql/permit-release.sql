-- Releases one request: its state, its permits and the counters of its semaphores in one statement,
-- which commits by itself. One round trip, and nothing that a crash could leave half done.
--
-- In:     {which}, the condition that names the request, and for a sweep also the reason, so that a
--         renewal that came first wins.
-- Out:    rows matched: released. 0 rows: not acquired, or the reason is gone.
-- Keeps:  ACQUIRED -> RELEASED is the gate: a counter is lowered once for each permit.
--
-- The outer joins fix the order: the request, its permits, their semaphores, in the order in which the
-- permits were made, which is that of the names.
UPDATE permit_request r
LEFT JOIN permit p FORCE INDEX (request) ON p.permit_request_id = r.id AND p.state = 'ACQUIRED'
LEFT JOIN semaphore s ON s.id = p.semaphore_id
SET r.state = 'RELEASED', r.expires_at = NULL, r.updated_at = NOW(6),
    p.state = 'RELEASED',
    s.used = s.used - p.count
WHERE {which}
  AND r.state = 'ACQUIRED'
