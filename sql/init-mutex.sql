-- The table of mutexes: one row per mutex, made on first use and kept.
--
-- The columns are those of Simba 4, so that its JDBC contenders and ours take turns on one table, and
-- two of ours with defaults: `waiters` and `run_at`. Names and ids are compared byte by byte (`Lock` is
-- not `lock`). A table made by Simba is brought up to this by sql/upgrade-mutex.sql.
--
-- Invariants:
-- - Times are epoch milliseconds on this server's clock.
-- - `owner_id` is '' (free), an id (owned, until `transition_at`), or '~' and a token: handed over to the
--   contender with that token, until `transition_at`.
-- - `waiters` lists the tokens of the contenders that wait, first come first: ':' and 18 digits each, no
--   token twice. 12 digits name the process (a factory), 6 the contender. 3990 characters hold 210.
-- - `fencing_token` is the fence of the present or last owner. It never falls while the row lives, and
--   an acquisition raises it to the server's microseconds at least, so that it grows even over a row
--   that was deleted.
-- - `version` counts changes, for Simba, which reads it as a signed INT: it wraps below 2^31.

-- Uncomment to make the database too:
-- CREATE DATABASE IF NOT EXISTS simba_db;
-- USE simba_db;

CREATE TABLE IF NOT EXISTS `simba_mutex` (
    mutex         VARCHAR(66)     NOT NULL PRIMARY KEY COMMENT 'mutex name',
    acquired_at   BIGINT UNSIGNED NOT NULL COMMENT 'when the owner acquired, 0: no owner',
    ttl_at        BIGINT UNSIGNED NOT NULL COMMENT 'until when the owner may believe',
    transition_at BIGINT UNSIGNED NOT NULL COMMENT 'until when no other contender can acquire',
    owner_id      VARCHAR(128)    NOT NULL COMMENT 'contender id of the owner',
    version       INT UNSIGNED    NOT NULL COMMENT 'counts changes',
    fencing_token BIGINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'the fence of the present or last owner',
    waiters       VARCHAR(3990) CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT ''
                  COMMENT 'tokens of the contenders that wait, in order',
    run_at        BIGINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'the last recorded run of a schedule, 0: none'
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
