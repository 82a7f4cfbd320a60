//! Dropping is stopping: no thread is left, with the server well, paused or gone.

use std::time::{Duration, Instant};

use contend::EventKind;
use testbed::{threads, wait_until, within};

use crate::conformance::{HANG, PATIENCE, next, started, wait_for_owner};

/// With each of these parameters, then with the server paused, and with one that never answered.
fn dropped_factory_leaves_no_thread(url: &str, parameters: &[&str], pause: impl FnOnce()) {
    within(HANG, || {
        let own = || threads(std::process::id());
        let before = own();
        let none_is_left = || wait_until(PATIENCE, "no other thread is left", || own() <= before);
        let used = |parameters: &str| {
            let factory = contend::connect(&format!("{url}?{parameters}")).unwrap();
            let (owner, events) = started(&factory, "m", "owner");
            next(&events, EventKind::Acquired);
            let waiters = ["first", "second"].map(|id| started(&factory, "m", id));
            for (waiter, _) in &waiters {
                wait_for_owner(waiter, "owner");
            }
            let observer = factory.observe("m").build().unwrap();
            observer.start().unwrap();
            // Four services, and one that opens connections.
            assert!(own() >= before + 5);
            (observer, waiters, owner, events, factory)
        };
        for parameters in parameters {
            drop(used(parameters));
            none_is_left();
        }
        let used = used(parameters[0]);
        pause();
        let began = Instant::now();
        drop(used);
        // Each of them may take a request limit.
        let took = began.elapsed();
        assert!(took < Duration::from_secs(20), "{took:?}");
        none_is_left();
        // No server is there.
        let port = url.rsplit(':').next().unwrap().split('/').next().unwrap();
        drop(contend::connect(&url.replace(port, "1")).unwrap());
        none_is_left();
    });
}

#[cfg(feature = "redis")]
alone! {
    fn dropped_redis_factory_leaves_no_thread() {
        let server = testbed::RedisServer::start();
        dropped_factory_leaves_no_thread(&server.url(), &["ttl=5s"], || server.pause());
    }
}

#[cfg(feature = "mysql")]
alone! {
    fn dropped_mysql_factory_leaves_no_thread() {
        let server = testbed::MariaDbServer::start();
        let url = server.create_database("d");
        let woken = "ttl=5s&create_table=true";
        let polling = "ttl=5s&create_table=true&wakeups=off";
        dropped_factory_leaves_no_thread(&url, &[woken, polling], || server.pause());
    }
}

#[cfg(feature = "zk")]
alone! {
    fn dropped_zookeeper_factory_leaves_no_thread() {
        let server = testbed::ZooKeeperServer::start();
        let parameters = ["session_timeout=6s"];
        dropped_factory_leaves_no_thread(&server.url(), &parameters, || server.pause());
    }
}
