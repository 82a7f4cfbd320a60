//! Acquiring: through a lane first, alone if that failed, and never with an outcome that stays open.

use std::sync::Arc;

use super::answer::Acquisition;
use super::batch::{self, Decision, Held, Outcome, Setback};
use super::combine::{Job, Verdict};
use super::core::Core;
use super::record::Record;
use super::request::Wish;
use super::retry::{MAX_TRIES, pause};
use super::store::{explain, fill, quote, quote_option};
use crate::error::{Error, ErrorKind, Result};

const TOMBSTONE: &str = include_str!("../../sql/permit-tombstone.sql");

impl Core {
    /// All permits of the wish, or none; does not wait for a permit.
    pub(super) fn acquire(&self, wish: &Arc<Wish>) -> Result<Acquisition> {
        // This call decides about the id now: what an earlier one left behind must not end it later.
        self.keeper.leave(&wish.external_id);
        let lane = self.lanes.of(&wish.names());
        match lane.submit(&self.store, Job::Acquire(Arc::clone(wish)))? {
            Verdict::Decided(decision) => self.conclude(wish, decision, false),
            Verdict::Alone(setback) => self.acquire_alone(wish, setback),
            Verdict::Released(_) => Err(Error::new(
                ErrorKind::Protocol,
                "an acquire was answered as a release",
            )),
        }
    }

    /// The second try and those after it, on a connection of our own.
    fn acquire_alone(&self, wish: &Arc<Wish>, mut setback: Setback) -> Result<Acquisition> {
        let mut unknown = setback.unknown;
        let mut tries = 1;
        while setback.is_worth_a_retry() && tries < MAX_TRIES {
            tries += 1;
            pause(tries);
            match self
                .attempt(wish, setback.blocked)
                .map(|outcome| outcome.decisions.into_iter().next())
            {
                // Our own ghost, if there is one, had its turn before this transaction got its locks:
                // so where it is not known by now, it is not there.
                Ok(Some(decision)) => return self.conclude(wish, decision, unknown),
                Ok(None) => break,
                Err(next) => {
                    unknown |= next.unknown;
                    setback = next;
                }
            }
        }
        let error = setback.error.context(format_args!(
            "could not acquire {:?} in {tries} {}",
            wish.external_id,
            if tries == 1 { "try" } else { "tries" }
        ));
        if unknown {
            return self.settle(wish, error);
        }
        Err(error)
    }

    /// One transaction for this wish alone. `blocked`: whoever is about to take the external id is waited
    /// for first, with nothing locked, so that nobody waits for us meanwhile.
    fn attempt(&self, wish: &Arc<Wish>, blocked: bool) -> Result<Outcome, Setback> {
        let mut link = self.store.checkout().map_err(Setback::known)?;
        if blocked {
            let statement = format!(
                "SELECT id FROM permit_request WHERE external_id = {} LOCK IN SHARE MODE",
                quote(&wish.external_id)
            );
            let waited = self.store.send(&mut link, &statement);
            waited.map_err(|fault| Setback {
                blocked: true,
                ..Setback::of(fault, false)
            })?;
        }
        let wishes = [Arc::clone(wish)];
        batch::run(&self.store, &mut link, &wish.names(), &[], &wishes)
    }

    fn conclude(&self, wish: &Wish, decision: Decision, ours: bool) -> Result<Acquisition> {
        match decision {
            Decision::Granted { permits, held } => {
                self.holdings.add(&wish.external_id, held);
                Ok(Acquisition::Acquired(permits))
            }
            Decision::Known(record) => self.recognise(wish, &record, ours),
            Decision::Exhausted(exhausted) => Ok(Acquisition::Exhausted(exhausted)),
            Decision::Refused(error) => Err(error),
        }
    }

    fn recognise(&self, wish: &Wish, record: &Record, ours: bool) -> Result<Acquisition> {
        let answer = record.answer(wish, ours)?;
        if record.held {
            let counts = record.permits.iter();
            let held = Held {
                request_id: record.request_id,
                names: wish.names(),
                counts: counts.map(|(permit, id)| (*id, permit.count)).collect(),
            };
            self.holdings.add(&wish.external_id, held);
        }
        Ok(answer)
    }

    /// Nobody knows whether the request was committed, or will be: makes an end of it. Either it turns
    /// out that it was, or a tombstone takes its external id, and then it cannot be.
    fn settle(&self, wish: &Wish, error: Error) -> Result<Acquisition> {
        let statement = tombstone(&wish.external_id, wish.owner.as_deref());
        for tries in 1..=MAX_TRIES {
            let buried = self
                .store
                .checkout()
                .map(|mut link| self.store.send(&mut link, &statement));
            match buried {
                Ok(Ok(_)) => {
                    return Err(error.context(
                        "nothing is held, and the external id is used up so that nothing can be",
                    ));
                }
                Ok(Err(fault)) if fault.is_duplicate() => {
                    if let Ok(Some(record)) = Record::read(&self.store, &wish.external_id) {
                        return self.recognise(wish, &record, true);
                    }
                }
                Ok(Err(fault)) if !explain(fault.clone()).is_transient() => break,
                Ok(Err(_)) | Err(_) => {}
            }
            if tries < MAX_TRIES {
                pause(tries);
            }
        }
        // A permit that this process holds already is no ghost.
        if self.holdings.get(&wish.external_id).is_none() {
            self.keeper.bury(&wish.external_id);
        }
        Err(error.context(
            "the outcome is not known; whatever was acquired is released as soon as the server can be \
             reached",
        ))
    }
}

/// The statement that uses an external id up.
pub(super) fn tombstone(external_id: &str, owner: Option<&str>) -> String {
    fill(
        TOMBSTONE,
        &[
            ("{external_id}", &quote(external_id)),
            ("{owner}", &quote_option(owner)),
        ],
    )
}
