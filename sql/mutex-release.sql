-- Ends an ownership or a hand-over, and hands the mutex over to the first contender that waits.
--
-- In:     :mutex, and whose it is: :id, or NULL for any, with :fence, or NULL for any. An owner names both, Simba's
--         repository its id, an operator the fence. What was handed over to a token is passed on by '~' and the
--         token as :id. {first}: nothing, or takes all tokens of a dead process out of the list.
-- Out:    1 row matched: ended, and the token that it was handed to, or 0, is the OK packet's last
--         insert id. 0 rows: it was not so.
-- Keeps:  any lease that is not the one named, our own later one included. The row is '~FIRST' until the
--         clock + claim time, and FIRST is out of the list; or free, exactly if no contender waits. SET
--         works from left to right.
UPDATE {table}
SET {first}
    acquired_at   = 0,
    ttl_at        = 0,
    transition_at = IF(LAST_INSERT_ID(IF(waiters = '', 0, CAST(SUBSTRING(waiters, 2, 18) AS UNSIGNED))) = 0,
                       0, {clock} + {claim}),
    owner_id      = IF(waiters = '', '', CONCAT('~', SUBSTRING(waiters, 2, 18))),
    waiters       = SUBSTRING(waiters, 20),
    version       = {changed}
WHERE mutex = :mutex
  AND (:id IS NULL OR owner_id = :id)
  AND (:fence IS NULL OR ({owned}))
