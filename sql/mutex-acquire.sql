-- Makes a contender the owner of a mutex that is free, handed over to its process, or its own already.
--
-- In:     :mutex, :id, :ttl and :total (milliseconds), :token (its process', '0' for none), :more (1: others
--         of its process wait), :not_after (server time at which nobody wants the mutex any more).
-- Out:    1 row matched: acquired, and the fence is the OK packet's last insert id, so that the winner
--         reads nothing. 0 rows: somebody else's, somebody else's turn, too late, or no such row.
-- Keeps:  the fence grows, to the server's microseconds at least. While processes wait, a free mutex is
--         for the first of them, until the claim time has passed as well: nobody barges in, and nobody
--         who is gone blocks it. The token leaves the list, and goes to its end while others of the
--         process wait: processes take turns. No end of an own lease moves back (a delayed ghost of our
--         own may come last, with the NOW of its start), nor lies beyond the clock + lease.
--
-- Free is what Simba calls free, transition_at < now: at equality the owner still has it. Simba lets
-- the owner renew only while transition_at > now, so that at equality nobody can; here the owner
-- always may, which leaves no gap and contradicts no peer. A hand-over further ahead than the claim time
-- is void: the server's clock was set back.
UPDATE {table}
SET fencing_token = LAST_INSERT_ID(GREATEST(fencing_token + 1, {micros})),
    acquired_at   = {now},
    ttl_at        = LEAST(GREATEST(IF(owner_id = :id, ttl_at, 0), {now} + :ttl), {clock} + :ttl),
    transition_at = LEAST(GREATEST(IF(owner_id = :id, transition_at, 0), {now} + :total), {clock} + :total),
    owner_id      = :id,
    waiters       = CONCAT(REPLACE(waiters, CONCAT(':', :token), ''),
                           IF(:more AND LENGTH(REPLACE(waiters, CONCAT(':', :token), '')) <= {room},
                              CONCAT(':', :token), '')),
    version       = IF(version < 2147483647, version + 1, 1)
WHERE mutex = :mutex
  AND {clock} <= :not_after
  AND (owner_id = :id
       OR owner_id = CONCAT('~', :token)
       OR (transition_at < {now}
           AND (waiters = '' OR SUBSTRING(waiters, 2, 18) = :token OR transition_at + {claim} < {now}))
       OR (owner_id LIKE '~%' AND transition_at > {clock} + {claim}))
