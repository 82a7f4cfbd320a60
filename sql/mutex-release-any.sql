-- Ends the ownership of an id, whatever its fence: the release of Simba's repository.
--
-- In:     :mutex, :id.
-- Out:    1 row matched: released. 0 rows: it was not ours.
UPDATE {table}
SET acquired_at   = 0,
    ttl_at        = 0,
    transition_at = 0,
    owner_id      = '',
    version       = version + 1
WHERE {mutex_is}
  AND {owner_is}
