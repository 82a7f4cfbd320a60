//! The in-process queues: for each mutex the contenders of this process that wait for it, services and
//! lockers alike, first come, first served. (The queue of processes stands in the row.) Only the head of a queue talks to the server, and what it reads is published to all of it.
//!
//! No I/O here. The rules that keep the row and the queue in step:
//! - The process' token stands in the row exactly while somebody waits here. After every join,
//!   acquisition and give-up one step per mutex at a time restores that ([`Queues::plan`]).
//! - "Not registered" is noted before a withdrawal is sent: whoever joins from then on waits for that step
//!   to end, and registers anew.
//! - A head that was told to look is given a moment to do so before the waiting connection waits again
//!   ([`Queues::await_looks`]), and is not waited for after that: a wait for a row that is ours to take
//!   would end at once, again and again.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::rows::Row;
use crate::backend::Wakeups;
use crate::clock::Moment;
use crate::owner::MutexOwner;
use crate::parker::Unparker;

/// How much later than its head those behind it look whether they have become the head.
const BEHIND: Duration = Duration::from_millis(50);

/// All queues of a factory, and the state of its waiting connection.
#[derive(Debug)]
pub(super) struct Queues {
    state: Mutex<State>,
    /// Notified when the waiting thread, or a thread that waits for it, should look at the state again.
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    queues: HashMap<Arc<str>, Queue>,
    waiter: WaiterState,
    /// What the waiting connection waits for at the moment; `None` between two waits.
    watched: Option<HashSet<Arc<str>>>,
    stopped: bool,
}

/// The state of the waiting connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum WaiterState {
    /// Nobody has waited yet.
    Untried,
    /// It is being opened for the first time.
    Starting,
    /// A process that is registered will be woken.
    Up,
    /// It broke, and is being opened again. Why.
    Down(Arc<str>),
    /// Nobody can be woken on this server, or nobody wants to be. Why.
    Polling(Arc<str>),
}

/// The contenders that wait for one mutex.
#[derive(Debug)]
struct Queue {
    entries: VecDeque<Entry>,
    registered: Registered,
    /// The head should look now, whatever the time.
    told: bool,
    /// The head talks to the server at the moment.
    looking: bool,
    /// When the head looks without being told.
    next: Moment,
    /// The owner last read by any contender of the queue.
    seen: MutexOwner,
    /// Held by whoever registers or withdraws the token.
    step: Arc<Mutex<()>>,
    /// How often in a row the row looked free and could not be had.
    quarrels: u32,
}

/// Whether the process' token stands in the row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Registered {
    No,
    Yes,
    /// The answer was lost.
    Unknown,
}

/// One contender in a queue.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) number: u64,
    pub(super) unparker: Unparker,
    /// A service, which is told when the owner changes; a locker has no use for that.
    pub(super) leads: bool,
}

/// What a contender that wants to wait should do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Nobody waits here: try.
    Alone,
    /// It is the head, and should look now.
    Head {
        /// Whether its process' token stands in the row.
        registered: bool,
        /// Whether others wait behind it.
        more: bool,
    },
    /// It stands in the queue, and the time to look has not come: who owns, and when to ask again.
    Wait(MutexOwner, Duration),
}

/// What would bring row and queue in step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plan {
    Nothing,
    Register,
    Withdraw,
}

impl Queues {
    pub(super) fn new(waiter: WaiterState) -> Queues {
        Queues {
            state: Mutex::new(State {
                queues: HashMap::new(),
                waiter,
                watched: None,
                stopped: false,
            }),
            changed: Condvar::new(),
        }
    }

    // What a contender does.

    /// Returns whose turn it is. Enters the queue if others wait in it.
    pub(super) fn turn(&self, mutex: &Arc<str>, entry: &Entry) -> Turn {
        let mut state = self.state.lock();
        match state.queues.get_mut(mutex) {
            Some(queue) if !queue.entries.is_empty() => queue.turn(entry),
            _ => Turn::Alone,
        }
    }

    /// Enters the queue, and makes the head look if it is this contender.
    pub(super) fn join(&self, mutex: &Arc<str>, entry: &Entry) -> Turn {
        let mut state = self.state.lock();
        let queue = state
            .queues
            .entry(Arc::clone(mutex))
            .or_insert_with(Queue::new);
        if queue.entries.is_empty() {
            queue.told = true;
        }
        queue.turn(entry)
    }

    /// Changes a queue, if it is there, and forgets it if nothing is left of it. `change` learns whether
    /// the waiting connection is up.
    fn change<T>(&self, mutex: &str, change: impl FnOnce(&mut Queue, bool) -> T) -> Option<T> {
        let mut state = self.state.lock();
        let up = state.waiter == WaiterState::Up;
        let queue = state.queues.get_mut(mutex);
        let changed = queue.map(|queue| change(queue, up));
        state.forget(mutex);
        drop(state);
        self.changed.notify_all();
        changed
    }

    /// Waits while a condition holds, until `by`.
    fn wait_while(&self, by: Moment, condition: impl Fn(&State) -> bool) {
        let mut state = self.state.lock();
        while !by.remaining().is_zero() && condition(&state) {
            self.changed.wait_for(&mut state, by.remaining());
        }
    }

    /// Records that a contender owns the mutex, taken with the token of the process (and `more`) or without.
    /// Returns `true` if the token is to be withdrawn.
    pub(super) fn granted(
        &self,
        mutex: &Arc<str>,
        number: u64,
        token: Option<bool>,
        owner: &MutexOwner,
        gone_at: Moment,
    ) -> bool {
        let spare = self.change(mutex, |queue, up| {
            queue.quarrels = 0;
            if let Some(more) = token {
                queue.registered = if more {
                    Registered::Yes
                } else {
                    Registered::No
                };
            }
            queue.next = gone_at;
            queue.publish(owner);
            if queue.remove(number) {
                queue.told = false;
                if up && queue.registered != Registered::Yes {
                    // Somebody joined in between: it registers itself.
                    queue.tell();
                }
            }
            queue.is_spare()
        });
        spare.unwrap_or(false)
    }

    /// Records what the head saw: who owns, and when to look again.
    pub(super) fn looked(&self, mutex: &Arc<str>, number: u64, owner: &MutexOwner, next: Moment) {
        self.change(mutex, |queue, _| queue.looked(number, owner, next));
    }

    /// Records that the head could not look.
    pub(super) fn failed(&self, mutex: &Arc<str>, number: u64) {
        self.change(mutex, |queue, _| {
            if queue.is_head(number) {
                queue.looking = false;
                queue.next = Moment::now();
            }
        });
    }

    /// Records that the row looked free to the head but could not be acquired. Returns how long to leave
    /// it alone; the waiting connection does not wait for it either, because a wait would end at once.
    pub(super) fn quarrelled(
        &self,
        mutex: &Arc<str>,
        number: u64,
        poll_interval: Duration,
    ) -> Duration {
        let pause = self.change(mutex, |queue, _| {
            let quarrels = queue.quarrels.saturating_add(1);
            let pause = (Duration::from_millis(5) * 2_u32.pow(quarrels.min(10))).min(poll_interval);
            queue.looked(number, &MutexOwner::NONE, Moment::now() + pause);
            queue.quarrels = quarrels;
            pause
        });
        pause.unwrap_or(poll_interval)
    }

    /// Leaves the queue; the next one becomes its head. Returns `true` if the token is to be withdrawn.
    pub(super) fn leave(&self, mutex: &Arc<str>, number: u64) -> bool {
        let spare = self.change(mutex, |queue, _| {
            if queue.remove(number)
                && let Some(head) = queue.entries.front()
            {
                // It times the lease itself, or takes over what the last head was told.
                head.unparker.unpark();
            }
            queue.is_spare()
        });
        spare.unwrap_or(false)
    }

    /// Makes the head of a queue look. Returns `false` if nobody waits there.
    pub(super) fn tell(&self, mutex: &str) -> bool {
        let mut state = self.state.lock();
        state.queues.get_mut(mutex).is_some_and(Queue::tell)
    }

    // Bringing row and queue in step.

    /// Returns the lock of the steps for a mutex.
    pub(super) fn step(&self, mutex: &str) -> Option<Arc<Mutex<()>>> {
        let state = self.state.lock();
        state.queues.get(mutex).map(|queue| Arc::clone(&queue.step))
    }

    /// Returns what to do now; the caller holds the lock of the step. A withdrawal counts as done.
    pub(super) fn plan(&self, mutex: &str) -> Plan {
        let mut state = self.state.lock();
        let up = state.waiter == WaiterState::Up;
        let Some(queue) = state.queues.get_mut(mutex) else {
            return Plan::Nothing;
        };
        match (queue.entries.is_empty(), queue.registered) {
            (false, Registered::No | Registered::Unknown) if up => Plan::Register,
            (true, Registered::Yes | Registered::Unknown) => {
                queue.registered = Registered::No;
                Plan::Withdraw
            }
            _ => Plan::Nothing,
        }
    }

    /// Records whether the token stands in the row.
    pub(super) fn set_registered(&self, mutex: &str, registered: Registered) {
        self.change(mutex, |queue, _| queue.registered = registered);
    }

    /// Forgets a queue in which nobody waits, after a step.
    pub(super) fn step_over(&self, mutex: &str, step: Arc<Mutex<()>>) {
        drop(step);
        self.state.lock().forget(mutex);
    }

    /// Returns `true` if the waiting connection waits for other mutexes, but not for this one, which is
    /// registered and waited for. Between two waits it looks by itself.
    pub(super) fn is_unwatched(&self, mutex: &str) -> bool {
        let state = self.state.lock();
        let awaited = state.queues.get(mutex).is_some_and(Queue::is_awaited);
        awaited
            && state
                .watched
                .as_ref()
                .is_some_and(|watched| !watched.contains(mutex))
    }

    /// Waits a moment for a change.
    pub(super) fn await_change(&self, limit: Duration) {
        self.changed.wait_for(&mut self.state.lock(), limit);
    }

    // What the waiting thread does.

    pub(super) fn waiter_state(&self) -> WaiterState {
        self.state.lock().waiter.clone()
    }

    /// Returns how waiting contenders learn of a release.
    pub(super) fn wakeups(&self) -> Wakeups {
        match self.waiter_state() {
            WaiterState::Untried | WaiterState::Starting => Wakeups::Untried,
            WaiterState::Up => Wakeups::Working,
            WaiterState::Down(why) | WaiterState::Polling(why) => Wakeups::Polling(why),
        }
    }

    /// Notes that the waiting connection is being opened. Returns `false` if it was before.
    pub(super) fn start_waiter(&self) -> bool {
        let mut state = self.state.lock();
        let first = state.waiter == WaiterState::Untried && !state.stopped;
        if first {
            state.waiter = WaiterState::Starting;
        }
        first
    }

    /// Waits until the first attempt to open the waiting connection is over.
    pub(super) fn await_start(&self, by: Moment) {
        self.wait_while(by, |state| state.waiter == WaiterState::Starting);
    }

    /// Records that the waiting connection came up or went down, and makes every head look: what happened
    /// meanwhile was missed.
    pub(super) fn set_waiter(&self, waiter: WaiterState) {
        let mut state = self.state.lock();
        state.watched = None;
        if state.waiter != waiter {
            for queue in state.queues.values_mut() {
                queue.tell();
            }
        }
        state.waiter = waiter;
        drop(state);
        self.changed.notify_all();
    }

    /// Returns the mutexes to wait for. From here on they count as watched.
    pub(super) fn watch(&self) -> Vec<Arc<str>> {
        let mut state = self.state.lock();
        let awaited: Vec<Arc<str>> = state
            .queues
            .iter()
            .filter(|(_, queue)| queue.is_awaited())
            .map(|(mutex, _)| Arc::clone(mutex))
            .collect();
        state.watched = (!awaited.is_empty()).then(|| awaited.iter().cloned().collect());
        drop(state);
        self.changed.notify_all();
        awaited
    }

    /// Records that a wait is over.
    pub(super) fn unwatch(&self) {
        self.state.lock().watched = None;
    }

    /// Records the row of a mutex that is quiet.
    pub(super) fn saw_quiet(&self, mutex: &str, row: &Row) {
        let mut state = self.state.lock();
        if let Some(queue) = state.queues.get_mut(mutex) {
            queue.publish(&row.owner());
            // A lease that was renewed meanwhile ends later than its head thought.
            let ends = row.sent + row.left() + Duration::from_millis(1);
            if queue.next < ends && !queue.told && !row.is_simbas() {
                queue.next = ends;
            }
        }
    }

    /// Gives heads that were told to look a moment to do so.
    pub(super) fn await_looks(&self, mutexes: &[Arc<str>], limit: Duration) {
        self.wait_while(Moment::now() + limit, |state| {
            !state.stopped && state.any_looks(mutexes)
        });
    }

    /// Waits until there may be something to wait for, or tokens to withdraw.
    pub(super) fn await_work(&self, limit: Duration) {
        self.wait_while(Moment::now() + limit, |state| {
            !state.stopped && !state.has_work()
        });
    }

    /// Returns the mutexes for which nobody waits here, but whose rows may contain the token.
    pub(super) fn spare_tokens(&self) -> Vec<Arc<str>> {
        let state = self.state.lock();
        let spare = state.queues.iter().filter(|(_, queue)| queue.is_spare());
        spare.map(|(mutex, _)| Arc::clone(mutex)).collect()
    }

    /// Ends the waiting thread.
    pub(super) fn stop(&self) {
        self.state.lock().stopped = true;
        self.changed.notify_all();
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.state.lock().stopped
    }

    /// Pauses the waiting thread, unless it is to end.
    pub(super) fn pause(&self, limit: Duration) {
        self.wait_while(Moment::now() + limit, |state| !state.stopped);
    }
}

impl State {
    /// Forgets a queue of which nothing is left. One that is in a step is kept: a second one for the same
    /// mutex would make a second step beside it.
    fn forget(&mut self, mutex: &str) {
        if let Some(queue) = self.queues.get(mutex)
            && queue.entries.is_empty()
            && queue.registered == Registered::No
            && Arc::strong_count(&queue.step) == 1
        {
            self.queues.remove(mutex);
        }
    }

    fn any_looks(&self, mutexes: &[Arc<str>]) -> bool {
        mutexes.iter().any(|mutex| {
            let queue = self.queues.get(mutex);
            queue.is_some_and(|queue| (queue.told || queue.looking) && !queue.entries.is_empty())
        })
    }

    fn has_work(&self) -> bool {
        let mut queues = self.queues.values();
        queues.any(|queue| queue.is_awaited() || queue.is_spare())
    }
}

impl Queue {
    fn new() -> Queue {
        Queue {
            entries: VecDeque::new(),
            registered: Registered::No,
            told: false,
            looking: false,
            next: Moment::now(),
            seen: MutexOwner::NONE,
            step: Arc::default(),
            quarrels: 0,
        }
    }

    fn turn(&mut self, entry: &Entry) -> Turn {
        let known = self
            .entries
            .iter_mut()
            .find(|other| other.number == entry.number);
        match known {
            Some(known) => known.unparker = entry.unparker.clone(),
            None => self.entries.push_back(entry.clone()),
        }
        let left = self.next.remaining();
        if !self.is_head(entry.number) {
            if left.is_zero() && !self.looking && !self.told {
                // It should have looked by now.
                self.tell();
            }
            return Turn::Wait(self.seen.clone(), left + BEHIND);
        }
        if !self.told && !left.is_zero() {
            return Turn::Wait(self.seen.clone(), left);
        }
        self.told = false;
        self.looking = true;
        Turn::Head {
            registered: self.registered == Registered::Yes,
            more: self.entries.len() > 1,
        }
    }

    fn looked(&mut self, number: u64, owner: &MutexOwner, next: Moment) {
        if self.is_head(number) {
            self.looking = false;
            self.next = next;
            self.quarrels = 0;
        }
        self.publish(owner);
    }

    fn is_head(&self, number: u64) -> bool {
        self.entries
            .front()
            .is_some_and(|head| head.number == number)
    }

    /// Returns `true` if it was the head.
    fn remove(&mut self, number: u64) -> bool {
        let head = self.is_head(number);
        if head {
            self.looking = false;
        }
        self.entries.retain(|entry| entry.number != number);
        if self.entries.is_empty() {
            self.told = false;
        }
        head
    }

    fn tell(&mut self) -> bool {
        let Some(head) = self.entries.front() else {
            return false;
        };
        self.told = true;
        head.unparker.unpark();
        true
    }

    fn publish(&mut self, owner: &MutexOwner) {
        if self.seen.owner_id() != owner.owner_id() {
            for entry in self.entries.iter().filter(|entry| entry.leads) {
                entry.unparker.unpark();
            }
        }
        self.seen = owner.clone();
    }

    /// Returns `true` if the waiting connection should wait for it.
    fn is_awaited(&self) -> bool {
        !self.entries.is_empty()
            && self.registered == Registered::Yes
            && !self.told
            && !self.looking
            && self.quarrels == 0
    }

    /// Returns `true` if nobody waits, but the token may stand in the row.
    fn is_spare(&self) -> bool {
        self.entries.is_empty() && self.registered != Registered::No
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parker::{Parker, Unparked};

    struct Waits {
        parker: Parker,
        entry: Entry,
    }

    impl Waits {
        fn new(number: u64) -> Waits {
            let parker = Parker::new();
            let unparker = parker.unparker();
            Waits {
                parker,
                entry: Entry {
                    number,
                    unparker,
                    leads: false,
                },
            }
        }

        fn was_woken(&self) -> bool {
            self.parker.park(Moment::now()) == Unparked::Wake
        }
    }

    fn far() -> Moment {
        Moment::now() + Duration::from_secs(60)
    }

    fn nobody() -> MutexOwner {
        MutexOwner::NONE
    }

    /// A queue in which `waits` stand, the first one refused and registered.
    fn queue(waits: &[&Waits]) -> (Queues, Arc<str>) {
        let (queues, m) = (Queues::new(WaiterState::Up), Arc::from("m"));
        for (index, contender) in waits.iter().enumerate() {
            let turn = queues.join(&m, &contender.entry);
            assert_eq!(matches!(turn, Turn::Head { .. }), index == 0);
            if index == 0 {
                assert_eq!(queues.plan(&m), Plan::Register);
                queues.set_registered(&m, Registered::Yes);
                queues.looked(&m, contender.entry.number, &nobody(), far());
            }
        }
        (queues, m)
    }

    #[test]
    fn only_the_head_looks_and_only_when_it_is_told_or_due() {
        let (a, b) = (Waits::new(1), Waits::new(2));
        let (queues, m) = queue(&[&a, &b]);
        assert!(matches!(queues.turn(&m, &a.entry), Turn::Wait(..)));
        assert!(matches!(queues.turn(&m, &b.entry), Turn::Wait(..)));
        assert!(queues.tell(&m));
        assert!(a.was_woken() && !b.was_woken());
        assert!(matches!(queues.turn(&m, &b.entry), Turn::Wait(..)));
        let head = Turn::Head {
            registered: true,
            more: true,
        };
        assert_eq!(queues.turn(&m, &a.entry), head);
        queues.looked(&m, 1, &nobody(), Moment::now());
        assert_eq!(queues.turn(&m, &a.entry), head);
    }

    #[test]
    fn the_token_stays_while_others_wait_and_goes_with_the_last() {
        let (a, b) = (Waits::new(1), Waits::new(2));
        let (queues, m) = queue(&[&a, &b]);
        queues.tell(&m);
        queues.turn(&m, &a.entry);
        assert!(!queues.granted(&m, 1, Some(true), &nobody(), far()));
        assert_eq!(queues.plan(&m), Plan::Nothing);
        assert!(queues.leave(&m, 2));
        assert_eq!(queues.plan(&m), Plan::Withdraw);
        assert_eq!(queues.plan(&m), Plan::Nothing, "noted before it is sent");
        queues.state.lock().forget(&m);
        assert!(queues.state.lock().queues.is_empty());
    }

    /// The study's first draft lost wake-ups "where a join met an acquisition".
    #[test]
    fn who_joins_while_the_head_acquires_is_told_to_register() {
        let (a, b) = (Waits::new(1), Waits::new(2));
        let (queues, m) = queue(&[&a]);
        queues.tell(&m);
        assert!(matches!(
            queues.turn(&m, &a.entry),
            Turn::Head { more: false, .. }
        ));
        assert!(matches!(queues.turn(&m, &b.entry), Turn::Wait(..)));
        assert!(!queues.granted(&m, 1, Some(false), &nobody(), far()));
        assert!(b.was_woken());
        let head = Turn::Head {
            registered: false,
            more: false,
        };
        assert_eq!(queues.turn(&m, &b.entry), head);
        assert_eq!(queues.plan(&m), Plan::Register);
    }

    /// The other way round: who waited behind the head gave up while the head acquired for both.
    #[test]
    fn a_token_that_nobody_waits_for_any_more_is_withdrawn_by_the_winner() {
        let (a, b) = (Waits::new(1), Waits::new(2));
        let (queues, m) = queue(&[&a, &b]);
        queues.tell(&m);
        assert!(matches!(
            queues.turn(&m, &a.entry),
            Turn::Head { more: true, .. }
        ));
        assert!(!queues.leave(&m, 2), "the head still waits");
        assert!(queues.granted(&m, 1, Some(true), &nobody(), far()));
        assert_eq!(queues.plan(&m), Plan::Withdraw);
    }

    #[test]
    fn what_the_last_head_was_told_the_next_one_hears() {
        let (a, b) = (Waits::new(1), Waits::new(2));
        let (queues, m) = queue(&[&a, &b]);
        queues.tell(&m);
        assert!(!queues.leave(&m, 1));
        assert!(b.was_woken());
        assert!(matches!(queues.turn(&m, &b.entry), Turn::Head { .. }));
    }

    #[test]
    fn a_told_head_that_does_not_look_is_not_waited_for_again() {
        let a = Waits::new(1);
        let (queues, m) = queue(&[&a]);
        assert_eq!(queues.watch(), [Arc::clone(&m)]);
        assert!(!queues.is_unwatched(&m));
        queues.unwatch();
        queues.tell(&m);
        queues.await_looks(&[Arc::clone(&m)], Duration::from_millis(1));
        assert!(queues.watch().is_empty());
        queues.turn(&m, &a.entry);
        queues.looked(&m, 1, &nobody(), far());
        assert_eq!(queues.watch(), [Arc::clone(&m)]);
        // Another one, for which the wait that runs was not made.
        let (other, b) = (Arc::from("other"), Waits::new(2));
        queues.join(&other, &b.entry);
        queues.set_registered(&other, Registered::Yes);
        queues.looked(&other, 2, &nobody(), far());
        assert!(queues.is_unwatched(&other) && !queues.is_unwatched(&m));
    }

    #[test]
    fn a_queue_in_a_step_is_not_forgotten() {
        let a = Waits::new(1);
        let (queues, m) = queue(&[&a]);
        let step = queues.step(&m).unwrap();
        assert!(queues.leave(&m, 1));
        assert_eq!(queues.plan(&m), Plan::Withdraw);
        assert!(queues.step(&m).is_some());
        queues.step_over(&m, step);
        assert!(queues.step(&m).is_none());
    }

    /// Review 9: a hot loop where look and UPDATE disagree.
    #[test]
    fn who_quarrels_with_the_row_leaves_it_alone_ever_longer() {
        let a = Waits::new(1);
        let (queues, m) = queue(&[&a]);
        let second = Duration::from_secs(1);
        let pauses: Vec<Duration> = (0..12).map(|_| queues.quarrelled(&m, 1, second)).collect();
        assert!(pauses.windows(2).all(|two| two[0] <= two[1]));
        assert_eq!(pauses[11], second);
        assert!(pauses.iter().sum::<Duration>() > 4 * second);
        assert!(queues.watch().is_empty(), "a wait would end at once");
        queues.looked(&m, 1, &nobody(), far());
        assert_eq!(queues.watch(), [m]);
    }

    #[test]
    fn a_service_hears_of_a_new_owner_and_a_locker_does_not() {
        let (mut a, b) = (Waits::new(1), Waits::new(2));
        a.entry.leads = true;
        let (queues, m) = queue(&[&a, &b]);
        let _ = (a.was_woken(), b.was_woken());
        queues.looked(&m, 1, &MutexOwner::new("x", 1, 2, 3, 4), far());
        assert!(a.was_woken() && !b.was_woken());
    }
}
