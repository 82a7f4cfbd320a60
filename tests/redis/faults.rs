//! Redis in trouble: servers killed and paused, connections cut and black-holed, processes killed.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::conformance::{HANG, PATIENCE, lease, next, outage, started, wait_for_owner};
use contend::backend::CLAIM_TIME;
use contend::redis::Builder;
use contend::{ErrorKind, EventKind, Factory, Lease, MutexContendService};
use testbed::{Direction, Output, Process, Proxy, RedisServer, wait_until, within};

/// What a machine that has other things to do may add to any time.
const SLOW: Duration = Duration::from_secs(5);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn at(address: impl ToString) -> Factory {
    Builder::new(address.to_string())
        .ttl(lease().ttl())
        .transition(lease().transition())
        .build()
        .unwrap()
}

/// Looks all the time whether two services own at once.
struct Referee {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<u64>>,
}

impl Referee {
    fn watch(services: [&Arc<MutexContendService>; 2]) -> Referee {
        let [a, b] = services.map(Arc::clone);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut both = 0;
            while !stopped.load(Ordering::Relaxed) {
                // The second look at the first: it may have stepped down between the two.
                if a.is_owner() && b.is_owner() && a.is_owner() {
                    both += 1;
                }
                std::thread::sleep(ms(1));
            }
            both
        });
        Referee {
            stop,
            thread: Some(thread),
        }
    }

    fn verdict(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let both = self.thread.take().unwrap().join().unwrap();
        assert_eq!(both, 0, "two owned at once");
    }
}

/// Rules 1, 2 and 4: an owner that is cut off is gone before the next one comes, and comes back.
fn an_owner_cut_off_steps_down_before_the_next_owns(direction: Direction) {
    within(HANG, || {
        let server = RedisServer::start();
        let proxy = Proxy::to(server.addr());
        let (a, in_a) = started(&at(proxy.addr()), "m", "a");
        let first = next(&in_a, EventKind::Acquired);
        let (b, in_b) = started(&at(server.addr()), "m", "b");
        wait_for_owner(&b, "a");
        let (a, b) = (Arc::new(a), Arc::new(b));
        let referee = Referee::watch([&a, &b]);

        proxy.black_hole(direction);
        let cut = Instant::now();
        next(&in_a, EventKind::Released);
        assert!(
            cut.elapsed() < lease().total() + SLOW,
            "{:?}",
            cut.elapsed()
        );
        wait_until(PATIENCE, "it says that it is in trouble", || {
            a.last_error().is_some_and(|error| error.is_transient())
        });
        let second = next(&in_b, EventKind::Acquired);
        assert!(second.fence() > first.fence());

        proxy.pass();
        wait_for_owner(&a, "b");
        b.stop().unwrap();
        let third = next(&in_a, EventKind::Acquired);
        assert!(third.fence() > second.fence());
        wait_until(PATIENCE, "its trouble is over", || a.last_error().is_none());
        referee.verdict();
    });
}

#[test]
fn an_owner_whose_requests_get_lost_steps_down_before_the_next_owns() {
    an_owner_cut_off_steps_down_before_the_next_owns(Direction::ToServer);
}

#[test]
fn an_owner_whose_replies_get_lost_steps_down_before_the_next_owns() {
    an_owner_cut_off_steps_down_before_the_next_owns(Direction::ToClient);
}

#[test]
fn an_owner_whose_connections_are_cut_stays_owner() {
    within(HANG, || {
        let server = RedisServer::start();
        let proxy = Proxy::to(server.addr());
        // Between two cuts there must be time for a renewal, and in a belief for several, also where
        // everything is slow.
        let lease = Lease::new(ms(5_000), ms(1_000)).unwrap();
        let factory = Builder::new(proxy.addr().to_string())
            .ttl(lease.ttl())
            .transition(lease.transition());
        let (a, events) = started(&factory.build().unwrap(), "m", "a");
        let fence = next(&events, EventKind::Acquired).fence();
        let until = Instant::now() + lease.total();
        let mut resets = false;
        while Instant::now() < until {
            if resets {
                proxy.reset()
            } else {
                proxy.cut()
            }
            resets = !resets;
            std::thread::sleep(ms(250));
            assert!(a.is_owner(), "{:?}", a.last_error());
            assert_eq!(a.fence(), fence);
        }
    });
}

#[test]
fn a_waiter_whose_messages_are_cut_off_is_told_all_the_same() {
    within(HANG, || {
        let server = RedisServer::start();
        let factory = Builder::new(server.addr().to_string()).build().unwrap();
        let (mut owner, mut in_owner) = started(&factory, "m", "a");
        next(&in_owner, EventKind::Acquired);
        for round in 0..5 {
            let (waiter, in_waiter) = started(&factory, "m", &format!("waiter-{round}"));
            wait_for_owner(&waiter, owner.id());
            assert_eq!(
                server.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]).trim(),
                "1"
            );
            let began = Instant::now();
            owner.stop().unwrap();
            next(&in_waiter, EventKind::Acquired);
            // Not at the end of the lease (16 s) that it saw.
            assert!(
                began.elapsed() < Duration::from_secs(12),
                "{:?}",
                began.elapsed()
            );
            (owner, in_owner) = (waiter, in_waiter);
        }
        drop(in_owner);
    });
}

#[test]
fn a_server_that_restarts_empty_gives_a_higher_fence() {
    within(HANG, || {
        let server = RedisServer::start();
        let (a, events) = started(&at(server.addr()), "m", "a");
        let mut last = next(&events, EventKind::Acquired).fence();
        for _ in 0..3 {
            server.restart();
            next(&events, EventKind::Released);
            let again = next(&events, EventKind::Acquired).fence();
            assert!(again > last, "{again:?} after {last:?}");
            last = again;
        }
        assert!(a.is_owner());
    });
}

#[test]
fn a_server_that_is_paused_past_the_lease_finds_no_owner() {
    within(HANG, || {
        let server = RedisServer::start();
        let (a, in_a) = started(&at(server.addr()), "m", "a");
        let first = next(&in_a, EventKind::Acquired).fence();
        let (b, in_b) = started(&at(server.addr()), "m", "b");
        wait_for_owner(&b, "a");
        let (a, b) = (Arc::new(a), Arc::new(b));
        let referee = Referee::watch([&a, &b]);
        server.pause();
        let paused = Instant::now();
        next(&in_a, EventKind::Released);
        let took = paused.elapsed();
        assert!(took < lease().total() + SLOW, "{took:?}");
        wait_until(PATIENCE, "the lease is over", || {
            paused.elapsed() > lease().total() + ms(200)
        });
        server.resume();
        let owner = || [&a, &b].into_iter().find(|service| service.is_owner());
        wait_until(PATIENCE, "somebody owns", || owner().is_some());
        let second = owner().and_then(|service| service.fence());
        assert!(second > first, "{second:?} after {first:?}");
        drop(in_b);
        referee.verdict();
    });
}

#[test]
fn an_owner_that_was_flushed_away_notices_at_its_next_renewal() {
    within(HANG, || {
        let server = RedisServer::start();
        let (_a, events) = started(&at(server.addr()), "m", "a");
        let first = next(&events, EventKind::Acquired).fence();
        let began = Instant::now();
        server.cli(&["FLUSHALL"]);
        next(&events, EventKind::Released);
        let took = began.elapsed();
        assert!(took < lease().ttl() + SLOW, "{took:?}");
        let second = next(&events, EventKind::Acquired).fence();
        assert!(second > first);
    });
}

#[test]
fn a_call_keeps_to_its_time_whatever_the_server_does() {
    use contend::backend::{Contender, OnRefusal, Purpose};
    within(HANG, || {
        let server = RedisServer::start();
        let factory = at(server.addr());
        let place = Contender {
            mutex: "m".into(),
            id: "a".into(),
            lease: lease(),
            purpose: Purpose::Lead,
        };
        let (backend, parker) = (factory.backend().unwrap(), contend::Parker::new());
        let mut contender = backend.contender(&place, &parker.unparker()).unwrap();
        let soon = || contend::Moment::now() + ms(400);
        contender.acquire(OnRefusal::Leave, soon()).unwrap();
        server.pause();
        for _ in 0..3 {
            let began = Instant::now();
            let error = contender.renew(1, soon()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Timeout, "{error:?}");
            assert!(contender.acquire(OnRefusal::Enqueue, soon()).is_err());
            assert!(began.elapsed() < ms(800) + SLOW, "{:?}", began.elapsed());
        }
        server.resume();
        server.kill();
        // It says at once why there is no connection, and of what kind that is.
        wait_until(PATIENCE, "it says that nobody is there", || {
            let began = Instant::now();
            let error = contender.acquire(OnRefusal::Leave, soon()).unwrap_err();
            assert!(began.elapsed() < ms(400) + SLOW, "{:?}", began.elapsed());
            error.kind() == ErrorKind::Unreachable
        });
    });
}

/// Rule 2: a kernel ends a socket's wait up to an eighth late, which `try_lock` must not. Eight at once, as
/// how late depends on the moment; and again, as a busy machine is late by itself.
#[test]
fn a_try_lock_ends_in_its_time_although_the_kernel_rounds_up() {
    within(HANG, || {
        let server = RedisServer::start();
        let bound = Lease::default().ttl() / 4;
        wait_until(PATIENCE, "none of eight outlasts its time", || {
            let lockers: Vec<_> = (0..8)
                .map(|number| {
                    let factory = Builder::new(server.addr().to_string()).build().unwrap();
                    let locker = factory.locker(format!("m{number}")).build().unwrap();
                    locker.lock().unwrap().unlock().unwrap();
                    locker
                })
                .collect();
            server.pause();
            let took: Vec<_> = std::thread::scope(|scope| {
                let calls: Vec<_> = (lockers.iter())
                    .map(|locker| {
                        std::thread::sleep(ms(30));
                        scope.spawn(move || {
                            let began = Instant::now();
                            let error = locker.try_lock().unwrap_err();
                            assert_eq!(error.kind(), ErrorKind::Timeout, "{error:?}");
                            began.elapsed()
                        })
                    })
                    .collect();
                calls.into_iter().map(|it| it.join().unwrap()).collect()
            });
            server.resume();
            println!("of {bound:?}: {took:?}");
            took.iter().all(|took| *took <= bound)
        });
    });
}

/// Unlocking has less time than locking: what it sets on the socket must not stay for the next lock, which
/// gave up on a slow server after a third of its time.
#[test]
fn a_slow_server_has_the_time_of_a_lock_after_an_unlock() {
    within(HANG, || {
        let server = RedisServer::start();
        let proxy = Proxy::to(server.addr());
        let factory = Builder::new(proxy.addr().to_string()).build().unwrap();
        let locker = factory.locker("m").build().unwrap();
        for _ in 0..2 {
            locker.lock().unwrap().unlock().unwrap();
        }
        // Longer than an unlock waits, and well below the 2.5 s of a lock.
        proxy.delay_replies(ms(1_000));
        let guard = locker.try_lock().unwrap();
        proxy.pass();
        guard.unlock().unwrap();
    });
}

/// Rule 2: those who wait cannot use up the connections that an owner needs.
#[test]
fn a_crowd_that_acquires_does_not_keep_an_owner_from_renewing() {
    use contend::Moment;
    use contend::backend::{Attempt, Contender, OnRefusal, Purpose, Renewal};
    within(HANG, || {
        let server = RedisServer::start();
        let proxy = Proxy::to(server.addr());
        let factory = Builder::new(proxy.addr().to_string())
            .pool_size(4)
            .build()
            .unwrap();
        let contender = |id: &str| {
            let place = Contender {
                mutex: "m".into(),
                id: id.into(),
                lease: Lease::default(),
                purpose: Purpose::Lock,
            };
            let backend = factory.backend().unwrap();
            backend
                .contender(&place, &contend::Parker::new().unparker())
                .unwrap()
        };
        let by = || Moment::now() + Duration::from_secs(60);
        let mut owner = contender("owner");
        let Attempt::Granted(grant) = owner.acquire(OnRefusal::Leave, by()).unwrap() else {
            panic!("refused");
        };
        // A round trip of 600 ms, and 60 that want one at once: 12 s for three connections.
        proxy.delay(ms(300));
        let crowd: Vec<_> = (0..60)
            .map(|number| {
                let mut contender = contender(&format!("{number}"));
                std::thread::spawn(move || contender.acquire(OnRefusal::Leave, by()).unwrap())
            })
            .collect();
        std::thread::sleep(ms(300));
        let began = Instant::now();
        let renewal = owner.renew(grant.owner.fence(), by()).unwrap();
        assert!(matches!(renewal, Renewal::Renewed(_)));
        assert!(began.elapsed() < ms(8_000), "{:?}", began.elapsed());
        assert!(crowd.iter().any(|thread| !thread.is_finished()));
        for thread in crowd {
            thread.join().unwrap();
        }
        assert!(proxy.accepted() <= 4, "{}", proxy.accepted());
    });
}

#[test]
fn a_service_that_started_before_its_server_owns_when_it_comes() {
    within(HANG, || {
        let server = RedisServer::start();
        server.kill();
        let (service, events) = started(&at(server.addr()), "m", "a");
        wait_until(PATIENCE, "it says why it cannot", || {
            service
                .last_error()
                .is_some_and(|error| error.kind() == ErrorKind::Unreachable)
        });
        server.start();
        next(&events, EventKind::Acquired);
        // Not at once: it may have become owner while its subscription still failed.
        wait_until(PATIENCE, "its next renewal is fine", || {
            service.last_error().is_none()
        });
    });
}

const CHILD: &str = "CONTEND_TEST_REDIS_CHILD";

/// Not a test: the process that the next ones kill. It contends for `m` until its end.
#[test]
#[ignore = "run by other tests"]
fn child() {
    let Ok(arguments) = std::env::var(CHILD) else {
        return;
    };
    let mut arguments = arguments.split(' ');
    let (address, id) = (arguments.next().unwrap(), arguments.next().unwrap());
    let lease = Lease::new(ms(600), ms(300)).unwrap();
    let factory = Builder::new(address)
        .ttl(lease.ttl())
        .transition(lease.transition())
        .build()
        .unwrap();
    let service = factory.contend("m").id(id).build().unwrap();
    service.start().unwrap();
    std::thread::sleep(Duration::from_secs(100));
}

fn spawn_child(server: &RedisServer, id: &str) -> Process {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["faults::child", "--exact", "--ignored", "--nocapture"])
        .env(CHILD, format!("{} {id}", server.addr()));
    Process::spawn(&command, &Output::Pipe).unwrap()
}

/// What a killed owner costs, each time.
fn take_over(rounds: usize) -> Vec<Duration> {
    let server = RedisServer::start();
    let factory = at(server.addr());
    (0..rounds)
        .map(|round| {
            let id = format!("child-{round}");
            let child = spawn_child(&server, &id);
            wait_until(PATIENCE, "the child owns", || {
                server.cli(&["GET", "simba:{m}"]).trim() == id
            });
            let (waiter, events) = started(&factory, "m", "waiter");
            wait_for_owner(&waiter, &id);
            child.kill();
            let killed = Instant::now();
            next(&events, EventKind::Acquired);
            let waited = killed.elapsed();
            waiter.stop().unwrap();
            waited
        })
        .collect()
}

#[test]
fn a_killed_owner_is_followed_when_its_lease_is_over() {
    within(HANG, || {
        for waited in take_over(3) {
            // ttl + transition are 900 ms; the rest is for a busy machine.
            assert!(waited < ms(900) + SLOW, "{waited:?}");
        }
    });
}

/// How many connections are subscribed to a channel.
fn subscribers(server: &RedisServer, channel: &str) -> String {
    let count = server.cli(&["PUBSUB", "NUMSUB", channel]);
    count.lines().last().unwrap_or_default().to_owned()
}

/// An owner and a waiter in this process, and in between a waiter that is a process of its own; and the
/// server.
struct Line {
    server: RedisServer,
    owner: MutexContendService,
    child: Process,
    /// Kept: a service whose events nobody can read is another thing.
    _events: contend::Events,
    waiter: MutexContendService,
    waiting: contend::Events,
}

impl Line {
    fn up() -> Line {
        let server = RedisServer::start();
        let factory = Builder::new(server.addr().to_string()).build().unwrap();
        let (owner, events) = started(&factory, "m", "owner");
        next(&events, EventKind::Acquired);
        let child = spawn_child(&server, "child");
        // On a busy machine, it may queue before its subscription is there.
        wait_until(PATIENCE, "the child waits, and hears", || {
            let place = server.cli(&["ZSCORE", "simba:{m}:contender", "child"]);
            !place.trim().is_empty() && subscribers(&server, "simba:{m}:child") == "1"
        });
        let (waiter, waiting) = started(&factory, "m", "waiter");
        wait_for_owner(&waiter, "owner");
        Line {
            server,
            owner,
            child,
            _events: events,
            waiter,
            waiting,
        }
    }

    /// How long it takes from the release until the waiter owns.
    fn release(&self, between: impl FnOnce()) -> Duration {
        let began = Instant::now();
        self.owner.stop().unwrap();
        between();
        next(&self.waiting, EventKind::Acquired);
        let waited = began.elapsed();
        assert!(self.waiter.is_owner());
        waited
    }
}

/// A process killed while it waits: the server knows by its connection.
#[test]
fn a_killed_waiter_is_passed_over() {
    within(HANG, || {
        let line = Line::up();
        line.child.kill();
        wait_until(PATIENCE, "the server knows that it is gone", || {
            subscribers(&line.server, "simba:{m}:child") == "0"
        });
        let waited = line.release(|| {});
        println!("a waiter was killed: the next owned after {waited:?}");
        // Not the lease of 16 s that it saw.
        assert!(waited < ms(100) + SLOW, "{waited:?}");
    });
}

/// A process that was told that its turn has come, and is killed before it can do anything about it.
#[test]
fn a_killed_waiter_whose_turn_has_come_costs_the_next_one_the_claim_time() {
    within(HANG, || {
        let line = Line::up();
        line.child.pause();
        let waited = line.release(|| line.child.kill());
        println!("killed when its turn had come: the next owned after {waited:?}");
        // Not the lease of 16 s that it saw.
        assert!(waited >= CLAIM_TIME - ms(20), "{waited:?}");
        assert!(waited < CLAIM_TIME + ms(100) + SLOW, "{waited:?}");
    });
}

/// Rule "trouble is visible": whoever waits for another's lease to end asks nothing until then, and was said to be fine.
#[test]
fn the_health_of_a_waiting_service_shows_an_outage_before_the_lease_ends() {
    within(HANG, || {
        let server = RedisServer::start();
        outage::shows_in_the_health_of_a_waiting_service(
            &server.url(),
            || server.kill(),
            || server.start(),
        );
    });
}
