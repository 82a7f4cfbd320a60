//! The life of one connection on which messages arrive: what is sent on it, and what comes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ::redis::{Connection, PushKind, RedisError, Value};

use super::listener::Listener;
use super::script::command;
use super::subscriber::Shared;
use super::trouble::is_timeout;
use crate::clock::Moment;

/// After this much silence the connection is asked for a sign of life, and after twice as much
/// without one it is given up.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// The life of one connection.
pub(super) struct Session<'a> {
    shared: &'a Shared,
    connection: Connection,
    /// Who is to be rung when, unless its turn comes before; numbered, because two may be due at once.
    alarms: BTreeMap<(Moment, u64), Arc<Listener>>,
    alarms_set: u64,
    heard_at: Moment,
    asked_at: Moment,
    /// What the socket's timeout is set to.
    timeout: Duration,
}

impl Session<'_> {
    pub(super) fn new(shared: &Shared, connection: Connection) -> Session<'_> {
        let now = Moment::now();
        Session {
            shared,
            connection,
            alarms: BTreeMap::new(),
            alarms_set: 0,
            heard_at: now,
            asked_at: now,
            timeout: Duration::ZERO,
        }
    }

    /// Reads until the end of the connection or of the factory. `heard`: the server answered.
    pub(super) fn run(mut self, heard: &mut bool) -> std::result::Result<(), RedisError> {
        {
            let mut state = self.shared.state.lock();
            state.live = true;
            state.suspect = false;
            state.stale.clear();
            state.fresh = state.routes.keys().cloned().collect();
        }
        self.ask()?;
        loop {
            if !self.send_news()? {
                return Ok(());
            }
            let wait = self.ring_alarms().max(Duration::from_millis(1));
            // A system call, and with every message the wait begins anew: to wake a little early is
            // cheaper than to set the clock each time.
            if self.timeout > wait || self.timeout < wait / 2 {
                self.connection.set_read_timeout(Some(wait))?;
                self.timeout = wait;
            }
            match self.connection.recv_response() {
                Ok(Value::Push { kind, data }) => {
                    *heard = true;
                    self.heard_at = Moment::now();
                    self.take(&kind, &data);
                }
                Ok(Value::ServerError(error)) => return Err(error.into()),
                Ok(_) => {}
                Err(error) if is_timeout(&error) => self.listen_for_life()?,
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends what was queued. `false`: this connection is to end.
    fn send_news(&mut self) -> std::result::Result<bool, RedisError> {
        let (fresh, stale) = {
            let mut state = self.shared.state.lock();
            if state.closed || state.suspect {
                return Ok(false);
            }
            state.poked = false;
            if state.fresh.is_empty() && state.stale.is_empty() {
                return Ok(true);
            }
            let mut fresh = std::mem::take(&mut state.fresh);
            let stale = std::mem::take(&mut state.stale);
            // Who came and went, or went and came, before we looked.
            fresh.retain(|channel| state.routes.contains_key(channel));
            (fresh, stale)
        };
        self.send(b"UNSUBSCRIBE", &stale)?;
        self.send(b"SUBSCRIBE", &fresh)?;
        Ok(true)
    }

    fn send(&mut self, verb: &[u8], channels: &[Vec<u8>]) -> std::result::Result<(), RedisError> {
        for some in channels.chunks(500) {
            let mut arguments = vec![verb];
            arguments.extend(some.iter().map(Vec::as_slice));
            self.connection.send_packed_command(&command(&arguments))?;
        }
        Ok(())
    }

    /// Rings whose time has come, and says for how long there is nothing to do.
    fn ring_alarms(&mut self) -> Duration {
        let now = Moment::now();
        let mut next = self.heard_at.max(self.asked_at) + HEARTBEAT;
        while let Some(alarm) = self.alarms.first_entry() {
            let (at, _) = *alarm.key();
            if at > now {
                next = next.min(at);
                break;
            }
            alarm.remove().ring_alarm(at);
        }
        next - now
    }

    /// After a silence: asks for a sign of life, or gives up if one was asked for in vain.
    fn listen_for_life(&mut self) -> std::result::Result<(), RedisError> {
        let now = Moment::now();
        if self.asked_at > self.heard_at {
            if now - self.asked_at >= HEARTBEAT {
                return Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into());
            }
        } else if now - self.heard_at >= HEARTBEAT {
            self.ask()?;
        }
        Ok(())
    }

    /// Subscribes (again) to the control channel. Not PING: its reply is no push, and the driver
    /// swallows replies of which it thinks that nobody waits for them any more.
    fn ask(&mut self) -> std::result::Result<(), RedisError> {
        self.asked_at = Moment::now();
        let control = self.shared.control.as_bytes();
        self.connection
            .send_packed_command(&command(&[b"SUBSCRIBE", control]))
    }

    fn take(&mut self, kind: &PushKind, data: &[Value]) {
        let Some(Value::BulkString(channel)) = data.first() else {
            return;
        };
        let mut state = self.shared.state.lock();
        let Some(route) = state.routes.get_mut(channel) else {
            return;
        };
        match (kind, data.get(1)) {
            (PushKind::Message, Some(Value::BulkString(payload))) => {
                let (purpose, listeners) = (route.purpose, route.listeners.clone());
                drop(state);
                for listener in listeners {
                    if let Some(at) = listener.take(purpose, payload) {
                        self.alarms_set += 1;
                        self.alarms.insert((at, self.alarms_set), listener);
                    }
                }
            }
            (PushKind::Subscribe, _) => {
                route.acknowledged = true;
                if std::mem::take(&mut route.interrupted) {
                    route.wake();
                }
                // Each on its own: a thousand that start together must not wake each other.
                for listener in &route.listeners {
                    listener.settled.notify_one();
                }
            }
            _ => {}
        }
    }
}
