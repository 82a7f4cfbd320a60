-- Makes a contender the owner of a mutex that it may take.
--
-- In:     :mutex, :id, :ttl and :transition (milliseconds), :token (the contender's, '0' for none), :not_after
--         (server time after which the mutex is not wanted any more). {takeable} is free, handed over to
--         this token, or this id's own.
-- Out:    1 row matched: acquired. The fence is the OK packet's last insert id, so the winner reads
--         nothing. 0 rows: not takeable, too late, or no such row.
-- Keeps:  the fence grows, to the server's microseconds at least. While contenders wait, a free mutex is
--         for the first of them, until the claim time has passed as well: nothing barges in, and a waiter
--         that is gone does not block it. The token leaves the list. So do all tokens of another process
--         that did not claim what it was handed. The ttl of an own lease does not move back (a delayed
--         request of our own may come last, with the NOW of its start), nor lie beyond the clock + ttl. That
--         of any other lease that may be taken is over. SET works from left to right.
--
-- A server pays for each operand of a statement, in every execution: few are quick.
--
-- Free is what Simba calls free, transition_at < now: at equality the owner still has it. Simba lets
-- the owner renew only while transition_at > now, so at equality no contender can. Here the owner
-- always may, which leaves no gap and contradicts no peer.
UPDATE {table}
SET fencing_token = LAST_INSERT_ID(GREATEST(fencing_token + 1, CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS UNSIGNED))),
    acquired_at   = {now},
    ttl_at        = LEAST(GREATEST(ttl_at, acquired_at + :ttl), {clock} + :ttl),
    transition_at = ttl_at + :transition,
    waiters       = REPLACE(IF(owner_id LIKE '~%' AND SUBSTRING(owner_id, 2, 12) <> LEFT(:token, 12),
                               REGEXP_REPLACE(waiters, CONCAT(':', SUBSTRING(owner_id, 2, 12), '[0-9]*'), ''),
                               waiters),
                            CONCAT(':', :token), ''),
    owner_id      = :id,
    version       = {changed}
WHERE mutex = :mutex
  AND {clock} <= :not_after
  AND {takeable}
