//! Bytes from outside, which must not be trusted: what servers send, and what callers give.
//!
//! The parsers of replies are reached where they stand in use: a real server behind a proxy that changes
//! what it sends, and servers that send noise. Nothing may panic, hang beyond its bound, or grow without one.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::panic;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Once};
use std::thread;
use std::time::{Duration, Instant};

use contend::Factory;
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use testbed::{MariaDbServer, Proxy, RedisServer, ZooKeeperServer, rss_kib, wait_until, within};

const LIMIT: Duration = Duration::from_secs(150);

/// A reply of a few bytes may say that gigabytes follow; they must not be set aside.
const MOST_GROWTH_KIB: usize = 200 * 1024;

/// Panics of the library's threads, of all tests together: the hook belongs to the process.
static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Watches for panics from now on, and returns the memory of the process in KiB.
fn watch() -> usize {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let thread = thread::current().name().unwrap_or("?").to_owned();
            // Threads of other tests are named after them; those of the library are not.
            let ours = !thread.contains("::") && !thread.starts_with("main");
            // The MySQL driver panics on some handshakes (an unchecked subtraction in mysql_common 0.37). The same
            // factory must work on afterwards.
            let place = info.location();
            if place.is_some_and(|place| place.file().contains("mysql_common")) {
                return;
            }
            if ours {
                PANICS.lock().push(format!("{thread}: {info}"));
            }
            // A backtrace loads the symbols of the whole binary: hundreds of MiB that are not the library's.
            before(info);
        }));
    });
    rss_kib(std::process::id())
}

/// Uses everything that a factory gives for a while, whatever comes back.
fn use_all(factory: &Factory, lasts: Duration) {
    let services = ["one", "two"].map(|id| {
        let (service, events) = factory.contend("hostile").id(id).channel().unwrap();
        service.start().unwrap();
        (service, events)
    });
    let observer = factory.observe("hostile").build().unwrap();
    observer.start().unwrap();
    let lockers = [(); 2].map(|()| factory.locker("hostile-lock").build().unwrap());
    let end = Instant::now() + lasts;
    thread::scope(|scope| {
        for locker in &lockers {
            scope.spawn(move || {
                while Instant::now() < end {
                    drop(locker.try_lock_for(Duration::from_millis(150)));
                }
            });
        }
        while Instant::now() < end {
            let _ = factory.ping(Duration::from_millis(100));
            let _ = factory.owner("hostile");
            let _ = factory.participants("hostile");
            let _ = factory.list();
            for (service, events) in &services {
                let _ = service.last_error();
                while events.try_recv().is_ok() {}
            }
            thread::sleep(Duration::from_millis(10));
        }
    });
}

/// A server that sends noise, of several kinds, to every client.
fn noise(seed: u64) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let served = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&served);
    thread::spawn(move || {
        for (number, stream) in listener.incoming().flatten().enumerate() {
            count.fetch_add(1, Ordering::Relaxed);
            let mut random = StdRng::seed_from_u64(seed + number as u64);
            thread::spawn(move || {
                let mut stream = stream;
                let _ = stream.set_read_timeout(Some(Duration::from_millis(50)));
                for _ in 0..20 {
                    let bytes: Vec<u8> = match random.random_range(0..7) {
                        // RESP: lengths that do not fit anywhere, deep nesting, wrong types.
                        0 => b"$2147483647\r\n".to_vec(),
                        1 => b"*1000000000\r\n".to_vec(),
                        2 => b"*1\r\n".repeat(5_000),
                        3 => b":9999999999999999999999\r\n+OK\r\n-ERR \xff\xfe\r\n".to_vec(),
                        // ZooKeeper: a frame of two gigabytes, and one of a negative length.
                        4 => [0x7f, 0xff, 0xff, 0xff, 0, 0, 0, 0].to_vec(),
                        5 => [0xff, 0xff, 0xff, 0xf0, 1, 2, 3].to_vec(),
                        // MySQL: a packet header with the largest length, and anything.
                        _ => {
                            let mut bytes = vec![0xff, 0xff, 0xff, 0x00, 0x0a];
                            bytes.extend((0..200).map(|_| random.random_range(0..=255) as u8));
                            bytes
                        }
                    };
                    if stream.write_all(&bytes).is_err() {
                        return;
                    }
                    let _ = stream.read(&mut [0; 1024]);
                }
            });
        }
    });
    (addr, served)
}

fn calm(before_kib: usize) {
    let panics = PANICS.lock();
    assert!(panics.is_empty(), "{panics:#?}");
    let now = rss_kib(std::process::id());
    let bound = before_kib + MOST_GROWTH_KIB;
    assert!(now < bound, "{before_kib} KiB before, {now} KiB after");
}

/// "Nothing in the library panics on what a server, a network or a caller can do."
#[test]
fn noise_does_no_harm() {
    within(LIMIT, || {
        let before = watch();
        for (scheme, rest) in [
            ("redis", "?ttl=1s&transition=500ms"),
            ("redis+cluster", "?ttl=1s&transition=500ms"),
            ("mysql", "/db?ttl=1s&transition=500ms"),
            ("zk", "?session_timeout=1s"),
        ] {
            let (addr, served) = noise(77);
            let factory = contend::connect(&format!("{scheme}://{addr}{rest}")).unwrap();
            use_all(&factory, Duration::from_millis(1_500));
            assert!(
                served.load(Ordering::Relaxed) > 0,
                "{scheme} talked to no server"
            );
            calm(before);
        }
    });
}

/// The replies of a real server with some bytes changed; then it is well again, and so are we.
fn garbled(proxy: &Proxy, url: &str) {
    let before = watch();
    let factory = contend::connect(url).unwrap();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            // Often, so that few handshakes pass, and rarely, so that what comes after them is reached.
            for (round, per_mille) in [300, 20, 100, 20].into_iter().cycle().enumerate() {
                if over.load(Ordering::SeqCst) {
                    return;
                }
                // Time to connect, and time to be disturbed.
                proxy.pass();
                thread::sleep(Duration::from_millis(300));
                proxy.garble(per_mille, 1_000 + round as u64);
                thread::sleep(Duration::from_millis(700));
            }
        });
        // Once through all of them.
        use_all(&factory, Duration::from_millis(4_500));
        over.store(true, Ordering::SeqCst);
    });
    proxy.pass();
    // As many at once as there are connections: none of them got lost on the way.
    thread::scope(|scope| {
        for number in 0..8 {
            let factory = &factory;
            scope.spawn(move || {
                let mutex = format!("afterwards-{number}");
                let locker = factory.locker(&mutex).build().unwrap();
                wait_until(Duration::from_secs(60), "it can be locked again", || {
                    locker.try_lock_for(Duration::from_secs(2)).is_ok()
                });
            });
        }
    });
    calm(before);
}

/// RESP results and pub/sub messages.
#[test]
fn garbled_redis_replies_do_no_harm() {
    within(LIMIT, || {
        let server = RedisServer::start();
        let proxy = Proxy::to(server.addr());
        let addr = proxy.addr();
        garbled(&proxy, &format!("redis://{addr}?ttl=1s&transition=500ms"));
    });
}

/// Rows, and what stands in them.
#[test]
fn garbled_mysql_replies_do_no_harm() {
    within(LIMIT, || {
        let server = MariaDbServer::start();
        server.create_database("d");
        let proxy = Proxy::to(server.addr());
        let options = "ttl=1s&transition=500ms&create_table=true";
        garbled(
            &proxy,
            &format!("mysql://root@{}/d?{options}", proxy.addr()),
        );
    });
}

/// ZooKeeper frames.
#[test]
fn garbled_zookeeper_replies_do_no_harm() {
    within(LIMIT, || {
        let server = ZooKeeperServer::start();
        let proxy = Proxy::to(server.addr());
        garbled(&proxy, &format!("zk://{}?session_timeout=2s", proxy.addr()));
    });
}

/// What stands in the keys of a Redis that other programs write to.
#[test]
fn strange_redis_values_do_no_harm() {
    within(LIMIT, || {
        let before = watch();
        let server = RedisServer::start();
        let url = format!("{}?ttl=1s&transition=500ms", server.url());
        let strange = [
            "",
            "x",
            "\u{fffd}\u{1}",
            "9999999999999999999999",
            "-1",
            "~",
            "!",
            "@@",
        ];
        for (number, value) in strange.into_iter().enumerate() {
            let mutex = format!("strange-{number}");
            for suffix in ["", ":token", ":fence", ":run"] {
                let key = format!("simba:{{{mutex}}}{suffix}");
                server.cli(&["SET", &key, value, "PX", "300"]);
            }
            let queue = format!("simba:{{{mutex}}}:contender");
            server.cli(&["ZADD", &queue, "-inf", value, "nan", "b", "inf", "c"]);
            let factory = contend::connect(&url).unwrap();
            let _ = factory.owner(&mutex);
            let _ = factory.participants(&mutex);
            let _ = factory.list();
            // The counter stands until it is overwritten; what expires may have done so before we look.
            server.cli(&["SET", &format!("simba:{{{mutex}}}:fence"), value]);
            let service = factory.contend(&mutex).build().unwrap();
            service.start().unwrap();
            for channel in ["", ":x", "!handed"] {
                let channel = format!("simba:{{{mutex}}}{channel}");
                for message in [
                    value,
                    "acquired@@",
                    "released@@!",
                    "@@@@@",
                    "released@@\u{1}",
                ] {
                    server.cli(&["PUBLISH", &channel, message]);
                }
            }
            wait_until(Duration::from_secs(30), "it owns in the end", || {
                service.is_owner()
            });
        }
        calm(before);
    });
}

/// What stands in a row that other programs write to.
#[test]
fn strange_rows_do_no_harm() {
    within(LIMIT, || {
        let before = watch();
        let server = MariaDbServer::start();
        let url = server.create_database("d");
        let url = format!("{url}?ttl=1s&transition=500ms&poll_interval=100ms&create_table=true");
        let factory = contend::connect(&url).unwrap();
        drop(factory.locker("row").build().unwrap().lock().unwrap());
        let full: String = (0..210)
            .map(|token| format!(":{}", 100_000_000_000_000_000_u64 + token))
            .collect();
        let fixed = [
            ("waiters", "'x'"),
            ("waiters", "':'"),
            ("waiters", "'::::::'"),
            ("waiters", "':000000000000000000'"),
            ("waiters", "':12345678901234567'"),
            ("waiters", "REPEAT('9', 3990)"),
            ("waiters", &format!("'{full}'")),
            ("owner_id", "'~'"),
            ("owner_id", "'~x'"),
            ("owner_id", "'~999999999999999999'"),
            ("owner_id", "REPEAT('\u{e9}', 128)"),
            ("version", "4294967295"),
            ("ttl_at", "18446744073709551615"),
            ("run_at", "18446744073709551615"),
            ("acquired_at", "18446744073709551615"),
        ]
        .map(|(column, value)| (column, value.to_owned()));
        let mut random = StdRng::seed_from_u64(0x2035);
        let noise = (0..10).map(|_| {
            let length = random.random_range(1..200);
            let letter = || char::from(b":~0123456789x"[random.random_range(0..13)]);
            let text: String = std::iter::repeat_with(letter).take(length).collect();
            ("waiters", format!("'{text}'"))
        });
        for (number, (column, value)) in fixed.into_iter().chain(noise).enumerate() {
            let mutex = format!("strange-{number}");
            server.sql(&format!(
                "INSERT INTO d.simba_mutex (mutex, acquired_at, ttl_at, transition_at, owner_id, version) \
                 VALUES ('{mutex}', 0, 0, UNIX_TIMESTAMP(NOW(3)) * 1000 + 200, 'other', 0); \
                 UPDATE d.simba_mutex SET {column} = {value} WHERE mutex = '{mutex}'"
            ));
            let _ = factory.owner(&mutex);
            let _ = factory.participants(&mutex);
            let _ = factory.list();
            let locker = factory.locker(&mutex).build().unwrap();
            wait_until(Duration::from_secs(30), "it is locked in the end", || {
                locker.try_lock_for(Duration::from_secs(2)).is_ok()
            });
        }
        calm(before);
    });
}

/// URLs, durations, times of day and names, from random pieces and random bytes.
#[test]
fn no_text_makes_a_parser_panic() {
    let before = watch();
    let mut random = StdRng::seed_from_u64(0x7e47);
    let pieces: Vec<&str> = "redis rediss mysql zk memory redis+cluster redis+sentinel :// : / // @ ? & = , [ ] % \
        %4 %zz %00 %ff ttl 10s 1ms 99999999999999999999s -1s 0 1h30m transition pool_size tls true # .. \0 é \u{202e} \
        a b:2181 user:pa%40ss { } ' ; -- NaN inf 1e9 .5s 02:30 24:00 +02:00 Europe"
        .split_whitespace()
        .collect();
    let mut accepted = 0;
    for _ in 0..10_000 {
        let mut text = String::new();
        for _ in 0..random.random_range(0..12) {
            if random.random_range(0..8) == 0 {
                text.extend(char::from_u32(random.random_range(0..0x0011_0000)));
            } else {
                text.push_str(pieces[random.random_range(0..pieces.len())]);
            }
        }
        accepted += usize::from(contend::parse_duration(&text).is_ok());
        let _ = contend::Schedule::daily_at(&text, "UTC");
        let _ = contend::Schedule::daily_at("02:30", &text);
        // No factory is kept: one has threads.
        if !text.starts_with("memory") {
            drop(contend::connect(&text));
        }
    }
    assert!(accepted > 0, "not one duration was right");
    let factory = contend::memory::factory("hostile-names", contend::Lease::default());
    for _ in 0..5_000 {
        let length = random.random_range(0..200);
        let text: String = (0..length)
            .filter_map(|_| char::from_u32(random.random_range(0..0x3000)))
            .collect();
        if let Ok(locker) = factory.locker(&text).id(&text).build() {
            assert!(locker.try_lock().is_ok(), "{text:?} was accepted");
        }
    }
    calm(before);
}
