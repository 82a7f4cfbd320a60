//! Builds a `MutexContendService`.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Receiver;

use super::contend::MutexContendService;
use super::courier::Executor;
use super::delivery::Listener;
use super::lifecycle::Lifecycle;
use super::listening::Listening;
use super::terms::{Settled, Terms};
use crate::backend::Hold;
use crate::contender::MutexContender;
use crate::error::Result;
use crate::event::{Event, EventKind};
use crate::factory::Factory;
use crate::id::ContenderIdGenerator;

/// Builds a [`MutexContendService`]. Everything is checked at the end, before anything happens.
#[derive(Debug)]
#[must_use]
pub struct ContendBuilder {
    terms: Terms,
    initial_delay: Duration,
    listening: Listening,
}

impl ContendBuilder {
    pub(crate) fn new(factory: Factory, mutex: &str) -> ContendBuilder {
        ContendBuilder {
            initial_delay: factory.initial_delay(),
            terms: Terms::new(factory, mutex),
            listening: Listening::default(),
        }
    }

    pub(crate) fn contender(
        factory: Factory,
        contender: impl MutexContender + 'static,
    ) -> ContendBuilder {
        let mut builder =
            ContendBuilder::new(factory, contender.mutex()).id(contender.contender_id());
        builder.listening.own = Some(Arc::new(move |event: &Event| contender.notify_owner(event)));
        builder
    }

    /// The id to contend under. Default: a generated one. No other contender of the mutex, in any
    /// process, may have it.
    pub fn id(mut self, id: &str) -> ContendBuilder {
        self.terms.id = Some(Arc::from(id));
        self
    }

    /// How to generate an id. Default: [`ContenderIdGenerator::Host`].
    pub fn id_generator(mut self, ids: ContenderIdGenerator) -> ContendBuilder {
        self.terms.ids = ids;
        self
    }

    /// How long this contender may believe it owns without a renewal. Default: the factory's, 10 s.
    pub fn ttl(mut self, ttl: Duration) -> ContendBuilder {
        self.terms.ttl = ttl;
        self
    }

    /// How long after the ttl nobody else can own. Default: the factory's, 6 s.
    pub fn transition(mut self, transition: Duration) -> ContendBuilder {
        self.terms.transition = transition;
        self
    }

    /// How long after a grant the lease is renewed. Default: a third of the ttl.
    pub fn renew_after(mut self, renew_after: Duration) -> ContendBuilder {
        self.terms.renew_after = Some(renew_after);
        self
    }

    /// Over how long contenders spread their attempts when a lease has ended. Default: a twentieth of
    /// the ttl, at most 50 ms.
    pub fn jitter(mut self, jitter: Duration) -> ContendBuilder {
        self.terms.jitter = Some(jitter);
        self
    }

    /// How long after `start` the first attempt is made. Default: the factory's, none.
    pub fn initial_delay(mut self, initial_delay: Duration) -> ContendBuilder {
        self.initial_delay = initial_delay;
        self
    }

    /// How many events wait for a receiver or callback that is slow. Default: 256; at least 2.
    pub fn event_capacity(mut self, capacity: usize) -> ContendBuilder {
        self.listening.capacity = capacity;
        self
    }

    /// Whether trouble with the backend is an event too. Default: no.
    pub fn failures(mut self, failures: bool) -> ContendBuilder {
        self.listening.failures = failures;
        self
    }

    /// Calls `callback` when this contender became the owner.
    pub fn on_acquired(mut self, callback: impl FnMut(&Event) + Send + 'static) -> ContendBuilder {
        self.listening.on(EventKind::Acquired, callback);
        self
    }

    /// Calls `callback` when this contender ceased to be the owner. Nobody else begins before it
    /// returns, as long as the lease lasts.
    pub fn on_released(mut self, callback: impl FnMut(&Event) + Send + 'static) -> ContendBuilder {
        self.listening.on(EventKind::Released, callback);
        self
    }

    /// Calls `callback` when another owner was seen, or that there is none.
    pub fn on_owner_changed(
        mut self,
        callback: impl FnMut(&Event) + Send + 'static,
    ) -> ContendBuilder {
        self.listening.on(EventKind::OwnerChanged, callback);
        self
    }

    /// Calls `callback` when the trouble with the backend changed.
    pub fn on_failure(mut self, callback: impl FnMut(&Event) + Send + 'static) -> ContendBuilder {
        self.listening.on(EventKind::Failed, callback);
        self
    }

    /// Runs callbacks through `executor`. Default: on a thread of their own.
    pub fn executor(mut self, executor: Executor) -> ContendBuilder {
        self.listening.executor = Some(executor);
        self
    }

    /// The service, with the callbacks given, if any.
    ///
    /// # Errors
    /// `InvalidInput` for a name, id or duration that is not allowed, `DuplicateContender` for an id
    /// that this process contends under already, `Forked` in a child process.
    pub fn build(mut self) -> Result<MutexContendService> {
        let listening = std::mem::take(&mut self.listening);
        let failures = listening.failures;
        self.finish(listening.callbacks(), failures)
    }

    /// The service, and the receiver of its events; usable in crossbeam's `select!`. The receiver
    /// outlives restarts and is disconnected when the service is dropped.
    ///
    /// # Errors
    /// As [`build`](ContendBuilder::build); and `InvalidInput` where callbacks were given too.
    pub fn channel(mut self) -> Result<(MutexContendService, Receiver<Event>)> {
        let listening = std::mem::take(&mut self.listening);
        let failures = listening.failures;
        let (listener, receiver) = listening.channel()?;
        Ok((self.finish(listener, failures)?, receiver))
    }

    fn finish(self, listener: Listener, failures: bool) -> Result<MutexContendService> {
        let Settled {
            backend,
            place,
            period,
            claim,
        } = self.terms.settle(Hold::Long)?;
        // What this backend cannot keep is refused now, not at the start.
        backend.seat(&place)?;
        Ok(MutexContendService {
            backend,
            place,
            period,
            initial_delay: self.initial_delay,
            failures,
            listener,
            board: Arc::default(),
            lifecycle: Lifecycle::new(),
            claim: Arc::new(claim),
        })
    }
}
