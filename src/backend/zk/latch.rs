//! A contender's place in the line: one ephemeral sequential node, and at most two watches.
//!
//! Round trips: an attempt is one (the creation and the list of children travel together, and the
//! server works on them in order), a release is one, a renewal none. A waiter that stood second takes
//! over on the word that the first is gone, without asking anything: nodes before ours can only
//! disappear.

use std::sync::Arc;
use std::time::Duration;

use super::ask::{Ask, unexpected};
use super::message::{Code, Reply, Request};
use super::orphan::Orphan;
use super::path::mutex_path;
use super::session::Session;
use super::spot::{Granted, Line, Node, Predecessor, Spot};
use super::watches::Sentinel;
use super::{Core, owner};
use crate::backend::{Attempt, Entry, Grant, Hold, Place, Refusal, Renewal, Seat};
use crate::bell::Waker;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::owner::MutexOwner;

/// How often an attempt starts over because nodes came and went under its hands.
const ROUNDS: usize = 16;

pub(super) struct Latch {
    core: Arc<Core>,
    place: Place,
    spot: Spot,
}

impl Latch {
    pub(super) fn new(core: Arc<Core>, place: &Place) -> Latch {
        let mutex_path = mutex_path(&core.config.chroot, &place.mutex);
        Latch {
            spot: Spot::new(Arc::clone(&core), Arc::clone(&place.id), mutex_path),
            core,
            place: place.clone(),
        }
    }

    fn try_acquire(&mut self, session: &Arc<Session>, entry: Entry, by: Moment) -> Result<Attempt> {
        if let Some(rest) = self.winding_down() {
            return Ok(Attempt::Refused(Refusal {
                owner: MutexOwner::NONE,
                retry_in: rest,
            }));
        }
        self.spot.forget_the_past(session);
        if self.takes_over(session) {
            return self.grant(session, None);
        }
        for _ in 0..ROUNDS {
            let (Some(line), Some(node)) = (self.spot.step(session, by)?, &mut self.spot.node)
            else {
                continue;
            };
            node.epoch = line.epoch;
            let mut names = line.members.iter().map(|member| &member.name);
            let attempt = match names.position(|name| *name == node.name) {
                // Deleted by somebody else.
                None => {
                    self.spot.node = None;
                    None
                }
                Some(0) => {
                    let at_once = node.predecessor.is_none().then_some(node.ctime);
                    Some(self.grant(session, at_once)?)
                }
                Some(_) if entry == Entry::Try => Some(self.leave(session, &line, by)?),
                Some(position) => self.stand_behind(session, &line, position, by)?,
            };
            if let Some(attempt) = attempt {
                return Ok(attempt);
            }
        }
        Err(Error::new(
            ErrorKind::Unavailable,
            "nodes come and go faster than they can be read",
        ))
    }

    /// What is left of the transition after we stepped down. Until it is over our old node stays: the
    /// next in line leads when it goes, and our owner's work may still be winding down.
    fn winding_down(&self) -> Option<Duration> {
        let node = self.spot.node.as_ref()?;
        let granted = node.granted.as_ref()?;
        let deleted = node.own.as_ref().is_some_and(|own| own.is_gone());
        let rest = (granted.until + self.place.lease.transition()).remaining();
        (!node.session.state().is_over() && !deleted && !rest.is_zero()).then_some(rest)
    }

    /// Whether we lead by what we were told: the leader that we stood behind is gone, and our own
    /// node is not. Only over the same connection: after another one, the line is read anew.
    fn takes_over(&self, session: &Session) -> bool {
        self.spot.node.as_ref().is_some_and(|node| {
            node.predecessor
                .as_ref()
                .is_some_and(|before| before.led && before.sentinel.is_gone())
                && node.own.as_ref().is_some_and(|own| !own.has_fired())
                && session.look(|state| state.is_connected() && state.epoch == node.epoch)
        })
    }

    /// We lead. `acquired_at`: since when, where it was at once; otherwise since now.
    fn grant(&mut self, session: &Session, acquired_at: Option<i64>) -> Result<Attempt> {
        let until = self.belief(session)?;
        let Some(node) = &mut self.spot.node else {
            return Err(unexpected());
        };
        node.predecessor = None;
        if node.own.is_none() && self.place.hold == Hold::Long {
            // Not waited for: it costs the owner nothing, and fires if the node is gone already.
            let own = Sentinel::new(&self.spot.alarm);
            session.look_out(&node.path, &own);
            node.own = Some(own);
        }
        session.begin_lease(&node.path, until + self.place.lease.transition());
        node.granted = Some(Granted { acquired_at, until });
        let owner = self.ours(session, until);
        if let Some(Node {
            granted: Some(granted),
            ..
        }) = &mut self.spot.node
        {
            // Fixed from now on, so that every renewal names the same moment.
            granted.acquired_at = i64::try_from(owner.acquired_at()).ok();
        }
        Ok(Attempt::Granted(Grant {
            owner,
            until: Some(until),
        }))
    }

    /// Until when we may believe: the session certainly lives, and the transition is left.
    fn belief(&self, session: &Session) -> Result<Moment> {
        let now = Moment::now();
        let lease = self.place.lease;
        let (alive_until, timeout) =
            session.look(|state| (state.pulse.alive_until(), state.pulse.timeout()));
        // Where the server granted a shorter session than the lease counts on, the transition shrinks
        // with it; what two clocks can drift apart always stays.
        let drift = timeout / 100 + Duration::from_millis(5);
        let transition = lease.transition().min(timeout / 3).max(drift);
        alive_until
            .map(|alive| (alive - transition).min(now + lease.belief()))
            .filter(|until| *until > now)
            .ok_or_else(|| {
                Error::new(
                    ErrorKind::Timeout,
                    "no heartbeat has been acknowledged for so long that the session may be over",
                )
            })
    }

    fn ours(&self, session: &Session, until: Moment) -> MutexOwner {
        let (acquired_at, czxid) = self.spot.node.as_ref().map_or((None, 0), |node| {
            let granted = node.granted.as_ref();
            (granted.and_then(|granted| granted.acquired_at), node.czxid)
        });
        // Renewals come at a third of what is left of the belief. By two thirds one has failed: then
        // the ttl is over, and an owner that is no longer sure can be told from one that is.
        let left = until.remaining();
        let ttl = left * 2 / 3;
        let total = left + self.place.lease.transition();
        owner(session, &self.place.id, acquired_at, czxid, (ttl, total))
    }

    /// Not first, and not willing to wait: leaves no trace, and asks who leads on the way out.
    fn leave(&mut self, session: &Session, line: &Line, by: Moment) -> Result<Attempt> {
        let Some(node) = self.spot.node.take() else {
            return Err(unexpected());
        };
        let path = node.path.clone();
        // Its watches go first: nobody is to be rung for what we do ourselves.
        drop(node);
        let asks = vec![
            Request::Delete { path: path.clone() }.into(),
            self.first(line).into(),
        ];
        let mut answers = session
            .call(asks, by)
            .inspect_err(|_| session.abandon(Orphan::Node(path.clone())))?;
        match answers.next()? {
            Ok(_) | Err(Code::NO_NODE) => {}
            Err(code) => return Err(code.error(&path)),
        }
        let owner = self.leader(session, answers.next()?)?;
        Ok(self.refused(owner))
    }

    /// Watches the node before ours and, the first time, our own. `None`: one of them is gone.
    fn stand_behind(
        &mut self,
        session: &Session,
        line: &Line,
        position: usize,
        by: Moment,
    ) -> Result<Option<Attempt>> {
        let first = self.first(line);
        let Some(node) = &mut self.spot.node else {
            return Ok(None);
        };
        let Some(before) = line.members.get(position - 1) else {
            return Ok(None);
        };
        let path = format!("{}/{}", self.spot.mutex_path, before.name);
        let sentinel = Sentinel::new(&self.spot.alarm);
        let mut asks = vec![Ask::watch(&path, &sentinel)];
        let own = node.own.take().filter(|own| !own.has_fired());
        let watched = own.is_some();
        let own = own.unwrap_or_else(|| Sentinel::new(&self.spot.alarm));
        if !watched {
            asks.push(Ask::watch(&node.path, &own));
        }
        let led = position == 1;
        if !led {
            asks.push(first.into());
        }
        let mut answers = session.call(asks, by)?;
        let seen = answers.next()?;
        if !watched {
            match answers.next()? {
                Ok(_) => {}
                Err(Code::NO_NODE) => {
                    self.spot.node = None;
                    return Ok(None);
                }
                Err(code) => return Err(code.error(&node.path)),
            }
        }
        node.own = Some(own);
        match &seen {
            Ok(_) => node.predecessor = Some(Predecessor { sentinel, led }),
            Err(Code::NO_NODE) => return Ok(None),
            Err(code) => return Err(code.error(&path)),
        }
        let leader = if led { seen } else { answers.next()? };
        let owner = self.leader(session, leader)?;
        Ok(Some(self.refused(owner)))
    }

    /// Asks for the node that leads.
    fn first(&self, line: &Line) -> Request {
        let name = line.members.first().map_or("", |first| &first.name);
        Request::Data {
            path: format!("{}/{name}", self.spot.mutex_path),
            watch: false,
        }
    }

    fn leader(&self, session: &Session, answer: Result<Reply, Code>) -> Result<MutexOwner> {
        match answer {
            Ok(Reply::Data(id, stat)) => Ok(owner(
                session,
                &String::from_utf8_lossy(&id),
                Some(stat.ctime),
                stat.czxid,
                (self.place.lease.ttl(), self.place.lease.total()),
            )),
            Ok(_) => Err(unexpected()),
            // Gone by now, or not for us to read.
            Err(_) => Ok(MutexOwner::NONE),
        }
    }

    fn refused(&self, owner: MutexOwner) -> Attempt {
        Attempt::Refused(Refusal {
            owner,
            retry_in: self.place.lease.total(),
        })
    }

    /// Whoever is told "unknown" is rung when there is something new to say.
    fn or_ring_later<T>(&self, session: &Session, result: Result<T>) -> Result<T> {
        if result.is_err() && self.spot.alarm.is_set() {
            session.ring_later(&self.spot.alarm);
        }
        result
    }
}

impl Seat for Latch {
    fn listen(&mut self, waker: &Waker, _by: Moment) -> Result<()> {
        self.core.origin.check()?;
        // The watches are set by `acquire`, each together with the look that it guards.
        self.spot.alarm.set(Some(waker));
        Ok(())
    }

    fn acquire(&mut self, entry: Entry, by: Moment) -> Result<Attempt> {
        let session = self.core.session()?;
        let result = self.try_acquire(&session, entry, by);
        self.or_ring_later(&session, result)
    }

    fn renew(&mut self, fence: u64, _by: Moment) -> Result<Renewal> {
        self.core.origin.check()?;
        let lost = Ok(Renewal::Lost(MutexOwner::NONE));
        let transition = self.place.lease.transition();
        let Some(node) = self.spot.node.as_mut().filter(|node| node.holds(fence)) else {
            return lost;
        };
        let session = Arc::clone(&node.session);
        let granted_until = node.granted.as_ref().map(|granted| granted.until);
        if granted_until.is_some_and(|until| until + transition <= Moment::now()) {
            // The node may still be there, but the lease has run out: the next attempt replaces it.
            return lost;
        }
        if session.state().is_over() || node.own.as_ref().is_some_and(|own| own.is_gone()) {
            self.spot.node = None;
            return lost;
        }
        if node.own.as_ref().is_none_or(|own| own.has_fired()) {
            // A short hold that turned out long, or somebody wrote to our node.
            let own = Sentinel::new(&self.spot.alarm);
            session.look_out(&node.path, &own);
            node.own = Some(own);
        }
        let late =
            session.look(|state| !state.is_connected() || state.pulse.is_late(Moment::now()));
        let result = if late {
            Err(Error::new(
                ErrorKind::Unreachable,
                format!(
                    "{}: no server acknowledges the session's heartbeat",
                    self.core.config.realm
                ),
            ))
        } else {
            self.belief(&session)
        };
        let until = self.or_ring_later(&session, result)?;
        if let Some(Node {
            granted: Some(granted),
            path,
            ..
        }) = &mut self.spot.node
        {
            if !session.renew_lease(path, until + transition) {
                return lost;
            }
            granted.until = granted.until.max(until);
        }
        Ok(Renewal::Renewed(Grant {
            owner: self.ours(&session, until),
            until: Some(until),
        }))
    }

    fn release(&mut self, fence: u64, by: Moment) -> Result<bool> {
        self.core.origin.check()?;
        match self.spot.node.take_if(|node| node.holds(fence)) {
            Some(node) => Spot::delete(node, by),
            None => Ok(false),
        }
    }

    fn withdraw(&mut self, by: Moment) -> Result<()> {
        self.core.origin.check()?;
        self.spot.alarm.set(None);
        self.spot.abandon_unsure();
        if self.winding_down().is_some() {
            // Not released: the owner's work has not ended. The node goes when the lease is over, or
            // with the seat, which lives until the last callback has returned.
            return Ok(());
        }
        match self.spot.node.take() {
            Some(node) => Spot::delete(node, by).map(drop),
            None => Ok(()),
        }
    }
}

impl Drop for Latch {
    fn drop(&mut self) {
        if self.core.origin.is_here() {
            self.spot.alarm.set(None);
            self.spot.abandon();
        }
    }
}
