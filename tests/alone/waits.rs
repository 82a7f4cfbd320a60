//! Waits that end: on a server that is paused, with a long ttl, and when they are cancelled. Prints what each
//! took; with `--nocapture` as a table.

use std::fs;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use contend::{AcquireOutcome, Cancel, ErrorKind, Probe};
use parking_lot::Mutex;
use testbed::{threads, wait_until, within};

use crate::conformance::PATIENCE;

const HANG: Duration = Duration::from_secs(150);

/// What a call may take beyond its own timeout: the limit of a request, and the scheduling of threads.
const LIMIT: Duration = Duration::from_millis(2_200);

/// What a loaded machine may add.
const SLACK: Duration = Duration::from_millis(500);

/// How many lockers are cancelled.
const LOCKERS: usize = 100;

fn timed<T>(call: impl FnOnce() -> T) -> (T, Duration) {
    let began = Instant::now();
    (call(), began.elapsed())
}

/// Every call that a caller waits for, while the server does not answer and the ttl is 60 s.
fn paused(backend: &str, url: &str, pause: impl FnOnce()) {
    let factory = contend::connect(url).unwrap();
    let locker = factory.locker("m").build().unwrap();
    drop(locker.lock().unwrap());
    let other = factory.locker("n").build().unwrap();
    let held = factory.locker("held").build().unwrap().lock().unwrap();
    let many = factory.lock_all(["a", "b", "c", "d"]).lock().unwrap();
    let service = factory.contend("led").build().unwrap();
    service.start().unwrap();
    wait_until(PATIENCE, "it leads", || service.is_owner());
    pause();

    let row = |what: &str, own: Duration, call: &mut dyn FnMut() -> String| {
        let (outcome, took) = timed(call);
        let bound = own + LIMIT;
        println!("{backend:>8}  {what:<26} {took:>9.1?}  bound {bound:>6?}  {outcome}");
        assert!(took < bound + SLACK, "{backend}: {what} took {took:?}");
    };
    let error = |locked: contend::Result<contend::Guard>| locked.unwrap_err().to_string();
    let short = Duration::from_millis(300);
    for what in ["try_lock_for(300ms)", "try_lock_for(300ms) again"] {
        row(what, short, &mut || error(locker.try_lock_for(short)));
    }
    row("try_lock", Duration::ZERO, &mut || error(other.try_lock()));
    let dropped = |what, value: Box<dyn std::any::Any>| {
        let mut value = Some(value);
        row(what, Duration::ZERO, &mut || {
            value = None;
            String::new()
        });
    };
    dropped("drop of a held guard", Box::new(held));
    dropped("drop of a guard of four", Box::new(many));
    row("stop of a leader", Duration::ZERO, &mut || {
        format!("{:?}", service.stop())
    });
    let all = (service, locker, other, factory);
    let mut all = Some(all);
    row("drop of the factory", Duration::ZERO, &mut || {
        all = None;
        String::new()
    });
}

/// The calls for each mutex: when they ended, and what they took. Tells a call that outlasted its end from what came
/// after it.
#[derive(Default)]
struct Calls(Mutex<Vec<(String, Instant, Duration)>>);

impl Probe for Calls {
    fn acquire(&self, mutex: &str, _: AcquireOutcome<'_>, took: Duration) {
        let call = (mutex.to_owned(), Instant::now(), took);
        self.0.lock().push(call);
    }
}

/// How many pages this thread had to wait for until they were read from the disk.
fn major_faults() -> String {
    let stat = fs::read_to_string("/proc/thread-self/stat").unwrap_or_default();
    // After the name in brackets, in which there may be spaces.
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let faults = fields.split_whitespace().nth(9).unwrap_or("?");
    format!("{faults} major page faults")
}

/// Waits that are cancelled while the server does not answer: of one that is queued, of one whose first call
/// hangs, of one that has failed for a while, and of one whose locker is still busy with what an earlier call left.
fn cancelled_while_paused(backend: &str, url: &str, pause: impl FnOnce()) {
    let calls = Arc::new(Calls::default());
    let factory = contend::connect(url).unwrap();
    let factory = factory.with_probe(Arc::clone(&calls) as _);
    let held = factory.locker("waited").build().unwrap().lock().unwrap();
    let cancel = Cancel::new();
    let waits = |locker: contend::Locker| {
        thread::spawn(move || {
            let error = locker.lock().map(drop).unwrap_err();
            let at = Instant::now();
            (error.kind(), at, major_faults(), locker.mutex().to_owned())
        })
    };
    let locker = |mutex: &str| factory.locker(mutex).cancel(&cancel).build().unwrap();
    let queued = waits(locker("waited"));
    let busy = locker("busy");
    drop(busy.lock().unwrap());
    wait_until(PATIENCE, "one is queued", || {
        factory.participants("waited").unwrap().len() == 1
    });
    pause();
    let failing = waits(locker("failing"));
    thread::sleep(Duration::from_secs(5));
    busy.try_lock_for(Duration::from_millis(100)).unwrap_err();
    let busy = waits(busy);
    let first = waits(locker("first"));
    thread::sleep(Duration::from_millis(300));

    let began = Instant::now();
    cancel.cancel();
    for (what, wait) in [
        ("queued", queued),
        ("in its first call", first),
        ("failing for a while", failing),
        ("after a failed call", busy),
    ] {
        let (kind, at, faults, mutex) = wait.join().unwrap();
        let took = at - began;
        println!("{backend:>8}  cancelled, {what:<20} {took:>9.1?}  bound {LIMIT:?}");
        assert_eq!(kind, ErrorKind::Cancelled);
        let ended = |(of, at, took): &(String, Instant, Duration)| {
            let since = at.saturating_duration_since(began);
            (*of == mutex).then_some((since, *took))
        };
        assert!(
            took < LIMIT + SLACK,
            "{backend}: {what} took {took:?}; its calls ended after, and took: {:?}; {faults}",
            calls.0.lock().iter().filter_map(ended).collect::<Vec<_>>()
        );
    }
    drop(held);
}

/// A hundred lockers wait in threads of their own, and are cancelled.
fn cancelled(backend: &str, url: &str, places: usize) {
    let before = threads(std::process::id());
    let factory = contend::connect(url).unwrap();
    let watcher = contend::connect(url).unwrap();
    let guard = factory.locker("queue").build().unwrap().lock().unwrap();
    let cancel = Cancel::new();
    let waits: Vec<_> = (0..LOCKERS)
        .map(|_| {
            let locker = factory.locker("queue").cancel(&cancel).build().unwrap();
            thread::spawn(move || {
                let kind = locker.lock().map(drop).unwrap_err().kind();
                (kind, Instant::now())
            })
        })
        .collect();
    // Those in the queue as the server sees them.
    let left = || watcher.participants("queue").unwrap().len();
    wait_until(PATIENCE, "all of them wait", || left() == places);
    let began = Instant::now();
    cancel.cancel();
    let mut took: Vec<Duration> = Vec::new();
    for wait in waits {
        let (kind, at) = wait.join().unwrap();
        assert_eq!(kind, ErrorKind::Cancelled);
        took.push(at - began);
    }
    took.sort_unstable();
    wait_until(PATIENCE, "nobody is left in the queue", || left() == 0);
    let gone = began.elapsed();
    assert!(guard.is_valid());
    guard.unlock().unwrap();
    drop((factory, watcher));
    wait_until(PATIENCE, "no thread is left", || {
        threads(std::process::id()) <= before
    });
    println!(
        "{backend:>8}  {LOCKERS} cancelled: median {:.1?}, last {:.1?}; queue empty after {gone:.1?}; \
         threads left 0",
        took[LOCKERS / 2],
        took[LOCKERS - 1],
    );
    assert!(took[LOCKERS - 1] < LIMIT + SLACK);
}

alone! {
    fn waits_end_on_memory() {
        within(HANG, || cancelled("memory", "memory://waits", LOCKERS));
    }
}

#[cfg(feature = "redis")]
alone! {
    fn waits_end_on_redis() {
        within(HANG, || {
            let server = testbed::RedisServer::start();
            let url = server.url();
            cancelled("redis", &url, LOCKERS);
            let keys = server.cli(&["KEYS", "*queue*"]);
            assert!(!keys.contains(":contender"), "{keys}");
            let long = format!("{url}?ttl=60s&transition=1s");
            cancelled_while_paused("redis", &long, || server.pause());
            server.resume();
            paused("redis", &long, || server.pause());
            server.resume();
        });
    }
}

#[cfg(feature = "mysql")]
alone! {
    fn waits_end_on_mysql() {
        within(HANG, || {
            use mysql::prelude::Queryable;
            let server = crate::mysql_ground::start();
            let url = server.create_database("waits");
            let mut operator = crate::mysql_ground::operator(&url);
            operator.query_drop(contend::mysql::INIT_SQL).unwrap();
            // One for the process: its contenders queue behind it.
            cancelled("mysql", &url, 1);
            wait_until(PATIENCE, "no connection waits", || {
                crate::mysql_ground::waiting(&mut operator, &url) == 0
            });
            let long = format!("{url}?ttl=60s&transition=1s");
            cancelled_while_paused("mysql", &long, || server.pause());
            server.resume();
            paused("mysql", &long, || server.pause());
            server.resume();
        });
    }
}

#[cfg(feature = "zk")]
alone! {
    fn waits_end_on_zk() {
        within(HANG, || {
            let server = testbed::ZooKeeperServer::start_with(&["maxSessionTimeout=120000"], &[]);
            let url = server.url();
            cancelled("zk", &url, LOCKERS);
            let long = format!("{url}?ttl=60s&transition=1s");
            cancelled_while_paused("zk", &long, || server.pause());
            server.resume();
            paused("zk", &long, || server.pause());
            server.resume();
        });
    }
}
