//! `Doubts`: external ids whose last call is not over, or left in doubt what it was granted; and how such
//! calls are ended.
//!
//! An id has one keeper at a time: a call, until its answer has come, also after its caller has given up; or a
//! clean-up. What a keeper leaves in doubt goes to the next one, all of it.

use std::collections::{BTreeMap, HashMap};
use std::process;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::acquire::{FIRST_POLL, RETRY};
use super::request::Wait;
use super::semaphores::{CALL, SharedSemaphores};
use crate::backend::permit_store::{Call, Held, PermitStore, Wish, reclaim_after};
use crate::background::{CleanUp, Cleaned};
use crate::cancel::{Cancel, cancelled};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};

/// The external ids that calls of this process have in hand, or have left in doubt, on one store.
#[derive(Debug, Default)]
pub(super) struct Doubts {
    ids: Mutex<HashMap<Arc<str>, Doubt>>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Doubt {
    /// A call, or the end of one, is under way.
    busy: bool,
    /// Calls with these tokens may have been granted something, which nobody holds.
    left: Vec<u64>,
    /// Of these semaphores.
    names: Vec<Arc<str>>,
}

/// The process too: a forked child has the parent's memory, and none of its calls.
type Realm = (u32, String);

impl Doubts {
    /// Those of all factories of this process that share their semaphores.
    pub(super) fn of(realm: &str) -> Arc<Doubts> {
        static ALL: Mutex<BTreeMap<Realm, Weak<Doubts>>> = Mutex::new(BTreeMap::new());
        let mut all = ALL.lock();
        all.retain(|_, doubts| doubts.strong_count() > 0);
        let known = all.entry((process::id(), realm.to_owned())).or_default();
        known.upgrade().unwrap_or_else(|| {
            let doubts = Arc::default();
            *known = Arc::downgrade(&doubts);
            doubts
        })
    }

    /// Takes an external id for a call. Returns the tokens of calls in doubt.
    ///
    /// # Errors
    /// `Timeout`; `Cancelled`.
    pub(super) fn begin(&self, wish: &Wish, by: Moment, wait: &Wait) -> Result<Vec<u64>> {
        let id = &wish.external_id;
        let mut ids = self.ids.lock();
        loop {
            let doubt = ids.entry(Arc::clone(id)).or_default();
            // Only who locks the same semaphores knows that what was sent before has come or gone.
            let names = wish.permits.iter().map(|(name, _)| name);
            if !doubt.busy && (doubt.left.is_empty() || names.eq(&doubt.names)) {
                doubt.busy = true;
                return Ok(std::mem::take(&mut doubt.left));
            }
            if wait.cancelled_by().is_some_and(Cancel::is_cancelled) {
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

    /// A call that had taken its id is over. In doubt, it leaves its tokens.
    pub(super) fn end(&self, call: &Call, in_doubt: bool) {
        let wish = &call.wish;
        if in_doubt {
            let names = wish.permits.iter().map(|(name, _)| Arc::clone(name));
            self.add(&wish.external_id, &tokens(call), names.collect());
        }
        self.give_up(&wish.external_id, &[]);
    }

    /// Gives an id up that was taken, with what is left in doubt.
    fn give_up(&self, external_id: &Arc<str>, left: &[u64]) {
        let mut ids = self.ids.lock();
        if let Some(doubt) = ids.get_mut(external_id) {
            doubt.busy = false;
            doubt.left.extend(left);
            if doubt.left.is_empty() {
                ids.remove(external_id);
            }
        }
        self.changed.notify_all();
    }

    /// Leaves something in doubt under an id, whoever has it.
    fn add(&self, external_id: &Arc<str>, left: &[u64], names: Vec<Arc<str>>) {
        let mut ids = self.ids.lock();
        let doubt = ids.entry(Arc::clone(external_id)).or_default();
        doubt.left.extend(left);
        doubt.names = names;
    }

    /// Takes an id to end all that is in doubt under it, if one of these calls is, and nobody has it.
    fn claim(&self, external_id: &Arc<str>, tokens: &[u64]) -> Claim {
        let mut ids = self.ids.lock();
        match ids.get_mut(external_id) {
            Some(doubt) if doubt.busy => Claim::Later,
            Some(doubt) if tokens.iter().any(|token| doubt.left.contains(token)) => {
                doubt.busy = true;
                Claim::Ours(std::mem::take(&mut doubt.left))
            }
            _ => Claim::Gone,
        }
    }

    /// Nobody needs to end these calls.
    fn forget(&self, external_id: &Arc<str>, tokens: &[u64]) {
        let mut ids = self.ids.lock();
        if let Some(doubt) = ids.get_mut(external_id) {
            doubt.left.retain(|token| !tokens.contains(token));
            if doubt.left.is_empty() && !doubt.busy {
                ids.remove(external_id);
            }
        }
    }
}

/// The tokens of a call and of those that it has taken over.
fn tokens(call: &Call) -> Vec<u64> {
    let former = call.former.iter().copied();
    former.chain([call.token]).collect()
}

/// What became of a claim to end calls in doubt.
#[derive(Debug, PartialEq, Eq)]
enum Claim {
    /// With the tokens of all that are in doubt.
    Ours(Vec<u64>),
    /// A call has the id: one of these, which nobody waits for, or one that takes them over or not.
    Later,
    /// They are not in doubt any more: answered, ended, or taken over by a later call.
    Gone,
}

impl SharedSemaphores {
    /// Ends, in the background, a call that is in doubt, or will be when it is over.
    pub(super) fn end_call(self: &Arc<SharedSemaphores>, call: &Call) {
        let wish = &call.wish;
        let permits = wish.permits.clone();
        self.end_calls(&wish.external_id, tokens(call), permits, wish.ttl);
    }

    /// Releases, in the background, what nobody will hold.
    pub(super) fn end_held(self: &Arc<SharedSemaphores>, held: &Held, ttl: Duration) {
        let permits = held.permits.iter();
        let permits: Vec<_> = permits
            .map(|it| (Arc::clone(&it.semaphore), it.count))
            .collect();
        let names = permits.iter().map(|(name, _)| Arc::clone(name)).collect();
        let (id, tokens) = (&held.external_id, vec![held.token]);
        self.doubts.add(id, &tokens, names);
        self.end_calls(id, tokens, permits, Some(ttl));
    }

    fn end_calls(
        self: &Arc<SharedSemaphores>,
        external_id: &Arc<str>,
        tokens: Vec<u64>,
        permits: Vec<(Arc<str>, u32)>,
        ttl: Option<Duration>,
    ) {
        let end = EndCalls {
            shared: Arc::downgrade(self),
            doubts: Arc::clone(&self.doubts),
            store: Arc::clone(&self.store),
            external_id: Arc::clone(external_id),
            tokens,
            permits,
            ttl,
            warned: false,
        };
        // Without a ttl nothing else would ever take it back.
        let until = ttl.map_or(Moment::FAR, |ttl| Moment::now() + reclaim_after(ttl) + CALL);
        let background = &self.factory.background;
        background.clean_up(Box::new(end), CALL, until);
    }
}

/// Ends a call of a factory that is gone, and its clean-ups with it. The call has its id until then, so nobody
/// else is at it.
pub(super) fn end_late(store: &dyn PermitStore, doubts: &Doubts, call: &Call) {
    let wish = &call.wish;
    last_try(store, &wish.external_id, &tokens(call), wish.ttl);
    doubts.end(call, false);
}

/// Ends calls that nobody will end if this fails.
fn last_try(store: &dyn PermitStore, id: &str, tokens: &[u64], ttl: Option<Duration>) {
    let outcome = store.bury(id, tokens, Moment::now() + CALL);
    if let Err(error) = outcome
        && ttl.is_none()
    {
        log::warn!(
            "request {id:?}: its factory ended before the server said what became of it; what it may hold \
             has no ttl, and stays held until it is released by its id or swept by age: {error}"
        );
    }
}

/// Ends calls in doubt, unless a later call under the same id takes them over.
struct EndCalls {
    shared: Weak<SharedSemaphores>,
    doubts: Arc<Doubts>,
    store: Arc<dyn PermitStore>,
    external_id: Arc<str>,
    tokens: Vec<u64>,
    permits: Vec<(Arc<str>, u32)>,
    ttl: Option<Duration>,
    /// Of an error that does not pass by itself.
    warned: bool,
}

impl CleanUp for EndCalls {
    fn label(&self) -> String {
        format!("release of request {:?}", self.external_id)
    }

    fn attempt(&mut self, by: Moment) -> Cleaned {
        let tokens = match self.doubts.claim(&self.external_id, &self.tokens) {
            Claim::Ours(tokens) => tokens,
            Claim::Later => return Cleaned::NotYet(RETRY),
            Claim::Gone => return Cleaned::Done,
        };
        let outcome = self.store.bury(&self.external_id, &tokens, by);
        let left = if outcome.is_err() { &*tokens } else { &[] };
        self.doubts.give_up(&self.external_id, left);
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
                    let permits = self.permits.iter();
                    shared.given_back(permits.map(|(name, count)| (&**name, *count)));
                }
                Cleaned::Done
            }
        }
    }
}

impl Drop for EndCalls {
    fn drop(&mut self) {
        if self.ttl.is_some() {
            // Given up: it runs out by itself.
            self.doubts.forget(&self.external_id, &self.tokens);
        } else if let Claim::Ours(tokens) = self.doubts.claim(&self.external_id, &self.tokens) {
            // Given up with its factory, perhaps for want of time only.
            last_try(&*self.store, &self.external_id, &tokens, None);
            self.doubts.give_up(&self.external_id, &[]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(name: &str) -> Wish {
        Wish {
            external_id: Arc::from("id"),
            owner: None,
            ttl: None,
            permits: vec![(Arc::from(name), 1)],
        }
    }

    fn begin(doubts: &Doubts, name: &str) -> Result<Vec<u64>> {
        doubts.begin(&wish(name), Moment::now(), &Wait::from(Duration::ZERO))
    }

    fn end(doubts: &Doubts, former: &[u64], token: u64) {
        let call = Call {
            wish: wish("a"),
            token,
            former: former.to_vec(),
            on_held: crate::backend::permit_store::OnHeld::Report,
        };
        doubts.end(&call, true);
    }

    /// An attack: the clean-up of the first call left the second, which had taken it over, to nobody.
    #[test]
    fn of_two_calls_in_doubt_under_one_id_both_are_ended() {
        let (doubts, id) = (Doubts::default(), Arc::from("id"));
        assert!(begin(&doubts, "a").unwrap().is_empty());
        end(&doubts, &[], 1);
        assert_eq!(begin(&doubts, "a").unwrap(), [1]);
        assert_eq!(doubts.claim(&id, &[1]), Claim::Later);
        end(&doubts, &[1], 2);
        // Whoever comes first ends both; after a failure they are in doubt again, for whoever comes next.
        for tokens in [&[1][..], &[1, 2]] {
            assert_eq!(doubts.claim(&id, tokens), Claim::Ours(vec![1, 2]));
            doubts.give_up(&id, &[1, 2]);
        }
        assert_eq!(doubts.claim(&id, &[1]), Claim::Ours(vec![1, 2]));
        doubts.give_up(&id, &[]);
        assert_eq!(doubts.claim(&id, &[1, 2]), Claim::Gone);
    }

    /// A wish for another semaphore locks that one: what it sees says nothing about a call that has the first
    /// one locked and is about to commit.
    #[test]
    fn a_wish_for_another_semaphore_does_not_take_over_what_is_in_doubt() {
        let (doubts, id) = (Doubts::default(), Arc::from("id"));
        begin(&doubts, "a").unwrap();
        end(&doubts, &[], 1);
        let error = begin(&doubts, "b").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert_eq!(doubts.claim(&id, &[1]), Claim::Ours(vec![1]));
        doubts.give_up(&id, &[]);
        assert!(begin(&doubts, "b").unwrap().is_empty());
    }

    #[test]
    fn factories_of_one_store_know_each_others_doubts() {
        let one = Doubts::of("memory://doubts");
        assert!(Arc::ptr_eq(&one, &Doubts::of("memory://doubts")));
        assert!(!Arc::ptr_eq(&one, &Doubts::of("memory://others")));
    }
}
