//! The tables: made where they are missing, recognised where they are another program's, and mended.

use crate::ground::{HOUR, acquired, connect, ids, locked, number, on_mysql, want};
use crate::mysql_ground::{HANG, empty_database, operator};
use contend::ErrorKind;
use contend::semaphore::Liveness;
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

/// Beside the seed's tables ours have another name; told to use theirs, the error says what is wrong with them, and
/// nothing is changed.
#[test]
fn foreign_tables_are_recognised_and_left_alone() {
    within(HANG, || {
        let url = empty_database();
        for table in SEED {
            operator(&url).query_drop(table).unwrap();
        }
        let semaphores = connect(&url);
        let error = semaphores.usage("a").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured);
        assert!(error.to_string().contains("init-semaphore.sql"), "{error}");
        semaphores.create_tables().unwrap();
        semaphores.create_tables().unwrap();
        semaphores.create("a", 1).unwrap();
        acquired(semaphores.acquire(&want("job", "a", 1)).unwrap());
        assert_eq!(number(&url, "SELECT COUNT(*) FROM permit"), 0);

        let theirs = connect(&format!("{url}?table_prefix="));
        let error = theirs.create_tables().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured);
        for says in ["semaphore", "used", "table_prefix"] {
            assert!(error.to_string().contains(says), "{error}");
        }
        let count =
            "SELECT COUNT(*) FROM information_schema.TABLES WHERE TABLE_SCHEMA = DATABASE()";
        assert_eq!(number(&url, count), 3 + 4, "nothing was made beside them");
        // Used all the same, they are refused with what to do, not with a bare 1054.
        let error = theirs.acquire(&want("job", "a", 1)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured);
        assert!(error.to_string().contains("table_prefix"), "{error}");
        let error = contend::connect(&format!("{url}?table_prefix=a%20b")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    });
}

/// The file can be applied as it is, again and again.
#[test]
fn tables_can_be_made_by_hand() {
    within(HANG, || {
        let url = empty_database();
        let file = include_str!("../../sql/init-semaphore.sql");
        operator(&url).query_drop(file).unwrap();
        let semaphores = connect(&url);
        semaphores.create("a", 1).unwrap();
        acquired(semaphores.acquire(&want("job", "a", 1)).unwrap());
        operator(&url).query_drop(file).unwrap();
        semaphores.create_tables().unwrap();
        assert_eq!(semaphores.usage("a").unwrap().held, 1);
    });
}

#[test]
fn planted_counter_error_is_found_and_corrected() {
    on_mysql(&[("a", 5), ("b", 5), ("c", 5)], |semaphores, url| {
        let request = want("job", "a", 2).permits("b", 1);
        acquired(semaphores.acquire(&request).unwrap());
        assert_eq!(semaphores.check().unwrap(), []);
        operator(&url)
            .query_drop("UPDATE contend_semaphore SET used = used + 1 WHERE name IN ('b', 'c')")
            .unwrap();
        let found: Vec<_> = semaphores
            .check()
            .unwrap()
            .iter()
            .map(|wrong| (wrong.semaphore.to_string(), wrong.counter, wrong.permits))
            .collect();
        assert_eq!(found, [("b".to_owned(), 2, 1), ("c".to_owned(), 1, 0)]);
        assert_eq!(semaphores.repair().unwrap().len(), 2);
        assert_eq!(semaphores.check().unwrap(), []);
        assert_eq!(semaphores.repair().unwrap(), []);
        // A counter that is too low does not let what is held be deleted.
        operator(&url)
            .query_drop("UPDATE contend_semaphore SET used = 0 WHERE name = 'a'")
            .unwrap();
        let error = semaphores.delete("a").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidState);
        assert_eq!(semaphores.repair().unwrap().len(), 1);
        semaphores.release("job").unwrap();
        assert_eq!(number(&url, "SELECT SUM(used) FROM contend_semaphore"), 0);
    });
}

/// A request that another program has locked is left for the next time, and does not stop the sweep; what was renewed
/// meanwhile is not taken.
#[test]
fn renewal_between_look_and_release_wins() {
    on_mysql(&[("a", 10)], |semaphores, url| {
        let sweeps: [(&str, &dyn Fn() -> Vec<String>); 3] = [
            ("expired", &|| ids(semaphores.sweep_expired().unwrap())),
            ("stale", &|| ids(semaphores.sweep_stale(24 * HOUR).unwrap())),
            ("dead", &|| {
                ids(semaphores.sweep_dead(|_| Liveness::Dead).unwrap())
            }),
        ];
        for (id, sweep) in sweeps {
            let other = format!("{id}-too");
            for id in [id, &other] {
                let request = want(id, "a", 1).owner("me").ttl(HOUR);
                acquired(semaphores.acquire(&request).unwrap());
            }
            operator(&url)
                .query_drop(
                    "UPDATE contend_permit_request SET updated_at = updated_at - INTERVAL 48 HOUR, \
                     reclaim_at = reclaim_at - INTERVAL 48 HOUR",
                )
                .unwrap();
            let mut renewer = locked(&url, "permit_request", &format!("external_id = '{id}'"));
            renewer
                .query_drop(format!(
                    "UPDATE contend_permit_request SET updated_at = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR, \
                     reclaim_at = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR WHERE external_id = '{id}'"
                ))
                .unwrap();
            assert_eq!(sweep(), [other]);
            renewer.query_drop("COMMIT").unwrap();
            assert_eq!(sweep(), [] as [String; 0], "{id}");
            assert!(semaphores.status(id).unwrap().unwrap().held);
            semaphores.release(id).unwrap();
        }
    });
}
