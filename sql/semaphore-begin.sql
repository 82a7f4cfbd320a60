-- Begins a transaction that takes two round trips.
--
-- Invariant: a client that vanishes between the two keeps its locks for five seconds at most. READ
--   COMMITTED, because a read after a lock must see what was committed during the wait for it, and because
--   gap locks would let acquires and releases of different requests wait for each other.

SET wait_timeout = 5;
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
BEGIN
