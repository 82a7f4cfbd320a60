//! Belief ends on the local boot-time clock, counted from before the request was sent: replies are delayed, and what a
//! reader sees is compared with the time of sending.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use crate::conformance::hooked::{self, Call, Switch, When};
use crate::conformance::{HANG, PATIENCE, closed, ms, name, next};
use contend::{EventKind, Factory, Lease, Moment};
use parking_lot::Mutex;
use testbed::{wait_until, within};

/// How long a reply is on its way: a belief counted from there is too long by as much.
const REPLY: Duration = ms(300);

fn lease() -> Lease {
    // Long enough for a busy machine to renew in.
    Lease::new(ms(4_000), ms(1_000)).unwrap()
}

/// What the hook saw.
struct Sent {
    /// When the last acquisition or renewal was sent, at the latest.
    at: Mutex<Moment>,
    renewals: AtomicUsize,
    /// Replies to renewals come when belief is over.
    late: Switch,
}

impl Sent {
    /// What a reader was told at `now` ends in time.
    fn bounds(&self, now: Moment, valid_for: Duration) {
        let end = *self.at.lock() + lease().belief();
        let told = now + valid_for;
        assert!(told <= end, "valid for {:?} too long", told - end);
    }

    /// Looks over three renewals.
    fn bounds_over_renewals(&self, valid_for: impl Fn() -> Duration) {
        wait_until(PATIENCE, "three renewals", || {
            let (now, valid_for) = (Moment::now(), valid_for());
            assert!(!valid_for.is_zero());
            self.bounds(now, valid_for);
            self.renewals.load(Ordering::SeqCst) >= 3
        });
    }
}

/// A factory whose replies take their time.
fn delayed() -> (Factory, Arc<Sent>) {
    let memory = contend::memory::factory(&name("belief"), lease());
    let sent = Arc::new(Sent {
        at: Mutex::new(Moment::now()),
        renewals: AtomicUsize::new(0),
        late: Switch::default(),
    });
    let seen = Arc::clone(&sent);
    let factory = hooked::around(&memory, move |when, call, _, _| {
        let renews = call == Call::Renew;
        if !renews && !matches!(call, Call::Acquire(_)) {
            return Ok(());
        }
        match when {
            When::Before => *seen.at.lock() = Moment::now(),
            When::After if renews && seen.late.is_on() => {
                let end = *seen.at.lock() + lease().belief() + REPLY;
                thread::sleep(end.remaining());
            }
            When::After => {
                thread::sleep(REPLY);
                let renewed = usize::from(renews);
                seen.renewals.fetch_add(renewed, Ordering::SeqCst);
            }
        }
        Ok(())
    });
    (factory, sent)
}

#[test]
fn service_counts_from_the_sending() {
    within(HANG, || {
        let (factory, sent) = delayed();
        let (service, events) = factory.contend("m").channel().unwrap();
        service.start().unwrap();
        let fence = next(&events, EventKind::Acquired).fence();
        sent.bounds_over_renewals(|| {
            assert_eq!(service.fence(), fence);
            service.valid_for()
        });
    });
}

#[test]
fn guard_counts_from_the_sending() {
    within(HANG, || {
        let (factory, sent) = delayed();
        let guard = factory.locker("m").build().unwrap().lock().unwrap();
        sent.bounds_over_renewals(|| guard.valid_for());
    });
}

/// The worker is in a call when the deadline passes. No reader may be told that it owns all the same, and the reply,
/// which says so, changes nothing.
#[test]
fn deadline_passes_during_a_call() {
    within(HANG, || {
        let (factory, sent) = delayed();
        let (service, events) = factory.contend("m").channel().unwrap();
        service.start().unwrap();
        let first = next(&events, EventKind::Acquired).fence();
        let guard = factory.locker("n").build().unwrap().lock().unwrap();
        sent.late.on();
        wait_until(PATIENCE, "both are over", || {
            let now = Moment::now();
            sent.bounds(now, service.valid_for().max(guard.valid_for()));
            service.fence() != first && !guard.is_valid()
        });
        sent.late.off();
        assert_eq!(next(&events, EventKind::Released).fence(), first);
        let again = next(&events, EventKind::Acquired).fence();
        assert!(again > first, "never the same one again");
        closed(&guard.lost());
        assert!(!guard.is_valid());
    });
}
