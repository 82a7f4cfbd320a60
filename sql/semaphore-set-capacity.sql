-- Sets the capacity of a semaphore and records the change, if it is one.
--
-- In:     {name}, {capacity}, {changed_by}.
-- Out:    the capacity before; no row: there is no such semaphore.
-- Invariant: part of a transaction; the semaphore is locked before its capacity is read.

SELECT capacity FROM {semaphore} WHERE name = {name} FOR UPDATE;
INSERT INTO {history} (semaphore_id, semaphore_name, changed_by, old_capacity, new_capacity)
SELECT id, name, {changed_by}, capacity, {capacity} FROM {semaphore}
WHERE name = {name} AND capacity <> {capacity};
UPDATE {semaphore} SET capacity = {capacity}, updated_at = SYSDATE(6)
WHERE name = {name} AND capacity <> {capacity}
