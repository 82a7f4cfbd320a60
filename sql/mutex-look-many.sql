-- Reads the mutexes that a process waits for, and whether each is quiet: nothing that its head should try.
--
-- In:     {mutexes}, a list of names as literals; {token}, 18 digits. Sent as text: the list varies.
-- Out:    a row for each that is there, as sql/mutex-look.sql, but without the list. What is missing, or not quiet, is worth a look: free, handed over
--         to this process, or our token is gone from it.
SELECT mutex, {quiet}, owner_id, acquired_at, ttl_at, transition_at, fencing_token, '', 0, 0, {clock}
FROM {table}
WHERE mutex IN ({mutexes})
