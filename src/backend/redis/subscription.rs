//! How a contender or observer listens: what it makes of each message, and the subscription that lasts as
//! long as somebody holds it.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::Common;
use super::connection::Opener;
use super::error::CallResult;
use super::keys::Keys;
use super::script::Call;
use super::server::Server;
use crate::backend::permit_store::OnTurn;
use crate::clock::Moment;
use crate::error::Result;
use crate::lease::Lease;
use crate::parker::Unparker;
use crate::pool::Checkout;

/// How long the server may take to come to an early acquire. Every waiter waits for a reply longer than
/// that, so it never becomes an owner that does not know it.
const PATIENCE: Duration = Duration::from_millis(350);

/// What a channel carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Channel {
    /// `released@@ID`: the turn of the contender whose channel this is.
    Turn,
    /// `acquired@@ID` and `released@@ID`, to everybody.
    Changes,
    /// `CLAIM@@ID`: the mutex was handed to ID, which has CLAIM ms to acquire it.
    Handed,
    /// `FREE@@NAME`: this process comes first in the line of a semaphore.
    Permits,
}

/// What a recipient listens for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Role {
    /// Nothing: it has released, and does not contend yet.
    Idle,
    /// Its turn, or a free mutex.
    Waiting,
    /// Any sign that it does not own any more.
    Owning,
    /// Every change.
    Observing,
}

/// One contender or observer, as the subscriber sees it.
pub(super) struct Recipient {
    /// The contender's id; empty for an observer.
    id: Vec<u8>,
    unparker: Unparker,
    /// A [`Role`].
    role: AtomicU8,
    /// Notified when a channel of this recipient was acknowledged, or cannot be.
    pub(super) acknowledged: Condvar,
    early: Mutex<Early>,
    on_turn: Option<OnTurn>,
}

/// What there is of an early acquire. Locked while it is sent: a waiter that wakes up by itself in that
/// moment must find it, or it would own without knowing.
///
/// Between the message that its turn has come and the acquisition lies the way from the thread that reads
/// messages to the one that waits. So the first one sends the acquisition itself, at once, and the second
/// one, when it is up, only has to read the reply. Only for a waiter that is parked at that moment: what
/// is sent here, it must come for soon, to own it or to give it back.
#[derive(Debug, Default)]
#[allow(clippy::large_enum_variant)] // one for each subscription, and the large one is the hot one
enum Early {
    #[default]
    None,
    Prepared(Prepared),
    Sent(EarlyAcquire),
}

impl std::fmt::Debug for Recipient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Recipient")
    }
}

impl Recipient {
    pub(super) fn new(id: &[u8], unparker: &Unparker, role: Role) -> Recipient {
        Recipient {
            id: id.to_vec(),
            unparker: unparker.clone(),
            role: AtomicU8::new(role as u8),
            acknowledged: Condvar::new(),
            early: Mutex::default(),
            on_turn: None,
        }
    }

    /// This process comes first in the line of a semaphore.
    pub(super) fn permits(&self, said: &[u8]) {
        let said = std::str::from_utf8(said).ok();
        if let (Some(on_turn), Some((free, name))) =
            (&self.on_turn, said.and_then(|it| it.split_once("@@")))
        {
            on_turn(name, free.parse().unwrap_or(0));
        }
    }

    fn is(&self, role: Role) -> bool {
        self.role.load(Ordering::Relaxed) == role as u8
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.is(Role::Waiting)
    }

    pub(super) fn is_parked(&self) -> bool {
        self.unparker.is_parked()
    }

    pub(super) fn wake(&self) {
        self.unparker.unpark();
    }

    /// Messages may have been missed.
    pub(super) fn interrupted(&self) {
        if !self.is(Role::Idle) {
            self.wake();
        }
    }

    /// Its turn has come.
    pub(super) fn turn(&self) {
        if self.is(Role::Idle) {
            return;
        }
        let mut early = self.early.lock();
        if matches!(*early, Early::Prepared(_))
            && self.unparker.is_parked()
            && let Early::Prepared(prepared) = std::mem::take(&mut *early)
            && let Some(sent) = prepared.send()
        {
            *early = Early::Sent(sent);
        }
        drop(early);
        self.wake();
    }

    /// `id` has acquired.
    pub(super) fn acquired_by(&self, id: &[u8]) {
        if self.is(Role::Observing) || (self.is(Role::Owning) && id != self.id) {
            self.wake();
        }
    }

    /// `id` has released, and no waiter in particular was told.
    pub(super) fn released_by(&self, id: &[u8]) {
        // An owner that hears this of itself was revoked.
        let own_doing = self.is(Role::Waiting) && id == self.id;
        if !self.is(Role::Idle) && !own_doing {
            self.wake();
        }
    }

    /// The mutex was handed to somebody.
    pub(super) fn handed(&self) {
        if self.is(Role::Owning) || self.is(Role::Observing) {
            self.wake();
        }
    }
}

/// All that the next attempt of a waiter takes.
#[derive(Debug)]
struct Prepared {
    server: Weak<Server>,
    call: Call,
    lease: Lease,
}

impl Prepared {
    /// Sends the attempt. Never waits: `None` if there is no connection to spare, or it is broken.
    fn send(mut self) -> Option<EarlyAcquire> {
        let server = self.server.upgrade()?;
        let sent = Moment::now();
        let budget = self.lease.request_limit();
        let mut checkout = server.spare()?;
        let deadline = sent + PATIENCE.min(budget * 2 / 3);
        server
            .send_early(&mut checkout, &mut self.call, deadline, sent + budget)
            .ok()?;
        Some(EarlyAcquire {
            server,
            checkout,
            call: self.call,
            sent,
            until: sent + self.lease.belief(),
        })
    }
}

/// An attempt that was sent, and its reply not read yet. One that is dropped takes its connection along.
#[derive(Debug)]
pub(super) struct EarlyAcquire {
    server: Arc<Server>,
    checkout: Checkout<Opener>,
    call: Call,
    sent: Moment,
    /// The end of belief, should it be granted: counted from before it was sent.
    pub(super) until: Moment,
}

impl EarlyAcquire {
    pub(super) fn finish(mut self, by: Moment) -> CallResult<::redis::Value> {
        (self.server).finish_early(&mut self.checkout, &self.call, self.sent, by)
    }
}

/// A contender's or observer's subscription, and the lack of one.
pub(super) struct Subscription {
    id: Vec<u8>,
    role: Role,
    channels: Vec<(Vec<u8>, Channel)>,
    slot: u16,
    unparker: Unparker,
    on_turn: Option<OnTurn>,
    attached: Option<Attached>,
}

impl Subscription {
    pub(super) fn of_permits(channel: &str, slot: u16, on_turn: OnTurn) -> Subscription {
        Subscription {
            id: Vec::new(),
            role: Role::Idle,
            channels: vec![(channel.as_bytes().to_vec(), Channel::Permits)],
            slot,
            unparker: crate::parker::Parker::new().unparker(),
            on_turn: Some(on_turn),
            attached: None,
        }
    }

    pub(super) fn of_contender(keys: &Keys, id: &str, unparker: &Unparker) -> Subscription {
        Subscription {
            id: id.as_bytes().to_vec(),
            role: Role::Waiting,
            channels: vec![
                (keys.turn(id), Channel::Turn),
                (keys.changes(), Channel::Changes),
                (keys.handed(), Channel::Handed),
            ],
            slot: keys.slot,
            unparker: unparker.clone(),
            on_turn: None,
            attached: None,
        }
    }

    pub(super) fn of_observer(keys: &Keys, unparker: &Unparker) -> Subscription {
        Subscription {
            id: Vec::new(),
            role: Role::Observing,
            channels: vec![
                (keys.changes(), Channel::Changes),
                (keys.handed(), Channel::Handed),
            ],
            slot: keys.slot,
            unparker: unparker.clone(),
            on_turn: None,
            attached: None,
        }
    }

    /// Subscribes on the server that has the mutex now, which in a cluster may change. Takes at most half of the
    /// time: the rest is for the request that follows.
    pub(super) fn ensure(&mut self, common: &Common, by: Moment) -> Result<()> {
        if self.attached.is_some() && !common.is_cluster() {
            return Ok(());
        }
        let half = by - by.remaining() / 2;
        let server = common.server(self.slot, half)?;
        let recipient = match &self.attached {
            Some(attached) if Arc::ptr_eq(&server, &attached.server) => return Ok(()),
            Some(attached) => Arc::clone(&attached.recipient),
            None => Arc::new(Recipient {
                on_turn: self.on_turn.clone(),
                ..Recipient::new(&self.id, &self.unparker, self.role)
            }),
        };
        self.attach(server, recipient, half)
    }

    fn attach(&mut self, server: Arc<Server>, recipient: Arc<Recipient>, by: Moment) -> Result<()> {
        // Whatever happens, it ends with this value.
        let attached = Attached {
            server,
            recipient,
            channels: self.channels.clone(),
        };
        (attached.server).subscribe(&attached.channels, &attached.recipient, by)?;
        self.attached = Some(attached);
        Ok(())
    }

    /// Says what is listened for from now on.
    pub(super) fn set_role(&mut self, role: Role) {
        self.role = role;
        if let Some(attached) = &self.attached {
            attached.recipient.role.store(role as u8, Ordering::Relaxed);
        }
    }

    /// Has the next attempt sent as soon as the turn comes.
    pub(super) fn prepare(&self, call: &Call, lease: Lease) {
        if let Some(attached) = &self.attached {
            *attached.recipient.early.lock() = Early::Prepared(Prepared {
                server: Arc::downgrade(&attached.server),
                call: call.clone(),
                lease,
            });
        }
    }

    /// Returns `true` if an attempt was sent; if not, none is from now on.
    pub(super) fn is_sent(&self) -> bool {
        let Some(attached) = &self.attached else {
            return false;
        };
        let mut early = attached.recipient.early.lock();
        if let Early::Prepared(_) = *early {
            *early = Early::None;
        }
        matches!(*early, Early::Sent(_))
    }

    /// Takes what was sent in the meantime; from now on nothing is.
    pub(super) fn take_early(&self) -> Option<EarlyAcquire> {
        let attached = self.attached.as_ref()?;
        match std::mem::take(&mut *attached.recipient.early.lock()) {
            Early::Sent(sent) => Some(sent),
            Early::None | Early::Prepared(_) => None,
        }
    }

    /// Ends the subscription. The server hears of it soon.
    pub(super) fn close(&mut self) {
        self.attached = None;
    }
}

/// The channels of one recipient on one server; ends with this value, without waiting.
struct Attached {
    server: Arc<Server>,
    recipient: Arc<Recipient>,
    channels: Vec<(Vec<u8>, Channel)>,
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.server.unsubscribe(&self.channels, &self.recipient);
    }
}
