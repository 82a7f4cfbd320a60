-- Frees a mutex that was handed over to a process which we may not wake (another account's).
--
-- In:     :mutex, :token.
-- Keeps:  everything unless the mutex is handed over to :token. Whoever looks next takes it.
UPDATE {table}
SET transition_at = 0,
    owner_id      = '',
    version       = IF(version < 2147483647, version + 1, 1)
WHERE mutex = :mutex
  AND owner_id = CONCAT('~', :token)
