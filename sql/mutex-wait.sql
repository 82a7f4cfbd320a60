-- Waits until a contender of this process may have something to do.
--
-- In:     {process}, 12 digits; {each_quiet}, per mutex waited for the condition that none of its tokens has
--         anything to do, joined by OR; {count}, how many mutexes these are. Sent as text: they vary.
-- Out:    NULL or error 1317: ended by a KILL QUERY. 0: not all were quiet, or a second has passed (whole
--         ones, because MySQL rounds). 1: the lock waited for is free: our second connection is gone.
-- Keeps:  no wake-up is lost. A releaser commits the hand-over first and sends its KILL then: it hits
--         this statement, or this statement began later and sees the row.
--
-- Not SLEEP: with two sleepers a KILL of one hangs for 2 s on MariaDB.
SELECT GET_LOCK('contend:wait:{process}',
                IF((SELECT COUNT(*) FROM {table} WHERE {each_quiet}) = {count}, 1, 0))
