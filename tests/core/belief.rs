//! Rule "belief ends on the local boot-time clock, counted from before the request was sent": the replies are
//! delayed, and what a reader sees is compared with the time of sending.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use crate::conformance::hooked::{self, Call, When};
use crate::conformance::{HANG, PATIENCE, closed, name, next};
use contend::{EventKind, Factory, Lease, Moment};
use parking_lot::Mutex;
use testbed::{wait_until, within};

/// How long a reply is on its way: a belief counted from there is too long by as much.
const REPLY: Duration = Duration::from_millis(300);

fn lease() -> Lease {
    Lease::new(Duration::from_secs(2), Duration::from_secs(1)).unwrap()
}

/// What the hook saw.
struct Sent {
    /// When the last acquisition or renewal was sent, at the latest.
    at: Mutex<Moment>,
    renewals: AtomicUsize,
    /// Replies to renewals come when belief is over.
    late: AtomicBool,
}

impl Sent {
    /// Whatever a reader was told at `now` ends in time.
    fn bounds(&self, now: Moment, valid_for: Duration) {
        let end = *self.at.lock() + lease().belief();
        assert!(
            now + valid_for <= end,
            "valid for {valid_for:?}, {:?} beyond the end",
            now + valid_for - end
        );
    }
}

/// A factory whose replies take their time.
fn delayed() -> (Factory, Arc<Sent>) {
    let memory = contend::memory::factory(&name("belief"), lease());
    let sent = Arc::new(Sent {
        at: Mutex::new(Moment::now()),
        renewals: AtomicUsize::new(0),
        late: AtomicBool::new(false),
    });
    let hooked = Arc::clone(&sent);
    let factory = hooked::around(&memory, move |when, call, _, _| {
        let renews = call == Call::Renew;
        if !renews && !matches!(call, Call::Acquire(_)) {
            return Ok(());
        }
        match when {
            When::Before => *hooked.at.lock() = Moment::now(),
            When::After if renews && hooked.late.load(Ordering::SeqCst) => {
                let end = *hooked.at.lock() + lease().belief() + REPLY;
                thread::sleep(end.remaining());
            }
            When::After => {
                thread::sleep(REPLY);
                hooked
                    .renewals
                    .fetch_add(usize::from(renews), Ordering::SeqCst);
            }
        }
        Ok(())
    });
    (factory, sent)
}

#[test]
fn a_service_counts_from_the_sending_of_an_acquisition_and_of_a_renewal() {
    within(HANG, || {
        let (factory, sent) = delayed();
        let (service, events) = factory.contend("m").channel().unwrap();
        service.start().unwrap();
        let fence = next(&events, EventKind::Acquired).fence();
        wait_until(PATIENCE, "three renewals", || {
            let now = Moment::now();
            sent.bounds(now, service.valid_for());
            assert_eq!(service.fence(), fence);
            sent.renewals.load(Ordering::SeqCst) >= 3
        });
        let now = Moment::now();
        sent.bounds(now, service.valid_for());
    });
}

#[test]
fn a_guard_counts_from_the_sending_of_an_acquisition_and_of_a_renewal() {
    within(HANG, || {
        let (factory, sent) = delayed();
        let guard = factory.locker("m").build().unwrap().lock().unwrap();
        wait_until(PATIENCE, "three renewals", || {
            let now = Moment::now();
            sent.bounds(now, guard.valid_for());
            assert!(guard.is_valid());
            sent.renewals.load(Ordering::SeqCst) >= 3
        });
        let now = Moment::now();
        sent.bounds(now, guard.valid_for());
    });
}

/// The worker is in a call when the deadline passes: nobody may be told that it owns all the same, and the
/// reply, which says so, changes nothing.
#[test]
fn readers_see_the_deadline_pass_while_the_worker_is_in_a_call() {
    within(HANG, || {
        let (factory, sent) = delayed();
        let (service, events) = factory.contend("m").channel().unwrap();
        service.start().unwrap();
        let first = next(&events, EventKind::Acquired).fence();
        let guard = factory.locker("n").build().unwrap().lock().unwrap();
        sent.late.store(true, Ordering::SeqCst);
        wait_until(PATIENCE, "both are over", || {
            let now = Moment::now();
            sent.bounds(now, service.valid_for().max(guard.valid_for()));
            service.fence() != first && !guard.is_valid()
        });
        sent.late.store(false, Ordering::SeqCst);
        assert_eq!(next(&events, EventKind::Released).fence(), first);
        let again = next(&events, EventKind::Acquired).fence();
        assert!(again > first, "never the same one again");
        closed(&guard.lost());
        assert!(!guard.is_valid());
    });
}
