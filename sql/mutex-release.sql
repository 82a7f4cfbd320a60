-- Ends an ownership.
--
-- In:     :mutex, :id, :fence.
-- Out:    1 row matched: released. 0 rows: it was not ours with this fence.
-- Keeps:  whatever lease has another fence, our own later one included.
UPDATE {table}
SET acquired_at   = 0,
    ttl_at        = 0,
    transition_at = 0,
    owner_id      = '',
    version       = version + 1
WHERE {mutex_is}
  AND {owner_is}
  AND version = :fence
