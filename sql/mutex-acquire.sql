-- Makes a contender the owner of a mutex that it may take.
--
-- In:     :mutex, :id, :ttl and :total (milliseconds), :token (the contender's, '0' for none), :not_after
--         (server time after which the mutex is not wanted any more). {takeable} is free, handed over to
--         this token, or this id's own.
-- Out:    1 row matched: acquired. The fence is the OK packet's last insert id, so the winner reads
--         nothing. 0 rows: not takeable, too late, or no such row.
-- Keeps:  the fence grows, to the server's microseconds at least. While contenders wait, a free mutex is
--         for the first of them, until the claim time has passed as well: nothing barges in, and a waiter
--         that is gone does not block it. The token leaves the list. So do all tokens of another process
--         that did not claim what it was handed. No end of an own lease moves back (a delayed request of
--         our own may come last, with the NOW of its start), nor lies beyond the clock + lease.
--
-- Free is what Simba calls free, transition_at < now: at equality the owner still has it. Simba lets
-- the owner renew only while transition_at > now, so at equality no contender can. Here the owner
-- always may, which leaves no gap and contradicts no peer.
UPDATE {table}
SET fencing_token = LAST_INSERT_ID(GREATEST(fencing_token + 1, CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS UNSIGNED))),
    acquired_at   = {now},
    ttl_at        = LEAST(GREATEST(IF(owner_id = :id, ttl_at, 0), {now} + :ttl), {clock} + :ttl),
    transition_at = LEAST(GREATEST(IF(owner_id = :id, transition_at, 0), {now} + :total), {clock} + :total),
    waiters       = IF(owner_id LIKE '~%' AND SUBSTRING(owner_id, 2, 12) <> SUBSTRING(:token, 1, 12),
                       REGEXP_REPLACE(REPLACE(waiters, CONCAT(':', :token), ''),
                                      CONCAT(':', SUBSTRING(owner_id, 2, 12), '[0-9]*'), ''),
                       REPLACE(waiters, CONCAT(':', :token), '')),
    owner_id      = :id,
    version       = {changed}
WHERE mutex = :mutex
  AND {clock} <= :not_after
  AND {takeable}
