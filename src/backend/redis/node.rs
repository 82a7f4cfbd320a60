//! One server: its connections for commands and the one for messages.

use std::sync::Arc;
use std::time::Duration;

use ::redis::Value;

use super::link::{Address, Connector};
use super::listener::{Listener, Purpose, Subscription};
use super::pool::{Failure, Lane, Pool, Spare};
use super::script::Call;
use super::subscriber::{Next, Subscriber};
use crate::clock::Moment;
use crate::error::Result;

/// How long the end of a factory waits for the server to wake the reader. Without it, the reader
/// ends at its next heartbeat.
const FAREWELL: Duration = Duration::from_millis(200);

/// How long a contender that has left waits for the server to hear that it does not listen any more.
const HURRY: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(super) struct Node {
    pub(super) address: Address,
    // Ended in this order: the reader is woken through the pool.
    subscriber: Subscriber,
    pool: Pool,
}

impl Node {
    pub(super) fn new(
        connector: &Arc<Connector>,
        address: &Address,
        size: usize,
        prefix: &str,
        on_trouble: Box<dyn Fn() + Send + Sync>,
    ) -> Result<Node> {
        // No brace in it, so it is nobody else's; random, so it is no other factory's.
        let control = format!("{prefix}:!control:{:032x}", rand::random::<u128>());
        Ok(Node {
            address: address.clone(),
            pool: Pool::new(connector, address, size, &control)?,
            subscriber: Subscriber::new(connector, address, control, on_trouble),
        })
    }

    /// Runs a script; the reply is waited for until `by`, and the server is told so.
    pub(super) fn call(&self, call: &mut Call, lane: Lane, by: Moment) -> Result<Value, Failure> {
        self.pool.call(call, lane, by)
    }

    /// The way to a connection for who does not wait for one.
    pub(super) fn spare(&self) -> Spare {
        self.pool.spare()
    }

    /// Subscribes, and returns once the server has acknowledged it.
    pub(super) fn subscribe(
        self: &Arc<Self>,
        channels: &[(Vec<u8>, Purpose); 2],
        listener: &Arc<Listener>,
        by: Moment,
    ) -> Result<Subscription> {
        let next = self.subscriber.add(channels, listener)?;
        let names = [channels[0].0.clone(), channels[1].0.clone()];
        let subscription = Subscription::new(self, listener, names);
        if next == Next::Poke
            && let Err(error) = self.pool.poke(by)
        {
            self.subscriber.not_poked();
            return Err(error);
        }
        self.subscriber.acknowledged(channels, listener, by)?;
        Ok(subscription)
    }

    pub(super) fn unsubscribe(&self, channels: &[Vec<u8>; 2], listener: &Arc<Listener>) {
        self.subscriber.remove(channels, listener);
    }

    /// Has the server told now what [`Node::unsubscribe`] left for later. It may fail: later is soon.
    pub(super) fn hurry(&self) {
        let _ = self.pool.poke(Moment::now() + HURRY);
    }

    pub(super) fn wake_all(&self) {
        self.subscriber.wake_all();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if self.subscriber.close() {
            let _ = self.pool.poke(Moment::now() + FAREWELL);
        }
    }
}
