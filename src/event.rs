//! What a listener is told: `Event`, and `Events`, where a channel's receiver gets them from.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Weak};

use crossbeam_channel::Receiver;

use crate::error::Error;
use crate::owner::MutexState;

/// A change of ownership, or an error, of one service.
///
/// Per service, Acquired and Released alternate strictly, and each comes exactly once.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Event {
    /// What happened.
    pub kind: EventKind,
    /// The mutex it happened to.
    pub mutex: Arc<str>,
    /// The owner before and the owner after. For a failure, the unchanged state.
    pub state: MutexState,
    /// What went wrong, for [`EventKind::Failed`].
    pub error: Option<Error>,
    /// How many events before this one were dropped because the receiver did not read: complete pairs of
    /// Acquired and Released, and changes that a later one made obsolete.
    pub missed: u64,
}

/// The kinds of [`Event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EventKind {
    /// This contender became the owner.
    Acquired,
    /// This contender ceased to be the owner.
    Released,
    /// Another owner was seen, or the mutex was seen to be free. A waiting contender is not woken for this:
    /// it may learn of a new owner only when the lease of the previous one would have ended. If that is too
    /// late, follow the mutex with [`Factory::observe`](crate::Factory::observe).
    OwnerChanged,
    /// The backend cannot be used; the service keeps trying. Only sent if the service was built to
    /// [report failures](crate::ContendBuilder::failures).
    Failed,
}

impl Event {
    pub(crate) fn new(kind: EventKind, mutex: &Arc<str>, state: MutexState) -> Event {
        Event {
            kind,
            mutex: Arc::clone(mutex),
            state,
            error: None,
            missed: 0,
        }
    }

    /// Returns the fence of the ownership that began, ended or was seen.
    ///
    /// ```
    /// let factory = contend::connect("memory://event-fence-doc")?;
    /// let (service, events) = factory.contend("demo").channel()?;
    /// service.start()?;
    /// let acquired = events.recv().unwrap();
    /// service.stop()?;
    /// let released = events.recv().unwrap();
    /// assert!(acquired.fence().is_some() && acquired.fence() == released.fence());
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn fence(&self) -> Option<u64> {
        let owner = match self.kind {
            EventKind::Released => self.state.before(),
            _ => self.state.after(),
        };
        (!owner.owner_id().is_empty()).then(|| owner.fence())
    }
}

impl fmt::Display for EventKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EventKind::Acquired => "acquired",
            EventKind::Released => "released",
            EventKind::OwnerChanged => "owner changed",
            EventKind::Failed => "failed",
        })
    }
}

/// The receiving end of a service's events. Dereferences to a crossbeam [`Receiver`], so it has `recv`,
/// `try_recv` and `iter`, and works in `select!`.
///
/// [`Receiver`]: https://docs.rs/crossbeam-channel/0.5/crossbeam_channel/struct.Receiver.html
///
/// When its last clone is dropped, the program can no longer act on the ownership. The service logs that and steps
/// down for good, unless it was built to [lead without a
/// listener](crate::ContendBuilder::lead_without_listener). An observer logs it and ends.
///
/// ```
/// use contend::crossbeam_channel::select;
/// use contend::EventKind;
/// use std::time::Duration;
///
/// let factory = contend::connect("memory://events-doc")?;
/// let (service, events) = factory.contend("demo").channel()?;
/// service.start()?;
/// select! {
///     recv(events) -> event => assert_eq!(event.unwrap().kind, EventKind::Acquired),
///     default(Duration::from_secs(10)) => panic!("no owner after 10 s"),
/// }
/// # Ok::<(), contend::Error>(())
/// ```
#[derive(Clone)]
pub struct Events {
    receiver: Receiver<Event>,
    /// Lives for as long as a clone can be read.
    _listener: Arc<()>,
}

impl Events {
    /// The second value is dead once no clone can be read.
    pub(crate) fn new(receiver: Receiver<Event>) -> (Events, Weak<()>) {
        let listener = Arc::default();
        let is_heard = Arc::downgrade(&listener);
        let events = Events {
            receiver,
            _listener: listener,
        };
        (events, is_heard)
    }
}

impl Deref for Events {
    type Target = Receiver<Event>;

    fn deref(&self) -> &Receiver<Event> {
        &self.receiver
    }
}

impl<'a> IntoIterator for &'a Events {
    type Item = Event;
    type IntoIter = crossbeam_channel::Iter<'a, Event>;

    fn into_iter(self) -> Self::IntoIter {
        self.receiver.iter()
    }
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Events")
            .field("waiting", &self.receiver.len())
            .finish()
    }
}
