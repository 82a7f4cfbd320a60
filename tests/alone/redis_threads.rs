//! Redis: threads.

use std::thread;
use std::time::{Duration, Instant};

use contend::connect;
use rustix::time::{ClockId, clock_gettime};
use testbed::{Proxy, RedisServer, threads, wait_until, within};

alone! {
    /// Rule 12, with the server well, paused and gone.
    fn a_dropped_factory_leaves_no_thread() {
        within(Duration::from_secs(120), || {
            let server = RedisServer::start();
            let own = || threads(std::process::id());
            let before = own();
            let used = || {
                let factory = connect(&format!("{}?connect_timeout=500ms", server.url())).unwrap();
                let services: Vec<_> = ["a", "b"]
                    .map(|id| {
                        let service = factory.contend("m").id(id).build().unwrap();
                        service.start().unwrap();
                        service
                    })
                    .into();
                wait_until(Duration::from_secs(20), "one owns", || {
                    services.iter().any(|service| service.is_owner())
                });
                (factory, services)
            };
            // A thread that was joined is on the list for a moment more.
            let left = |more: usize| {
                wait_until(Duration::from_secs(20), "no other thread is left", || {
                    own() == before + more
                });
            };
            let (factory, services) = used();
            drop(services);
            // The one that opens connections, and the reader.
            left(2);
            drop(factory);
            left(0);

            let (factory, services) = used();
            drop(services);
            server.pause();
            let began = Instant::now();
            drop(factory);
            assert!(
                began.elapsed() < Duration::from_secs(20),
                "{:?}",
                began.elapsed()
            );
            left(0);
            server.resume();

            let proxy = Proxy::to(server.addr());
            proxy.refuse();
            let factory = connect(&format!("redis://{}", proxy.addr())).unwrap();
            drop(factory);
            left(0);
        });
    }
}

/// What this process has used of the processors.
fn cpu() -> Duration {
    clock_gettime(ClockId::ProcessCPUTime).try_into().unwrap()
}

alone! {
    /// With looks a hundred times a second, two processors were busy with that, and 3,000 services needed ten seconds
    /// to lead again after an outage.
    fn thousand_waiters_for_a_connection_use_little_cpu() {
        within(Duration::from_secs(120), || {
            let server = RedisServer::start();
            let factory = connect(&format!("{}?ttl=60s", server.url())).unwrap();
            factory.ping(Duration::from_secs(20)).unwrap();
            server.pause();
            thread::scope(|scope| {
                for number in 0..1_000 {
                    let locker = factory.locker(format!("m-{number}")).build().unwrap();
                    let wait = move || locker.try_lock_for(Duration::from_secs(4)).is_err();
                    scope.spawn(wait);
                }
                // Until all have begun, and have looked a few times.
                thread::sleep(Duration::from_millis(1_500));
                let (began, used) = (Instant::now(), cpu());
                thread::sleep(Duration::from_millis(1_000));
                let (took, used) = (began.elapsed(), cpu() - used);
                println!("{used:?} of processor time in {took:?}");
                assert!(used < took / 2, "{used:?} in {took:?}");
            });
            server.resume();
        });
    }
}
