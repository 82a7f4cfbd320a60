//! `StandIn`: semaphores over a store that does as tests tell it.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::acquire::FIRST_POLL;
use super::doubts::Doubts;
use super::renewals::Renewals;
use super::semaphores::SharedSemaphores;
use super::wait_list::WaitList;
use crate::backend::permit_store::{
    Call, CapacityChange, Decision, Failure, Held, HeldPermit, Holder, PermitRenewal, PermitStore,
    Release, Renewed, RequestStatus, StoreTime, Sweep, Swept, Usage,
};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::probe::Probed;

/// The semaphores of a factory over a store that does as it is told.
pub(super) struct StandIn {
    pub(super) shared: Arc<SharedSemaphores>,
    /// The burials, each with its tokens and its time.
    pub(super) buried: Receiver<(Vec<u64>, Moment)>,
    /// Lets burials and renewals go on.
    pub(super) let_go: Sender<()>,
    /// The sweeps.
    pub(super) swept: Receiver<()>,
}

/// Makes one whose calls to acquire do this, and whose burials are told, and then wait for a word and fail; or
/// panic, as the first sweep does then. Of its renewals the first fails, and the next ones wait for a word, whatever
/// time they are given.
pub(super) fn stand_in(acquire: fn() -> Result<Decision, Failure>, panics: bool) -> StandIn {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let (burials, buried) = unbounded();
    let (let_go, hang) = unbounded();
    let (sweeps, swept) = unbounded();
    let store: Arc<dyn PermitStore> = Arc::new(Store {
        realm: format!("stand-in {}", NEXT.fetch_add(1, Ordering::Relaxed)),
        acquire,
        burials,
        hang,
        sweeps,
        has_swept: AtomicBool::new(false),
        has_renewed: AtomicBool::new(false),
        panics,
    });
    let real = crate::connect("memory://stand-in").unwrap();
    let real = real.semaphores().unwrap();
    let shared = SharedSemaphores {
        renewals: Arc::new(Renewals::new(Arc::clone(&store))),
        waiting: WaitList::default(),
        doubts: Doubts::of(store.realm()),
        probe: Probed::default(),
        store,
        factory: Arc::clone(&real.shared.get().unwrap().factory),
    };
    StandIn {
        shared: Arc::new(shared),
        buried,
        let_go,
        swept,
    }
}

#[derive(Debug)]
struct Store {
    realm: String,
    acquire: fn() -> Result<Decision, Failure>,
    burials: Sender<(Vec<u64>, Moment)>,
    hang: Receiver<()>,
    sweeps: Sender<()>,
    has_swept: AtomicBool,
    has_renewed: AtomicBool,
    panics: bool,
}

fn away<T>() -> Result<T> {
    Err(Error::new(ErrorKind::Unreachable, "away"))
}

impl PermitStore for Store {
    fn realm(&self) -> &str {
        &self.realm
    }
    fn patience(&self) -> Duration {
        Duration::ZERO
    }
    fn min_ttl(&self) -> Duration {
        Duration::ZERO
    }
    fn poll_interval(&self) -> Duration {
        FIRST_POLL
    }
    fn acquire(&self, _: &Arc<Call>, _: Moment) -> Result<Decision, Failure> {
        (self.acquire)()
    }
    fn bury(&self, _: &str, tokens: &[u64], by: Moment) -> Result<bool> {
        let _ = self.burials.send((tokens.to_vec(), Moment::now()));
        if self.panics {
            resume_unwind(Box::new(()));
        }
        let _ = self.hang.recv_timeout(by.remaining());
        away()
    }
    fn sweep(&self, _: &Sweep, _: Moment) -> Result<Vec<Swept>> {
        let _ = self.sweeps.send(());
        if self.panics && !self.has_swept.swap(true, Ordering::Relaxed) {
            resume_unwind(Box::new(()));
        }
        away()
    }
    fn create(&self, _: &str, _: u32, _: Moment) -> Result<bool> {
        away()
    }
    fn set_capacity(&self, _: &str, _: u32, _: Option<&str>, _: Moment) -> Result<u32> {
        away()
    }
    fn history(&self, _: &str, _: Moment) -> Result<Vec<CapacityChange>> {
        away()
    }
    fn delete(&self, _: &str, _: Moment) -> Result<bool> {
        away()
    }
    fn usage(&self, _: Option<&str>, _: Moment) -> Result<Vec<Usage>> {
        away()
    }
    fn holders(&self, _: &str, _: Moment) -> Result<Vec<Holder>> {
        away()
    }
    fn status(&self, _: &str, _: Moment) -> Result<Option<RequestStatus>> {
        away()
    }
    fn renew(&self, _: &[Arc<Held>], _: Moment) -> Result<Vec<Renewed>> {
        if self.has_renewed.swap(true, Ordering::Relaxed) {
            let _ = self.hang.recv();
        }
        away()
    }
    fn release(&self, _: &Arc<Held>, _: Moment) -> Result<bool> {
        away()
    }
    fn release_part(&self, _: &Held, _: &HeldPermit, _: u32, _: Moment) -> Result<bool> {
        away()
    }
    fn release_request(&self, _: &str, _: Moment) -> Result<Release> {
        away()
    }
    fn renew_request(&self, _: &str, _: Moment) -> Result<PermitRenewal> {
        away()
    }
    fn owners(&self, _: Moment) -> Result<(Vec<Arc<str>>, StoreTime)> {
        away()
    }
    fn delete_requests(&self, _: Duration, _: usize, _: Moment) -> Result<u64> {
        away()
    }
    fn delete_history(&self, _: Duration, _: usize, _: Moment) -> Result<u64> {
        away()
    }
}
