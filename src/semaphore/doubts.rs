//! `Doubts`: external ids whose last call is not over, or left in doubt what it was granted; and how such
//! calls are ended.
//!
//! One at a time has an id: a call, until its answer has come, also after its caller has given up; or a
//! clean-up. What it leaves in doubt goes to the next one, all of it; where no clean-up will come any more, for
//! as long as something of it may still come.

use std::collections::{BTreeMap, HashMap};
use std::process;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::acquire::{FIRST_POLL, RETRY};
use super::semaphores::{CALL, SharedSemaphores};
use crate::backend::permit_store::{Call, Held, PermitStore, Wish, reclaim_after};
use crate::background::{CleanUp, Cleaned};
use crate::cancel::cancelled;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};

/// The external ids that calls of this process have in hand, or have left in doubt, on one store.
#[derive(Debug, Default)]
pub(super) struct Doubts {
    ids: Mutex<Ids>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Ids {
    doubts: HashMap<Arc<str>, Doubt>,
    /// When the first of those that nobody will end is to be forgotten.
    next_end: Option<Moment>,
}

#[derive(Debug, Default)]
struct Doubt {
    /// A call, or the end of one, is under way.
    busy: bool,
    /// Calls with these tokens may have been granted something, which nobody holds.
    left: Vec<u64>,
    /// Of these semaphores.
    names: Vec<Arc<str>>,
    /// Without a ttl.
    lasting: bool,
    /// Clean-ups that will end what is left.
    keepers: usize,
    /// How long a call may go on after its end.
    patience: Duration,
    /// Nobody will end what is left, and after this nothing of it can come any more.
    end: Option<Moment>,
}

impl Ids {
    /// Forgets what nobody will end, and nothing can come of any more.
    fn forget_old(&mut self) {
        let now = Moment::now();
        if self.next_end.is_some_and(|end| end <= now) {
            self.doubts
                .retain(|_, doubt| doubt.end.is_none_or(|end| end > now));
            self.next_end = self.doubts.values().filter_map(|doubt| doubt.end).min();
        }
    }

    /// Somebody is done with an id. Returns `true` if something without a ttl is left to nobody.
    fn settle(&mut self, external_id: &Arc<str>) -> bool {
        let Some(doubt) = self.doubts.get_mut(external_id) else {
            return false;
        };
        if doubt.busy || doubt.keepers > 0 {
            return false;
        }
        if doubt.left.is_empty() {
            self.doubts.remove(external_id);
            return false;
        }
        let end = Moment::now() + CALL * 2 + doubt.patience;
        doubt.end = Some(end);
        self.next_end.get_or_insert(end);
        doubt.lasting
    }
}

/// The process too: a forked child has the parent's memory, and none of its calls.
type Realm = (u32, String);

impl Doubts {
    /// Those of all factories of this process that share their semaphores. What is in doubt outlives the last
    /// of them: the next one must not take it for somebody else's while something of it may still come.
    pub(super) fn of(realm: &str) -> Arc<Doubts> {
        static ALL: Mutex<BTreeMap<Realm, Arc<Doubts>>> = Mutex::new(BTreeMap::new());
        let here = process::id();
        let mut all = ALL.lock();
        // A forked child leaves its parent's alone: a thread that is not there any more may have them locked.
        all.retain(|(process, _), doubts| {
            *process != here || Arc::strong_count(doubts) > 1 || doubts.has_any()
        });
        Arc::clone(all.entry((here, realm.to_owned())).or_default())
    }

    /// Returns `true` if an id is in hand or in doubt.
    fn has_any(&self) -> bool {
        let mut ids = self.ids.lock();
        ids.forget_old();
        !ids.doubts.is_empty()
    }

    /// Takes an external id for a call. Returns the tokens of calls in doubt.
    ///
    /// # Errors
    /// `Timeout`; `Cancelled`.
    pub(super) fn begin(
        &self,
        wish: &Wish,
        by: Moment,
        is_cancelled: impl Fn() -> bool,
    ) -> Result<Vec<u64>> {
        let id = &wish.external_id;
        let mut ids = self.ids.lock();
        loop {
            ids.forget_old();
            let doubt = ids.doubts.entry(Arc::clone(id)).or_default();
            // Only who locks the same semaphores knows that what was sent before has come or gone.
            let names = wish.permits.iter().map(|(name, _)| name);
            if !doubt.busy && (doubt.left.is_empty() || names.clone().eq(&doubt.names)) {
                doubt.lasting = wish.ttl.is_none() || doubt.lasting && !doubt.left.is_empty();
                doubt.names = names.cloned().collect();
                return Ok(doubt.take());
            }
            if is_cancelled() {
                return Err(cancelled(format_args!("request {id:?}")));
            }
            if by.remaining().is_zero() {
                let message = format!(
                    "request {id:?}: another call of this process under the same external id has not ended \
                     yet"
                );
                return Err(Error::new(ErrorKind::Timeout, message).before_asking());
            }
            // Not for long: nobody notifies of a cancelled wait here.
            let most = by.remaining().min(FIRST_POLL);
            self.changed.wait_for(&mut ids, most);
        }
    }

    /// What a call that took its id has in hand: all of it is in doubt until it is known not to be.
    pub(super) fn taken(&self, call: &Call) -> Taken<'_> {
        Taken {
            doubts: self,
            external_id: Arc::clone(&call.wish.external_id),
            left: tokens(call),
            last: false,
        }
    }

    /// Takes an id to end all that is in doubt under it, if one of these calls is, and nobody has it.
    fn claim(&self, external_id: &Arc<str>, tokens: &[u64]) -> Claim<'_> {
        let mut ids = self.ids.lock();
        match ids.doubts.get_mut(external_id) {
            Some(doubt) if doubt.busy => Claim::Later,
            Some(doubt) if tokens.iter().any(|token| doubt.left.contains(token)) => {
                Claim::Ours(Taken {
                    doubts: self,
                    external_id: Arc::clone(external_id),
                    left: doubt.take(),
                    last: false,
                })
            }
            _ => Claim::Gone,
        }
    }

    /// A clean-up will end what is left under an id, now or later.
    fn keep(&self, external_id: &Arc<str>, patience: Duration) {
        let mut ids = self.ids.lock();
        let doubt = ids.doubts.entry(Arc::clone(external_id)).or_default();
        doubt.keepers += 1;
        doubt.patience = doubt.patience.max(patience);
        doubt.end = None;
    }

    /// That clean-up is over. Returns `true` if it leaves something without a ttl to nobody.
    fn leave(&self, external_id: &Arc<str>) -> bool {
        let mut ids = self.ids.lock();
        if let Some(doubt) = ids.doubts.get_mut(external_id) {
            doubt.keepers -= 1;
        }
        ids.settle(external_id)
    }
}

impl Doubt {
    /// Adds what nobody holds any more. Where another call has the id, or left something, only whoever locks
    /// the semaphores of both knows what is still to come.
    fn add(&mut self, token: u64, names: Vec<Arc<str>>) {
        if !self.busy && self.left.is_empty() {
            self.names.clear();
        }
        self.left.push(token);
        self.names.extend(names);
        self.names.sort();
        self.names.dedup();
    }

    fn take(&mut self) -> Vec<u64> {
        self.busy = true;
        self.end = None;
        std::mem::take(&mut self.left)
    }
}

/// An id that was taken. Dropped, it is given up, with what is left in doubt: also by a panic.
#[derive(Debug)]
pub(super) struct Taken<'a> {
    doubts: &'a Doubts,
    external_id: Arc<str>,
    /// The tokens of calls in doubt.
    pub(super) left: Vec<u64>,
    /// Nobody comes after this.
    pub(super) last: bool,
}

impl Taken<'_> {
    /// Ends what is in doubt.
    pub(super) fn bury(&mut self, store: &dyn PermitStore, by: Moment) -> Result<bool> {
        let released = store.bury(&self.external_id, &self.left, by)?;
        self.left.clear();
        Ok(released)
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let mut ids = self.doubts.ids.lock();
        if let Some(doubt) = ids.doubts.get_mut(&self.external_id) {
            doubt.busy = false;
            doubt.left.append(&mut self.left);
        }
        let lost = ids.settle(&self.external_id);
        drop(ids);
        self.doubts.changed.notify_all();
        if lost && self.last {
            log::warn!("{}", given_up(&self.external_id, FACTORY_ENDED));
        }
    }
}

const FACTORY_ENDED: &str = "its factory ended before the server said what became of it";

const PANICKED: &str = "its release panicked before the server said what became of it";

/// Says why nobody will end what is in doubt under an id, and that nothing else will.
fn given_up(external_id: &str, why: &str) -> String {
    format!(
        "request {external_id:?}: {why}; what it may hold has no ttl, and stays held until it is released by \
         its id or swept by age"
    )
}

/// The tokens of a call and of those that it has taken over.
fn tokens(call: &Call) -> Vec<u64> {
    let former = call.former.iter().copied();
    former.chain([call.token]).collect()
}

/// What became of a claim to end calls in doubt.
#[derive(Debug)]
enum Claim<'a> {
    /// With the tokens of all that are in doubt.
    Ours(Taken<'a>),
    /// A call has the id: one of these, which nobody waits for, or one that takes them over or not.
    Later,
    /// They are not in doubt any more: answered, ended, or taken over by a later call.
    Gone,
}

impl SharedSemaphores {
    /// What ends a call that is in doubt, or will be when it is over.
    pub(super) fn end_of_call(self: &Arc<SharedSemaphores>, call: &Call) -> EndCalls {
        let wish = &call.wish;
        let permits = wish.permits.clone();
        self.end_of(&wish.external_id, tokens(call), permits, wish.ttl)
    }

    /// Releases, in the background, what nobody will hold.
    pub(super) fn end_held(self: &Arc<SharedSemaphores>, held: &Held, ttl: Duration) {
        let permits = held.permits.iter();
        let permits: Vec<_> = permits
            .map(|it| (Arc::clone(&it.semaphore), it.count))
            .collect();
        let names = permits.iter().map(|(name, _)| Arc::clone(name)).collect();
        let id = &held.external_id;
        let end = self.end_of(id, vec![held.token], permits, Some(ttl));
        if let Some(doubt) = self.doubts.ids.lock().doubts.get_mut(id) {
            doubt.add(held.token, names);
        }
        self.end(end);
    }

    fn end_of(
        self: &Arc<SharedSemaphores>,
        external_id: &Arc<str>,
        tokens: Vec<u64>,
        permits: Vec<(Arc<str>, u32)>,
        ttl: Option<Duration>,
    ) -> EndCalls {
        self.doubts.keep(external_id, self.store.patience());
        EndCalls {
            shared: Arc::downgrade(self),
            doubts: Arc::clone(&self.doubts),
            store: Arc::clone(&self.store),
            external_id: Arc::clone(external_id),
            tokens,
            permits,
            ttl,
            warned: false,
            over: FACTORY_ENDED,
        }
    }

    /// Ends calls in the background.
    pub(super) fn end(&self, end: EndCalls) {
        // Without a ttl nothing else would ever take it back.
        let until = end
            .ttl
            .map_or(Moment::FAR, |ttl| Moment::now() + reclaim_after(ttl) + CALL);
        let background = &self.factory.background;
        background.clean_up(Box::new(end), CALL, until);
    }
}

/// Ends calls in doubt, unless a later call under the same id takes them over.
pub(super) struct EndCalls {
    shared: Weak<SharedSemaphores>,
    doubts: Arc<Doubts>,
    store: Arc<dyn PermitStore>,
    external_id: Arc<str>,
    tokens: Vec<u64>,
    permits: Vec<(Arc<str>, u32)>,
    ttl: Option<Duration>,
    /// Of an error that does not pass by itself.
    warned: bool,
    /// Why it is over, if it is before it is done.
    over: &'static str,
}

impl CleanUp for EndCalls {
    fn label(&self) -> String {
        format!("release of request {:?}", self.external_id)
    }

    fn attempt(&mut self, by: Moment) -> Cleaned {
        let outcome = match self.doubts.claim(&self.external_id, &self.tokens) {
            Claim::Ours(mut taken) => {
                // Until it returns: it may panic.
                let over = std::mem::replace(&mut self.over, PANICKED);
                let outcome = taken.bury(&*self.store, by);
                self.over = over;
                outcome
            }
            Claim::Later => return Cleaned::NotYet(RETRY),
            Claim::Gone => {
                // Whoever ended them may be of another factory, and woke only those who wait there.
                if let Some(shared) = self.shared.upgrade() {
                    for (name, _) in &self.permits {
                        shared.waiting.changed(name);
                    }
                }
                return Cleaned::Done;
            }
        };
        match outcome {
            Err(error) if error.is_transient() => Cleaned::Again(RETRY),
            Err(error) => {
                // A password, or the tables: whoever mends that does not start this process anew.
                if !std::mem::replace(&mut self.warned, true) {
                    log::warn!("cannot end the {} yet: {error}", self.label());
                }
                Cleaned::Again(CALL)
            }
            Ok(released) => {
                if let Some(shared) = self.shared.upgrade()
                    && released
                {
                    shared.uncount_plain(&self.external_id);
                    let permits = self.permits.iter();
                    shared.wake(permits.map(|(name, count)| (&**name, *count)));
                }
                Cleaned::Done
            }
        }
    }
}

impl Drop for EndCalls {
    /// Without a call: its factory may be gone.
    fn drop(&mut self) {
        if self.doubts.leave(&self.external_id) {
            log::warn!("{}", given_up(&self.external_id, self.over));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
    use std::thread;

    use super::super::acquire::Attempts;
    use super::super::request::Wait;
    use super::super::stand_in::{StandIn, stand_in};
    use super::super::wait_list::Advice;
    use super::*;
    use crate::backend::permit_store::{Decision, Failure, HeldPermit, OnHeld};
    use crate::cancel::Cancel;
    use crate::parker::Parker;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn wish_of(id: &str, name: &str) -> Wish {
        Wish {
            external_id: Arc::from(id),
            owner: None,
            ttl: None,
            permits: vec![(Arc::from(name), 1)],
        }
    }

    fn begin(doubts: &Doubts, name: &str) -> Result<Vec<u64>> {
        doubts.begin(&wish_of("id", name), Moment::now(), || false)
    }

    fn call(wish: Wish, former: &[u64], token: u64) -> Call {
        Call {
            wish,
            token,
            former: former.to_vec(),
            on_held: OnHeld::Report,
        }
    }

    fn end(doubts: &Doubts, former: &[u64], token: u64) {
        drop(doubts.taken(&call(wish_of("id", "a"), former, token)));
    }

    fn claim<'a>(doubts: &'a Doubts, tokens: &[u64]) -> Option<Taken<'a>> {
        match doubts.claim(&Arc::from("id"), tokens) {
            Claim::Ours(taken) => Some(taken),
            Claim::Later | Claim::Gone => None,
        }
    }

    /// An attack: the clean-up of the first call left the second, which had taken it over, to nobody.
    #[test]
    fn of_two_calls_in_doubt_under_one_id_both_are_ended() {
        let (doubts, id) = (Doubts::default(), Arc::from("id"));
        assert!(begin(&doubts, "a").unwrap().is_empty());
        end(&doubts, &[], 1);
        assert_eq!(begin(&doubts, "a").unwrap(), [1]);
        assert!(matches!(doubts.claim(&id, &[1]), Claim::Later));
        end(&doubts, &[1], 2);
        // Whoever comes first ends both; after a failure they are in doubt again, for whoever comes next.
        for tokens in [&[1][..], &[1, 2]] {
            assert_eq!(claim(&doubts, tokens).unwrap().left, [1, 2]);
        }
        let mut taken = claim(&doubts, &[1]).unwrap();
        taken.left.clear();
        drop(taken);
        assert!(matches!(doubts.claim(&id, &[1, 2]), Claim::Gone));
    }

    /// A wish for another semaphore locks that one: what it sees says nothing about a call that has the first
    /// one locked and is about to commit.
    #[test]
    fn a_wish_for_another_semaphore_does_not_take_over_what_is_in_doubt() {
        let doubts = Doubts::default();
        begin(&doubts, "a").unwrap();
        end(&doubts, &[], 1);
        let error = begin(&doubts, "b").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        claim(&doubts, &[1]).unwrap().left.clear();
        assert!(begin(&doubts, "b").unwrap().is_empty());
    }

    #[test]
    fn factories_of_one_store_know_each_others_doubts() {
        let one = Doubts::of("memory://doubts");
        assert!(Arc::ptr_eq(&one, &Doubts::of("memory://doubts")));
        assert!(!Arc::ptr_eq(&one, &Doubts::of("memory://others")));
    }

    /// With the last factory of a store its tokens were forgotten, whatever of them was still to come.
    #[test]
    fn what_is_in_doubt_outlives_the_last_factory_of_its_store() {
        let (realm, id) = ("memory://outlives", Arc::from("id"));
        let doubts = Doubts::of(realm);
        begin(&doubts, "a").unwrap();
        doubts.keep(&id, Duration::ZERO);
        end(&doubts, &[], 1);
        doubts.leave(&id);
        drop(doubts);
        let next = Doubts::of(realm);
        assert_eq!(begin(&next, "a").unwrap(), [1]);
        end(&next, &[1], 2);
        // Nor is it kept for longer than something of it may come.
        let_time_pass(&next);
        let gone = Arc::downgrade(&next);
        drop(next);
        Doubts::of("memory://others");
        assert_eq!(gone.strong_count(), 0);
    }

    /// Lets the time pass after which nothing of what nobody will end can come any more.
    fn let_time_pass(doubts: &Doubts) {
        let mut ids = doubts.ids.lock();
        let now = Moment::now();
        assert!(ids.next_end.take().is_some_and(|end| end > now + CALL));
        ids.next_end = Some(now);
        for doubt in ids.doubts.values_mut() {
            doubt.end = doubt.end.map(|_| now);
        }
    }

    /// A clean-up that was given up forgot its calls: the next call under the id took what they had been
    /// granted for somebody else's, and then a release that was still under way took it back.
    #[test]
    fn what_is_given_up_is_taken_over_until_nothing_of_it_can_come() {
        let (doubts, id) = (Doubts::default(), Arc::from("id"));
        begin(&doubts, "a").unwrap();
        doubts.keep(&id, Duration::ZERO);
        end(&doubts, &[], 1);
        assert!(doubts.leave(&id), "it has no ttl");
        assert_eq!(begin(&doubts, "b").unwrap_err().kind(), ErrorKind::Timeout);
        assert_eq!(begin(&doubts, "a").unwrap(), [1]);
        end(&doubts, &[1], 2);
        let_time_pass(&doubts);
        assert!(begin(&doubts, "b").unwrap().is_empty());
    }

    /// What another factory's clean-up will end is not given up.
    #[test]
    fn what_has_another_keeper_has_no_end() {
        let (doubts, id) = (Doubts::default(), Arc::from("id"));
        begin(&doubts, "a").unwrap();
        doubts.keep(&id, Duration::ZERO);
        doubts.keep(&id, Duration::ZERO);
        end(&doubts, &[], 1);
        assert!(!doubts.leave(&id));
        assert_eq!(doubts.ids.lock().next_end, None);
        claim(&doubts, &[1]).unwrap().left.clear();
        assert!(!doubts.leave(&id));
        assert!(doubts.ids.lock().doubts.is_empty());
    }

    /// An answer that comes after its clean-up was given up left its tokens for the life of the process.
    #[test]
    fn what_comes_after_its_clean_up_is_forgotten_in_time() {
        let (doubts, id) = (Doubts::default(), Arc::from("id"));
        begin(&doubts, "a").unwrap();
        doubts.keep(&id, Duration::ZERO);
        doubts.leave(&id);
        end(&doubts, &[], 1);
        let_time_pass(&doubts);
        let other = wish_of("other", "a");
        doubts.begin(&other, Moment::now(), || false).unwrap();
        assert!(!doubts.ids.lock().doubts.contains_key(&id));
    }

    fn unknown() -> Result<Decision, Failure> {
        Err(Failure {
            unknown: true,
            ..Failure::known(Error::new(ErrorKind::Unreachable, "away"))
        })
    }

    fn attempts(shared: &Arc<SharedSemaphores>, wish: Wish) -> Result<Attempts<'_>> {
        let wait = Wait::from(PATIENCE);
        Attempts::new(shared, wish, OnHeld::Report, &wait, wait.deadline())
    }

    /// Each id in doubt cost a call of five seconds, one after the other, after its factory was gone.
    #[test]
    fn no_call_begins_after_the_drop_of_a_factory() {
        const IDS: usize = 20;
        let StandIn {
            shared,
            buried,
            let_go,
            ..
        } = stand_in(unknown, false);
        let realm = shared.store.realm().to_owned();
        let wish = |number: usize| wish_of(&number.to_string(), "a");
        for number in 0..IDS {
            let mut attempts = attempts(&shared, wish(number)).unwrap();
            assert!(attempts.tries(Moment::now()).is_err());
        }
        buried.recv_timeout(PATIENCE).unwrap();
        drop(shared);
        let dropped = Moment::now();
        drop(let_go);
        // All of them ended with their burials, none of which was started for it.
        assert!(buried.iter().all(|(_, at)| at <= dropped));
        assert!(Moment::now() - dropped < CALL * 2);
        let doubts = Doubts::of(&realm);
        for number in 0..IDS {
            let former = doubts.begin(&wish(number), Moment::now(), || false);
            assert_eq!(former.unwrap().len(), 1, "the next factory takes it over");
        }
    }

    #[test]
    fn dropping_a_factory_ends_the_wait_for_an_id_in_doubt() {
        let StandIn { shared, .. } = &stand_in(unknown, false);
        let first = attempts(shared, wish_of("id", "a")).unwrap();
        thread::scope(|scope| {
            let waits = scope.spawn(|| attempts(shared, wish_of("id", "b")).map(drop));
            // As the drop of its handle does.
            let dropped = shared.factory.waits();
            dropped.cancel();
            let error = waits.join().unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Cancelled);
        });
        drop(first);
    }

    /// Another factory's clean-up ended the call, and woke only those who wait there.
    #[test]
    fn what_another_factory_ended_wakes_who_waits_here() {
        let StandIn { shared, .. } = &stand_in(unknown, false);
        begin(&shared.doubts, "a").unwrap();
        let mut clean_up = shared.end_of_call(&call(wish_of("id", "a"), &[], 1));
        end(&shared.doubts, &[], 1);
        let parker = Parker::new();
        let turn = shared.waiting.join(&wish_of("waits", "a"), &parker);
        claim(&shared.doubts, &[1]).unwrap().left.clear();
        let cleaned = clean_up.attempt(Moment::now() + PATIENCE);
        assert!(matches!(cleaned, Cleaned::Done));
        assert_eq!(turn.advice(), Advice::Try);
    }

    /// The names of the call that had the id were forgotten: a wish for the others took over what it had left,
    /// and could not know what was still to come of it.
    #[test]
    fn what_a_guard_leaves_under_an_id_in_hand_is_in_doubt_with_the_rest() {
        let StandIn { shared, .. } = &stand_in(unknown, false);
        begin(&shared.doubts, "b").unwrap();
        let held = Held {
            external_id: Arc::from("id"),
            request_id: 1,
            token: 7,
            permits: vec![HeldPermit {
                id: 1,
                semaphore_id: 1,
                semaphore: Arc::from("a"),
                count: 1,
            }],
        };
        shared.end_held(&held, PATIENCE);
        let names = || {
            let ids = shared.doubts.ids.lock();
            let names = ids.doubts.get("id").map(|doubt| doubt.names.clone());
            names
                .unwrap()
                .iter()
                .map(|it| it.to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(names(), ["a", "b"]);
        end(&shared.doubts, &[], 1);
        assert_eq!(
            begin(&shared.doubts, "a").unwrap_err().kind(),
            ErrorKind::Timeout
        );
    }

    /// It kept its id for ever.
    #[test]
    fn a_burial_that_panics_gives_its_id_up() {
        let StandIn { shared, .. } = &stand_in(unknown, true);
        begin(&shared.doubts, "a").unwrap();
        let mut clean_up = shared.end_of_call(&call(wish_of("id", "a"), &[], 1));
        end(&shared.doubts, &[], 1);
        let by = Moment::now() + PATIENCE;
        assert!(catch_unwind(AssertUnwindSafe(|| clean_up.attempt(by))).is_err());
        // It was said that its factory had ended.
        let says = given_up("id", clean_up.over);
        assert!(says.contains("panicked"), "{says}");
        assert_eq!(begin(&shared.doubts, "a").unwrap(), [1]);
    }

    /// Nobody buried what it had sent.
    #[test]
    fn a_call_that_panics_is_in_doubt() {
        let StandIn {
            shared,
            buried,
            let_go: _let_go,
            ..
        } = stand_in(|| resume_unwind(Box::new(())), false);
        let mut attempts = attempts(&shared, wish_of("id", "a")).unwrap();
        let token = attempts.call.token;
        let panicked = catch_unwind(AssertUnwindSafe(move || {
            attempts.tries(Moment::FAR).is_ok()
        }));
        assert!(panicked.is_err());
        assert_eq!(buried.recv_timeout(PATIENCE).unwrap().0, [token]);
    }

    #[test]
    fn a_cancelled_wait_in_doubt_does_not_say_that_nothing_was_acquired() {
        let StandIn { shared, .. } = &stand_in(unknown, false);
        let cancel = Cancel::new();
        let wait = Wait::from(PATIENCE).cancel(&cancel);
        let mut attempts = attempts(shared, wish_of("id", "a")).unwrap();
        cancel.cancel();
        let error = attempts.wait(&wait, wait.deadline()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cancelled);
        let message = error.to_string();
        assert!(message.contains("outcome is not known"), "{message}");
        assert!(!message.contains("nothing was acquired"), "{message}");
    }
}
