//! What a user sees of an outage, on any server that can be killed, paused and started again.

use std::any::Any;
use std::thread;
use std::time::{Duration, Instant};

use contend::{Cancel, ErrorKind, Factory, Guard};
use testbed::wait_until;

use super::{PATIENCE, ms};

/// What a call may take beyond its own timeout: the limit of a request, and the scheduling of threads.
pub const LIMIT: Duration = ms(2_200);

/// What a loaded machine may add: less than the second request that a missing bound would wait for.
const SLACK: Duration = ms(1_500);

/// Prints a row of a table, and fails where a call took longer than its own timeout and the limit.
pub fn bounded(backend: &str, what: &str, own: Duration, took: Duration, outcome: &str) {
    let bound = own + LIMIT;
    println!("{backend:>8}  {what:<26} {took:>9.1?}  bound {bound:>6?}  {outcome}");
    assert!(took < bound + SLACK, "{backend}: {what} took {took:?}");
}

/// A waiter asks nothing until the lease of the owner ends: the lost connection wakes it.
pub fn shows_in_the_health_of_a_waiting_service(url: &str, kill: impl Fn(), start: impl Fn()) {
    let url = format!("{url}?ttl=40s&transition=10s");
    let [first, second] = [(); 2].map(|()| contend::connect(&url).unwrap());
    let leader = first.contend("m").build().unwrap();
    leader.start().unwrap();
    wait_until(PATIENCE, "it leads", || leader.is_owner());
    let waiter = second.contend("m").build().unwrap();
    waiter.start().unwrap();
    wait_until(PATIENCE, "it waits", || waiter.state().after().has_owner());
    assert!(second.health().is_fine());
    kill();
    wait_until(Duration::from_secs(15), "it is seen", || {
        !second.health().is_fine()
    });
    start();
    wait_until(PATIENCE, "it is over", || second.health().is_fine());
}

/// Every call that a caller waits for ends in time, while the server does not answer and the ttl is a minute.
pub fn calls_end(backend: &str, factory: Factory, pause: impl FnOnce()) {
    assert!(factory.lease().ttl() >= Duration::from_secs(8));
    let locker = |mutex| factory.locker(mutex).build().unwrap();
    let (first, second, held) = (locker("m"), locker("n"), locker("held"));
    drop(first.lock().unwrap());
    let held = held.lock().unwrap();
    let many = factory.lock_all(["a", "b", "c", "d"]).lock().unwrap();
    let services = ["stopped", "dropped"].map(|mutex| {
        let service = factory.contend(mutex).build().unwrap();
        service.start().unwrap();
        wait_until(PATIENCE, "it leads", || service.is_owner());
        service
    });
    let cancel = Cancel::new();
    let waits = |mutex| {
        let locker = factory.locker(mutex).cancel(&cancel).build().unwrap();
        thread::spawn(move || {
            let kind = locker.lock().map(drop).unwrap_err().kind();
            (kind, Instant::now())
        })
    };
    let queued = waits("held");
    // It stands in line then: on the server or, on MySQL, in this process, where it cannot be seen.
    thread::sleep(ms(500));
    pause();

    let asking = waits("asked");
    // Its request is under way then.
    thread::sleep(ms(300));
    let began = Instant::now();
    cancel.cancel();
    for (what, wait) in [
        ("cancel of a wait", queued),
        ("cancel of a request", asking),
    ] {
        let (kind, at) = wait.join().unwrap();
        assert_eq!(kind, ErrorKind::Cancelled);
        bounded(backend, what, ms(0), at - began, "cancelled");
    }

    let row = |what: &str, own: Duration, call: &mut dyn FnMut() -> String| {
        let began = Instant::now();
        let outcome = call();
        bounded(backend, what, own, began.elapsed(), &outcome);
    };
    let error = |locked: contend::Result<Guard>| locked.unwrap_err().to_string();
    let short = ms(300);
    for what in ["try_lock_for(300ms)", "try_lock_for(300ms) again"] {
        row(what, short, &mut || error(first.try_lock_for(short)));
    }
    row("try_lock", ms(0), &mut || error(second.try_lock()));
    row("owner", ms(0), &mut || format!("{:?}", factory.owner("m")));
    row("list", ms(0), &mut || format!("{:?}", factory.list()));
    row("revoke", ms(0), &mut || {
        format!("{:?}", factory.revoke("m", 1))
    });
    let [stopped, dropped] = services;
    row("stop of a leader", ms(0), &mut || {
        format!("{:?}", stopped.stop())
    });
    let values: [(&str, Box<dyn Any>); 4] = [
        ("drop of a held guard", Box::new(held)),
        ("drop of a guard of four", Box::new(many)),
        ("drop of a leader", Box::new(dropped)),
        (
            "drop of the factory",
            Box::new((stopped, first, second, factory)),
        ),
    ];
    for (what, value) in values {
        let mut value = Some(value);
        row(what, ms(0), &mut || {
            value = None;
            String::new()
        });
    }
}
