//! What every backend must do, as one set of tests: each is a fact about a [`Subject`], and a backend
//! joins by writing `conformance!(subject)` in its test file.
//!
//! Time: waits are for conditions, with [`PATIENCE`] as their end. Leases are long enough that a busy
//! machine does not lose one by accident ([`lease`]), short enough to see one run out.

#![allow(dead_code)]

mod contending;
mod contract;
pub mod hooked;
mod listening;
mod locker;
pub mod outage;
mod scheduler;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use contend::crossbeam_channel::{Receiver, RecvTimeoutError};
use contend::{Event, EventKind, Events, Factory, Lease, MutexContendService};

/// How long a condition may take to come true on a machine that has other things to do.
pub const PATIENCE: Duration = Duration::from_secs(40);

/// When a hung test is ended.
pub const HANG: Duration = Duration::from_secs(120);

pub const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A backend under test.
pub struct Subject {
    /// A factory of its own (own pool, own session) on the server that all tests of the file share.
    pub factory: Box<dyn Fn() -> Factory>,
    /// Whether waiting contenders own in the order in which they came.
    pub ordered: bool,
}

impl Subject {
    pub fn factory(&self) -> Factory {
        (self.factory)()
    }

    /// Returns `true` if an ownership lasts as long as a session, whatever the lease.
    pub fn is_kept_by_a_session(&self) -> bool {
        self.is_on("zk")
    }

    /// Returns `true` if a revoked owner is woken. Owning needs no connection on MySQL, so there an
    /// owner learns of it with its next renewal.
    pub fn notifies_owners(&self) -> bool {
        !self.is_on("mysql")
    }

    /// Returns `true` if the backend knows who waits by id. MySQL knows processes.
    pub fn queues_by_id(&self) -> bool {
        self.ordered && !self.is_on("mysql")
    }

    fn is_on(&self, scheme: &str) -> bool {
        self.factory().realm().starts_with(scheme)
    }
}

/// A lease for tests in which nothing goes wrong with time.
pub fn lease() -> Lease {
    Lease::new(ms(3_000), ms(2_000)).unwrap()
}

/// A registry in memory that no other test has, with this lease in milliseconds.
pub fn memory(ttl: u64, transition: u64) -> Factory {
    let lease = Lease::new(ms(ttl), ms(transition)).unwrap();
    contend::memory::factory(&name("registry"), lease)
}

/// A mutex name that no other test has.
pub fn name(fact: &str) -> String {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let number = COUNTER.fetch_add(1, Ordering::Relaxed);
    let salt: u32 = rand::random();
    format!("{fact}-{number}-{salt:08x}")
}

/// A started service and its events.
pub fn started(factory: &Factory, mutex: &str, id: &str) -> (MutexContendService, Events) {
    let (service, events) = factory.contend(mutex).id(id).channel().unwrap();
    service.start().unwrap();
    (service, events)
}

/// Runs `work` on another thread: one thread must not lock a mutex twice.
pub fn elsewhere<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| scope.spawn(work).join().unwrap())
}

/// Waits until the receiver of a guard's loss is closed.
pub fn closed(lost: &Receiver<()>) {
    assert_eq!(
        lost.recv_timeout(PATIENCE),
        Err(RecvTimeoutError::Disconnected)
    );
}

/// The next event of this kind; others are passed over, but not one that breaks alternation.
pub fn next(events: &Events, kind: EventKind) -> Event {
    loop {
        let event = events
            .recv_timeout(PATIENCE)
            .unwrap_or_else(|_| panic!("no {kind:?} within {PATIENCE:?}"));
        if event.kind == kind {
            return event;
        }
        assert!(
            !matches!(event.kind, EventKind::Acquired | EventKind::Released),
            "{:?} came where {kind:?} was due: {event:?}",
            event.kind,
        );
    }
}

/// Acquired and Released alternate.
pub fn opposite(kind: EventKind) -> EventKind {
    match kind {
        EventKind::Acquired => EventKind::Released,
        _ => EventKind::Acquired,
    }
}

/// Waits until the service knows that `owner` owns: then its own attempt was refused, and it stands
/// in the queue where there is one.
pub fn wait_for_owner(service: &MutexContendService, owner: &str) {
    testbed::wait_until(
        PATIENCE,
        &format!("{} sees {owner} own", service.id()),
        || service.state().after().is_owner(owner),
    );
}

macro_rules! facts {
    ($($module:ident: $($fact:ident),+ $(,)?;)+) => {
        $($(
            pub fn $fact(subject: &Subject) {
                testbed::within(HANG, || $module::$fact(subject));
            }
        )+)+

        /// Makes a test of every fact, for the subject that the expression gives.
        #[macro_export]
        macro_rules! conformance {
            ($subject:expr) => {
                $($(
                    #[test]
                    fn $fact() {
                        $crate::conformance::$fact(&$subject);
                    }
                )+)+
            };
        }
    };
}

facts! {
    contending:
        started_service_owns,
        restarted_service_has_larger_fence,
        owner_renews,
        ten_contenders_have_one_owner,
        waiters_own_in_order,
        released_comes_before_acquired,
        observer_follows_the_owner,
        unrenewed_owner_steps_down,
        dropped_service_releases,
        service_stops_at_any_time,
        departed_waiter_is_passed_over,
        doubles_do_not_alternate,
        stop_ends_delivery,
        every_name_is_itself;
    contract:
        stale_fence_touches_nothing,
        expired_lease_is_not_renewed,
        hand_over_is_kept_for_its_waiter,
        withdrawn_waiter_hands_on,
        adoption_raises_the_fence,
        owner_alone_records_a_run,
        last_run_has_its_age,
        revoked_owner_loses_to_the_next,
        inspection_shows_owner_and_queue;
    listening:
        slow_callback_delays_no_renewal,
        panicking_callback_stops_no_other,
        next_owner_waits_for_the_callback,
        callback_can_stop_its_service,
        executor_runs_own_callbacks,
        full_channel_drops_whole_pairs;
    locker:
        lock_excludes_until_unlocked,
        unlock_wakes_the_waiter,
        lockers_lock_in_order,
        lockers_exclude_each_other,
        timed_out_lock_leaves_no_trace,
        guard_is_renewed,
        unrenewed_guard_is_lost,
        max_hold_ends_a_guard,
        panic_releases_the_lock,
        reentry_is_an_error,
        lock_all_is_all_or_none,
        cancel_ends_wait,
        other_thread_drops_a_guard,
        locker_and_service_take_turns,
        fronts_share_ids;
    scheduler:
        one_leader_works_and_fails_over,
        stop_leads_until_work_has_ended,
        lost_leadership_cancels_work,
        new_leader_keeps_the_beat,
        new_leader_rests_after_last_run,
        lost_work_ends_with_its_leadership,
        new_leader_skips_what_was_missed;
}
