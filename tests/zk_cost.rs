//! What it costs: sessions, threads and memory of many services, processor time while the server is
//! away, and a hand-off beside the bare round trips. One test after the other, alone in its process.
#![cfg(feature = "zk")]

mod zk_support;

use std::time::{Duration, Instant};

use contend::backend::Entry;
use contend::zk::Mode;
use contend::{Bell, Ring};
use ground::{ZooKeeperServer, cpu_time, rss_kib, threads, wait_until, within};
use zk_support::{HANG, PATIENCE, factory, granted, long_seat, name, refused, session, soon};

#[test]
fn many_services_share_a_session_and_an_absent_server_costs_nothing() {
    within(HANG, || {
        let server = ZooKeeperServer::start();
        hand_off(&server);
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
            let service = factory.contend(&mutex(number)).id("a").build().unwrap();
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
    std::thread::sleep(Duration::from_secs(3));
    println!(
        "3 s of leading: {:?} of processor time",
        cpu_time(pid) - idle
    );
}

/// All services have lost their leadership and go on trying.
fn away(server: &ZooKeeperServer) {
    let pid = std::process::id();
    let factory = factory(server.addr(), Duration::from_secs(3));
    let services: Vec<_> = (0..3)
        .map(|number| {
            let service = factory.contend(&format!("away-{number}")).build().unwrap();
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
    let span = Duration::from_secs(5);
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

/// Release by one session, wake-up and takeover by another; beside the bare delete and the watch's
/// ideal: a delete and a read on one connection each.
fn hand_off(server: &ZooKeeperServer) {
    const ROUNDS: usize = 300;
    let mutex = name("hand-off");
    let factories = [(); 2].map(|()| factory(server.addr(), Duration::from_secs(50)));
    let (one, two) = (Bell::new(), Bell::new());
    let mut seats = [
        (long_seat(&factories[0], &mutex, "a"), one),
        (long_seat(&factories[1], &mutex, "b"), two),
    ];
    for (seat, bell) in &mut seats {
        seat.listen(&bell.waker(), soon()).unwrap();
    }
    let mut fence = granted(&mut *seats[0].0, Entry::Queue).owner.fence();
    let mut passed = Vec::new();
    for _ in 0..ROUNDS {
        let [(owner, _), (waiter, bell)] = &mut seats;
        refused(&mut **waiter, Entry::Queue);
        let began = Instant::now();
        owner.release(fence, soon()).unwrap();
        assert_eq!(bell.wait(soon()), Ring::Wake);
        fence = granted(&mut **waiter, Entry::Queue).owner.fence();
        passed.push(began.elapsed());
        seats.swap(0, 1);
    }
    let bare = session(server.addr(), Duration::from_secs(50));
    bare.create("/bare", b"", Mode::Persistent, soon()).unwrap();
    let (mut creates, mut deletes, mut reads) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let began = Instant::now();
        let (path, _) = bare
            .create("/bare/n-", b"a", Mode::EphemeralSequential, soon())
            .unwrap();
        creates.push(began.elapsed());
        let began = Instant::now();
        bare.get_children("/bare", soon()).unwrap();
        reads.push(began.elapsed());
        let began = Instant::now();
        bare.delete(&path, soon()).unwrap();
        deletes.push(began.elapsed());
    }
    let mut acquires = Vec::new();
    let mut seat = long_seat(&factories[0], &name("free"), "a");
    for _ in 0..ROUNDS {
        let began = Instant::now();
        let fence = granted(&mut *seat, Entry::Try).owner.fence();
        acquires.push(began.elapsed());
        seat.release(fence, soon()).unwrap();
    }
    for (what, list) in [
        ("hand-off", &mut passed),
        ("acquire (create + list in one go)", &mut acquires),
        ("bare create", &mut creates),
        ("bare delete", &mut deletes),
        ("bare getChildren", &mut reads),
    ] {
        list.sort();
        println!(
            "{what}: p50 {:?}, p99 {:?}",
            list[ROUNDS / 2],
            list[ROUNDS * 99 / 100]
        );
    }
}
