-- Grants permits.
--
-- In:     {rows}: semaphore, request, count, state.
-- Out:    the id of the first, its fence; the others follow at the server's step.

INSERT INTO {permit} (semaphore_id, permit_request_id, count, state)
VALUES {rows}
