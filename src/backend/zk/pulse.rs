//! Until when a session is certainly alive: pure arithmetic on what was sent and acknowledged.
//!
//! Only the ensemble's leader expires a session, so only what the leader surely knew counts. A
//! follower that is cut off from it goes on answering pings and reads. Two things prove more:
//!
//! - **A handshake.** To open a session or to take one over, the server must ask the leader, and the
//!   leader starts the session's timeout anew when it says yes: the session lives until the send of
//!   the handshake + T at least. So an ownership can be founded right after connecting.
//! - **A `sync`, once a later one has been acknowledged.** A `sync` goes through the leader but does
//!   not touch the session there. The follower reports the sessions it heard from in its answers to
//!   the leader's own pings, every half tick, on the same ordered connection that carries the `sync`.
//!   So when a `sync` comes through that was sent at least half a tick after an earlier one was
//!   acknowledged, a report that includes the earlier one came through before it. Half a tick is at
//!   most T/4, because a server grants no T below two ticks (unless told to: `minSessionTimeout`).
//!
//! With a beat every T/6 the proof lags by T/3 to T/2, and there is time for two lost beats before an
//! owner has to step down.

use std::collections::VecDeque;
use std::time::Duration;

use crate::clock::Moment;

#[derive(Debug)]
pub(super) struct Pulse {
    /// The negotiated session timeout, T.
    timeout: Duration,
    /// The leader surely counted the session's timeout anew at this moment or later.
    proven: Option<Moment>,
    /// Acknowledged beats that prove nothing yet: when sent, when acknowledged.
    acknowledged: VecDeque<(Moment, Moment)>,
    /// Beats without an answer: when sent.
    unanswered: VecDeque<Moment>,
    next_beat: Moment,
}

impl Pulse {
    /// For a session that has not been opened yet.
    pub(super) fn new(timeout: Duration) -> Pulse {
        Pulse {
            timeout,
            proven: None,
            acknowledged: VecDeque::new(),
            unanswered: VecDeque::new(),
            next_beat: Moment::FAR,
        }
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// A handshake sent at `sent` was answered with a session of `timeout`.
    pub(super) fn connected(&mut self, sent: Moment, timeout: Duration, now: Moment) {
        self.timeout = timeout;
        self.proven = Some(sent);
        self.acknowledged.clear();
        self.unanswered.clear();
        self.next_beat = now + timeout / 6;
    }

    /// Beats over a lost connection prove nothing about the next one.
    pub(super) fn disconnected(&mut self) {
        self.acknowledged.clear();
        self.unanswered.clear();
        self.next_beat = Moment::FAR;
    }

    /// When the next beat is due.
    pub(super) fn next_beat(&self) -> Moment {
        self.next_beat
    }

    pub(super) fn sent(&mut self, now: Moment) {
        self.unanswered.push_back(now);
        self.next_beat = now + self.timeout / 6;
    }

    /// The oldest beat without an answer was acknowledged.
    pub(super) fn acknowledged(&mut self, now: Moment) {
        let Some(sent) = self.unanswered.pop_front() else {
            return;
        };
        while let Some((earlier, when)) = self.acknowledged.front().copied()
            && when + self.timeout / 4 <= sent
        {
            self.proven = self.proven.max(Some(earlier));
            self.acknowledged.pop_front();
        }
        self.acknowledged.push_back((sent, now));
    }

    /// Up to when the leader cannot have expired the session, on a clock that runs like its own.
    pub(super) fn alive_until(&self) -> Option<Moment> {
        self.proven.map(|proven| proven + self.timeout)
    }

    /// When a connection that has left a beat unanswered must be given up: half of T after the beat,
    /// which is two thirds after the one before.
    pub(super) fn give_up_at(&self) -> Moment {
        self.unanswered
            .front()
            .map_or(Moment::FAR, |sent| *sent + self.timeout / 2)
    }

    /// Whether a beat is out for longer than it takes until the next: the connection is in doubt.
    pub(super) fn is_late(&self, now: Moment) -> bool {
        self.unanswered
            .front()
            .is_some_and(|sent| *sent + self.timeout / 6 <= now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: Duration = Duration::from_millis(1200);

    fn at(ms: u64) -> Moment {
        Moment::from_origin(Duration::from_millis(ms))
    }

    fn beat(pulse: &mut Pulse, sent: u64, acknowledged: u64) {
        pulse.sent(at(sent));
        pulse.acknowledged(at(acknowledged));
    }

    fn connected() -> Pulse {
        let mut pulse = Pulse::new(T);
        assert_eq!(pulse.alive_until(), None);
        pulse.connected(at(0), T, at(10));
        pulse
    }

    #[test]
    fn a_beat_counts_only_once_a_later_one_left_time_for_the_report_between() {
        let mut pulse = connected();
        assert_eq!(pulse.alive_until(), Some(at(1200)));
        assert_eq!(pulse.next_beat(), at(210));
        beat(&mut pulse, 210, 220);
        assert_eq!(pulse.alive_until(), Some(at(1200)));
        beat(&mut pulse, 410, 420); // 190 ms after the acknowledgement of the first: less than T/4
        assert_eq!(pulse.alive_until(), Some(at(1200)));
        beat(&mut pulse, 610, 620);
        assert_eq!(pulse.alive_until(), Some(at(1410)));
        beat(&mut pulse, 810, 820);
        assert_eq!(pulse.alive_until(), Some(at(1610)));
    }

    #[test]
    fn beats_close_together_prove_nothing() {
        let mut pulse = connected();
        for ms in 210..300 {
            beat(&mut pulse, ms, ms + 1);
        }
        assert_eq!(pulse.alive_until(), Some(at(1200)));
    }

    #[test]
    fn a_slow_answer_makes_the_proof_later_not_wrong() {
        let mut pulse = connected();
        beat(&mut pulse, 210, 409);
        beat(&mut pulse, 410, 420);
        beat(&mut pulse, 610, 620); // the first was acknowledged 201 ms before this one was sent
        assert_eq!(pulse.alive_until(), Some(at(1200)));
        beat(&mut pulse, 810, 820); // both of the first two are proven now
        assert_eq!(pulse.alive_until(), Some(at(1610)));
    }

    #[test]
    fn silence_is_noticed_then_acted_on_and_a_new_connection_starts_afresh() {
        let mut pulse = connected();
        beat(&mut pulse, 210, 220);
        pulse.sent(at(410));
        assert!(!pulse.is_late(at(609)) && pulse.is_late(at(610)));
        pulse.sent(at(610));
        assert_eq!(pulse.give_up_at(), at(1010));
        pulse.disconnected();
        assert_eq!(
            (pulse.give_up_at(), pulse.next_beat()),
            (Moment::FAR, Moment::FAR)
        );
        assert_eq!(pulse.alive_until(), Some(at(1200)));
        pulse.connected(at(1100), T, at(1110));
        beat(&mut pulse, 1310, 1320);
        assert_eq!(pulse.alive_until(), Some(at(2300)));
    }
}
