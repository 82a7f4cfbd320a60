//! A probe hears what happens, in order, and cannot disturb it.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::conformance::hooked::{Call, When, around};
use crate::conformance::{HANG, PATIENCE, ms, name};
use contend::{AcquireOutcome, Factory, Lease, LossReason, Probe, RenewOutcome, memory};
use parking_lot::Mutex;
use testbed::{wait_until, within};

/// Writes down what it hears.
#[derive(Default)]
struct Notes(Mutex<Vec<String>>);

impl Notes {
    fn add(&self, note: String) {
        self.0.lock().push(note);
    }

    fn all(&self) -> Vec<String> {
        self.0.lock().clone()
    }

    fn contain(&self, note: &str) -> bool {
        self.all().iter().any(|one| one == note)
    }

    /// Those of ownership: renewals and attempts come as often as they come.
    fn ownership(&self) -> Vec<String> {
        let mut notes = self.all();
        notes.retain(|note| note.starts_with("gained") || note.starts_with("lost"));
        notes
    }
}

impl Probe for Notes {
    fn acquire(&self, mutex: &str, outcome: AcquireOutcome<'_>, _took: Duration) {
        let failed = !matches!(outcome, AcquireOutcome::Granted | AcquireOutcome::Refused);
        self.add(format!("acquire {mutex} failed: {failed}"));
    }

    fn renew(&self, mutex: &str, outcome: RenewOutcome<'_>, _took: Duration) {
        let failed = !matches!(outcome, RenewOutcome::Renewed | RenewOutcome::Lost);
        self.add(format!("renew {mutex} failed: {failed}"));
    }

    fn gained(&self, mutex: &str, id: &str, fence: u64) {
        assert!(fence > 0);
        self.add(format!("gained {mutex} {id}"));
    }

    fn lost(&self, mutex: &str, id: &str, _fence: u64, held: Duration, reason: LossReason) {
        assert!(held < PATIENCE, "{held:?}");
        self.add(format!("lost {mutex} {id} {reason:?}"));
    }

    fn waited(&self, mutex: &str, waited: Duration, locked: bool) {
        assert!(waited < PATIENCE, "{waited:?}");
        self.add(format!("waited {mutex} {locked}"));
    }

    fn handed_off(&self, mutex: &str, took: Duration) {
        assert!(took < PATIENCE, "{took:?}");
        self.add(format!("handed off {mutex}"));
    }
}

fn factory(name: &str, probe: Arc<dyn Probe>) -> Factory {
    // Long enough for a busy machine to renew in.
    let lease = Lease::new(ms(2_000), ms(1_000)).unwrap();
    memory::factory(name, lease).with_probe(probe)
}

#[test]
fn probe_hears_how_ownership_begins_and_ends() {
    within(HANG, || {
        let notes = Arc::new(Notes::default());
        let factory = factory("probe-ownership", Arc::clone(&notes) as Arc<dyn Probe>);
        let handle = memory::handle("probe-ownership");
        let service = factory.contend("m").id("a").build().unwrap();
        service.start().unwrap();
        wait_until(PATIENCE, "it renews", || {
            notes.contain("renew m failed: false")
        });
        assert!(handle.revoke("m"));
        wait_until(PATIENCE, "taken away", || notes.ownership().len() >= 3);
        handle.set_unreachable(true);
        wait_until(PATIENCE, "expired", || notes.ownership().len() >= 4);
        assert!(notes.contain("renew m failed: true"), "{:?}", notes.all());
        wait_until(PATIENCE, "it tries", || {
            notes.contain("acquire m failed: true")
        });
        handle.set_unreachable(false);
        wait_until(PATIENCE, "it leads again", || notes.ownership().len() >= 5);
        service.stop().unwrap();
        assert_eq!(
            notes.ownership(),
            [
                "gained m a",
                "lost m a TakenAway",
                "gained m a",
                "lost m a Expired",
                "gained m a",
                "lost m a Released",
            ]
        );
    });
}

/// Keeps how long the last ownership was held.
#[derive(Default)]
struct Holds(Mutex<Option<Duration>>);

impl Probe for Holds {
    fn lost(&self, _: &str, _: &str, _: u64, held: Duration, _: LossReason) {
        *self.0.lock() = Some(held);
    }
}

/// Not to the moment of noticing: after a pause it would look as if two had held.
#[test]
fn hold_is_counted_to_beliefs_end() {
    within(HANG, || {
        let lease = Lease::new(ms(1_000), ms(500)).unwrap();
        let memory = memory::factory(&name("probe"), lease);
        // As if the whole process had been stopped in its first renewal.
        let factory = around(&memory, |when, call, _, _| {
            if (when, call) == (When::Before, Call::Renew) {
                thread::sleep(ms(3_000));
            }
            Ok(())
        });
        let holds = Arc::new(Holds::default());
        let factory = factory.with_probe(Arc::clone(&holds) as Arc<dyn Probe>);
        let service = factory.contend("m").build().unwrap();
        service.start().unwrap();
        wait_until(PATIENCE, "it is lost", || holds.0.lock().is_some());
        let held = holds.0.lock().unwrap();
        assert!(held <= lease.ttl(), "{held:?}");
    });
}

#[test]
fn probe_hears_of_hand_offs_and_waits() {
    within(HANG, || {
        let notes = Arc::new(Notes::default());
        let factory = factory("probe-locks", Arc::clone(&notes) as Arc<dyn Probe>);
        let first = factory.locker("m").id("first").build().unwrap();
        let second = factory.locker("m").id("second").build().unwrap();
        let guard = first.lock().unwrap();
        assert!(notes.contain("waited m true"), "{:?}", notes.all());
        let second = thread::spawn(move || {
            assert!(second.try_lock_for(Duration::from_millis(50)).is_err());
            second
        });
        let second = second.join().unwrap();
        assert!(notes.contain("waited m false"), "{:?}", notes.all());
        let waits = thread::spawn(move || second.lock().map(drop));
        wait_until(PATIENCE, "it waits", || {
            !factory.participants("m").unwrap().is_empty()
        });
        drop(guard);
        waits.join().unwrap().unwrap();
        assert!(notes.contain("handed off m"), "{:?}", notes.all());
        assert_eq!(notes.ownership().len(), 4, "{:?}", notes.all());
    });
}

/// Panics at all that these tests cause.
struct Panics;

impl Probe for Panics {
    fn acquire(&self, _: &str, _: AcquireOutcome<'_>, _: Duration) {
        panic!("on purpose: acquire");
    }
    fn renew(&self, _: &str, _: RenewOutcome<'_>, _: Duration) {
        panic!("on purpose: renew");
    }
    fn gained(&self, _: &str, _: &str, _: u64) {
        panic!("on purpose: gained");
    }
    fn lost(&self, _: &str, _: &str, _: u64, _: Duration, _: LossReason) {
        panic!("on purpose: lost");
    }
    fn waited(&self, _: &str, _: Duration, _: bool) {
        panic!("on purpose: waited");
    }
}

#[test]
fn panicking_probe_ends_nothing() {
    within(HANG, || {
        let factory = factory("probe-panics", Arc::new(Panics));
        let service = factory.contend("m").build().unwrap();
        service.start().unwrap();
        wait_until(PATIENCE, "it leads", || service.is_owner());
        let fence = service.fence();
        // Over its ttl: it renews.
        thread::sleep(ms(2_000));
        assert_eq!(service.fence(), fence);
        service.stop().unwrap();
        let locker = factory.locker("m").build().unwrap();
        assert!(locker.lock().unwrap().is_valid());
    });
}
