-- Reads the rows of the mutexes that a process waits for.
--
-- In:     {mutexes}, a list of names as literals. Sent as text: the list varies.
-- Out:    a row for each that is there: name, list of tokens, fence, whether the lease or hand-over is
--         over, and whether the claim time after it has passed too.
-- Keeps:  everything; a consistent read.
SELECT mutex, waiters, fencing_token, transition_at < {now}, transition_at + {claim} < {now}
FROM {table}
WHERE mutex IN ({mutexes})
