//! A thousand services on one factory: a thread each, and nothing else that grows.

use std::time::{Duration, Instant};

use contend::{Lease, MutexContendService};
use testbed::{rss_kib, threads, wait_until};

alone! {
    fn thousand_services_start_own_and_stop_in_five_seconds() {
        const COUNT: usize = 1_000;
        testbed::within(Duration::from_secs(100), || {
            let me = std::process::id();
            let factory = contend::memory::factory("scale", Lease::default());
            let (threads_before, rss_before) = (threads(me), rss_kib(me));
            let services: Vec<MutexContendService> = (0..COUNT)
                .map(|number| factory.contend(format!("mutex-{number}")).build().unwrap())
                .collect();
            let began = Instant::now();
            for service in &services {
                service.start().unwrap();
            }
            wait_until(Duration::from_secs(30), "all own", || {
                services.iter().all(MutexContendService::is_owner)
            });
            let owning = began.elapsed();
            let (threads_during, rss_during) = (threads(me), rss_kib(me));
            for service in &services {
                service.stop().unwrap();
            }
            let all = began.elapsed();
            // A thread that was joined may stand in /proc for a moment still.
            wait_until(Duration::from_secs(30), "no thread is left", || {
                threads(me) == threads_before
            });
            let rss_after = rss_kib(me);
            println!("{COUNT} services: all own after {owning:?}, stopped after {all:?}");
            println!("threads: {threads_before} before, {threads_during} during");
            println!("RSS KiB: {rss_before} before, {rss_during} during, {rss_after} after");
            assert!(all < Duration::from_secs(5), "{all:?}");
            assert_eq!(threads_during, threads_before + COUNT);
        });
    }
}
