-- Records that a run of a schedule is now.
--
-- In:     :mutex, :id, :fence.
-- Out:    1 row matched: recorded. 0 rows: the owner has not this fence any more.
UPDATE {table}
SET run_at = {clock}
WHERE mutex = :mutex
  AND owner_id = :id
  AND fencing_token = :fence
  AND transition_at >= {clock}
