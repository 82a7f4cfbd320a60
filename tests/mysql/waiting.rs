//! Waiting: the queue in the row and in the process, and what goes wrong with those that wait. Factories
//! stand for processes where none is killed or paused.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::conformance::{PATIENCE, elsewhere, next, started};
use crate::server::{
    HANG, SEEDS_TABLE, create_users, database, empty_database, ms, operator, own_server, status,
    through,
};
use contend::backend::{Attempt, Contender, OnRefusal, Purpose, RawContender, Wakeups};
use contend::{
    AcquireOutcome, ErrorKind, EventKind, Factory, Guard, Locker, Moment, Parker, Probe,
};
use mysql::Conn;
use mysql::prelude::Queryable;
use testbed::{Proxy, cpu_time, wait_until, within};

fn connect(url: &str, parameters: &str) -> Factory {
    contend::connect(&format!("{url}?{parameters}")).unwrap()
}

fn locker(factory: &Factory, mutex: &str) -> Locker {
    factory.locker(mutex).build().unwrap()
}

/// A factory with a guard of the mutex `m`.
fn held(url: &str) -> (Factory, Guard) {
    let holder = connect(url, "ttl=60s");
    let guard = locker(&holder, "m").lock().unwrap();
    (holder, guard)
}

/// The connection that holds a named lock.
fn holder_of(conn: &mut Conn, name: &str) -> Option<u64> {
    let holder = conn.exec_first("SELECT IS_USED_LOCK(?)", (name,));
    holder.unwrap().unwrap()
}

/// The tokens that stand in the row of `mutex`.
fn tokens(conn: &mut Conn, mutex: &str) -> Vec<String> {
    let list = conn.exec_first("SELECT waiters FROM simba_mutex WHERE mutex = ?", (mutex,));
    let list: String = list.unwrap().unwrap_or_default();
    list.split(':').skip(1).map(str::to_owned).collect()
}

fn wait_for_tokens(url: &str, mutex: &str, count: usize) -> Vec<String> {
    let mut conn = operator(url);
    let mut seen = Vec::new();
    let what = format!("{count} processes wait for {mutex}");
    wait_until(PATIENCE, &what, || {
        seen = tokens(&mut conn, mutex);
        seen.len() == count
    });
    seen
}

/// A service that waits and never takes what it is handed: its connection is there, its process is not.
fn registers_and_sleeps(factory: &Factory, mutex: &str) -> (Box<dyn RawContender>, Parker) {
    let contender = Contender {
        mutex: mutex.into(),
        id: "asleep".into(),
        lease: factory.lease(),
        purpose: Purpose::Lead,
    };
    let parker = Parker::new();
    let backend = factory.backend().unwrap();
    let mut raw = backend.contender(&contender, &parker.unparker()).unwrap();
    let by = || Moment::now() + Duration::from_secs(10);
    wait_until(PATIENCE, "it is registered", || {
        let can_register = factory.health().wakeups == Wakeups::Working;
        match raw.acquire(OnRefusal::Enqueue, by()) {
            Ok(attempt) => assert!(matches!(attempt, Attempt::Refused(_))),
            // A busy machine.
            Err(error) => assert!(error.is_transient(), "{error:?}"),
        }
        can_register
    });
    (raw, parker)
}

/// How long a fresh process takes to own `mutex`, once it is connected.
fn time_to_own(url: &str, mutex: &str) -> Duration {
    let factory = connect(url, "");
    let began = Instant::now();
    factory.ping(PATIENCE).unwrap();
    let connected = Instant::now();
    // Another thread, because this one may hold a guard that is lost.
    let locker = locker(&factory, mutex);
    let guard = thread::spawn(move || locker.try_lock_for(Duration::from_secs(20)).map(drop));
    guard.join().unwrap().unwrap();
    println!("  connected after {:?}", connected - began);
    connected.elapsed()
}

/// A third party's `GET_LOCK` on a name kept a free mutex from fresh contenders without end.
#[test]
fn names_held_by_a_stranger_keep_no_contender_out() {
    within(HANG, || {
        let url = database();
        let mut other = operator(&url);
        other
            .query_drop("SELECT GET_LOCK('contend:m', 0), GET_LOCK('contend:wait:m', 0)")
            .unwrap();
        let took = time_to_own(&url, "m");
        println!("names held by others: owned after {took:?}");
        assert!(took < Duration::from_secs(5), "{took:?}");
        // Also that of a process that waits: it takes its name back, or polls.
        let (_holder, guard) = held(&url);
        let (service, events) = started(&connect(&url, ""), "m", "waits");
        let token = wait_for_tokens(&url, "m", 1).remove(0);
        let process = &token[..12];
        other
            .query_drop(format!("KILL CONNECTION IS_USED_LOCK('contend:{process}')"))
            .unwrap();
        other
            .query_drop(format!("SELECT GET_LOCK('contend:{process}', 5)"))
            .unwrap();
        drop(guard);
        let began = Instant::now();
        next(&events, EventKind::Acquired);
        assert!(began.elapsed() < Duration::from_secs(10));
        drop(service);
    });
}

/// A waiter whose connections are silently dropped costs the claim time, twice at most,
/// and the waiter itself notices within seconds.
#[test]
fn silently_dropped_waiter_delays_others_by_the_claim_time() {
    within(HANG, || {
        let (server, url) = own_server(&[]);
        let proxy = Proxy::to(server.addr());
        let through = through(&proxy, &url);
        let (_holder, guard) = held(&url);
        let dark = connect(&through, "ttl=2s&transition=1s");
        let (_service, events) = started(&dark, "m", "dark");
        wait_for_tokens(&url, "m", 1);
        proxy.black_hole(testbed::Direction::Both);
        guard.unlock().unwrap();
        let took = time_to_own(&url, "m");
        println!("dropped waiter: owned after {took:?}");
        assert!(took < Duration::from_secs(6), "{took:?}");
        proxy.pass();
        next(&events, EventKind::Acquired);
    });
}

/// A waiter whose connections were silent for longer than the server allows lost its place.
#[test]
fn closed_idle_connections_cost_no_waiter_its_place() {
    within(HANG, || {
        let (_server, url) = own_server(&["--wait-timeout=2"]);
        let (_holder, guard) = held(&url);
        let factories = [connect(&url, "ttl=30s"), connect(&url, "ttl=30s")];
        let waits: Vec<_> = factories
            .iter()
            .enumerate()
            .map(|(index, factory)| {
                let service = started(factory, "m", ["first", "second"][index]);
                (service, wait_for_tokens(&url, "m", index + 1))
            })
            .collect();
        let ((first, events), _) = &waits[0];
        let tokens = waits[1].1.clone();
        let mut conn = operator(&url);
        conn.query_drop("SET wait_timeout = 60").unwrap();
        let holders = |conn: &mut Conn| -> Vec<Option<u64>> {
            let processes = tokens.iter().map(|token| &token[..12]);
            let names =
                processes.flat_map(|it| [format!("contend:{it}"), format!("contend:wait:{it}")]);
            names.map(|name| holder_of(conn, &name)).collect()
        };
        let before = holders(&mut conn);
        // Time is the subject: longer than that limit, and than the time between two signs of life.
        thread::sleep(ms(4_500));
        assert_eq!(holders(&mut conn), before);
        assert_eq!(wait_for_tokens(&url, "m", 2), tokens);
        guard.unlock().unwrap();
        let released = Instant::now();
        next(events, EventKind::Acquired);
        // Well below the poll interval, at which a lost wake-up would be made up for.
        assert!(released.elapsed() < ms(800), "{:?}", released.elapsed());
        assert!(first.is_owner());
    });
}

/// Its patience is shorter than the lease that people use.
#[test]
fn short_timeout_is_enough_to_lock_and_to_learn_the_holder() {
    within(HANG, || {
        let url = database();
        let parameters = "ttl=60s&transition=30s";
        let (ours, theirs) = (connect(&url, parameters), connect(&url, parameters));
        // The subject is a statement's time, not that of the first log-in.
        theirs.ping(PATIENCE).unwrap();
        let locker = theirs.locker("m").id("theirs").build().unwrap();
        for timeout in [1, 100, 700] {
            let guard = locker.try_lock_for(ms(timeout)).unwrap();
            guard.unlock().unwrap();
        }
        let _guard = ours.locker("m").id("ours").build().unwrap().lock().unwrap();
        for timeout in [1, 100, 700] {
            let error = elsewhere(|| locker.try_lock_for(ms(timeout)).map(drop).unwrap_err());
            assert_eq!(error.kind(), ErrorKind::Held, "{timeout} ms: {error}");
            assert!(error.to_string().contains("\"ours\""), "{error}");
        }
    });
}

/// A waiter that is paused keeps what it is handed for the claim time, and no longer.
#[test]
fn paused_waiter_delays_others_by_the_claim_time() {
    within(HANG, || {
        let url = database();
        let (_holder, guard) = held(&url);
        let paused = connect(&url, "ttl=30s");
        let (raw, _parker) = registers_and_sleeps(&paused, "m");
        wait_for_tokens(&url, "m", 1);
        // The claim time runs from the release on, however long its reply takes.
        let released = Instant::now();
        guard.unlock().unwrap();
        let took = time_to_own(&url, "m");
        println!("paused waiter: owned after {took:?}");
        let kept = released.elapsed();
        assert!(kept >= ms(490), "it was its turn: {kept:?}");
        assert!(took < Duration::from_secs(6), "{took:?}");
        drop(raw);
    });
}

/// An acquire that arrives after its caller gave up does nothing.
#[test]
fn late_acquire_does_nothing() {
    within(HANG, || {
        let (server, url) = own_server(&[]);
        let factory = connect(&url, "ttl=2s&transition=30s");
        let ours = locker(&factory, "m");
        drop(ours.lock().unwrap());
        server.pause();
        assert!(ours.try_lock_for(ms(300)).is_err());
        thread::sleep(Duration::from_secs(1));
        server.resume();
        let took = time_to_own(&url, "m");
        println!("after a pause: owned after {took:?}");
        assert!(took < Duration::from_secs(6), "the ghost owns it: {took:?}");
    });
}

/// A renewal brings the end back.
#[test]
fn clock_that_was_set_back_leaves_no_lease_ahead() {
    within(HANG, || {
        let url = database();
        let mut conn = operator(&url);
        let factory = connect(&url, "ttl=5s&transition=1s");
        let (_service, events) = started(&factory, "m", "a");
        let fence = next(&events, EventKind::Acquired).fence().unwrap();
        // What a clock set back by ten minutes leaves behind.
        conn.query_drop("UPDATE simba_mutex SET ttl_at = ttl_at + 600000, transition_at = transition_at + 600000")
            .unwrap();
        wait_until(PATIENCE, "a renewal has brought the end back", || {
            let ahead: Option<i64> = conn
                .query_first(
                    "SELECT CAST(transition_at AS SIGNED) - CAST(UNIX_TIMESTAMP(SYSDATE(3)) * 1000 AS SIGNED) \
                     FROM simba_mutex",
                )
                .unwrap();
            ahead.unwrap() <= 6_000
        });
        assert!(factory.owner("m").unwrap().fence() == fence);
    });
}

/// Another account's waiters cannot be killed. They poll, and none is shut out.
#[test]
fn waiter_of_another_account_polls() {
    within(HANG, || {
        let (_server, url) = own_server(&[]);
        create_users(&url);
        let as_user = |user: &str| url.replace("root@", &format!("{user}:pw@"));
        let one = connect(&as_user("one"), "ttl=30s");
        let two = connect(&as_user("two"), "ttl=30s");
        for (holder, waiter) in [(&one, &two), (&two, &one)] {
            let guard = locker(holder, "m").lock().unwrap();
            let waits = thread::spawn({
                let locker = locker(waiter, "m");
                move || locker.try_lock_for(Duration::from_secs(20)).map(drop)
            });
            wait_for_tokens(&url, "m", 1);
            let began = Instant::now();
            guard.unlock().unwrap();
            waits.join().unwrap().unwrap();
            let took = began.elapsed();
            assert!(took < Duration::from_secs(8), "{took:?}");
        }
    });
}

/// A limit on the time of statements ended waits.
#[test]
fn limit_on_statements_ends_no_wait() {
    within(HANG, || {
        let limit = if testbed::is_mysql() {
            "--max-execution-time=300"
        } else {
            "--max-statement-time=0.3"
        };
        let (_server, url) = own_server(&[limit]);
        let (_holder, guard) = held(&url);
        let factory = connect(&url, "ttl=30s");
        let (_service, events) = started(&factory, "m", "waits");
        wait_for_tokens(&url, "m", 1);
        thread::sleep(Duration::from_secs(1));
        let condition = factory.backend().unwrap().condition();
        assert_eq!(condition.wakeups, Wakeups::Working);
        guard.unlock().unwrap();
        next(&events, EventKind::Acquired);
    });
}

/// Why contenders poll is known.
#[test]
fn whether_contenders_are_woken_is_visible() {
    within(HANG, || {
        let url = database();
        let wakeups = |factory: &Factory| factory.backend().unwrap().condition().wakeups;
        let polling = connect(&url, "wakeups=off");
        assert_eq!(wakeups(&polling), Wakeups::Polling("wakeups=off".into()));
        let holder = connect(&url, "");
        assert_eq!(wakeups(&holder), Wakeups::Untried);
        let guard = locker(&holder, "m").lock().unwrap();
        // A mutex that had no row is no reason to open the waiting connections.
        assert_eq!(wakeups(&holder), Wakeups::Untried);
        let factory = connect(&url, "");
        let waits = locker(&factory, "m");
        let waits = thread::spawn(move || waits.try_lock_for(PATIENCE).is_ok());
        wait_until(PATIENCE, "it can be woken", || {
            wakeups(&factory) == Wakeups::Working
        });
        let pool = factory.backend().unwrap().condition().pool.unwrap();
        assert!(pool.open > 0 && pool.size == 8, "{pool:?}");
        drop(guard);
        assert!(waits.join().unwrap());
    });
}

#[test]
fn process_beyond_the_full_list_polls() {
    within(HANG, || {
        let url = database();
        let mut conn = operator(&url);
        let (_holder, guard) = held(&url);
        let full: String = (0..210)
            .map(|n| format!(":{}", 100_000_000_000_000_000_u64 + n))
            .collect();
        conn.exec_drop("UPDATE simba_mutex SET waiters = ?", (full,))
            .unwrap();
        let factory = connect(&url, "ttl=30s&poll_interval=200ms");
        let waits = thread::spawn({
            let locker = locker(&factory, "m");
            move || locker.try_lock_for(Duration::from_secs(30)).map(drop)
        });
        thread::sleep(ms(500));
        // A release passes over 16 dead ones; what is left runs out.
        guard.unlock().unwrap();
        waits.join().unwrap().unwrap();
    });
}

/// The last waiter is dropped without a word, and its token goes.
#[test]
fn dropped_contender_leaves_no_token() {
    within(HANG, || {
        let url = database();
        let (_holder, guard) = held(&url);
        let factory = connect(&url, "ttl=30s");
        let (raw, _parker) = registers_and_sleeps(&factory, "m");
        wait_for_tokens(&url, "m", 1);
        drop(raw);
        wait_for_tokens(&url, "m", 0);
        drop(guard);
    });
}

fn questions(conn: &mut Conn) -> u64 {
    status(conn, "Com_stmt_execute")
}

/// Two statements for an uncontended cycle, and two for a hand-off inside a process.
#[test]
fn cycle_is_two_statements_with_waiters_and_without() {
    within(HANG, || {
        let (_server, url) = own_server(&[]);
        let mut conn = operator(&url);
        let factory = connect(&url, "ttl=60s");
        let ours = locker(&factory, "m");
        drop(ours.lock().unwrap());
        let before = questions(&mut conn);
        for _ in 0..100 {
            drop(ours.lock().unwrap());
        }
        let alone = questions(&mut conn) - before;
        println!("100 uncontended cycles: {alone} statements");
        assert_eq!(alone, 200);

        let locks = AtomicUsize::new(0);
        let before = questions(&mut conn);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let locker = locker(&factory, "m");
                    for _ in 0..100 {
                        let guard = locker.lock().unwrap();
                        locks.fetch_add(1, Ordering::SeqCst);
                        // Long enough for the others to queue up again.
                        thread::sleep(ms(2));
                        drop(guard);
                    }
                });
            }
        });
        let contended = questions(&mut conn) - before;
        println!("400 contended locks in one process: {contended} statements");
        assert!(contended < 1_000, "{contended}");
    });
}

/// A mixed fleet: the statements of Simba 3.1 and of Simba 4 beside ours, on Simba's own table after
/// the script that upgrades it. How many turns each
/// takes depends on who polls how often; that each takes turns, and none beside another, does not.
#[test]
fn simba_contenders_take_turns_with_ours() {
    const TURNS: usize = 10;
    within(HANG, || {
        let url = empty_database();
        let mut conn = operator(&url);
        conn.query_drop(SEEDS_TABLE).unwrap();
        conn.query_drop(contend::mysql::UPGRADE_SQL).unwrap();
        drop(locker(&connect(&url, ""), "m").lock().unwrap());
        let over = AtomicBool::new(false);
        let turns: [AtomicUsize; 3] = Default::default();
        let (holders, overlaps) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let fences = std::sync::Mutex::new(Vec::new());
        // One turn; `fence`: only Simba 3.1 has none.
        let take_turn = |who: usize, fence: Option<u64>| {
            if holders.fetch_add(1, Ordering::SeqCst) > 0 {
                overlaps.fetch_add(1, Ordering::SeqCst);
            }
            fences.lock().unwrap().extend(fence);
            turns[who].fetch_add(1, Ordering::SeqCst);
            thread::sleep(ms(5));
            holders.fetch_sub(1, Ordering::SeqCst);
        };
        let rest = || thread::sleep(ms(rand::random_range(20..60)));
        let now = "CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS UNSIGNED)";
        let simba = |who: usize, id: &str, fencing: bool| {
            let mut conn = operator(&url);
            let raise = if fencing {
                "fencing_token = IF(owner_id = ? AND transition_at > 0, fencing_token, fencing_token + 1),"
            } else {
                "fencing_token = IF(? = '', 0, fencing_token),"
            };
            let acquire = format!(
                "UPDATE simba_mutex SET {raise} acquired_at = {now}, ttl_at = {now} + 5000, \
                 transition_at = {now} + 8000, owner_id = ?, version = version + 1 WHERE mutex = 'm' \
                 AND (transition_at < {now} OR (owner_id = ? AND transition_at > {now}))"
            );
            while !over.load(Ordering::SeqCst) {
                conn.exec_drop(&acquire, (id, id, id)).unwrap();
                if conn.affected_rows() == 0 {
                    thread::sleep(ms(10));
                    continue;
                }
                // As its driver reads it: an int.
                let (version, fence): (i32, u64) = conn
                    .query_first("SELECT version, fencing_token FROM simba_mutex WHERE mutex = 'm'")
                    .unwrap()
                    .unwrap();
                assert!(version >= 0);
                take_turn(who, fencing.then_some(fence));
                conn.exec_drop(
                    "UPDATE simba_mutex SET acquired_at = 0, ttl_at = 0, transition_at = 0, \
                     owner_id = '', version = version + 1 WHERE mutex = 'm' AND owner_id = ?",
                    (id,),
                )
                .unwrap();
                rest();
            }
        };
        let ours = || {
            let factory = connect(&url, "poll_interval=20ms");
            let locker = factory.locker("m").id("i".repeat(128)).build().unwrap();
            while !over.load(Ordering::SeqCst) {
                let guard = locker.lock().unwrap();
                take_turn(2, Some(guard.fence()));
                drop(guard);
                rest();
            }
        };
        let began = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| simba(0, "simba-3", false));
            scope.spawn(|| simba(1, "simba-4", true));
            scope.spawn(ours);
            let all = || {
                turns
                    .iter()
                    .all(|turns| turns.load(Ordering::SeqCst) >= TURNS)
            };
            while !all() && began.elapsed() < Duration::from_secs(60) {
                thread::sleep(ms(10));
            }
            over.store(true, Ordering::SeqCst);
        });
        let turns = turns.map(AtomicUsize::into_inner);
        println!(
            "turns of Simba 3.1, Simba 4 and ours in {:?}: {turns:?}",
            began.elapsed()
        );
        assert_eq!(overlaps.into_inner(), 0);
        assert!(turns.iter().all(|turns| *turns >= TURNS), "{turns:?}");
        let fences = fences.into_inner().unwrap();
        assert!(fences.is_sorted_by(|a, b| a < b), "fences fell");
    });
}

/// Counts attempts.
#[derive(Default)]
struct Attempts(AtomicUsize);

impl Probe for Attempts {
    fn acquire(&self, _mutex: &str, _outcome: AcquireOutcome<'_>, _took: Duration) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Each contender behind the head of a queue undid the head's back-off.
#[test]
fn outage_is_met_by_one_locker_of_a_process() {
    let count = 50;
    within(HANG, || {
        let (server, url) = own_server(&[]);
        let proxy = Proxy::to(server.addr());
        let through = through(&proxy, &url);
        let (_holder, guard) = held(&url);
        let attempts = Arc::new(Attempts::default());
        let factory = connect(&through, "").with_probe(Arc::clone(&attempts) as _);
        let locked = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..count {
                scope.spawn(|| {
                    let guard = locker(&factory, "m").lock().unwrap();
                    locked.fetch_add(1, Ordering::SeqCst);
                    drop(guard);
                });
            }
            wait_for_tokens(&url, "m", 1);
            proxy.refuse();
            proxy.cut();
            let (before, spent) = (
                attempts.0.load(Ordering::SeqCst),
                cpu_time(std::process::id()),
            );
            // Time is the subject: back-off keeps the attempts few.
            thread::sleep(ms(4_000));
            let made = attempts.0.load(Ordering::SeqCst) - before;
            let spent = cpu_time(std::process::id()).saturating_sub(spent);
            println!("{count} lockers, 4 s without a server: {made} attempts, {spent:?} of CPU");
            assert!(made < 60, "{made}");
            proxy.pass();
            drop(guard);
        });
        assert_eq!(locked.into_inner(), count);
    });
}

/// An answer to KILL that was not expected ended wake-ups for the life of the factory.
#[test]
fn refused_kill_leaves_wake_ups_on() {
    within(HANG, || {
        let (server, url) = own_server(&[]);
        create_users(&url);
        let (_holder, guard) = held(&url);
        // The account changes after the first log-in: connections of the pool may not kill the one that waits.
        let log_ins = AtomicUsize::new(0);
        let factory = contend::mysql::Builder::new("127.0.0.1", "app")
            .port(server.addr().port())
            .credentials(move || {
                let is_first = log_ins.fetch_add(1, Ordering::SeqCst) == 0;
                let user = if is_first { "one" } else { "two" };
                (user.to_owned(), "pw".to_owned())
            })
            .pool_size(1)
            .build()
            .unwrap();
        let (_service, events) = started(&factory, "m", "waits");
        wait_until(PATIENCE, "it can be woken", || {
            factory.health().wakeups == Wakeups::Working
        });
        wait_for_tokens(&url, "m", 1);
        guard.unlock().unwrap();
        next(&events, EventKind::Acquired);
    });
}

/// A wait that the session's own limit for locks ended cost the waiting connections, and waiters their place.
#[test]
fn locked_table_costs_waiters_no_place() {
    within(HANG, || {
        let url = database();
        let (_holder, guard) = held(&url);
        let factory = connect(&url, "ttl=60s");
        let (_service, events) = started(&factory, "m", "waits");
        let token = wait_for_tokens(&url, "m", 1).remove(0);
        let mut conn = operator(&url);
        let name = format!("contend:{}", &token[..12]);
        let before = holder_of(&mut conn, &name);
        assert!(before.is_some());
        conn.query_drop("LOCK TABLES simba_mutex WRITE").unwrap();
        // Time is the subject: several waits begin while the table is locked.
        thread::sleep(ms(3_500));
        conn.query_drop("UNLOCK TABLES").unwrap();
        assert_eq!(holder_of(&mut conn, &name), before);
        assert_eq!(tokens(&mut conn, "m"), std::slice::from_ref(&token));
        guard.unlock().unwrap();
        next(&events, EventKind::Acquired);
    });
}

/// A mutex whose owner and whose waiters are all dead is not listed for ever.
#[test]
fn tokens_of_dead_processes_are_not_listed() {
    within(HANG, || {
        let url = database();
        let mut conn = operator(&url);
        let dead = "INSERT INTO simba_mutex (mutex, acquired_at, ttl_at, transition_at, owner_id, version, waiters) \
                    VALUES ('dead', 1, 1, 1, 'gone', 0, ':123456789012000001')";
        conn.query_drop(dead).unwrap();
        let holder = connect(&url, "ttl=30s");
        let _guard = locker(&holder, "m").lock().unwrap();
        let backend = holder.backend().unwrap();
        let by = Moment::now() + PATIENCE;
        assert_eq!(backend.list(by).unwrap(), [Arc::<str>::from("m")]);
    });
}
