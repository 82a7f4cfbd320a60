//! A factory's threads for what outlives a call: renewals of guards and permits, and clean-ups.
//!
//! Renewals and clean-ups never share a thread: a clean-up that hangs must not cost anybody a lease.
//! One thread renews; where calls hang, up to three helpers work on the same list, so that what can be
//! renewed is. A helper starts when the list falls behind, when a renewal that failed is about to be
//! repeated, or when one call could last longer than another's lease; it ends when that has not happened
//! for a while. Threads start with the first entry and end with the factory.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::clock::Moment;
use crate::error::Result;
use crate::parker::{Parker, Unparker};
use crate::thread::{self, Thread};
use crate::virtual_time::Condvar;

/// How many threads renew at most.
const MOST_RENEWERS: usize = 4;

/// How many of them may repeat what has just failed, and may hang again: one is always left for what
/// has nothing wrong with it.
const MOST_RETRIES: usize = MOST_RENEWERS - 1;

/// How many threads clean up at most.
const MOST_CLEANERS: usize = 4;

/// How long helpers stay after the last failure, and cleaners after the last job.
const CALM: Duration = Duration::from_secs(10);

/// How long dropping a factory waits for what is under way: with the connections after it, within a second.
const DROP: Duration = Duration::from_millis(400);

/// The pause between two looks of a clean-up at a call that must end first, while the factory is dropped.
const LAST_LOOKS: Duration = Duration::from_millis(5);

/// The pause between two tries of a clean-up that fails, while the factory is dropped: the server may be back.
const LAST_TRIES: Duration = Duration::from_millis(50);

/// Something that must be renewed in time: a guard, or all permits of a store.
pub(crate) trait Renewable: Send + Sync {
    /// Names it in log lines.
    fn label(&self) -> String;

    /// Does what is due with at most one call, which ends before `by`, and says when to come again.
    fn visit(&self, by: Moment) -> Next;

    /// A visit panicked: what it renews is lost.
    fn panicked(&self);
}

/// What a visit came to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Next {
    /// Visit again then.
    At(Due),
    /// Nothing is left to renew.
    Over,
}

/// When to visit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Due {
    /// When there is something to do.
    pub(crate) at: Moment,
    /// When its holder must have been told at the latest that belief has ended, if it ends.
    pub(crate) tell_by: Moment,
    /// The last renewal failed: it may hang again.
    pub(crate) again: bool,
    /// The longest that a call may take.
    pub(crate) call: Duration,
}

/// Something that an attempt of unknown outcome may have left on the server.
pub(crate) trait CleanUp: Send {
    /// Names it in log lines.
    fn label(&self) -> String;

    /// Tries to clean up, with calls that end before `by`.
    fn attempt(&mut self, by: Moment) -> Cleaned;
}

/// What an attempt to clean up came to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Cleaned {
    /// Nothing is left, or somebody else has taken it over.
    Done,
    /// Try again after this long.
    Again(Duration),
    /// A call of this process must end first: look again after this long, and while the factory is dropped
    /// for as long as that waits.
    NotYet(Duration),
}

/// Names an entry of the list of renewals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct EntryId(u64);

/// The threads of one factory.
pub(crate) struct Background {
    shared: Arc<Shared>,
}

struct Shared {
    renewals: Mutex<Renewals>,
    clean_ups: Mutex<CleanUps>,
    /// A clean-up was added, or is over, or the factory is.
    changed: Condvar,
}

impl Background {
    pub(crate) fn new() -> Background {
        Background {
            shared: Arc::new(Shared {
                renewals: Mutex::new(Renewals::new()),
                clean_ups: Mutex::new(CleanUps::default()),
                changed: Condvar::new(),
            }),
        }
    }

    /// Begins to visit `renewable` when it is due.
    ///
    /// # Errors
    /// `Unavailable` where the system allows no more threads.
    pub(crate) fn add(&self, renewable: Arc<dyn Renewable>, due: Due) -> Result<EntryId> {
        let mut renewals = self.shared.renewals.lock();
        if !renewals.renewers.iter().any(Renewer::is_started) {
            self.shared.start_renewer(&mut renewals, 0)?;
        }
        let id = renewals.insert(renewable, due);
        // Where every thread is in a call, nobody knows how long it lasts.
        if let Some(number) = renewals.missing() {
            renewals.calm_at = Moment::now() + CALM;
            self.shared.start_helper(&mut renewals, number);
        }
        Ok(id)
    }

    /// Visits an entry no later than `due` says.
    pub(crate) fn hasten(&self, id: EntryId, due: Due) {
        self.shared.renewals.lock().hasten(id, due);
    }

    /// Ends the visits of an entry; one that is under way goes on to its end.
    pub(crate) fn remove(&self, id: EntryId) {
        self.shared.renewals.lock().remove(id);
    }

    /// Cleans up, at once and again until it is done or `until` has passed.
    pub(crate) fn clean_up(&self, job: Box<dyn CleanUp>, call: Duration, until: Moment) {
        let mut clean_ups = self.shared.clean_ups.lock();
        if clean_ups.closed.is_some() {
            return;
        }
        clean_ups.jobs.push_back(Job {
            job,
            at: Moment::now(),
            call,
            until,
        });
        self.shared.staff(&mut clean_ups);
        drop(clean_ups);
        self.shared.changed.notify_all();
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        let by = Moment::now() + DROP;
        let mut threads = self.shared.renewals.lock().close();
        {
            let mut clean_ups = self.shared.clean_ups.lock();
            clean_ups.closed = Some(by);
            let now = Moment::now();
            clean_ups.jobs.iter_mut().for_each(|job| job.at = now);
            self.shared.changed.notify_all();
            threads.append(&mut clean_ups.cleaners);
        }
        for mut thread in threads {
            // One that is still in a call ends with that call.
            thread.join(by);
        }
    }
}

impl fmt::Debug for Background {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let renewals = self.shared.renewals.lock().entries.len();
        let clean_ups = self.shared.clean_ups.lock().jobs.len();
        f.debug_struct("Background")
            .field("renewals", &renewals)
            .field("clean_ups", &clean_ups)
            .finish()
    }
}

/// The list of what must be renewed: ordered keys, so that thousands cost a look-up each and no scan.
struct Renewals {
    entries: BTreeMap<u64, Entry>,
    next: u64,
    /// By when they are due.
    due: BTreeSet<(Moment, u64)>,
    /// Those whose last renewal failed, likewise: they come after all others that are due.
    retries: BTreeSet<(Moment, u64)>,
    /// By when their holders must be told.
    tell_by: BTreeSet<(Moment, u64)>,
    renewers: [Renewer; MOST_RENEWERS],
    /// How many visits are to something whose last renewal failed.
    retrying: usize,
    /// When no helper is needed any more, if nothing happens until then.
    calm_at: Moment,
    closed: bool,
}

struct Entry {
    renewable: Arc<dyn Renewable>,
    due: Due,
    stage: Stage,
}

enum Stage {
    /// In the ordered keys.
    Waiting,
    /// A thread is with it; it was asked to come again no later than this.
    Visited { hasten: Option<Due> },
}

#[derive(Default)]
struct Renewer {
    thread: Option<Thread>,
    /// What it sleeps for, and how to wake it.
    asleep: Option<(Moment, Unparker)>,
}

impl Renewer {
    fn is_started(&self) -> bool {
        self.thread.is_some()
    }
}

/// Something to visit now.
struct Visit {
    id: u64,
    renewable: Arc<dyn Renewable>,
    due: Due,
    /// Until when a call may last on account of the others.
    others: Moment,
}

impl Renewals {
    fn new() -> Renewals {
        Renewals {
            entries: BTreeMap::new(),
            next: 0,
            due: BTreeSet::new(),
            retries: BTreeSet::new(),
            tell_by: BTreeSet::new(),
            renewers: Default::default(),
            retrying: 0,
            calm_at: Moment::now(),
            closed: false,
        }
    }

    fn insert(&mut self, renewable: Arc<dyn Renewable>, due: Due) -> EntryId {
        let id = self.next;
        self.next += 1;
        let stage = Stage::Waiting;
        let entry = Entry {
            renewable,
            due,
            stage,
        };
        self.entries.insert(id, entry);
        self.queue(id, due);
        EntryId(id)
    }

    /// Threads are woken only if this is due before what they sleep for: a cycle that ends before its
    /// first renewal never wakes anybody.
    fn queue(&mut self, id: u64, due: Due) {
        self.order(due.again).insert((due.at, id));
        self.tell_by.insert((due.tell_by, id));
        self.wake_for(due.at);
    }

    fn unqueue(&mut self, id: u64, due: Due) {
        self.order(due.again).remove(&(due.at, id));
        self.tell_by.remove(&(due.tell_by, id));
    }

    fn hasten(&mut self, EntryId(id): EntryId, sooner: Due) {
        let Some(entry) = self.entries.get_mut(&id) else {
            return;
        };
        match &mut entry.stage {
            Stage::Visited { hasten } => *hasten = Some(earlier(*hasten, sooner)),
            Stage::Waiting if sooner.at < entry.due.at || sooner.tell_by < entry.due.tell_by => {
                let old = entry.due;
                let due = earlier(Some(old), sooner);
                entry.due = due;
                self.unqueue(id, old);
                self.queue(id, due);
            }
            Stage::Waiting => {}
        }
    }

    fn remove(&mut self, EntryId(id): EntryId) {
        if let Some(entry) = self.entries.remove(&id)
            && matches!(entry.stage, Stage::Waiting)
        {
            self.unqueue(id, entry.due);
        }
    }

    /// Takes what is due. Who must be told comes before who only wants to be renewed, and what may hang
    /// again comes last.
    fn pop(&mut self, now: Moment) -> Option<Visit> {
        let late = first(&self.tell_by, now);
        let id = late
            .or_else(|| first(&self.due, now))
            .or_else(|| first(&self.retries, now).filter(|_| self.retrying < MOST_RETRIES))?;
        let entry = self.entries.get_mut(&id)?;
        entry.stage = Stage::Visited { hasten: None };
        let (due, renewable) = (entry.due, Arc::clone(&entry.renewable));
        self.unqueue(id, due);
        self.retrying += usize::from(due.again);
        let others = self.tell_by.first().map_or(Moment::FAR, |(at, _)| *at);
        Some(Visit {
            id,
            renewable,
            due,
            others,
        })
    }

    /// A visit is over.
    fn visited(&mut self, id: u64, was: Due, next: Next) {
        if was.again {
            self.retrying = self.retrying.saturating_sub(1);
            if self.retrying + 1 == MOST_RETRIES {
                // Those that sleep did so without regard to what had to wait for this.
                self.wake_for(self.next_due());
            }
        }
        let Some(entry) = self.entries.get_mut(&id) else {
            return;
        };
        let Next::At(due) = next else {
            self.entries.remove(&id);
            return;
        };
        let due = match &entry.stage {
            Stage::Visited { hasten: Some(it) } => earlier(Some(*it), due),
            _ => due,
        };
        entry.stage = Stage::Waiting;
        entry.due = due;
        self.queue(id, due);
    }

    /// When there is something to do for a thread without anything to do.
    fn next_due(&self) -> Moment {
        let at = |set: &BTreeSet<(Moment, u64)>| set.first().map_or(Moment::FAR, |(at, _)| *at);
        let mut next = at(&self.due).min(at(&self.tell_by));
        if self.retrying < MOST_RETRIES {
            next = next.min(at(&self.retries));
        }
        next
    }

    /// All that sleep for longer: the first of them may find work that hangs.
    fn wake_for(&mut self, at: Moment) {
        for renewer in &mut self.renewers {
            if let Some((until, unparker)) = &mut renewer.asleep
                && at < *until
            {
                *until = at;
                unparker.unpark();
            }
        }
    }

    /// A helper ends: nobody may count on it from here on.
    fn ends(&mut self, number: usize) {
        if let Some(renewer) = self.renewers.get_mut(number) {
            *renewer = Renewer::default();
        }
    }

    /// A thread to start, if nobody is left to see to what becomes due next.
    fn missing(&self) -> Option<usize> {
        let lookout = self.closed || self.renewers.iter().any(|it| it.asleep.is_some());
        let free = || self.renewers.iter().position(|it| !it.is_started());
        if lookout { None } else { free() }
    }

    fn order(&mut self, again: bool) -> &mut BTreeSet<(Moment, u64)> {
        if again {
            &mut self.retries
        } else {
            &mut self.due
        }
    }

    /// Ends the threads, and returns them to be joined.
    fn close(&mut self) -> Vec<Thread> {
        self.closed = true;
        self.wake_for(Moment::now() - Duration::MAX);
        let threads = self.renewers.iter_mut();
        threads.filter_map(|it| it.thread.take()).collect()
    }
}

fn first(set: &BTreeSet<(Moment, u64)>, now: Moment) -> Option<u64> {
    set.first().filter(|(at, _)| *at <= now).map(|(_, id)| *id)
}

fn earlier(one: Option<Due>, other: Due) -> Due {
    one.map_or(other, |one| Due {
        at: one.at.min(other.at),
        tell_by: one.tell_by.min(other.tell_by),
        again: one.again || other.again,
        call: one.call.min(other.call),
    })
}

impl Shared {
    fn start_renewer(self: &Arc<Shared>, renewals: &mut Renewals, number: usize) -> Result<()> {
        let (shared, parker) = (Arc::clone(self), Parker::new());
        let unparker = parker.unparker();
        let thread = thread::start("contend-renew", move || shared.renew(number, &parker))?;
        if let Some(renewer) = renewals.renewers.get_mut(number) {
            renewer.thread = Some(thread);
            // It looks at the list before it does anything else: nobody needs to come beside it.
            renewer.asleep = Some((Moment::FAR, unparker));
        }
        Ok(())
    }

    /// One thread that renews.
    fn renew(self: &Arc<Shared>, number: usize, parker: &Parker) {
        // A helper joins while renewals fail: what is late then is not late because it slept.
        let mut up_since = Moment::now() - if number > 0 { CALM } else { Duration::ZERO };
        loop {
            let mut until = Moment::FAR;
            let visit = {
                let mut renewals = self.renewals.lock();
                if renewals.closed {
                    return;
                }
                let now = Moment::now();
                let visit = renewals.pop(now);
                match &visit {
                    Some(visit) => self.reinforce(&mut renewals, visit, up_since, now),
                    None if number > 0 && renewals.calm_at <= now => return renewals.ends(number),
                    None => {
                        until = renewals.next_due();
                        if number > 0 {
                            until = until.min(renewals.calm_at);
                        }
                    }
                }
                let asleep = visit.is_none().then(|| (until, parker.unparker()));
                if let Some(renewer) = renewals.renewers.get_mut(number) {
                    renewer.asleep = asleep;
                }
                visit
            };
            let Some(visit) = visit else {
                parker.park(until);
                up_since = Moment::now();
                if let Some(renewer) = self.renewals.lock().renewers.get_mut(number) {
                    renewer.asleep = None;
                }
                continue;
            };
            let by = visit.others.min(Moment::now() + visit.due.call);
            let visited = catch_unwind(AssertUnwindSafe(|| visit.renewable.visit(by)));
            let next = visited.unwrap_or_else(|_| {
                log::error!("{}: a renewal panicked", visit.renewable.label());
                visit.renewable.panicked();
                Next::Over
            });
            self.renewals.lock().visited(visit.id, visit.due, next);
        }
    }

    /// Sees to it that somebody looks after the others during a visit while renewals fail. Without that
    /// one thread is enough, and the first call that hangs costs the others the time of one.
    fn reinforce(
        self: &Arc<Shared>,
        renewals: &mut Renewals,
        visit: &Visit,
        up_since: Moment,
        now: Moment,
    ) {
        // What came late because the machine slept is nobody's fault.
        let late = now - visit.due.at.max(up_since);
        let behind = late > visit.due.call / 4;
        // A call for a long lease may last longer than a short one has left.
        let tight = visit.others < now + visit.due.call * 2;
        if behind || tight || visit.due.again {
            renewals.calm_at = now + CALM;
        }
        if now < renewals.calm_at
            && let Some(number) = renewals.missing()
        {
            self.start_helper(renewals, number);
        }
    }

    fn start_helper(self: &Arc<Shared>, renewals: &mut Renewals, number: usize) {
        if let Err(error) = self.start_renewer(renewals, number) {
            log::debug!("no helper for renewals that hang: {error}");
        }
    }
}

/// What is to be cleaned up.
#[derive(Default)]
struct CleanUps {
    jobs: VecDeque<Job>,
    cleaners: Vec<Thread>,
    /// Cleaners that will look at the jobs again: one that has seen its last is not over yet.
    at_work: usize,
    /// Cleaners that wait for something to do.
    idle: usize,
    /// The factory is gone: until when a last attempt may take.
    closed: Option<Moment>,
}

struct Job {
    job: Box<dyn CleanUp>,
    /// When to try next.
    at: Moment,
    call: Duration,
    /// When what is left goes away by itself.
    until: Moment,
}

impl Job {
    /// Makes an attempt, and returns what is to be tried again. It takes the job, so that one that is over is
    /// dropped here: neither that, which may talk to its server, nor a logger may run under the lock.
    fn attempt(mut self, now: Moment, closed: Option<Moment>) -> Option<Job> {
        let by = closed.unwrap_or(self.until).min(now + self.call);
        if by <= now {
            log::debug!("{}: given up", self.job.label());
            return None;
        }
        let after = match catch_unwind(AssertUnwindSafe(|| self.job.attempt(by))) {
            Ok(Cleaned::Done) => return None,
            Ok(Cleaned::Again(after) | Cleaned::NotYet(after)) if closed.is_none() => after,
            Ok(Cleaned::NotYet(_)) => LAST_LOOKS,
            Ok(Cleaned::Again(_)) => LAST_TRIES,
            Err(_) => {
                log::error!("{}: a clean-up panicked", self.job.label());
                return None;
            }
        };
        self.at = Moment::now() + after;
        Some(self)
    }

    /// The same job, tried again soon where the factory was dropped during its attempt: later nobody tries it.
    fn in_time(mut self, closed: Option<Moment>) -> Job {
        if closed.is_some() {
            self.at = self.at.min(Moment::now() + LAST_TRIES);
        }
        self
    }
}

impl Shared {
    /// Starts a cleaner where all are busy.
    fn staff(self: &Arc<Shared>, clean_ups: &mut CleanUps) {
        clean_ups.cleaners.retain(|thread| !thread.is_over());
        if clean_ups.idle > 0 || clean_ups.at_work >= MOST_CLEANERS {
            return;
        }
        let shared = Arc::clone(self);
        match thread::start("contend-clean-up", move || shared.clean()) {
            Ok(thread) => {
                clean_ups.cleaners.push(thread);
                clean_ups.at_work += 1;
            }
            // What is left goes away by itself when its lease ends, or with the next clean-up.
            Err(error) => log::debug!("no thread to clean up: {error}"),
        }
    }

    /// One thread that cleans up.
    fn clean(&self) {
        let mut clean_ups = self.clean_ups.lock();
        let mut idle_since = Moment::now();
        loop {
            let now = Moment::now();
            let closed = clean_ups.closed;
            let over = closed.is_some_and(|by| by <= now);
            let ready = |job: &Job| over || job.at <= now;
            if let Some(place) = clean_ups.jobs.iter().position(ready)
                && let Some(job) = clean_ups.jobs.remove(place)
            {
                drop(clean_ups);
                // Also where it panics as it is dropped: this thread counts as one at work.
                let again = catch_unwind(AssertUnwindSafe(|| job.attempt(now, closed)));
                let again = again.unwrap_or_else(|_| {
                    log::error!("a clean-up panicked as it was given up");
                    None
                });
                clean_ups = self.clean_ups.lock();
                let again = again.map(|job| job.in_time(clean_ups.closed));
                clean_ups.jobs.extend(again);
                idle_since = Moment::now();
                continue;
            }
            if clean_ups.jobs.is_empty() && (closed.is_some() || idle_since + CALM <= now) {
                clean_ups.at_work -= 1;
                return;
            }
            let next = clean_ups.jobs.iter().map(|job| job.at).min();
            let until = next.unwrap_or(idle_since + CALM);
            clean_ups.idle += 1;
            let until = until.min(closed.unwrap_or(until));
            self.changed.wait_for(&mut clean_ups, until.remaining());
            clean_ups.idle -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossbeam_channel::{Receiver, Sender, unbounded};

    /// Reports its visits; each waits for a word, or takes no time.
    struct Fake {
        visits: Sender<Moment>,
        hang: Option<Receiver<()>>,
        again_in: Duration,
        panics: bool,
    }

    impl Renewable for Fake {
        fn label(&self) -> String {
            "fake".to_owned()
        }

        fn visit(&self, by: Moment) -> Next {
            let _ = self.visits.send(Moment::now());
            if self.panics {
                std::panic::resume_unwind(Box::new(()));
            }
            if let Some(hang) = &self.hang {
                let _ = hang.recv_timeout(by.remaining());
            }
            Next::At(due(self.again_in))
        }

        fn panicked(&self) {
            let _ = self.visits.send(Moment::FAR);
        }
    }

    fn due(after: Duration) -> Due {
        Due {
            at: Moment::now() + after,
            tell_by: Moment::now() + after + Duration::from_secs(60),
            again: false,
            call: Duration::from_secs(30),
        }
    }

    fn fake(again_in: Duration) -> (Fake, Receiver<Moment>) {
        let (visits, seen) = unbounded();
        let fake = Fake {
            visits,
            hang: None,
            again_in,
            panics: false,
        };
        (fake, seen)
    }

    const PATIENCE: Duration = Duration::from_secs(60);

    /// Review core 1: a call that hangs must not cost a healthy one its renewal.
    #[test]
    fn a_visit_that_hangs_holds_up_nobody_else() {
        let background = Background::new();
        let (let_go, hang) = unbounded::<()>();
        let (mut slow, slow_visits) = fake(Duration::from_millis(1));
        slow.hang = Some(hang);
        background.add(Arc::new(slow), due(Duration::ZERO)).unwrap();
        slow_visits.recv_timeout(PATIENCE).unwrap();
        let (healthy, visits) = fake(Duration::from_millis(1));
        let due = Due {
            tell_by: Moment::now() + Duration::from_secs(5),
            ..due(Duration::ZERO)
        };
        background.add(Arc::new(healthy), due).unwrap();
        for _ in 0..3 {
            visits.recv_timeout(PATIENCE).unwrap();
        }
        drop(let_go);
    }

    /// Who must be told of a loss comes before what only wants to be renewed, what failed comes last and
    /// leaves one thread free, and a call ends before another holder must be told.
    #[test]
    fn visits_come_in_the_order_of_what_is_at_stake() {
        let ago = |ms| Moment::now() - Duration::from_millis(ms);
        let mut renewals = Renewals::new();
        let mut insert = |at, tell_by, again| {
            let (fake, _) = fake(Duration::ZERO);
            let call = Duration::from_secs(30);
            let due = Due {
                at,
                tell_by,
                again,
                call,
            };
            renewals.insert(Arc::new(fake), due).0
        };
        let far = Moment::now() + PATIENCE;
        let failed: Vec<u64> = (0..5).map(|_| insert(ago(30), far, true)).collect();
        let (renew, late) = (insert(ago(20), far, false), insert(ago(10), ago(1), false));
        let mut pop = || renewals.pop(Moment::now());
        assert_eq!(pop().map(|visit| visit.id), Some(late));
        let visit = pop().unwrap();
        assert_eq!((visit.id, visit.others), (renew, far));
        let retried: Vec<u64> = std::iter::from_fn(|| pop().map(|visit| visit.id)).collect();
        assert_eq!(retried, failed[..MOST_RETRIES]);
    }

    /// Sends until when its call may last.
    struct Bounded(Sender<Moment>);

    impl Renewable for Bounded {
        fn label(&self) -> String {
            "bounded".to_owned()
        }

        fn visit(&self, by: Moment) -> Next {
            let _ = self.0.send(by);
            Next::Over
        }

        fn panicked(&self) {}
    }

    #[test]
    fn a_call_ends_before_another_holder_must_be_told() {
        let background = Background::new();
        let (other, _) = fake(PATIENCE);
        let tell_by = Moment::now() + Duration::from_secs(5);
        let soon = Due {
            tell_by,
            ..due(Duration::from_secs(4))
        };
        background.add(Arc::new(other), soon).unwrap();
        let (sends, bounds) = unbounded();
        let long = Arc::new(Bounded(sends));
        background.add(long, due(Duration::ZERO)).unwrap();
        assert!(bounds.recv_timeout(PATIENCE).unwrap() <= tell_by);
    }

    #[test]
    fn what_is_removed_is_not_visited_and_what_is_hastened_comes_sooner() {
        let background = Background::new();
        let (one, visits) = fake(Duration::from_secs(3600));
        let id = background
            .add(Arc::new(one), due(Duration::from_secs(3600)))
            .unwrap();
        background.hasten(id, due(Duration::ZERO));
        visits.recv_timeout(PATIENCE).unwrap();
        background.remove(id);
        background.hasten(id, due(Duration::ZERO));
        assert!(visits.recv_timeout(Duration::from_millis(20)).is_err());
        assert!(background.shared.renewals.lock().tell_by.is_empty());
    }

    #[test]
    fn a_panic_in_a_visit_costs_that_entry_only() {
        let background = Background::new();
        let (mut bad, bad_visits) = fake(Duration::ZERO);
        bad.panics = true;
        background.add(Arc::new(bad), due(Duration::ZERO)).unwrap();
        bad_visits.recv_timeout(PATIENCE).unwrap();
        assert_eq!(bad_visits.recv_timeout(PATIENCE).unwrap(), Moment::FAR);
        let (good, visits) = fake(Duration::from_millis(1));
        background.add(Arc::new(good), due(Duration::ZERO)).unwrap();
        visits.recv_timeout(PATIENCE).unwrap();
    }

    struct Clean {
        attempts: Sender<()>,
        failures: u32,
        hang: Option<Receiver<()>>,
    }

    impl CleanUp for Clean {
        fn label(&self) -> String {
            "clean".to_owned()
        }

        fn attempt(&mut self, _by: Moment) -> Cleaned {
            let _ = self.attempts.send(());
            if let Some(hang) = &self.hang {
                // Deaf to its own limit, as a driver may be.
                let _ = hang.recv();
            }
            self.failures = self.failures.saturating_sub(1);
            match self.failures {
                0 => Cleaned::Done,
                // Later than a drop waits.
                _ => Cleaned::Again(DROP + Duration::from_millis(100)),
            }
        }
    }

    #[test]
    fn a_clean_up_is_repeated_until_it_is_done() {
        let background = Background::new();
        let (attempts, seen) = unbounded();
        let job = Clean {
            attempts,
            failures: 3,
            hang: None,
        };
        let until = Moment::now() + PATIENCE;
        background.clean_up(Box::new(job), PATIENCE, until);
        assert_eq!(seen.iter().count(), 3);
    }

    /// An attack: the server is just back, the first try still fails, and the drop gave up with its time unused. So it
    /// did after a try that had begun before the drop, and was to be repeated in its own good time.
    #[test]
    fn a_clean_up_that_fails_is_tried_again_while_the_factory_is_dropped() {
        let background = Background::new();
        let (attempts, seen) = unbounded();
        let (let_go, hang) = unbounded();
        let job = Clean {
            attempts,
            failures: 3,
            hang: Some(hang),
        };
        background.clean_up(Box::new(job), PATIENCE, Moment::now() + PATIENCE);
        seen.recv_timeout(PATIENCE).unwrap();
        let shared = Arc::clone(&background.shared);
        let dropped = std::thread::spawn(move || drop(background));
        while shared.clean_ups.lock().closed.is_none() {
            std::thread::yield_now();
        }
        drop(let_go);
        dropped.join().unwrap();
        assert_eq!(seen.iter().count(), 2);
    }

    /// Has `clean_ups` clean-ups hang until what is returned is dropped.
    fn hang_clean_ups(background: &Background, clean_ups: usize) -> Sender<()> {
        let (let_go, hang) = unbounded();
        let (attempts, seen) = unbounded();
        for _ in 0..clean_ups {
            let job = Clean {
                attempts: attempts.clone(),
                failures: 1,
                hang: Some(hang.clone()),
            };
            let until = Moment::now() + PATIENCE;
            background.clean_up(Box::new(job), PATIENCE, until);
            seen.recv_timeout(PATIENCE).unwrap();
        }
        let_go
    }

    #[test]
    fn a_clean_up_that_hangs_holds_up_no_other() {
        let background = Background::new();
        let let_go = hang_clean_ups(&background, MOST_CLEANERS - 1);
        let (attempts, seen) = unbounded();
        let job = Clean {
            attempts,
            failures: 1,
            hang: None,
        };
        let until = Moment::now() + PATIENCE;
        background.clean_up(Box::new(job), PATIENCE, until);
        seen.recv_timeout(PATIENCE).unwrap();
        drop(let_go);
    }

    /// Cleaners that had seen no job for long and were about to end counted as if they would see the next one.
    #[test]
    fn cleaners_that_end_do_not_keep_others_from_starting() {
        let background = Background::new();
        let (let_go, hang) = unbounded::<()>();
        for _ in 0..MOST_CLEANERS {
            let hang = hang.clone();
            let ends = thread::start("ends", move || {
                let _ = hang.recv();
            })
            .unwrap();
            background.shared.clean_ups.lock().cleaners.push(ends);
        }
        let (attempts, seen) = unbounded();
        let job = Clean {
            attempts,
            failures: 1,
            hang: None,
        };
        let until = Moment::now() + PATIENCE;
        background.clean_up(Box::new(job), PATIENCE, until);
        seen.recv_timeout(PATIENCE).unwrap();
        drop(let_go);
    }

    #[test]
    fn clean_ups_that_hang_hold_up_no_renewal() {
        let background = Background::new();
        let let_go = hang_clean_ups(&background, MOST_CLEANERS);
        let (healthy, visits) = fake(Duration::from_millis(1));
        let healthy = Arc::new(healthy);
        background.add(healthy, due(Duration::ZERO)).unwrap();
        for _ in 0..3 {
            visits.recv_timeout(PATIENCE).unwrap();
        }
        drop(let_go);
    }

    /// Tells whether clean-ups could be added while it was dropped.
    struct Dropped {
        shared: Arc<Shared>,
        free: Sender<bool>,
    }

    impl CleanUp for Dropped {
        fn label(&self) -> String {
            "dropped".to_owned()
        }

        fn attempt(&mut self, _by: Moment) -> Cleaned {
            Cleaned::Done
        }
    }

    impl Drop for Dropped {
        fn drop(&mut self) {
            let patience = Duration::from_secs(5);
            let free = self.shared.clean_ups.try_lock_for(patience).is_some();
            let _ = self.free.send(free);
        }
    }

    /// Dropping a contender may talk to its server: whoever leaves something to the background meanwhile must
    /// not wait for that.
    #[test]
    fn a_clean_up_that_is_over_is_dropped_without_the_lock() {
        let background = Background::new();
        let (sends, free) = unbounded();
        for until in [Moment::now() + PATIENCE, Moment::now()] {
            let job = Dropped {
                shared: Arc::clone(&background.shared),
                free: sends.clone(),
            };
            background.clean_up(Box::new(job), PATIENCE, until);
            assert!(free.recv_timeout(PATIENCE).unwrap());
        }
    }

    struct PanicsAsItIsDropped(Sender<()>);

    impl CleanUp for PanicsAsItIsDropped {
        fn label(&self) -> String {
            "panics as it is dropped".to_owned()
        }

        fn attempt(&mut self, _by: Moment) -> Cleaned {
            Cleaned::Done
        }
    }

    impl Drop for PanicsAsItIsDropped {
        fn drop(&mut self) {
            let _ = self.0.send(());
            std::panic::resume_unwind(Box::new(()));
        }
    }

    /// Each cost a cleaner, which was still counted: after a few nothing was cleaned up any more.
    #[test]
    fn a_clean_up_that_panics_as_it_is_dropped_costs_no_cleaner() {
        let background = Background::new();
        let until = Moment::now() + PATIENCE;
        let (drops, dropped) = unbounded();
        for _ in 0..MOST_CLEANERS * 2 {
            let job = PanicsAsItIsDropped(drops.clone());
            background.clean_up(Box::new(job), PATIENCE, until);
            dropped.recv_timeout(PATIENCE).expect("somebody cleans up");
        }
    }

    /// Rule "dropping is stopping": dropping waits for a clean-up, but not for ever.
    #[test]
    fn dropping_waits_a_second_for_a_clean_up_that_hangs() {
        let background = Background::new();
        let (let_go, hang) = unbounded::<()>();
        let (attempts, seen) = unbounded();
        let until = Moment::now() + PATIENCE;
        let hangs = Clean {
            attempts: attempts.clone(),
            failures: 1,
            hang: Some(hang),
        };
        background.clean_up(Box::new(hangs), PATIENCE, until);
        seen.recv_timeout(PATIENCE).unwrap();
        let start = Moment::now();
        drop(background);
        let took = Moment::now() - start;
        assert!(took >= DROP && took < PATIENCE / 2, "{took:?}");
        drop(let_go);
    }
}
