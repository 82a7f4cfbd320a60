//! `PermitGuard`: permits that are renewed, and given back when it goes out of scope.

use std::collections::BTreeMap;
use std::fmt;
use std::process;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crossbeam_channel::Receiver;
use parking_lot::Mutex;

use super::acquire::RETRY;
use super::renewals::Keep;
use super::semaphores::{CALL, SharedSemaphores};
use crate::backend::permit_store::{Held, HeldPermit, Permit, PermitStore, reclaim_after};
use crate::background::{CleanUp, Cleaned};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::thread::Local;

/// The longest that giving permits back takes; what is left then goes on in the background.
const GIVE_BACK: Duration = Duration::from_secs(2);

/// As above, where the guard is dropped: dropping takes a second at most.
const DROP: Duration = Duration::from_millis(800);

/// Holds permits for as long as it lives.
///
/// They are renewed in the background after every third of the ttl, and released when the guard is
/// dropped. If the server cannot be reached then, they are released as soon as it can be, or end with
/// their ttl.
///
/// ```
/// use contend::semaphore::PermitRequest;
/// use std::time::Duration;
///
/// let semaphores = contend::connect("memory://permit-guard-doc")?.semaphores()?;
/// semaphores.create("downloads", 3)?;
/// let request = PermitRequest::generated().permits("downloads", 2);
/// let mut guard = semaphores.guard(&request, Duration::ZERO)?;
///
/// let lost = guard.lost();
/// for file in 0..3 {
///     if !guard.is_valid() {
///         break; // a quarter of the ttl is left to stop in
///     }
///     // write the file; the fence says in a log under which grant
///     let _ = (file, guard.fence("downloads"), &lost);
/// }
/// guard.release_part("downloads", 1)?; // the rest needs less
/// guard.release()?; // `Lost` if the permits were not ours to the end
/// # Ok::<(), contend::Error>(())
/// ```
#[must_use = "an unused guard gives the permits back at once; bind it to a name: `let _guard = ..`"]
pub struct PermitGuard {
    shared: Local<Arc<SharedSemaphores>>,
    keep: Arc<Keep>,
    /// Its number in the list of renewals.
    number: u64,
    since: Moment,
    over: bool,
    /// Keeps the external id taken.
    _only: OnlyGuard,
}

impl PermitGuard {
    pub(super) fn new(
        shared: &Arc<SharedSemaphores>,
        keep: Arc<Keep>,
        number: u64,
        only: OnlyGuard,
    ) -> PermitGuard {
        PermitGuard {
            shared: Local::new(Arc::clone(shared)),
            keep,
            number,
            since: Moment::now(),
            over: false,
            _only: only,
        }
    }

    /// Returns the permits, in the order of the semaphores' names.
    #[must_use]
    pub fn permits(&self) -> Vec<Permit> {
        self.keep.held().to_permits()
    }

    /// Returns the fence of a semaphore's permit: larger than that of every earlier grant of that semaphore.
    ///
    /// With a capacity of 1, reject any write whose fence is lower than the highest seen, as with a lock.
    /// With a larger capacity that check would reject valid holders, whose fences differ: there a fence only
    /// identifies the grant.
    #[must_use]
    pub fn fence(&self, semaphore: &str) -> Option<u64> {
        let held = self.keep.held();
        let permit = held.permits.iter().find(|it| &*it.semaphore == semaphore);
        permit.map(|permit| permit.id)
    }

    /// Returns the external id that the permits are held under.
    #[must_use]
    pub fn external_id(&self) -> Arc<str> {
        Arc::clone(&self.keep.held().external_id)
    }

    /// Returns `true` if the permits are certainly held at the moment of the call. This is correct even
    /// while renewal is blocked or the server is unreachable, and after the machine was suspended. Once
    /// `false`, it stays `false`.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        !self.valid_for().is_zero()
    }

    /// Returns how long the permits are certainly held without another renewal; zero once they are not.
    #[must_use]
    pub fn valid_for(&self) -> Duration {
        match self.shared.here().is_some() {
            true => self.keep.valid_for(),
            false => Duration::ZERO,
        }
    }

    /// Returns a receiver that is disconnected when the permits are lost: at the end of the ttl if renewal
    /// failed, or as soon as the server reports that they were released or taken over. In the first case,
    /// a quarter of the ttl is left to stop. No message is ever sent. All receivers are disconnected, also
    /// when the guard ends.
    #[must_use]
    pub fn lost(&self) -> Receiver<()> {
        self.keep.lost()
    }

    /// Gives the permits back.
    ///
    /// # Errors
    /// `Lost` if they were not held to the end, so that more holders than the capacity allows may have
    /// worked at once. Otherwise the server could not be reached: the permits are released as soon as it
    /// can be, or end with their ttl.
    pub fn release(mut self) -> Result<()> {
        self.end(GIVE_BACK)
    }

    /// Gives back `count` permits of `semaphore` and keeps the rest.
    ///
    /// # Errors
    /// `InvalidInput` for more than the guard holds, or for all that it holds; `Lost`. If the server
    /// could not be reached, those permits are given back as soon as it can be, or with the rest.
    pub fn release_part(&mut self, semaphore: &str, count: u32) -> Result<()> {
        let shared = Arc::clone(self.shared.get()?);
        let before = self.keep.held();
        let part = before.permits.iter().find(|it| &*it.semaphore == semaphore);
        let part = match part {
            Some(part) if (1..=part.count).contains(&count) => part.clone(),
            part => {
                let held = part.map_or(0, |part| part.count);
                return Err(Error::invalid(format!(
                    "request {:?} holds {held} permits of the semaphore {semaphore:?}; {count} of them \
                     cannot be given back",
                    before.external_id
                )));
            }
        };
        let left = part.count - count;
        let mut held = Held::clone(&before);
        for own in held.permits.iter_mut().filter(|own| own.id == part.id) {
            own.count = left;
        }
        held.permits.retain(|own| own.count > 0);
        if held.permits.is_empty() {
            return Err(Error::invalid(
                "these are all permits that the guard holds; release it instead",
            ));
        }
        if !self.is_valid() {
            return Err(lost(&before));
        }
        // The belief in a part ends before it is given back.
        self.keep.set_held(held);
        shared.count(semaphore, -i64::from(count));
        let by = Moment::now() + self.keep.lease.call_budget().min(GIVE_BACK);
        match shared.store.release_part(&before, &part, left, by) {
            Ok(true) => {
                shared.wake([(semaphore, count)]);
                Ok(())
            }
            Ok(false) => {
                self.keep.end();
                Err(lost(&before))
            }
            Err(error) => {
                let lower = ReleasePart {
                    shared: Arc::downgrade(&shared),
                    store: Arc::clone(&shared.store),
                    held: before,
                    part,
                    left,
                };
                let until = Moment::now() + reclaim_after(self.keep.lease.ttl());
                let background = &shared.factory.background;
                background.clean_up(Box::new(lower), CALL, until);
                Err(error)
            }
        }
    }

    fn end(&mut self, patience: Duration) -> Result<()> {
        if std::mem::replace(&mut self.over, true) {
            return Ok(());
        }
        // In a child process the permits are still the parent's.
        let shared = self.shared.get()?;
        shared.renewals.remove(self.number);
        let was_valid = self.is_valid();
        let held = self.keep.held();
        self.keep.end();
        shared.count_held(&held, -1);
        let by = Moment::now() + self.keep.lease.call_budget().min(patience);
        let outcome = shared.store.release(&held, by);
        log::debug!(
            "released the permits of {:?}, held for {:?}",
            held.external_id,
            Moment::now() - self.since
        );
        match outcome {
            Ok(released) => {
                if released {
                    let permits = held.permits.iter();
                    shared.wake(permits.map(|it| (&*it.semaphore, it.count)));
                }
                match released && was_valid {
                    true => Ok(()),
                    false => Err(lost(&held)),
                }
            }
            Err(error) => {
                shared.end_held(&held, self.keep.lease.ttl());
                Err(error.context(format_args!(
                    "request {:?} is released as soon as the server answers, or ends with its ttl",
                    held.external_id
                )))
            }
        }
    }
}

impl Drop for PermitGuard {
    fn drop(&mut self) {
        match self.end(DROP) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::Forked => {}
            Err(error) => log::warn!("{error}"),
        }
    }
}

impl fmt::Debug for PermitGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PermitGuard")
            .field("external_id", &self.external_id())
            .field("permits", &self.permits())
            .field("valid_for", &self.valid_for())
            .finish()
    }
}

fn lost(held: &Held) -> Error {
    Error::new(
        ErrorKind::Lost,
        format!(
            "the permits of {:?} were lost before they were given back",
            held.external_id
        ),
    )
}

/// A partial release that could not be carried out yet.
struct ReleasePart {
    /// Those who wait; gone with the factory, which waits for this.
    shared: Weak<SharedSemaphores>,
    store: Arc<dyn PermitStore>,
    held: Arc<Held>,
    part: HeldPermit,
    left: u32,
}

impl CleanUp for ReleasePart {
    fn label(&self) -> String {
        format!("partial release of {:?}", self.held.external_id)
    }

    fn attempt(&mut self, by: Moment) -> Cleaned {
        let (held, part) = (&self.held, &self.part);
        match self.store.release_part(held, part, self.left, by) {
            Err(error) if error.is_transient() => Cleaned::Again(RETRY),
            outcome => {
                if let Some(shared) = self.shared.upgrade()
                    && outcome.is_ok_and(|lowered| lowered)
                {
                    shared.wake([(&*part.semaphore, part.count - self.left)]);
                }
                Cleaned::Done
            }
        }
    }
}

/// The process too: a forked child has the parent's memory, and none of its guards.
type Key = (u32, String, Arc<str>);

/// The external ids with a live guard in this process, by the realm of their store, and what those hold.
static LIVE: Mutex<BTreeMap<Key, Weak<Keep>>> = Mutex::new(BTreeMap::new());

/// Ends the belief of the guards of this process, whatever factory they come from, that hold what `which`
/// names: it is given back without them.
pub(super) fn end_guards(realm: &str, which: impl Fn(&Keep) -> bool) {
    let kept: Vec<Arc<Keep>> = {
        let live = LIVE.lock();
        let here = live.iter().filter(|((_, of, _), _)| of == realm);
        here.filter_map(|(_, keep)| keep.upgrade()).collect()
    };
    for keep in kept.iter().filter(|keep| which(keep)) {
        keep.end();
    }
}

/// Keeps an external id from having a second live guard in this process.
#[derive(Debug)]
pub(super) struct OnlyGuard {
    key: Key,
}

impl OnlyGuard {
    /// # Errors
    /// `DuplicateContender` where there is one.
    pub(super) fn new(realm: &str, external_id: &Arc<str>) -> Result<OnlyGuard> {
        let key = (process::id(), realm.to_owned(), Arc::clone(external_id));
        let mut live = LIVE.lock();
        if live.contains_key(&key) {
            return Err(Error::new(
                ErrorKind::DuplicateContender,
                format!(
                    "request {external_id:?} has a live guard in this process, or is being acquired; \
                     drop that one first, or use an external id of its own for each operation"
                ),
            ));
        }
        live.insert(key.clone(), Weak::new());
        Ok(OnlyGuard { key })
    }

    /// The guard has what it asked for.
    pub(super) fn holds(&self, keep: &Arc<Keep>) {
        LIVE.lock().insert(self.key.clone(), Arc::downgrade(keep));
    }
}

impl Drop for OnlyGuard {
    fn drop(&mut self) {
        LIVE.lock().remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::super::request::PermitRequest;
    use super::super::wait_list::Advice;
    use super::*;
    use crate::backend::permit_store::Wish;
    use crate::memory;
    use crate::parker::Parker;

    /// Whoever waited for it learned of it by polling.
    #[test]
    fn a_part_that_is_given_back_in_the_background_wakes_who_waits_for_it() {
        let semaphores = crate::connect("memory://part-wakes").unwrap();
        let semaphores = semaphores.semaphores().unwrap();
        semaphores.create("a", 2).unwrap();
        let request = PermitRequest::generated().permits("a", 2);
        let mut guard = semaphores.guard(&request, Duration::ZERO).unwrap();
        let shared = semaphores.shared.get().unwrap();
        let parker = Parker::new();
        let waits = Wish {
            external_id: Arc::from("waits"),
            owner: None,
            ttl: None,
            permits: vec![(Arc::from("a"), 1)],
        };
        let turn = shared.waiting.join(&waits, &parker);
        memory::handle("part-wakes").set_unreachable(true);
        assert!(guard.release_part("a", 1).is_err());
        memory::handle("part-wakes").set_unreachable(false);
        parker.park(Moment::now() + Duration::from_secs(30));
        assert_eq!(turn.advice(), Advice::Try);
        assert_eq!(semaphores.usage("a").unwrap().held, 1);
    }
}
