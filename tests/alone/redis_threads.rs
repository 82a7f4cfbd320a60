//! Redis: threads.

use std::time::{Duration, Instant};

use contend::connect;
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
            // Two that open connections, and the reader.
            left(3);
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
