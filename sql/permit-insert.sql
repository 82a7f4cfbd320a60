-- Writes the permits of the requests inserted just before.
--
-- In:     {rows}: (semaphore_id, permit_request_id, count, state), the second as an offset from
--         LAST_INSERT_ID(), which within one statement is what the statement before it set.
-- Out:    the first new id: the first fence.
INSERT INTO permit (semaphore_id, permit_request_id, count, state)
VALUES {rows}
