-- The tables of the counting semaphores, with the default prefix of their names: apply it as it is. With
-- another table_prefix, write that for contend_ in the four names.
--
-- A semaphore is a capacity with a name. A request takes permits from one or more semaphores at once,
-- under an external id that its caller chose. Every row is written by a transaction that holds the rows
-- of the semaphores concerned, in the order of their names.
--
-- Invariants:
--   semaphore.used = the sum of permit.count over its permits in state ACQUIRED. The counter changes in
--     the transaction that changes the permits, so a crash leaves both or neither; semaphore-audit.sql
--     compares them.
--   used <= capacity, unless the capacity was lowered below what was held.
--   A request goes from ACQUIRED to RELEASED and never back, its permits with it.
--   permit.id grows from grant to grant of a semaphore: it is the fence. A permit is never acquired again:
--     a request that is taken over gets new ones, and a new token.
--   token names one grant of a request: a renewal or release that names another one does nothing.
--   expires_at and reclaim_at are NULL without a ttl, and once released. Only the holder releases
--     before reclaim_at = expires_at + a quarter of the ttl.
--   Times are UTC on this server's clock.
--
-- There are no foreign keys: they would lock the parents again on every insert, and keep a semaphore
-- that is not used until its last released permit is old enough to go.

CREATE TABLE IF NOT EXISTS `contend_semaphore` (
    id         BIGINT UNSIGNED NOT NULL AUTO_INCREMENT PRIMARY KEY,
    name       VARCHAR(255)    NOT NULL,
    capacity   INT             NOT NULL,
    used       BIGINT          NOT NULL DEFAULT 0 COMMENT 'sum of its acquired permits',
    created_at DATETIME(6)     NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
    updated_at DATETIME(6)     NOT NULL DEFAULT CURRENT_TIMESTAMP(6) COMMENT 'last change of the capacity',
    UNIQUE KEY name (name)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `contend_permit_request` (
    id          BIGINT UNSIGNED NOT NULL AUTO_INCREMENT PRIMARY KEY,
    external_id VARCHAR(255)    NOT NULL COMMENT 'chosen by the caller: makes a retry safe',
    token       BIGINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'of the call that was granted last',
    owner       VARCHAR(255)    NULL COMMENT 'who can be asked whether it is alive',
    state       ENUM ('ACQUIRED', 'RELEASED') NOT NULL,
    ttl_seconds DECIMAL(14, 3)  NULL,
    expires_at  DATETIME(6)     NULL COMMENT 'last renewal + ttl_seconds',
    reclaim_at  DATETIME(6)     NULL COMMENT 'from here on it may be taken back',
    created_at  DATETIME(6)     NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
    updated_at  DATETIME(6)     NOT NULL DEFAULT CURRENT_TIMESTAMP(6) COMMENT 'last renewal, once released the release',
    UNIQUE KEY external_id (external_id),
    -- Staleness and the removal of old requests by time; the owners of what is held without reading a row.
    KEY state_updated_owner (state, updated_at, owner),
    -- Only what is held with a ttl has an entry that is not NULL.
    KEY reclaim_at (reclaim_at)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `contend_permit` (
    id                BIGINT UNSIGNED NOT NULL AUTO_INCREMENT PRIMARY KEY COMMENT 'the fence',
    semaphore_id      BIGINT UNSIGNED NOT NULL,
    permit_request_id BIGINT UNSIGNED NOT NULL,
    count             INT             NOT NULL DEFAULT 1,
    state             ENUM ('ACQUIRED', 'RELEASED') NOT NULL,
    -- With the count, so that a sum reads the index alone.
    KEY semaphore_state (semaphore_id, state, count),
    KEY request (permit_request_id)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `contend_semaphore_capacity_change` (
    id             BIGINT UNSIGNED NOT NULL AUTO_INCREMENT PRIMARY KEY,
    semaphore_id   BIGINT UNSIGNED NOT NULL,
    semaphore_name VARCHAR(255)    NOT NULL,
    changed_by     VARCHAR(255)    NULL,
    changed_at     DATETIME(6)     NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
    old_capacity   INT             NOT NULL,
    new_capacity   INT             NOT NULL,
    KEY semaphore_name (semaphore_name, id),
    KEY changed_at (changed_at)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
