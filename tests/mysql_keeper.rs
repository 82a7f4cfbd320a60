//! The thread that keeps the names of leaders. Alone in its process: it is watched by its name.

#![cfg(feature = "mysql")]

mod conformance;
mod mysql_ground;

use std::fs;
use std::thread;

use conformance::{PATIENCE, next, started, wait_for_owner};
use contend::EventKind;
use ground::{wait_until, within};
use mysql::prelude::Queryable;
use mysql_ground::{HANG, is_free, ms, operator, wake_name};

/// How often the keeper has gone to sleep so far.
fn sleeps() -> u64 {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let mut sleeps = 0;
    for task in tasks.flatten() {
        let read = |file| fs::read_to_string(task.path().join(file)).unwrap_or_default();
        // The kernel cuts a thread's name to 15 bytes.
        if read("comm").trim_end() == "contend-mysql-k" {
            sleeps += read("status")
                .lines()
                .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))
                .map_or(0, |count| count.trim().parse::<u64>().unwrap());
        }
    }
    sleeps
}

#[test]
fn a_server_error_that_passes_neither_spins_the_keeper_nor_ends_wake_ups() {
    within(HANG, || {
        let server = mysql_ground::start();
        let url = server.create_database("keeper");
        let mut root = operator(&url);
        root.query_drop(contend::mysql::INIT_SQL).unwrap();
        // Its row would be made by a statement that not every connection has prepared.
        root.query_drop("INSERT INTO simba_mutex VALUES ('n', 0, 0, 0, '', 0)")
            .unwrap();
        let slow = format!("{url}?ttl=60s&transition=30s&poll_interval=30s");
        // One connection, which has all prepared: another would be opened in its own time, maybe when
        // nothing can be prepared any more, and then be the one that is used.
        let factory = contend::connect(&format!("{slow}&pool_size=1")).unwrap();
        let (m, events) = started(&factory, "m", "a");
        next(&events, EventKind::Acquired);
        let names = [wake_name(&url, "m"), wake_name(&url, "n")];
        wait_until(PATIENCE, "the leader holds its name", || {
            !is_free(&mut root, &names[0])
        });
        assert!(sleeps() > 0, "the keeper has another name");

        // Its next connection can prepare nothing.
        let keeper: Option<u64> = root
            .exec_first("SELECT IS_USED_LOCK(?)", (&names[0],))
            .unwrap();
        root.query_drop("SET GLOBAL max_prepared_stmt_count = 0")
            .unwrap();
        root.query_drop(format!("KILL {}", keeper.unwrap()))
            .unwrap();
        let (n, events) = started(&factory, "n", "a");
        next(&events, EventKind::Acquired);
        // Time is the subject: how often it tries in a while.
        thread::sleep(ms(500));
        let before = sleeps();
        thread::sleep(ms(2_000));
        let slept = sleeps() - before;
        assert!(slept < 100, "it went to sleep {slept} times in two seconds");

        root.query_drop("SET GLOBAL max_prepared_stmt_count = 16382")
            .unwrap();
        for name in &names {
            let mut look = operator(&url);
            wait_until(PATIENCE, "the leaders hold their names again", || {
                !is_free(&mut look, name)
            });
        }
        // And they are of use: by time alone this would take half a minute.
        let other = contend::connect(&slow).unwrap();
        let (waiter, events) = started(&other, "n", "b");
        wait_for_owner(&waiter, "a");
        let stopped = std::time::Instant::now();
        n.stop().unwrap();
        next(&events, EventKind::Acquired);
        assert!(stopped.elapsed() < ms(10_000), "{:?}", stopped.elapsed());
        assert!(m.is_owner());
    });
}
