//! The tables: made where they are missing, recognised where they are somebody else's.

use crate::ground::{acquired, connect, number, want};
use crate::mysql_ground::{HANG, empty_database, operator};
use contend::ErrorKind;
use mysql::prelude::Queryable;
use testbed::within;

/// The seed's own tables.
const SEED: [&str; 3] = [
    "CREATE TABLE semaphore (id BIGINT UNSIGNED AUTO_INCREMENT PRIMARY KEY, \
     name VARCHAR(255) NOT NULL UNIQUE, capacity INT NOT NULL, \
     created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP, updated_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP)",
    "CREATE TABLE permit_request (id BIGINT UNSIGNED AUTO_INCREMENT PRIMARY KEY, \
     external_id VARCHAR(255) NOT NULL UNIQUE, owner VARCHAR(255), \
     state ENUM('ACQUIRED', 'RELEASED') NOT NULL, ttl_seconds INT, \
     created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP, updated_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP)",
    "CREATE TABLE permit (id BIGINT UNSIGNED AUTO_INCREMENT PRIMARY KEY, \
     semaphore_id BIGINT UNSIGNED NOT NULL, permit_request_id BIGINT UNSIGNED NOT NULL, \
     count INT NOT NULL DEFAULT 1, state ENUM('ACQUIRED', 'RELEASED') NOT NULL)",
];

/// Review E25: beside the seed's tables ours have another name; told to use theirs, the error says what is
/// wrong with them, and nothing is changed.
#[test]
fn tables_of_somebody_else_are_recognised_and_left_alone() {
    within(HANG, || {
        let url = empty_database();
        for table in SEED {
            operator(&url).query_drop(table).unwrap();
        }
        let semaphores = connect(&url);
        semaphores.create_tables().unwrap();
        semaphores.create_tables().unwrap();
        semaphores.create("a", 1).unwrap();
        acquired(semaphores.acquire(&want("job", "a", 1)).unwrap());
        assert_eq!(number(&url, "SELECT COUNT(*) FROM permit"), 0);

        let theirs = connect(&format!("{url}?table_prefix="));
        let error = theirs.create_tables().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured);
        for says in ["\"semaphore\" lacks the columns used", "table_prefix"] {
            assert!(error.to_string().contains(says), "{error}");
        }
        let count =
            "SELECT COUNT(*) FROM information_schema.TABLES WHERE TABLE_SCHEMA = DATABASE()";
        assert_eq!(number(&url, count), 3 + 4, "nothing was made beside them");
        // Used all the same, they are refused with what to do, not with a bare 1054.
        let error = theirs.acquire(&want("job", "a", 1)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured);
        assert!(error.to_string().contains("table_prefix"), "{error}");
    });
}

/// The file can be applied as it is, and makes what `create_tables` makes.
#[test]
fn the_file_that_makes_the_tables_can_be_applied_by_hand() {
    within(HANG, || {
        let (by_hand, by_call) = (empty_database(), empty_database());
        let file = include_str!("../../sql/init-semaphore.sql");
        operator(&by_hand).query_drop(file).unwrap();
        let semaphores = connect(&by_hand);
        semaphores.create("a", 1).unwrap();
        acquired(semaphores.acquire(&want("job", "a", 1)).unwrap());
        let other = connect(&by_call);
        other.create_tables().unwrap();
        let columns = |url: &str| -> Vec<(String, String, String)> {
            let sql = "SELECT TABLE_NAME, COLUMN_NAME, COLUMN_TYPE FROM information_schema.COLUMNS \
                       WHERE TABLE_SCHEMA = DATABASE() ORDER BY TABLE_NAME, ORDINAL_POSITION";
            operator(url).query(sql).unwrap()
        };
        assert!(!columns(&by_hand).is_empty());
        assert_eq!(columns(&by_hand), columns(&by_call));
        // Again, it keeps what there is.
        operator(&by_hand).query_drop(file).unwrap();
        assert_eq!(semaphores.usage("a").unwrap().held, 1);
    });
}

#[test]
fn two_prefixes_in_one_database_are_two_worlds() {
    within(HANG, || {
        let url = empty_database();
        for prefix in ["one_", "two_"] {
            let semaphores = connect(&format!("{url}?table_prefix={prefix}"));
            semaphores.create_tables().unwrap();
            semaphores.create("a", 1).unwrap();
            acquired(semaphores.acquire(&want("job", "a", 1)).unwrap());
        }
        operator(&url)
            .query_drop("CREATE TABLE old_semaphore (x INT) ENGINE = MyISAM")
            .unwrap();
        let old = connect(&format!("{url}?table_prefix=old_"));
        let error = old.create_tables().unwrap_err();
        assert!(error.to_string().contains("old_semaphore"), "{error}");
    });
}
