-- Ends an ownership, and hands the mutex over to the first process that waits.
--
-- In:     :mutex, and whose ownership: {whose}, by :id and :fence, by :id alone (Simba's repository), or
--         by :fence alone (an operator).
-- Out:    1 row matched: released, and the token that it was handed to, or 0, is the OK packet's last
--         insert id. 0 rows: there was no such ownership.
-- Keeps:  whatever lease is not the one named, our own later one included. The row is '~FIRST' until the
--         clock + claim time, and FIRST is out of the list; or free, exactly if nobody waits.
UPDATE {table}
SET acquired_at   = 0,
    ttl_at        = 0,
    transition_at = IF(LAST_INSERT_ID(IF(waiters = '', 0, CAST(SUBSTRING(waiters, 2, 18) AS UNSIGNED))) = 0,
                       0, {clock} + {claim}),
    owner_id      = IF(waiters = '', '', CONCAT('~', SUBSTRING(waiters, 2, 18))),
    waiters       = SUBSTRING(waiters, 20),
    version       = IF(version < 2147483647, version + 1, 1)
WHERE mutex = :mutex
  AND {whose}
