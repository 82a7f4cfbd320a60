-- Ends an ownership or a hand-over, and hands the mutex over to the first contender that waits.
--
-- In:     :mutex, and {whose} it is. An owner names :id and :fence. Any other caller may leave one of them
--         NULL: Simba's repository names its id, an operator the fence. What was handed over to a token is
--         passed on by '~' and the token as :id. {first}: nothing, or takes all tokens of the process :dead
--         out of the list; an owner's release is quicker without it.
-- Out:    1 row matched: ended, and the token that it was handed to, or 0, is the OK packet's last
--         insert id. 0 rows: it was not so.
-- Keeps:  any lease that is not the one named, our own later one included. The row is '~FIRST' until the
--         clock + claim time, and FIRST is out of the list; or free, exactly if no contender waits. SET
--         works from left to right.
UPDATE {table}
SET {first}
    acquired_at   = 0,
    ttl_at        = 0,
    owner_id      = REPLACE(LEFT(waiters, 19), ':', '~'),
    transition_at = IF(LAST_INSERT_ID(CAST(CONCAT('0', SUBSTRING(owner_id, 2)) AS UNSIGNED)) = 0,
                       0, {clock} + {claim}),
    waiters       = SUBSTRING(waiters, 20),
    version       = {changed}
WHERE mutex = :mutex
  AND {whose}
