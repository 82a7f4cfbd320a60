//! What time it is on the server, as far as this process knows without asking.

use parking_lot::Mutex;

use crate::clock::Moment;

/// The server's clock, carried on by the local boot-time clock.
///
/// Only for what is shown (`acquired_at`, `ttl_at` of an owner that just won and read nothing back):
/// the server decides expiry by its own clock, and belief counts locally from the send.
#[derive(Debug, Default)]
pub(crate) struct ServerClock {
    last: Mutex<Option<(u64, Moment)>>,
}

impl ServerClock {
    /// The server's clock showed `micros` at some moment between `sent` and `received`.
    pub(crate) fn learn(&self, micros: u64, sent: Moment, received: Moment) {
        let middle = sent + (received - sent) / 2;
        *self.last.lock() = Some((micros, middle));
    }

    /// As [`learn`](ServerClock::learn), from a coarser reading: only where it says something new, a
    /// clock that was set.
    pub(crate) fn learn_millis(&self, millis: u64, sent: Moment, received: Moment) {
        let micros = millis.saturating_mul(1_000);
        let known = self.micros_at(sent + (received - sent) / 2);
        if known.abs_diff(micros) > 1_000_000 {
            self.learn(micros, sent, received);
        }
    }

    /// The server's epoch microseconds at `local`; zero before the first connection.
    pub(crate) fn micros_at(&self, local: Moment) -> u64 {
        match *self.last.lock() {
            Some((micros, at)) if local >= at => {
                micros.saturating_add(u64::try_from((local - at).as_micros()).unwrap_or(u64::MAX))
            }
            Some((micros, at)) => {
                micros.saturating_sub(u64::try_from((at - local).as_micros()).unwrap_or(u64::MAX))
            }
            None => 0,
        }
    }
}
