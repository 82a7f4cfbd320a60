-- Sets the lease of an owner anew.
--
-- In:     :mutex, :id, :fence, :ttl and :transition (milliseconds).
-- Out:    1 row matched: renewed, and ttl_at is the OK packet's last insert id. 0 rows: lost.
-- Keeps:  the fence. Neither end moves back (NOW stands still while a statement waits for a lock, and of
--         two delayed renewals the earlier may commit last), nor lies beyond the clock + lease (the
--         server's clock may have been set back). Creates no lease: what ran out stays lost, also while
--         this waited for a lock. SET works from left to right.
UPDATE {table}
SET ttl_at        = LAST_INSERT_ID(LEAST(GREATEST(ttl_at, {now} + :ttl), {clock} + :ttl)),
    transition_at = ttl_at + :transition,
    version       = {changed}
WHERE mutex = :mutex
  AND owner_id = :id
  AND fencing_token = :fence
  AND transition_at >= {clock}
