-- The table of mutexes: one row per mutex, made on first use and kept.
--
-- The columns are those of Simba, so that its JDBC contenders and ours take turns on one table.
-- Different are the types that ran out or mixed names up there: `version` is 64 bits wide, ids may
-- have 128 bytes, and names and ids are compared byte by byte (`Lock` is not `lock`).
-- A table made by Simba's own script works as it is, within its limits: ids of at most 32 bytes, and
-- no two mutexes that its collation takes for one.
--
-- Invariants: `owner_id` is empty exactly if `transition_at` is 0, or names the last owner; times are
-- epoch milliseconds on this server's clock; `version` never falls while the row lives, and an
-- acquisition raises it to the server's microseconds at least, so that it grows even over a deleted row.

-- Whoever needs the database too, uncomment:
-- CREATE DATABASE IF NOT EXISTS simba_db;
-- USE simba_db;

CREATE TABLE IF NOT EXISTS `simba_mutex` (
    mutex         VARCHAR(66)     NOT NULL PRIMARY KEY COMMENT 'mutex name',
    acquired_at   BIGINT UNSIGNED NOT NULL COMMENT 'when the owner acquired, 0: nobody owns',
    ttl_at        BIGINT UNSIGNED NOT NULL COMMENT 'until when the owner may believe',
    transition_at BIGINT UNSIGNED NOT NULL COMMENT 'until when nobody else can acquire',
    owner_id      VARCHAR(128)    NOT NULL COMMENT 'contender id of the owner',
    version       BIGINT UNSIGNED NOT NULL COMMENT 'the fence of the present or last owner'
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
