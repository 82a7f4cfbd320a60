//! Builds a `MutexRetrievalService`.

use std::sync::Arc;

use crossbeam_channel::Receiver;

use super::courier::Executor;
use super::delivery::Listener;
use super::lifecycle::Lifecycle;
use super::listening::Listening;
use super::retrieval::MutexRetrievalService;
use crate::contender::MutexRetriever;
use crate::error::Result;
use crate::event::{Event, EventKind};
use crate::factory::Factory;
use crate::name::check_mutex;

/// Builds a [`MutexRetrievalService`].
#[derive(Debug)]
#[must_use]
pub struct ObserveBuilder {
    factory: Factory,
    mutex: Arc<str>,
    listening: Listening,
}

impl ObserveBuilder {
    pub(crate) fn new(factory: Factory, mutex: &str) -> ObserveBuilder {
        ObserveBuilder {
            factory,
            mutex: Arc::from(mutex),
            listening: Listening::default(),
        }
    }

    pub(crate) fn retriever(
        factory: Factory,
        retriever: impl MutexRetriever + 'static,
    ) -> ObserveBuilder {
        let mut builder = ObserveBuilder::new(factory, retriever.mutex());
        builder.listening.own = Some(Arc::new(move |event: &Event| retriever.notify_owner(event)));
        builder
    }

    /// How many events wait for a receiver or callback that is slow. Default: 256; at least 2.
    pub fn event_capacity(mut self, capacity: usize) -> ObserveBuilder {
        self.listening.capacity = capacity;
        self
    }

    /// Whether trouble with the backend is an event too. Default: no.
    pub fn failures(mut self, failures: bool) -> ObserveBuilder {
        self.listening.failures = failures;
        self
    }

    /// Calls `callback` when another owner was seen, or that there is none.
    pub fn on_owner_changed(
        mut self,
        callback: impl FnMut(&Event) + Send + 'static,
    ) -> ObserveBuilder {
        self.listening.on(EventKind::OwnerChanged, callback);
        self
    }

    /// Calls `callback` when the trouble with the backend changed.
    pub fn on_failure(mut self, callback: impl FnMut(&Event) + Send + 'static) -> ObserveBuilder {
        self.listening.on(EventKind::Failed, callback);
        self
    }

    /// Runs callbacks through `executor`. Default: on a thread of their own.
    pub fn executor(mut self, executor: Executor) -> ObserveBuilder {
        self.listening.executor = Some(executor);
        self
    }

    /// The service, with the callbacks given, if any.
    ///
    /// # Errors
    /// `InvalidInput` for a name that is not allowed, `Forked` in a child process.
    pub fn build(mut self) -> Result<MutexRetrievalService> {
        let listening = std::mem::take(&mut self.listening);
        let failures = listening.failures;
        self.finish(listening.callbacks(), failures)
    }

    /// The service, and the receiver of its events; usable in crossbeam's `select!`. The receiver
    /// outlives restarts and is disconnected when the service is dropped.
    ///
    /// # Errors
    /// As [`build`](ObserveBuilder::build); and `InvalidInput` where callbacks were given too.
    pub fn channel(mut self) -> Result<(MutexRetrievalService, Receiver<Event>)> {
        let listening = std::mem::take(&mut self.listening);
        let failures = listening.failures;
        let (listener, receiver) = listening.channel()?;
        Ok((self.finish(listener, failures)?, receiver))
    }

    fn finish(self, listener: Listener, failures: bool) -> Result<MutexRetrievalService> {
        let backend = Arc::clone(self.factory.backend()?);
        check_mutex(&self.mutex)?;
        // What this backend cannot keep is refused now, not at the start.
        backend.watch(&self.mutex)?;
        Ok(MutexRetrievalService {
            backend,
            mutex: self.mutex,
            lease: self.factory.lease(),
            failures,
            listener,
            board: Arc::default(),
            lifecycle: Lifecycle::new(),
        })
    }
}
