-- Sets the lease of an owner anew.
--
-- In:     :mutex, :id, :fence, :ttl and :total (milliseconds).
-- Out:    1 row matched: renewed, and ttl_at is the OK packet's last insert id. 0 rows: lost.
-- Keeps:  the fence; both ends never move backwards: NOW() stands still while a statement waits for a
--         lock, and of two delayed renewals the earlier may commit last. Creates no lease: what ran
--         out stays lost, also while this waited for a lock ({clock} does not stand still).
UPDATE {table}
SET ttl_at        = LAST_INSERT_ID(GREATEST(ttl_at, {now} + :ttl)),
    transition_at = GREATEST(transition_at, {now} + :total)
WHERE {mutex_is}
  AND {owner_is}
  AND version = :fence
  AND transition_at >= {clock}
