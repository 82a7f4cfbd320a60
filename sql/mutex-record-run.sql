-- Records that a run of a schedule is now.
--
-- In:     :mutex, :fence.
-- Out:    1 row matched: recorded. 0 rows: no owner has this fence.
-- Keeps:  the fence stays in the row after a release, so a mutex that is free or handed over does not match.
UPDATE {table}
SET run_at = {clock}
WHERE mutex = :mutex
  AND {owned}
