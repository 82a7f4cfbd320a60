//! The model backend: one mutex with exactly the semantics of the contract, and the habits that the
//! contract allows. It knows nothing of who believes what; `monitor.rs` watches it from outside.

use std::collections::VecDeque;

use contend::Lease;
use contend::backend::OnRefusal;

use crate::clock::{Clock, MS, True, millis};
use crate::plan::Habits;
use crate::plant::Plant;

/// A contender id, as a number.
pub type Id = usize;

/// What a contender asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    Acquire(OnRefusal),
    Renew(u64),
    Release(u64),
    Withdraw,
    Observe,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Granted(Held, u64),
    /// The owner, the backend's clock, and when to try again, in ms.
    Refused(Option<Held>, u64, u64),
    Renewed(Held, u64),
    Lost(Option<Held>, u64),
    Released(bool),
    Withdrawn,
    Seen(Option<Held>, u64),
    /// The call failed; whether the backend did it is another question.
    Failed,
}

/// A lease as the backend keeps it, in epoch ms of its own clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    pub id: Id,
    pub fence: u64,
    pub acquired_at: u64,
    pub ttl_at: u64,
    pub transition_at: u64,
}

pub struct Model {
    pub clock: Clock,
    pub lease: Option<Held>,
    /// The last one that ran out, where it can still be renewed.
    lapsed: Option<Held>,
    last_fence: u64,
    queue: VecDeque<Id>,
    /// Who may take the free mutex before all others, and until when.
    reserved: Option<(Id, u64)>,
    habits: Habits,
    plant: Plant,
    /// Who is to be woken.
    pub wake: Option<Id>,
}

impl Model {
    pub fn new(clock: Clock, habits: Habits, plant: Plant) -> Model {
        Model {
            clock,
            lease: None,
            lapsed: None,
            last_fence: 0,
            queue: VecDeque::with_capacity(8),
            reserved: None,
            habits,
            plant,
            wake: None,
        }
    }

    /// Restarted empty.
    pub fn lose_memory(&mut self) {
        self.lease = None;
        self.lapsed = None;
        self.last_fence = 0;
        self.queue.clear();
        self.reserved = None;
    }

    /// Whether anything is left of this contender.
    pub fn knows(&self, id: Id) -> bool {
        self.lease.is_some_and(|held| held.id == id)
            || self.queue.contains(&id)
            || self.reserved.is_some_and(|(first, _)| first == id)
    }

    /// Whether this contender stands in the queue.
    pub fn is_queued(&self, id: Id) -> bool {
        self.queue.contains(&id)
    }

    /// Forgets a waiter without a listener.
    pub fn forget_dead(&mut self, id: Id) {
        self.queue.retain(|waiter| *waiter != id);
    }

    /// The first true time at which another can have the mutex.
    pub fn free_at(&self, held: &Held) -> True {
        let last = held.transition_at + u64::from(self.habits.keeps_last_ms);
        self.clock.reaches(last * MS)
    }

    /// Lets run-out leases and reservations go, and offers a free mutex to the next in the queue.
    pub fn expire(&mut self, now_ns: u64) {
        let now_ms = now_ns / MS;
        let keeps = u64::from(self.habits.keeps_last_ms);
        if let Some(held) = self.lease
            && held.transition_at + keeps <= now_ms
        {
            self.lease = None;
            self.lapsed = self.habits.revives.then_some(held);
        }
        if let Some((id, until)) = self.reserved
            && until < now_ms
        {
            self.forget(id);
        }
        if self.lease.is_none() && self.reserved.is_none() {
            self.hand_on(now_ms);
        }
    }

    /// Does what is asked, at `now_ns` of its clock as the statement sees it.
    pub fn execute(&mut self, id: Id, lease: Lease, ask: Ask, now_ns: u64) -> Answer {
        let now_ms = now_ns / MS;
        match ask {
            Ask::Acquire(on_refusal) => self.acquire(id, lease, on_refusal, now_ns),
            Ask::Renew(fence) => {
                if self.lease.is_none()
                    && self
                        .lapsed
                        .is_some_and(|held| (held.id, held.fence) == (id, fence))
                {
                    self.lease = self.lapsed.take();
                }
                let plant = self.plant;
                match &mut self.lease {
                    Some(held) if (held.id, held.fence) == (id, fence) => {
                        let ttl_at = now_ms + millis(lease.ttl());
                        let transition_at = now_ms + millis(lease.total());
                        if plant == Plant::ShortensLease {
                            (held.ttl_at, held.transition_at) = (ttl_at, transition_at);
                        } else {
                            held.ttl_at = held.ttl_at.max(ttl_at);
                            held.transition_at = held.transition_at.max(transition_at);
                        }
                        Answer::Renewed(*held, now_ms)
                    }
                    other => Answer::Lost(*other, now_ms),
                }
            }
            Ask::Release(fence) => {
                let named = self.lease.is_some_and(|held| {
                    held.id == id && (held.fence == fence || self.plant == Plant::ReleasesById)
                });
                if named {
                    self.lease = None;
                    self.hand_on(now_ms);
                }
                Answer::Released(named)
            }
            Ask::Withdraw => {
                self.forget(id);
                self.expire(now_ns);
                Answer::Withdrawn
            }
            Ask::Observe => Answer::Seen(self.lease, now_ms),
        }
    }

    fn acquire(&mut self, id: Id, lease: Lease, on_refusal: OnRefusal, now_ns: u64) -> Answer {
        let now_ms = now_ns / MS;
        let ours = self.lease.filter(|held| held.id == id);
        let next = self.reserved.is_none_or(|(first, _)| first == id);
        if ours.is_some() || (self.lease.is_none() && next) {
            self.forget(id);
            self.lapsed = None;
            let mut held = Held {
                id,
                fence: (now_ns / 1_000).max(self.last_fence + 1),
                acquired_at: now_ms,
                ttl_at: now_ms + millis(lease.ttl()),
                transition_at: now_ms + millis(lease.total()),
            };
            if let Some(ghost) = ours {
                // Like a renewal, an adoption must move no end backwards: its clock may be frozen, and
                // it may come late from a process that was set up with a shorter lease before.
                if self.plant != Plant::ShortensOnAdoption {
                    held.ttl_at = held.ttl_at.max(ghost.ttl_at);
                    held.transition_at = held.transition_at.max(ghost.transition_at);
                }
                match self.plant {
                    Plant::KeepsFence => held.fence = ghost.fence,
                    Plant::AdoptsWithoutLease => {
                        held.ttl_at = ghost.ttl_at;
                        held.transition_at = ghost.transition_at;
                    }
                    _ => {}
                }
            }
            self.last_fence = self.last_fence.max(held.fence);
            self.lease = Some(held);
            return Answer::Granted(held, now_ms);
        }
        if on_refusal == OnRefusal::Enqueue && !self.queue.contains(&id) {
            self.queue.push_back(id);
        }
        let free_at = match (self.lease, self.reserved) {
            (Some(held), _) => held.transition_at,
            (None, Some((_, until))) => until,
            (None, None) => now_ms,
        };
        Answer::Refused(self.lease, now_ms, free_at.saturating_sub(now_ms) + 1)
    }

    /// Wakes the first in the queue, and keeps the free mutex for it where that is a habit. Where it
    /// is not, the woken one has left the queue: it enters again if another was faster.
    fn hand_on(&mut self, now_ms: u64) {
        if let Some(&first) = self.queue.front() {
            self.wake = Some(first);
            if self.habits.claim_ms > 0 {
                self.reserved = Some((first, now_ms + self.habits.claim_ms));
            } else {
                self.queue.pop_front();
            }
        }
    }

    fn forget(&mut self, id: Id) {
        self.queue.retain(|waiter| *waiter != id);
        if self.reserved.is_some_and(|(first, _)| first == id) {
            self.reserved = None;
        }
    }
}
