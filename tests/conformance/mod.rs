//! What every backend must do, as one set of tests: each is a fact about a [`Subject`], and a backend
//! joins by writing `conformance!(subject)` in its test file.
//!
//! Time: waits are for conditions, with [`PATIENCE`] as their end. Leases are long enough that a busy
//! machine does not lose one by accident ([`lease`]), short enough to see one run out.

#![allow(dead_code)]

mod contending;
mod contract;
mod faulty;
pub mod hooked;
mod inputs;
mod listening;
mod locker;
pub mod outage;
mod scheduler;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use contend::crossbeam_channel::{Receiver, RecvTimeoutError};
use contend::{Event, EventKind, Events, Factory, Lease, MutexContendService};

pub use faulty::Faulty;

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
    Lease::new(Duration::from_millis(3_000), Duration::from_millis(2_000)).unwrap()
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
        a_started_service_owns_and_a_stopped_one_does_not,
        a_service_restarts_and_its_fences_grow,
        an_owner_stays_owner_over_several_ttls,
        ten_contenders_have_one_owner_at_a_time,
        waiters_own_in_the_order_in_which_they_came,
        the_old_owner_is_released_before_the_new_one_acquires,
        an_observer_converges_on_the_owner,
        an_owner_that_cannot_renew_steps_down_and_owns_again,
        dropping_a_service_releases,
        stopping_a_waiting_service_takes_no_time,
        a_service_stops_in_the_middle_of_anything,
        a_waiter_that_left_is_passed_over,
        two_mutexes_do_not_disturb_each_other,
        nothing_is_delivered_after_stop;
    contract:
        a_stale_fence_renews_and_releases_nothing,
        a_lease_that_ran_out_cannot_be_renewed,
        nobody_barges_past_a_hand_over,
        a_waiter_that_withdraws_hands_on,
        an_adoption_raises_the_fence,
        a_run_is_recorded_by_the_owner_only,
        the_last_run_tells_its_age,
        a_revoked_owner_has_lost_and_the_next_owns,
        inspection_shows_the_owner_and_who_waits_in_order;
    listening:
        a_slow_callback_does_not_delay_renewal,
        a_panicking_callback_does_not_stop_the_next,
        the_next_owner_waits_for_the_callback_of_the_last,
        stop_from_inside_a_callback_returns,
        callbacks_run_on_the_executor_given,
        a_type_of_ones_own_contends,
        a_receiver_that_does_not_read_misses_whole_pairs;
    inputs:
        bad_names_ids_and_leases_are_refused_with_what_is_allowed,
        every_allowed_name_works_and_is_no_other,
        one_id_is_one_contender;
    locker:
        a_locked_mutex_is_held_and_an_unlocked_one_is_free,
        an_unlock_lets_the_waiting_locker_in,
        lockers_lock_in_the_order_in_which_they_came,
        threads_lockers_and_factories_exclude_each_other,
        a_lock_that_timed_out_leaves_no_trace_and_says_who_holds_it,
        a_guard_is_renewed_for_as_long_as_it_lives,
        a_guard_that_cannot_be_renewed_is_lost_at_the_end_of_its_ttl,
        a_guard_held_too_long_is_given_up,
        a_panic_under_the_lock_releases_it,
        locking_what_this_thread_holds_is_an_error,
        several_mutexes_are_locked_together_or_not_at_all,
        a_cancelled_wait_ends_and_leaves_no_trace,
        a_guard_may_be_dropped_by_another_thread,
        a_locker_and_a_service_take_turns,
        one_id_is_one_contender_over_fronts;
    scheduler:
        scheduled_work_runs_on_one_leader_and_fails_over,
        stop_keeps_leading_until_running_work_has_ended,
        a_restarted_scheduler_works_again,
        work_that_fails_or_panics_runs_again,
        work_is_cancelled_when_leadership_is_lost,
        a_new_leader_goes_on_where_the_last_one_was,
        a_new_leader_rests_after_the_last_ones_run,
        work_of_a_lost_leadership_does_not_go_on_in_the_next,
        a_new_leader_skips_what_was_missed;
}
