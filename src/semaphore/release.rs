//! Releasing: one way, once, in one transaction.

use std::sync::Arc;

use super::answer::{PermitRenewal, Release};
use super::combine::{Job, Verdict};
use super::core::Core;
use super::record::Record;
use super::retry::{MAX_TRIES, pause};
use super::store::{Store, explain, fill, first, quote, quote_all};
use crate::backend::mysql::link::Link;
use crate::error::Result;

const RELEASE: &str = include_str!("../../sql/permit-release.sql");
const RENEW: &str = include_str!("../../sql/permit-renew.sql");

impl Core {
    pub(super) fn release(&self, external_id: &str) -> Result<Release> {
        let held = self.holdings.get(external_id);
        let mut uncertain = false;
        if let Some(held) = &held {
            let lane = self.lanes.of(&held.names);
            let job = Job::Release {
                external_id: Arc::from(external_id),
                held: Arc::clone(held),
            };
            match lane.submit(&self.store, job) {
                Ok(Verdict::Released(true)) => return Ok(self.released(external_id)),
                Ok(Verdict::Alone(setback)) => uncertain = setback.error.is_transient(),
                // Not held any more, or no turn: the table knows.
                Ok(_) | Err(_) => {}
            }
        }
        match release_alone(&self.store, external_id)? {
            Freed::Yes => return Ok(self.released(external_id)),
            Freed::Perhaps => uncertain = true,
            Freed::No => {}
        }
        Ok(match Record::read(&self.store, external_id)? {
            // A try whose answer was lost may have done it.
            Some(_) if uncertain => self.released(external_id),
            Some(_) => {
                self.holdings.remove(external_id);
                Release::AlreadyReleased
            }
            None => {
                self.holdings.remove(external_id);
                Release::Unknown
            }
        })
    }

    fn released(&self, external_id: &str) -> Release {
        if let Some(held) = self.holdings.get(external_id) {
            self.waiting.wake(&held.names);
        }
        self.holdings.remove(external_id);
        Release::Released
    }

    pub(super) fn renew(&self, external_id: &str) -> Result<PermitRenewal> {
        if renew_all(&self.store, &[external_id])? == 1 {
            return Ok(PermitRenewal::Renewed);
        }
        Ok(match Record::read(&self.store, external_id)? {
            None => PermitRenewal::Unknown,
            Some(_) => PermitRenewal::AlreadyReleased,
        })
    }
}

/// Whether a release changed something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Freed {
    Yes,
    No,
    /// There was nothing to do, but perhaps only because a try whose answer was lost had done it.
    Perhaps,
}

/// Releases by external id, with retries, which are safe.
pub(super) fn release_alone(store: &Store, external_id: &str) -> Result<Freed> {
    release_where(store, &format!("r.external_id = {}", quote(external_id)))
}

/// Releases the request that `which` names, with retries.
pub(super) fn release_where(store: &Store, which: &str) -> Result<Freed> {
    let statement = fill(RELEASE, &[("{which}", which)]);
    let mut tries = 0;
    loop {
        tries += 1;
        let outcome = store.send_alone(&statement).and_then(first);
        match outcome {
            Ok(answer) if answer.matched > 0 => return Ok(Freed::Yes),
            Ok(_) if tries == 1 => return Ok(Freed::No),
            Ok(_) => return Ok(Freed::Perhaps),
            Err(error) if error.is_transient() && tries < MAX_TRIES => pause(tries),
            Err(error) => return Err(error),
        }
    }
}

/// One release, one statement, one try.
pub(super) fn by_request_id(store: &Store, link: &mut Link, request_id: u64) -> Result<bool> {
    let statement = fill(RELEASE, &[("{which}", &format!("r.id = {request_id}"))]);
    let answers = store.send(link, &statement).map_err(explain)?;
    Ok(first(answers)?.matched > 0)
}

/// Renews what is held of these; how many that are.
pub(super) fn renew_all<T: AsRef<str>>(store: &Store, external_ids: &[T]) -> Result<u64> {
    let statement = fill(RENEW, &[("{external_ids}", &quote_all(external_ids))]);
    let mut tries = 0;
    loop {
        tries += 1;
        match store.send_alone(&statement).and_then(first) {
            Ok(answer) => return Ok(answer.matched),
            Err(error) if error.is_transient() && tries < MAX_TRIES => pause(tries),
            Err(error) => return Err(error),
        }
    }
}
