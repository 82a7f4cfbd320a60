//! The scripts, a request as it goes over the wire, and what comes back.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use ::redis::{Arg, Cmd, ToRedisArgs, Value};

use super::error::not_understood;
use super::permits::{self, read};
use super::server::Answer;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::Lease;
use crate::owner::MutexOwner;

pub(super) static ACQUIRE: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("../../../lua/acquire.lua")));
pub(super) static RENEW: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("../../../lua/renew.lua")));
pub(super) static RELEASE: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("../../../lua/release.lua")));
pub(super) static WITHDRAW: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("../../../lua/withdraw.lua")));
pub(super) static OBSERVE: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("../../../lua/observe.lua")));
pub(super) static RECORD_RUN: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("../../../lua/record_run.lua")));
pub(super) static PERMITS: LazyLock<Script> = LazyLock::new(|| Script::new(permits::SCRIPT));

/// One script: its text and the SHA1 by which a server that has it knows it.
#[derive(Debug)]
pub(super) struct Script {
    text: String,
    sha: String,
}

impl Script {
    fn new(text: &str) -> Script {
        let hand_over = include_str!("../../../lua/hand_over.lua");
        let text = text.replace("--@hand_over\n", hand_over);
        let sha = ::redis::Script::new(&text).get_hash().to_owned();
        Script { text, sha }
    }
}

/// Whether a request names its last key, the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Queue {
    Needed,
    Optional,
    LeftOut,
}

/// A script with its keys and arguments, or a plain command, for the server that has a slot. May be sent twice.
#[derive(Clone, Debug)]
pub(super) struct Command {
    pub(super) slot: u16,
    script: Option<&'static Script>,
    /// How many of the words are keys: the first ones.
    keys: usize,
    words: Cmd,
    not_after: bool,
    pub(super) queue: Queue,
    /// How many replicas must have a grant.
    pub(super) replicas: u32,
}

impl Command {
    /// A script with its keys, which all lie in `slot`.
    pub(super) fn script(script: &'static Script, slot: u16, keys: &[&String]) -> Command {
        let command = Command {
            script: Some(script),
            keys: keys.len(),
            ..Command::plain(slot, &[])
        };
        command.arg(keys)
    }

    /// A plain command.
    pub(super) fn plain(slot: u16, words: &[&[u8]]) -> Command {
        let command = Command {
            slot,
            script: None,
            keys: 0,
            // Room for a whole request, so that it is allocated once.
            words: Cmd::with_capacity(16, 512),
            not_after: false,
            queue: Queue::Needed,
            replicas: 0,
        };
        command.arg(words)
    }

    /// Appends one argument, or several.
    pub(super) fn arg(mut self, argument: impl ToRedisArgs) -> Command {
        self.words.arg(argument);
        self
    }

    /// Has the time appended up to which the reply is waited for, in ms of the server's clock; 0 while that clock is
    /// not known.
    pub(super) fn not_after(mut self) -> Command {
        self.not_after = true;
        self
    }

    /// The same request without the queue, if that is optional. Where a slot is on its way, a script may name only
    /// keys that exist.
    pub(super) fn without_queue(&self) -> Option<Command> {
        let shorter = Command {
            queue: Queue::LeftOut,
            ..self.clone()
        };
        (self.queue == Queue::Optional).then_some(shorter)
    }

    /// The bytes to send. A server that does not know the script yet is sent its text, and remembers it from then on:
    /// one round trip, and no right to `SCRIPT LOAD` needed.
    pub(super) fn packed(&self, as_text: bool, not_after: i64) -> Vec<u8> {
        let mut command = Cmd::with_capacity(16, 512);
        let left_out = (self.queue == Queue::LeftOut).then(|| self.keys - 1);
        if let Some(script) = &self.script {
            let (verb, code) = match as_text {
                true => ("EVAL", &script.text),
                false => ("EVALSHA", &script.sha),
            };
            command.arg(verb).arg(code);
            command.arg(left_out.unwrap_or(self.keys));
        }
        for (at, word) in self.words.args_iter().enumerate() {
            if let Arg::Simple(word) = word
                && left_out != Some(at)
            {
                command.arg(word);
            }
        }
        if self.not_after {
            command.arg(not_after);
        }
        command.get_packed_command()
    }
}

/// `{outcome, now, owner, fence, left, place}`, as the scripts return it: as much of it as they have to say.
pub(super) struct Reply {
    /// The fence, 1 or 0: see the script.
    pub(super) outcome: u64,
    /// The server's time, in milliseconds.
    now: u64,
    /// Who owns; empty for none.
    id: Vec<u8>,
    /// `None` for an owner that has none (Simba before 4), 0 where the mutex is only handed over.
    fence: Option<u64>,
    /// How long the lease or hand-over lasts, in milliseconds; negative if it has no end (an operator's doing).
    left: i64,
    /// The place in the queue.
    pub(super) place: Vec<u8>,
    received: Moment,
    /// As in [`Answer`].
    pub(super) replicas: Option<i64>,
}

impl Reply {
    /// Reads a reply.
    ///
    /// # Errors
    /// `Timeout` if the request was late, or the server's clock was set. The next one knows the clock.
    pub(super) fn read(answer: Answer) -> Result<Reply> {
        type Text = Option<Vec<u8>>;
        type Fields = (i64, u64, Text, Option<String>, Option<i64>, Text);
        let Value::Array(mut fields) = answer.value else {
            return Err(not_understood());
        };
        // What the script did not say.
        fields.resize(6, Value::Nil);
        let fields: Fields = read(Value::Array(fields))?;
        let (outcome, micros, id, fence, left, place) = fields;
        let Ok(outcome) = u64::try_from(outcome) else {
            let error = Error::new(ErrorKind::Timeout, "redis: the request came too late");
            return Err(match answer.doubt {
                Some(_) => error,
                None => error.not_sent(),
            });
        };
        let fence = match fence.as_deref() {
            None | Some("") => None,
            Some(fence) => Some(fence.parse().map_err(|_| not_understood())?),
        };
        Ok(Reply {
            outcome,
            now: micros / 1000,
            id: id.unwrap_or_default(),
            fence,
            left: left.unwrap_or_default(),
            place: place.unwrap_or_default(),
            received: Moment::now(),
            replicas: answer.replicas,
        })
    }

    /// The owner that this contender became, or is still.
    pub(super) fn granted(&self, id: &Arc<str>, fence: u64, lease: Lease) -> MutexOwner {
        self.snapshot(Arc::clone(id), fence, lease.total(), lease)
    }

    /// The owner that the script saw; `NONE` where the mutex is only handed over. An owner does not tell
    /// its lease: `lease` stands in.
    pub(super) fn owner(&self, lease: Lease) -> MutexOwner {
        if self.id.is_empty() || self.fence == Some(0) {
            return MutexOwner::NONE;
        }
        let id = String::from_utf8_lossy(&self.id).into();
        let left = self.left().unwrap_or(lease.total());
        self.snapshot(id, self.fence.unwrap_or(0), left, lease)
    }

    fn snapshot(&self, id: Arc<str>, fence: u64, left: Duration, lease: Lease) -> MutexOwner {
        const IN_2001: u64 = 1_000_000_000_000;
        let transition_at = self.now + ms(left);
        // A fence is the server's time of the acquisition in microseconds, unless the last one was higher or Simba
        // counted it.
        let acquired_at = match fence / 1000 {
            at if at > IN_2001 => at,
            _ => transition_at.saturating_sub(ms(lease.total())),
        };
        let ttl_at = transition_at.saturating_sub(ms(lease.transition()));
        MutexOwner::new(id, acquired_at.min(self.now), ttl_at, transition_at, fence)
            .observed_at(self.now, self.received)
    }

    /// How long the lease or hand-over lasts; `None` if it has no end.
    pub(super) fn left(&self) -> Option<Duration> {
        u64::try_from(self.left).ok().map(Duration::from_millis)
    }

    /// Returns `true` if the script met as many dead waiters as it looks at in one go: there may be more.
    pub(super) fn is_unfinished(&self) -> bool {
        self.outcome == 0 && self.id.is_empty() && self.left == 0
    }
}

pub(super) fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    static SCRIPT: LazyLock<Script> = LazyLock::new(|| Script::new("return 1"));

    fn packed(words: &[&str]) -> Vec<u8> {
        let mut command = Cmd::new();
        command.arg(words);
        command.get_packed_command()
    }

    #[test]
    fn request_is_sent_by_hash_by_text_and_without_queue() {
        let keys = ["m", "t", "q"].map(str::to_owned);
        let request = Command::script(&SCRIPT, 7, &keys.each_ref());
        let request = request.arg(("id", 5));
        let sha = &*SCRIPT.sha;
        let by_hash = packed(&["EVALSHA", sha, "3", "m", "t", "q", "id", "5"]);
        assert_eq!(request.packed(false, 9), by_hash);
        let by_text = packed(&["EVAL", "return 1", "3", "m", "t", "q", "id", "5"]);
        assert_eq!(request.packed(true, 9), by_text);
        assert!(request.without_queue().is_none());
        let mut request = request.not_after();
        request.queue = Queue::Optional;
        let shorter = packed(&["EVALSHA", sha, "2", "m", "t", "id", "5", "9"]);
        let without = request.without_queue().unwrap();
        assert_eq!(without.packed(false, 9), shorter);
        assert!(without.without_queue().is_none());
        let late = packed(&["EVALSHA", sha, "3", "m", "t", "q", "id", "5", "9"]);
        assert_eq!(request.packed(false, 9), late);
    }

    #[test]
    fn hand_over_is_in_the_scripts_that_name_it() {
        for script in [&ACQUIRE, &RELEASE, &WITHDRAW] {
            assert!(script.text.contains("local function hand_over"));
            assert!(!script.text.contains("--@"));
        }
    }
}
