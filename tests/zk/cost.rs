//! What it costs: sessions, threads and memory of many services, and processor time while the server is
//! away. Alone in its process: others would be counted too.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::{HANG, PATIENCE, factory};
use testbed::{Output, Process, ZooKeeperServer, cpu_time, rss_kib, threads, wait_until, within};

#[test]
fn many_services_share_a_session_and_an_absent_server_costs_nothing() {
    let mut alone = Command::new(std::env::current_exe().unwrap());
    alone.args(["--exact", "cost::alone", "--ignored", "--nocapture"]);
    let child = Process::spawn(&alone, &Output::Pipe).unwrap();
    let status = child.wait(HANG).expect("it ends");
    assert!(status.success(), "{status:?}");
}

#[test]
#[ignore = "run by the other test, as another process"]
fn alone() {
    within(HANG, || {
        let server = ZooKeeperServer::start();
        five_hundred(&server);
        away(&server);
    });
}

fn connections(server: &ZooKeeperServer) -> usize {
    let answer = server.four_letter("cons").unwrap();
    // One of them asks.
    answer.lines().filter(|line| line.contains("sid=")).count()
}

fn five_hundred(server: &ZooKeeperServer) {
    const SERVICES: usize = 500;
    let pid = std::process::id();
    let factory = factory(server.addr(), Duration::from_secs(20));
    let mutex = |number: usize| format!("many-{number}");
    wait_until(PATIENCE, "the session is there", || {
        connections(server) == 1
    });
    let (threads_before, rss_before) = (threads(pid), rss_kib(pid));
    let began = Instant::now();
    let services: Vec<_> = (0..SERVICES)
        .map(|number| {
            let service = factory.contend(mutex(number)).id("a").build().unwrap();
            service.start().unwrap();
            service
        })
        .collect();
    wait_until(PATIENCE, "all lead", || {
        services.iter().all(|service| service.is_owner())
    });
    println!(
        "{SERVICES} services lead after {:?}: {} session, {} threads, {} KiB more",
        began.elapsed(),
        connections(server),
        threads(pid) - threads_before,
        rss_kib(pid).saturating_sub(rss_before),
    );
    assert_eq!(connections(server), 1);
    // A worker each, and none of ours.
    assert!(threads(pid) - threads_before <= 2 * SERVICES);
    let idle = cpu_time(pid);
    std::thread::sleep(Duration::from_secs(1));
    println!(
        "1 s of leading: {:?} of processor time",
        cpu_time(pid) - idle
    );
}

/// All services have lost their leadership and go on trying.
fn away(server: &ZooKeeperServer) {
    let pid = std::process::id();
    let factory = factory(server.addr(), Duration::from_secs(3));
    let services: Vec<_> = (0..3)
        .map(|number| {
            let service = factory.contend(format!("away-{number}")).build().unwrap();
            service.start().unwrap();
            service
        })
        .collect();
    wait_until(PATIENCE, "all lead", || {
        services.iter().all(|service| service.is_owner())
    });
    server.kill();
    wait_until(PATIENCE, "none leads", || {
        services.iter().all(|service| !service.is_owner())
    });
    let span = Duration::from_secs(3);
    let before = cpu_time(pid);
    std::thread::sleep(span);
    let used = cpu_time(pid) - before;
    println!("server away for {span:?}, 3 services: {used:?} of processor time");
    assert!(used < span / 10, "{used:?} in {span:?}");
    server.start();
    wait_until(PATIENCE, "all lead again", || {
        services.iter().all(|service| service.is_owner())
    });
}
