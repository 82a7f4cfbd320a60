//! Redis through bad weather: connections are cut, reset, delayed and black-holed at random, the
//! server is paused, the script cache is flushed; and there is never more than one owner.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use contend::redis::Builder;
use contend::{EventKind, Lease, MutexContendService, Status};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use testbed::{Direction, Proxy, RedisServer, wait_until, within};

const CONTENDERS: usize = 5;
const LASTS: Duration = Duration::from_secs(12);
const PATIENCE: Duration = Duration::from_secs(40);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A machine that is busy with other things may keep a thread from ending in time.
fn stop(service: &MutexContendService) {
    if let Err(error) = service.stop() {
        println!("{error}");
        wait_until(PATIENCE, "it has stopped", || {
            service.status() == Status::Initial
        });
    }
}

/// One gust.
fn blow(server: &RedisServer, proxies: &[Proxy], random: &mut StdRng) {
    let proxy = &proxies[random.random_range(0..proxies.len())];
    match random.random_range(0..8) {
        0 => proxy.cut(),
        1 => proxy.reset(),
        2 => proxy.black_hole(Direction::ToServer),
        3 => proxy.black_hole(Direction::ToClient),
        4 => proxy.delay(ms(random.random_range(1..60))),
        5 => {
            server.cli(&["SCRIPT", "FLUSH"]);
        }
        6 => {
            server.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        }
        _ => {
            server.pause();
            std::thread::sleep(ms(random.random_range(10..600)));
            server.resume();
        }
    }
    std::thread::sleep(ms(random.random_range(20..400)));
    if random.random_range(0..2) == 0 {
        proxy.pass();
    }
}

/// Rules 1 to 5 and 9, at once.
#[test]
fn there_is_one_owner_whatever_the_weather() {
    within(Duration::from_secs(150), || {
        let seed: u64 = std::env::var("CONTEND_TEST_SEED")
            .ok()
            .and_then(|seed| seed.parse().ok())
            .unwrap_or_else(rand::random);
        println!("CONTEND_TEST_SEED={seed}");
        let mut random = StdRng::seed_from_u64(seed);
        let server = RedisServer::start();
        let proxies: Vec<_> = (0..CONTENDERS).map(|_| Proxy::to(server.addr())).collect();
        let lease = Lease::new(ms(500), ms(300)).unwrap();
        let (services, events): (Vec<Arc<MutexContendService>>, Vec<_>) = proxies
            .iter()
            .enumerate()
            .map(|(number, proxy)| {
                let factory = Builder::new(proxy.addr().to_string())
                    .ttl(lease.ttl())
                    .transition(lease.transition())
                    .connect_timeout(ms(300))
                    .build()
                    .unwrap();
                let service = factory.contend("m").id(format!("c{number}"));
                let (service, events) = service.event_capacity(100_000).channel().unwrap();
                service.start().unwrap();
                (Arc::new(service), events)
            })
            .unzip();

        let over = Arc::new(AtomicBool::new(false));
        let referee = {
            let (over, services) = (Arc::clone(&over), services.clone());
            std::thread::spawn(move || {
                let mut fences = Vec::new();
                while !over.load(Ordering::Relaxed) {
                    for (number, a) in services.iter().enumerate() {
                        let Some(fence) = a.fence() else { continue };
                        if fences.last() != Some(&fence) {
                            fences.push(fence);
                        }
                        for b in &services[number + 1..] {
                            // The second look at the first: it may have stepped down in between.
                            let both = b.is_owner() && a.fence() == Some(fence);
                            assert!(!both, "{} and {} at once", a.id(), b.id());
                        }
                    }
                    std::thread::sleep(Duration::from_micros(500));
                }
                fences
            })
        };
        let began = Instant::now();
        while began.elapsed() < LASTS {
            blow(&server, &proxies, &mut random);
            // Now and then the owner gives up on purpose.
            if random.random_range(0..4) == 0
                && let Some(owner) = services.iter().find(|service| service.is_owner())
            {
                stop(owner);
                owner.start().unwrap();
            }
        }
        proxies.iter().for_each(Proxy::pass);
        wait_until(PATIENCE, "somebody owns when the weather is fine", || {
            services.iter().any(|service| service.is_owner())
        });
        over.store(true, Ordering::Relaxed);
        let fences = referee.join().expect("one owner at a time");
        assert!(fences.is_sorted(), "fences as they were seen: {fences:?}");

        let mut all = Vec::new();
        for (service, events) in services.iter().zip(&events) {
            stop(service);
            let mut due = EventKind::Acquired;
            let mut last = 0;
            for event in events.try_iter() {
                if event.kind == EventKind::OwnerChanged {
                    continue;
                }
                assert_eq!(event.kind, due, "they alternate");
                let fence = event.fence().unwrap();
                if due == EventKind::Acquired {
                    assert!(fence > last, "{fence} after {last}");
                    all.push(fence);
                    last = fence;
                    due = EventKind::Released;
                } else {
                    assert_eq!(fence, last);
                    due = EventKind::Acquired;
                }
            }
        }
        println!("{} ownerships", all.len());
        assert!(all.len() > 3, "{all:?}");
        all.sort_unstable();
        assert!(
            all.windows(2).all(|pair| pair[0] < pair[1]),
            "no fence twice"
        );
    });
}
