//! Attacks on the rules, front by front: storms of faults, hand-offs with give-ups, stops and drops at the wrong
//! moment. `CONTEND_ATTACK_SECONDS` makes them longer.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

#[path = "../mysql/server.rs"]
mod mysql_ground;
#[path = "../semaphore/ground.rs"]
mod semaphore_ground;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use contend::{Cancel, ErrorKind, EventKind, Events, Factory, MutexContendService};
use rand::RngExt;
use testbed::{Direction, Proxy, RedisServer, within};

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn seconds() -> u64 {
    std::env::var("CONTEND_ATTACK_SECONDS").map_or(6, |it| it.parse().unwrap())
}

/// Reads all events, and checks that they alternate and that fences grow.
fn drain(
    name: &'static str,
    events: Events,
    over: Arc<AtomicBool>,
    slow: bool,
) -> thread::JoinHandle<(u64, u64, Vec<String>)> {
    thread::spawn(move || {
        let (mut owns, mut last, mut gained, mut missed) = (false, 0, 0, 0u64);
        let mut faults = vec![];
        loop {
            let Ok(event) = events.recv_timeout(ms(200)) else {
                if over.load(SeqCst) {
                    return (gained, missed, faults);
                }
                continue;
            };
            if slow {
                thread::sleep(ms(30));
            }
            missed += event.missed;
            match event.kind {
                EventKind::Acquired => {
                    gained += 1;
                    let fence = event.fence().unwrap_or(0);
                    if owns || fence <= last {
                        faults.push(format!(
                            "{name}: acquired {fence} after {last}, owns {owns}"
                        ));
                    }
                    (owns, last) = (true, fence);
                }
                EventKind::Released => {
                    if !owns {
                        faults.push(format!("{name}: released twice"));
                    }
                    owns = false;
                }
                _ => {}
            }
        }
    })
}

fn storm(direct: &dyn Fn() -> Factory, through: &dyn Fn() -> Factory, proxy: &Proxy) {
    let (fa, fb) = (through(), direct());
    let make = |f: &Factory, id: &str| -> (Arc<MutexContendService>, Events) {
        let (s, e) = f.contend("m").id(id).channel().unwrap();
        s.start().unwrap();
        (Arc::new(s), e)
    };
    let (a, ea) = make(&fa, "a");
    let (b, eb) = make(&fb, "b");
    let (c, ec) = make(&fa, "c");
    let over = Arc::new(AtomicBool::new(false));
    let readers = [
        drain("a", ea, over.clone(), false),
        drain("b", eb, over.clone(), false),
        drain("c", ec, over.clone(), true),
    ];
    let referee = {
        let all = [a.clone(), b.clone(), c.clone()];
        let over = over.clone();
        thread::spawn(move || {
            let (mut both, mut looks, mut high, mut fell) = (0u64, 0u64, 0u64, 0u64);
            while !over.load(SeqCst) {
                looks += 1;
                for (x, y) in [(0, 1), (1, 2), (0, 2)] {
                    let f = all[x].fence();
                    if f.is_some() && all[y].is_owner() && all[x].fence() == f {
                        both += 1;
                    }
                }
                for s in &all {
                    if let Some(f) = s.fence() {
                        // Read while it is owner still: a lower one than the highest seen is two believers.
                        if f < high && s.fence() == Some(f) {
                            fell += 1;
                        }
                        high = high.max(f);
                    }
                }
                thread::sleep(Duration::from_micros(300));
            }
            (looks, both, fell)
        })
    };
    let mut rng = rand::rng();
    let until = Instant::now() + Duration::from_secs(seconds());
    let mut steps = 0;
    let mut slowest = Duration::ZERO;
    while Instant::now() < until {
        steps += 1;
        match rng.random_range(0..10) {
            0 => proxy.black_hole(Direction::ToClient),
            1 => proxy.black_hole(Direction::ToServer),
            2 => proxy.delay_replies(ms(rng.random_range(10..400))),
            3 => proxy.delay(ms(rng.random_range(5..200))),
            4 => proxy.lose_next_reply(),
            5 => proxy.cut(),
            _ => proxy.pass(),
        }
        thread::sleep(ms(rng.random_range(0..350)));
        let s = [&a, &b, &c][rng.random_range(0..3)];
        let began = Instant::now();
        match rng.random_range(0..5) {
            0 | 1 => {
                s.stop().unwrap();
                if s.is_owner() {
                    panic!("owner after stop");
                }
                slowest = slowest.max(began.elapsed());
                if rng.random_bool(0.5) {
                    proxy.pass();
                }
                s.start().unwrap();
            }
            2 => drop(s.resign_for(ms(rng.random_range(0..100)))),
            _ => {}
        }
    }
    proxy.pass();
    // Everybody can own in the end: no wait without an end.
    for s in [&a, &b, &c] {
        s.stop().unwrap();
    }
    let mut turns = vec![];
    for s in [&a, &b, &c, &a] {
        let began = Instant::now();
        s.start().unwrap();
        while !s.is_owner() {
            assert!(
                began.elapsed() < Duration::from_secs(20),
                "{} never owns",
                s.id()
            );
            thread::sleep(ms(1));
        }
        turns.push(began.elapsed());
        s.stop().unwrap();
    }
    over.store(true, SeqCst);
    let (looks, both, fell) = referee.join().unwrap();
    let outcomes = readers.map(|it| it.join().unwrap());
    println!(
        "STORM steps {steps} looks {looks} both {both} fell {fell} slowest stop {slowest:?} turns {turns:?} (gained, missed, faults) {outcomes:?}"
    );
    assert_eq!((both, fell), (0, 0));
    assert!(outcomes.iter().all(|it| it.2.is_empty()));
}

const SHORT: &str = "ttl=400ms&transition=250ms";

#[test]
fn storm_redis() {
    within(Duration::from_secs(200), || {
        let server = RedisServer::start();
        let proxy = Proxy::to(server.addr());
        let direct = || contend::connect(&format!("redis://{}?{SHORT}", server.addr())).unwrap();
        let through = || contend::connect(&format!("redis://{}?{SHORT}", proxy.addr())).unwrap();
        storm(&direct, &through, &proxy);
    });
}

#[test]
fn storm_mysql() {
    within(Duration::from_secs(200), || {
        let url = mysql_ground::database();
        let proxy = Proxy::to(semaphore_ground::addr_of(&url));
        let other = semaphore_ground::through(&url, proxy.addr());
        let direct = || contend::connect(&format!("{url}?{SHORT}")).unwrap();
        let through = || contend::connect(&format!("{other}?{SHORT}")).unwrap();
        storm(&direct, &through, &proxy);
    });
}

/// Hand-offs with cancels and timeouts between; then everything is dropped while threads wait.
fn hand_offs(connect: &(dyn Fn() -> Factory + Sync), label: &str) {
    let before = testbed::threads(std::process::id());
    let over = AtomicBool::new(false);
    let (inside, high) = (AtomicUsize::new(0), AtomicU64::new(0));
    let (locks, gave_up, cancelled) = (
        AtomicUsize::new(0),
        AtomicUsize::new(0),
        AtomicUsize::new(0),
    );
    let slowest = parking_lot::Mutex::new((Duration::ZERO, Duration::ZERO, Duration::ZERO));
    let factories: Vec<Factory> = (0..3).map(|_| connect()).collect();
    thread::scope(|scope| {
        for (number, factory) in factories.iter().enumerate() {
            for thread in 0..5 {
                let (over, inside, high, locks, gave_up, cancelled, slowest) = (
                    &over, &inside, &high, &locks, &gave_up, &cancelled, &slowest,
                );
                scope.spawn(move || {
                    let locker = factory
                        .locker("m")
                        .id(format!("{number}-{thread}"))
                        .build()
                        .unwrap();
                    let mut rng = rand::rng();
                    while !over.load(SeqCst) {
                        let began = Instant::now();
                        let guard = match rng.random_range(0..4) {
                            0 => {
                                let t = ms(rng.random_range(0..40));
                                let got = locker.try_lock_for(t);
                                let late = began.elapsed().saturating_sub(t);
                                let mut s = slowest.lock();
                                s.0 = s.0.max(late);
                                got
                            }
                            1 => {
                                let cancel = Cancel::new();
                                let t = ms(rng.random_range(0..40));
                                thread::scope(|inner| {
                                    let c = cancel.clone();
                                    inner.spawn(move || {
                                        thread::sleep(t);
                                        c.cancel();
                                    });
                                    let got = locker.lock_until_cancelled(&cancel);
                                    let late = began.elapsed().saturating_sub(t);
                                    let mut s = slowest.lock();
                                    s.1 = s.1.max(late);
                                    got
                                })
                            }
                            _ => {
                                let got = locker.lock();
                                let mut s = slowest.lock();
                                s.2 = s.2.max(began.elapsed());
                                got
                            }
                        };
                        match guard {
                            Ok(guard) => {
                                assert_eq!(inside.fetch_add(1, SeqCst), 0, "two inside");
                                let last = high.swap(guard.fence(), SeqCst);
                                assert!(last < guard.fence(), "fence fell");
                                assert!(guard.is_valid());
                                locks.fetch_add(1, SeqCst);
                                inside.fetch_sub(1, SeqCst);
                                drop(guard);
                            }
                            Err(error) if error.kind() == ErrorKind::Held => {
                                gave_up.fetch_add(1, SeqCst);
                            }
                            Err(error) if error.kind() == ErrorKind::Cancelled => {
                                cancelled.fetch_add(1, SeqCst);
                            }
                            Err(error) if error.is_transient() => {
                                gave_up.fetch_add(1, SeqCst);
                            }
                            Err(error) => panic!("{error}"),
                        }
                    }
                });
            }
        }
        thread::sleep(Duration::from_secs(seconds() / 2));
        over.store(true, SeqCst);
    });
    let worst = *slowest.lock();
    println!(
        "HANDOFFS {label}: locks {locks:?} held {gave_up:?} cancelled {cancelled:?}; worst beyond timeout {:?}, beyond cancel {:?}, lock() {:?}",
        worst.0, worst.1, worst.2
    );
    // Twenty wait, and the factory goes.
    let holder = factories[0].locker("m").id("holder").build().unwrap();
    let guard = holder.lock().unwrap();
    let waiting = AtomicUsize::new(0);
    let factory = connect();
    let lockers: Vec<_> = (0..20)
        .map(|n| factory.locker("m").id(format!("w{n}")).build().unwrap())
        .collect();
    let took = thread::scope(|scope| {
        let threads: Vec<_> = lockers
            .into_iter()
            .map(|locker| {
                let waiting = &waiting;
                scope.spawn(move || {
                    waiting.fetch_add(1, SeqCst);
                    let outcome = locker.lock().map(|it| it.fence());
                    (outcome.map_err(|it| it.kind()), Instant::now())
                })
            })
            .collect();
        while factories[0].participants("m").unwrap().is_empty() || waiting.load(SeqCst) < 20 {
            thread::sleep(ms(5));
        }
        thread::sleep(ms(300));
        let began = Instant::now();
        drop(factory);
        let took = began.elapsed();
        let ends: Vec<_> = threads.into_iter().map(|it| it.join().unwrap()).collect();
        let last = ends
            .iter()
            .map(|it| it.1.saturating_duration_since(began))
            .max()
            .unwrap();
        let kinds: std::collections::BTreeSet<String> =
            ends.iter().map(|it| format!("{:?}", it.0)).collect();
        (took, last, kinds)
    });
    let mut left = factories[0].participants("m").unwrap().len();
    let began = Instant::now();
    while left > 0 && began.elapsed() < Duration::from_secs(10) {
        thread::sleep(ms(20));
        left = factories[0].participants("m").unwrap().len();
    }
    println!(
        "DROP {label}: drop(factory) took, last waiter ended after, as: {took:?}; queue empty after {:?}, left {left}",
        began.elapsed()
    );
    assert!(guard.is_valid());
    drop(guard);
    drop(holder);
    drop(factories);
    let began = Instant::now();
    while testbed::threads(std::process::id()) > before && began.elapsed() < Duration::from_secs(10)
    {
        thread::sleep(ms(20));
    }
    let after = testbed::threads(std::process::id());
    println!(
        "THREADS {label}: before {before}, after {after} ({:?})",
        began.elapsed()
    );
    assert_eq!(left, 0);
}

#[test]
fn hand_offs_redis() {
    within(Duration::from_secs(150), || {
        let server = RedisServer::start();
        hand_offs(&|| contend::connect(&server.url()).unwrap(), "redis");
        println!(
            "KEYS {:?} CLIENTS {:?}",
            server.cli(&["KEYS", "*"]),
            server.cli(&["CLIENT", "LIST"]).lines().count()
        );
    });
}

#[test]
fn hand_offs_mysql() {
    within(Duration::from_secs(150), || {
        let url = mysql_ground::database();
        hand_offs(&|| contend::connect(&url).unwrap(), "mysql");
        let n = semaphore_ground::number(
            &url,
            "SELECT COUNT(*) FROM information_schema.processlist WHERE db = DATABASE()",
        );
        println!(
            "CONNECTIONS left (1 is ours) {n}; rows with waiters {}",
            semaphore_ground::number(&url, "SELECT COUNT(*) FROM simba_mutex WHERE waiters <> ''")
        );
    });
}

#[test]
fn hand_offs_memory() {
    within(Duration::from_secs(150), || {
        hand_offs(&|| contend::connect("memory://attack").unwrap(), "memory");
    });
}

/// A partial release whose commit is not answered is no loss, and frees exactly its part.
#[test]
fn release_part_whose_reply_is_lost() {
    within(Duration::from_secs(100), || {
        let (direct, url) = semaphore_ground::semaphores(&[("s", 10)]);
        let proxy = Proxy::to(semaphore_ground::addr_of(&url));
        let through = semaphore_ground::connect(&semaphore_ground::through(&url, proxy.addr()));
        for round in 0..6 {
            let request = semaphore_ground::want(&format!("r{round}"), "s", 5);
            let mut guard = through.guard(&request, ms(3000)).unwrap();
            if round % 2 == 0 {
                proxy.lose_reply_to(b"COMMIT");
            } else {
                proxy.lose_reply_to(b"@freed");
            }
            let outcome = guard.release_part("s", 2);
            let lost = proxy.lost_replies();
            let valid = guard.is_valid();
            thread::sleep(ms(1500));
            let used = direct.usage("s").unwrap();
            println!("PART {round}: {outcome:?}, lost {lost}, valid {valid}, {used:?}");
            if let Err(error) = &outcome {
                assert_ne!(
                    error.kind(),
                    ErrorKind::Lost,
                    "a lost reply is not a lost permit"
                );
            }
            let ended = guard.release();
            println!(
                "  release: {ended:?}; {:?}; check {:?}",
                direct.usage("s").unwrap(),
                direct.check().unwrap()
            );
            proxy.pass();
        }
    });
}

/// Nothing that a caller gives panics.
#[test]
fn weird_urls() {
    let seeds = [
        "memory://x?ttl=1s",
        "redis://u:p@127.0.0.1:1/0?ttl=1s&transition=1s&simba=true",
        "rediss://h",
        "redis+cluster://a:1,b:2",
        "redis+sentinel://a:1,b:2/NAME",
        "mysql://u:p%40@127.0.0.1:1/db?ttl=3s&poll_interval=20ms&wakeups=off&create_table=true",
        "zk://a:1,b:2/chroot/x?ttl=2s",
    ];
    let bits = [
        "%",
        "%zz",
        "\0",
        "{",
        "}",
        "é",
        "\u{1f512}",
        "//",
        "?",
        "&",
        "=",
        "@",
        ":",
        "[::1]",
        "18446744073709551616",
        "-1",
        "1e400s",
        "999999999999999999h",
        " ",
        "#",
        "%00",
        "%ff",
        ",",
        "/",
    ];
    let mut rng = rand::rng();
    let mut panics = vec![];
    let mut ok = 0;
    for _ in 0..6000 {
        let mut chars: Vec<char> = seeds[rng.random_range(0..seeds.len())].chars().collect();
        for _ in 0..rng.random_range(1..4) {
            let at = rng.random_range(0..=chars.len());
            match rng.random_range(0..3) {
                0 => {
                    let b = bits[rng.random_range(0..bits.len())];
                    chars.splice(at..at, b.chars());
                }
                1 if at < chars.len() => {
                    chars.remove(at);
                }
                _ => chars.truncate(at.max(3)),
            }
        }
        let url: String = chars.into_iter().collect();
        let outcome = std::panic::catch_unwind(|| {
            contend::connect(&url)
                .map(|f| {
                    let _ = f.locker("m").build().map(drop);
                })
                .is_ok()
        });
        match outcome {
            Ok(true) => ok += 1,
            Ok(false) => {}
            Err(_) => panics.push(url),
        }
    }
    println!("URLS ok {ok}, panics {panics:?}");
    assert!(panics.is_empty());
}

/// A run that begins while the last one's remains are cleaned up is woken all the same.
#[test]
fn restarted_in_an_outage_is_woken() {
    within(Duration::from_secs(150), || {
        let server = RedisServer::start();
        let proxy = Proxy::to(server.addr());
        let holder =
            contend::connect(&format!("redis://{}?ttl=30s&transition=5s", server.addr())).unwrap();
        let f =
            contend::connect(&format!("redis://{}?ttl=8s&transition=2s", proxy.addr())).unwrap();
        let locker = holder.locker("m").id("holder").build().unwrap();
        let (a, events) = f.contend("m").id("a").channel().unwrap();
        let reads = thread::spawn(move || while events.recv().is_ok() {});
        for round in 0..6 {
            let guard = locker.lock().unwrap();
            a.start().unwrap();
            while holder.participants("m").unwrap().is_empty() {
                thread::sleep(ms(5));
            }
            match round % 3 {
                0 => proxy.black_hole(Direction::Both),
                1 => proxy.black_hole(Direction::ToClient),
                _ => proxy.refuse(),
            }
            if round % 3 == 2 {
                proxy.cut();
            }
            let began = Instant::now();
            a.stop().unwrap();
            let stopped = began.elapsed();
            proxy.pass();
            a.start().unwrap();
            thread::sleep(ms(4000));
            let queue = holder.participants("m").unwrap().len();
            let began = Instant::now();
            guard.unlock().unwrap();
            while !a.is_owner() {
                assert!(began.elapsed() < Duration::from_secs(15));
                thread::sleep(Duration::from_micros(200));
            }
            println!(
                "RESTART {round}: stop took {stopped:?}, queue {queue}, woken after {:?}",
                began.elapsed()
            );
            assert!(began.elapsed() < ms(400));
            a.stop().unwrap();
        }
        drop(a);
        reads.join().unwrap();
    });
}

/// Everything goes in a callback of its own.
#[test]
fn dropped_in_a_callback() {
    within(Duration::from_secs(60), || {
        for round in 0..20 {
            let f = contend::connect(&format!("memory://cb{round}")).unwrap();
            let slot: Arc<parking_lot::Mutex<Option<(MutexContendService, Factory)>>> =
                Arc::default();
            let inner = slot.clone();
            let (done, over) = crossbeam_channel::bounded(1);
            let released = Arc::new(AtomicUsize::new(0));
            let r = released.clone();
            let s = f
                .contend("m")
                .on_acquired(move |_| {
                    thread::sleep(ms(10));
                    drop(inner.lock().take());
                    let _ = done.send(());
                })
                .on_released(move |_| {
                    r.fetch_add(1, SeqCst);
                })
                .build()
                .unwrap();
            let other = f.clone();
            let other = other.locker("m").build().unwrap();
            *slot.lock() = Some((s.clone(), f));
            s.start().unwrap();
            drop(s);
            over.recv_timeout(Duration::from_secs(20)).unwrap();
            let began = Instant::now();
            let got = other
                .try_lock_for(Duration::from_secs(3))
                .map(|g| g.fence());
            println!(
                "CALLBACK {round}: {:?} after {:?}, released {released:?}",
                got.map_err(|e| e.to_string()),
                began.elapsed()
            );
        }
    });
}

/// Section 6: only a failed write and a crash let two runs come closer than the delay; a stop that does
/// not wait for the work to its end is neither.
fn stopped_under_its_work(connect: &dyn Fn() -> Factory, label: &str) {
    use contend::Schedule;
    const DELAY: Duration = Duration::from_secs(3);
    let (fa, fb) = (connect(), connect());
    let runs: Arc<parking_lot::Mutex<Vec<(&'static str, Instant, Instant)>>> = Arc::default();
    let start = |f: &Factory, id: &'static str, works: Duration| {
        let runs = runs.clone();
        f.scheduler("m")
            .id(id)
            .stop_within(ms(300))
            .start(Schedule::with_delay(DELAY), move |_: &contend::Context| {
                let began = Instant::now();
                thread::sleep(works);
                runs.lock().push((id, began, Instant::now()));
            })
            .unwrap()
    };
    let a = start(&fa, "a", ms(2_000));
    while runs.lock().is_empty() {
        thread::sleep(ms(5));
    }
    let b = start(&fb, "b", ms(1));
    // In the middle of its second run.
    thread::sleep(DELAY + ms(700));
    let stopped = a.stop();
    while runs.lock().iter().all(|it| it.0 != "b") {
        thread::sleep(ms(5));
    }
    let runs = runs.lock().clone();
    let a_end = runs
        .iter()
        .filter(|it| it.0 == "a")
        .map(|it| it.2)
        .max()
        .unwrap();
    let b_begin = runs.iter().find(|it| it.0 == "b").unwrap().1;
    let gap = b_begin.saturating_duration_since(a_end);
    println!(
        "SCHEDULE {label}: {} runs of a; stop: {:?}; gap between the end of a's and b's {gap:?}, the delay is {DELAY:?}",
        runs.len() - 1,
        stopped.map_err(|e| e.kind())
    );
    drop((a, b));
    assert!(gap + ms(50) >= DELAY, "{gap:?}");
}

#[test]
fn schedule_stopped_memory() {
    within(Duration::from_secs(60), || {
        stopped_under_its_work(&|| contend::connect("memory://sched").unwrap(), "memory")
    });
}

#[test]
fn schedule_stopped_redis() {
    within(Duration::from_secs(60), || {
        let server = RedisServer::start();
        stopped_under_its_work(&|| contend::connect(&server.url()).unwrap(), "redis");
    });
}

#[test]
fn schedule_stopped_mysql() {
    within(Duration::from_secs(60), || {
        let url = mysql_ground::database();
        stopped_under_its_work(&|| contend::connect(&url).unwrap(), "mysql");
        let n = |s: &str| semaphore_ground::number(&url, s);
        for _ in 0..5 {
            println!(
                "CONNECTIONS {}",
                n("SELECT COUNT(*) FROM information_schema.processlist WHERE db = DATABASE()")
            );
            thread::sleep(ms(500));
        }
    });
}

#[test]
fn schedule_stopped_zk() {
    within(Duration::from_secs(60), || {
        let server = testbed::ZooKeeperServer::start();
        stopped_under_its_work(&|| contend::connect(&server.url()).unwrap(), "zk");
    });
}

/// Rule "dropping is stopping": who lost its belief, and stops while the server still keeps its lease, gives
/// it back, also where another of its process waits.
fn stops_in_its_transition(direct: &str, url: &str, proxy: &Proxy, label: &str) {
    let lease = "ttl=2s&transition=12s";
    let f = contend::connect(&format!("{url}?{lease}")).unwrap();
    let (a, in_a) = f.contend("m").id("a").channel().unwrap();
    a.start().unwrap();
    while !a.is_owner() {
        thread::sleep(ms(5));
    }
    let (c, in_c) = f.contend("m").id("c").channel().unwrap();
    c.start().unwrap();
    let watch = contend::connect(&format!("{direct}?{lease}")).unwrap();
    while watch.participants("m").unwrap().is_empty() {
        thread::sleep(ms(5));
    }
    proxy.black_hole(Direction::Both);
    while a.is_owner() {
        thread::sleep(ms(5));
    }
    thread::sleep(ms(700));
    proxy.cut();
    a.stop().unwrap();
    proxy.pass();
    let began = Instant::now();
    while !c.is_owner() {
        assert!(began.elapsed() < Duration::from_secs(30));
        thread::sleep(ms(2));
    }
    println!(
        "TRANSITION {label}: c owned {:?} after a had stopped and the server was back",
        began.elapsed()
    );
    assert!(began.elapsed() < Duration::from_secs(6));
    drop((in_a, in_c));
}

#[test]
fn transition_redis() {
    within(Duration::from_secs(60), || {
        let server = RedisServer::start();
        let proxy = Proxy::to(server.addr());
        let url = format!("redis://{}", proxy.addr());
        stops_in_its_transition(&format!("redis://{}", server.addr()), &url, &proxy, "redis");
    });
}

#[test]
fn transition_mysql() {
    within(Duration::from_secs(60), || {
        let url = mysql_ground::database();
        let proxy = Proxy::to(semaphore_ground::addr_of(&url));
        let through = semaphore_ground::through(&url, proxy.addr());
        stops_in_its_transition(&url, &through, &proxy, "mysql");
    });
}
