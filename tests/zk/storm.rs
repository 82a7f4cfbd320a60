//! Many contenders of one process on one mutex, on a machine whose processors are busy.
//!
//! `CONTEND_STORM_CONTENDERS` says how many (150 by default), `CONTEND_STORM_T_MS` their session timeout.

use std::time::{Duration, Instant};

use crate::support::{HANG, PATIENCE, factory, line, name, number, packets, session};
use testbed::{Proxy, ZooKeeperServer, cpu_load, wait_until, within};

/// When they started together, each read the whole line again and again, until the
/// server died; and idle they polled quadratically.
#[test]
fn many_that_start_together_stand_in_line_and_ask_little() {
    let count = number("CONTEND_STORM_CONTENDERS", 150);
    let timeout = Duration::from_millis(number("CONTEND_STORM_T_MS", 6_000));
    within(HANG * 3, || {
        let server = ZooKeeperServer::start();
        let proxy = Proxy::to(server.addr());
        let ours = factory(proxy.addr(), timeout);
        let mutex = name("storm");
        let reader = session(server.addr(), Duration::from_secs(60));
        let load = cpu_load(2);
        let asked = packets(&server);
        let began = Instant::now();
        let services: Vec<_> = (0..count)
            .map(|number| {
                let id = format!("c{number}");
                let service = ours.contend(&mutex).id(&id).build().unwrap();
                service.start().unwrap();
                service
            })
            .collect();
        wait_until(PATIENCE, "one leads", || {
            services.iter().any(|service| service.is_owner())
        });
        let led = began.elapsed();
        wait_until(PATIENCE * 2, "all stand in line", || {
            line(&reader, &mutex).len() as u64 == count
        });
        let in_line = began.elapsed();
        wait_until(PATIENCE * 2, "all know who leads", || {
            services
                .iter()
                .all(|service| service.is_owner() || service.state().after().has_owner())
        });
        // The reader's own, and heartbeats, are among them.
        let each = (packets(&server) - asked) as f64 / count as f64;
        println!(
            "{count} contenders, T = {timeout:?}: a leader after {led:?}, all in line after {in_line:?}, {each:.1} \
             requests each, server alive: {}",
            server.is_running()
        );
        assert!(each < 15.0, "{each} requests each");
        assert!(server.is_running());
        drop(load);
        // Idle, for longer than it takes until each has looked again.
        let span = timeout * 2;
        let (asked, bytes) = (packets(&server), proxy.bytes_to_client());
        std::thread::sleep(span);
        let requests = (packets(&server) - asked) as f64 / span.as_secs_f64();
        let rate = (proxy.bytes_to_client() - bytes) as f64 / span.as_secs_f64();
        println!("idle: {requests:.0} requests/s, {rate:.0} bytes/s to the client");
        let looks = count as f64 / timeout.as_secs_f64();
        let beats = 2.0 * 24.0 / timeout.as_secs_f64();
        assert!(
            requests < 3.0 * (looks + beats) + 20.0,
            "{requests} requests/s"
        );
        assert!(rate < 200.0 * requests + 20_000.0, "{rate} bytes/s");
    });
}
