-- Takes the token of a process out: one that gave up, or one that is dead. A mutex that was handed over to
-- it is handed on.
--
-- In:     :mutex, :token.
-- Out:    1 row matched: it was there, and the token that the mutex was handed on to, or 0, is the OK
--         packet's last insert id. 0 rows: it was not there.
-- Keeps:  the order of the others; an ownership. SET works from left to right: owner_id is new where
--         waiters is set.
UPDATE {table}
SET transition_at = IF(LAST_INSERT_ID(
                           IF(owner_id = CONCAT('~', :token) AND REPLACE(waiters, CONCAT(':', :token), '') <> '',
                              CAST(SUBSTRING(REPLACE(waiters, CONCAT(':', :token), ''), 2, 18) AS UNSIGNED), 0)) > 0,
                       {clock} + {claim}, IF(owner_id = CONCAT('~', :token), 0, transition_at)),
    owner_id      = IF(owner_id = CONCAT('~', :token),
                       IF(REPLACE(waiters, CONCAT(':', :token), '') = '', '',
                          CONCAT('~', SUBSTRING(REPLACE(waiters, CONCAT(':', :token), ''), 2, 18))),
                       owner_id),
    waiters       = IF(REPLACE(waiters, CONCAT(':', :token), '') <> ''
                       AND owner_id = CONCAT('~', SUBSTRING(REPLACE(waiters, CONCAT(':', :token), ''), 2, 18)),
                       SUBSTRING(REPLACE(waiters, CONCAT(':', :token), ''), 20),
                       REPLACE(waiters, CONCAT(':', :token), '')),
    version       = IF(version < 2147483647, version + 1, 1)
WHERE mutex = :mutex
  AND (owner_id = CONCAT('~', :token) OR LOCATE(CONCAT(':', :token), waiters) > 0)
