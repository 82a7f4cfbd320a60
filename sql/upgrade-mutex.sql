-- Brings a table made by Simba (3.1 or 4) up to sql/init-mutex.sql. Leave the lines away that name
-- columns which the table has already in this form: the error that contend reports for a table that it
-- cannot use contains exactly the statement that is needed, and ?create_table=true runs it.
--
-- Simba's statements name their columns, so its contenders go on working before, during and after.
ALTER TABLE `simba_mutex`
    -- Simba's default collation takes `Lock` for `lock`.
    MODIFY COLUMN mutex VARCHAR(66) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    -- CHAR(32) in Simba 3.1.
    MODIFY COLUMN owner_id VARCHAR(128) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    -- In Simba 4's table already.
    ADD COLUMN fencing_token BIGINT UNSIGNED NOT NULL DEFAULT 0,
    ADD COLUMN waiters VARCHAR(3990) CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '',
    ADD COLUMN run_at BIGINT UNSIGNED NOT NULL DEFAULT 0;
