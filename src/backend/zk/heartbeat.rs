//! Until when a session is certainly alive: arithmetic on what was sent and acknowledged. No clock.
//!
//! Only the ensemble's leader expires a session, so only what the leader surely knew counts. A
//! follower that is cut off from it goes on answering pings and reads. Two things prove more:
//!
//! - **A handshake.** To open a session or to take one over, the server must ask the leader, and the
//!   leader starts the session's timeout anew when it says yes: the session lives until the send of
//!   the handshake + T at least. So an ownership can be founded right after connecting.
//! - **A `sync`, once a later one has been acknowledged that was sent T/4 or more after its
//!   acknowledgement.** A `sync` goes through the leader but does not touch the session there. The
//!   follower reports the sessions that it heard from in its answers to the leader's own pings, every
//!   half tick, on the same ordered connection that carries the `sync`. Half a tick is at most T/4,
//!   because a server grants no T below two ticks (unless told to: `minSessionTimeout`). Beats close
//!   together prove nothing.
//!
//! A beat is sent every T/24, whether or not the last was answered. While all is well, the proof is T/4 to T/3 old.
//! A server may be silent for about half of T before an owner steps down.
//!
//! But was it still the leader? One that is cut off from its quorum takes sessions over and acknowledges every
//! `sync` until it notices, `syncLimit` ticks later. Meanwhile its followers, if they restart or lose their
//! connections sooner, elect another. That one counts every session's timeout anew from its election.
//!
//! So both of the above hold only up to T after **a commit**. Every fourth beat is a transaction that changes
//! nothing. It is answered only after a quorum has written it down, and a quorum that has elected another leader
//! writes nothing down for the old one. Opening a session is such a transaction; taking one over is not.
//!
//! **What this cannot see**, and what the transition of T/6 at least is for: a leader that stood still in the
//! very moment of a ping. It may acknowledge twice around a report that was never sent, so its view may be up to
//! half a tick older than it seems. That matters only if the connection between follower and leader is lost at once
//! afterwards.

use std::collections::VecDeque;
use std::time::Duration;

use crate::clock::Moment;

/// One beat in so many is a commit. So the last one is at most a sixth of T old, which is less than the age of what
/// the others prove.
const COMMIT_EVERY: u32 = 4;

/// What a beat asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Beat {
    /// An answer of the leader.
    Sync,
    /// An answer of a quorum, too.
    Commit,
}

/// The heartbeats of one session.
#[derive(Debug)]
pub(super) struct Heartbeat {
    /// The negotiated session timeout, T.
    timeout: Duration,
    /// The leader surely counted the session's timeout anew at this moment or later.
    proven: Option<Moment>,
    /// A quorum surely followed the leader that counts the session's timeout at this moment or later.
    committed: Option<Moment>,
    /// Acknowledged beats that do not count yet: when sent, when acknowledged.
    acknowledged: VecDeque<(Moment, Moment)>,
    /// Beats without an answer: when sent, and what they ask for.
    unanswered: VecDeque<(Moment, Beat)>,
    due: Moment,
    /// How many beats are sent before the next commit.
    before_commit: u32,
}

impl Heartbeat {
    /// For a session that has not been opened yet.
    pub(super) fn new(timeout: Duration) -> Heartbeat {
        Heartbeat {
            timeout,
            proven: None,
            committed: None,
            acknowledged: VecDeque::new(),
            unanswered: VecDeque::new(),
            due: Moment::FAR,
            before_commit: 0,
        }
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// A handshake sent at `sent` was answered with a session of `timeout`, which it opened or took over. The first
    /// beat is due.
    pub(super) fn connected(&mut self, sent: Moment, timeout: Duration, opened: bool, now: Moment) {
        self.disconnected();
        self.timeout = timeout;
        self.proven = self.proven.max(Some(sent));
        if opened {
            self.committed = Some(sent);
        }
        self.before_commit = if opened { COMMIT_EVERY - 1 } else { 0 };
        self.due = now;
    }

    /// Beats over a lost connection prove nothing about the next one.
    pub(super) fn disconnected(&mut self) {
        self.acknowledged.clear();
        self.unanswered.clear();
        self.due = Moment::FAR;
    }

    /// When the next beat is due.
    pub(super) fn due(&self) -> Moment {
        self.due
    }

    /// A beat is sent. Returns what it has to ask for.
    pub(super) fn sent(&mut self, now: Moment) -> Beat {
        let beat = match self.before_commit {
            0 => Beat::Commit,
            _ => Beat::Sync,
        };
        self.before_commit = (self.before_commit + COMMIT_EVERY - 1) % COMMIT_EVERY;
        self.unanswered.push_back((now, beat));
        self.due = now + self.timeout / 24;
        beat
    }

    /// The oldest beat without an answer was acknowledged.
    pub(super) fn acknowledged(&mut self, now: Moment) {
        let Some((sent, beat)) = self.unanswered.pop_front() else {
            return;
        };
        if beat == Beat::Commit {
            self.committed = self.committed.max(Some(sent));
        }
        while let Some((earlier, when)) = self.acknowledged.front().copied()
            && when + self.timeout / 4 <= sent
        {
            self.proven = self.proven.max(Some(earlier));
            self.acknowledged.pop_front();
        }
        self.acknowledged.push_back((sent, now));
    }

    /// How many beats have no answer yet.
    pub(super) fn unanswered(&self) -> usize {
        self.unanswered.len()
    }

    /// Up to when the leader cannot have expired the session, as far as beats can tell (see above),
    /// less what two clocks may drift apart in that time.
    pub(super) fn alive_until(&self) -> Option<Moment> {
        let margin = self.timeout / 100 + Duration::from_millis(5);
        let proven = self.proven?.min(self.committed?);
        Some(proven + self.timeout - margin)
    }

    /// When a server that has acknowledged no beat must be left for another one. One that takes longer than T/4 could
    /// not keep an owner, however steadily it answers.
    pub(super) fn silent_at(&self) -> Moment {
        self.unanswered
            .front()
            .map_or(Moment::FAR, |(sent, _)| *sent + self.timeout / 4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: Duration = Duration::from_millis(2_400);
    const MARGIN: u64 = 29;

    fn at(ms: u64) -> Moment {
        Moment::from_origin(Duration::from_millis(ms))
    }

    fn beat(heartbeat: &mut Heartbeat, sent: u64, acknowledged: u64) {
        heartbeat.sent(at(sent));
        heartbeat.acknowledged(at(acknowledged));
    }

    fn connected() -> Heartbeat {
        let mut heartbeat = Heartbeat::new(T);
        assert_eq!(heartbeat.alive_until(), None);
        heartbeat.connected(at(0), T, true, at(10));
        heartbeat
    }

    fn alive(ms: u64) -> Option<Moment> {
        Some(at(ms - MARGIN))
    }

    #[test]
    fn beat_counts_once_a_later_one_left_time_for_the_report() {
        let mut heartbeat = connected();
        assert_eq!(heartbeat.alive_until(), alive(2_400));
        assert_eq!(heartbeat.due(), at(10));
        for sent in (10..600).step_by(100) {
            beat(&mut heartbeat, sent, sent + 5);
            assert_eq!(heartbeat.due(), at(sent + 100));
            assert_eq!(heartbeat.alive_until(), alive(2_400));
        }
        beat(&mut heartbeat, 614, 620); // 599 ms after the first was acknowledged
        assert_eq!(heartbeat.alive_until(), alive(2_400));
        beat(&mut heartbeat, 615, 620);
        assert_eq!(heartbeat.alive_until(), alive(2_410));
        beat(&mut heartbeat, 815, 820);
        assert_eq!(heartbeat.alive_until(), alive(2_610));
    }

    #[test]
    fn beats_acknowledged_late_and_together_count_later() {
        let mut heartbeat = connected();
        for sent in [10, 110, 210, 310, 410] {
            heartbeat.sent(at(sent));
        }
        // All answers come late and together: the first was acknowledged after the last was sent.
        for _ in 0..5 {
            heartbeat.acknowledged(at(450));
        }
        assert_eq!(heartbeat.alive_until(), alive(2_400));
        beat(&mut heartbeat, 1_049, 1_060);
        assert_eq!(heartbeat.alive_until(), alive(2_400));
        beat(&mut heartbeat, 1_050, 1_060);
        // The last of them is later than the last commit.
        assert_eq!(heartbeat.alive_until(), alive(2_710));
    }

    #[test]
    fn silence_is_noticed_and_a_new_connection_starts_afresh() {
        let mut heartbeat = connected();
        beat(&mut heartbeat, 10, 20);
        heartbeat.sent(at(110));
        heartbeat.sent(at(210));
        assert_eq!(heartbeat.silent_at(), at(710));
        heartbeat.disconnected();
        assert_eq!(
            (heartbeat.silent_at(), heartbeat.due()),
            (Moment::FAR, Moment::FAR)
        );
        assert_eq!(heartbeat.alive_until(), alive(2_400));
        heartbeat.connected(at(1_100), T, true, at(1_110));
        beat(&mut heartbeat, 1_310, 1_320);
        assert_eq!(heartbeat.alive_until(), alive(3_500));
    }

    /// A leader without a quorum takes sessions over and answers every `sync`.
    #[test]
    fn nothing_counts_without_a_commit() {
        let mut heartbeat = connected();
        for four in 0..3 {
            for number in 0..4 {
                let sent = 10 + 400 * four + 100 * number;
                let beat = heartbeat.sent(at(sent));
                assert_eq!(beat == Beat::Commit, number == 3);
                heartbeat.acknowledged(at(sent + 5));
            }
        }
        // The last commit was sent at 1,110 and is not what limits belief. No further one is answered.
        assert_eq!(heartbeat.alive_until(), alive(2_810));
        for sent in (1_300..4_000).step_by(700) {
            heartbeat.connected(at(sent), T, false, at(sent + 10));
            assert_eq!(heartbeat.sent(at(sent + 10)), Beat::Commit);
        }
        assert_eq!(heartbeat.alive_until(), alive(1_110 + 2_400));
        heartbeat.acknowledged(at(3_420));
        assert_eq!(heartbeat.alive_until(), alive(3_400 + 2_400));
        assert_eq!(heartbeat.sent(at(3_510)), Beat::Sync);
    }
}
