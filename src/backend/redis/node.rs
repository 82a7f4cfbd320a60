//! One server: its connections for commands and the one for messages.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use ::redis::Value;

use super::link::{Address, Connector};
use super::listener::{Listener, Purpose, Subscription};
use super::pool::{Failure, Lane, Pool};
use super::script::Call;
use super::subscriber::{Next, Subscriber};
use crate::clock::Moment;
use crate::error::Result;

/// How long the end of a factory waits for the server to wake the reader. Without it, the reader
/// ends at its next heartbeat.
const FAREWELL: Duration = Duration::from_millis(200);

#[derive(Debug)]
pub(super) struct Node {
    pub(super) address: Address,
    // Ended in this order: the reader is woken through the pool.
    subscriber: Subscriber,
    pool: Pool,
    /// The server's clock less ours, in milliseconds; `i64::MIN` until a reply told.
    skew: AtomicI64,
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
            skew: AtomicI64::new(i64::MIN),
        })
    }

    /// Runs a script; the reply is waited for until `by`, and the server is told so.
    pub(super) fn call(&self, call: &mut Call, lane: Lane, by: Moment) -> Result<Value, Failure> {
        let sent = Moment::now();
        let skew = self.skew.load(Ordering::Relaxed);
        let deadline = if skew == i64::MIN {
            0
        } else {
            u64::try_from(local_ms(by).saturating_add(skew)).unwrap_or(0)
        };
        let value = self.pool.call(call.until(deadline), lane, by)?;
        // Counted from before the request, so that the deadline errs to the later side.
        if let Value::Array(fields) = &value
            && let Some(Value::Int(now)) = fields.get(1)
        {
            self.skew
                .store(now.saturating_sub(local_ms(sent)), Ordering::Relaxed);
        }
        Ok(value)
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
        if self.subscriber.remove(channels, listener) == Next::Poke {
            self.pool.poke_soon();
        }
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

fn local_ms(at: Moment) -> i64 {
    i64::try_from(at.since_origin().as_millis()).unwrap_or(i64::MAX)
}
