-- Waits until a mutex that this process waits for may be worth a look.
--
-- In:     {mutexes}, a list of {count} names as literals; {token}, 18 digits; {seconds}, the longest wait,
--         whole ones because MySQL rounds. Sent as text: the list varies.
-- Out:    NULL or error 1317: somebody woke us with KILL QUERY. 0: not all were quiet, or time is over. 1:
--         nobody holds the name that this waits for: our second connection is gone.
-- Keeps:  no wake-up is lost. Whoever hands a mutex over commits first and sends the KILL then: it hits
--         this statement, or this statement began later and sees the row.
--
-- Not SLEEP: with two sleepers a KILL of one hangs for 2 s on MariaDB.
SELECT GET_LOCK('contend:wait:{token}',
                IF((SELECT COUNT(*) FROM {table} WHERE mutex IN ({mutexes}) AND {quiet}) = {count},
                   {seconds}, 0))
