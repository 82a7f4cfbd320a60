//! The scripts, a request as it goes over the wire, and what comes back.

use std::sync::Arc;
use std::time::Duration;

use ::redis::{Cmd, ToRedisArgs, Value};

use super::error::not_understood;
use super::server::Answer;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::Lease;
use crate::owner::MutexOwner;

/// One script: its text and the SHA1 by which a server that has it knows it.
#[derive(Debug)]
pub(super) struct Script {
    text: String,
    sha: String,
}

impl Script {
    pub(super) fn new(text: String) -> Arc<Script> {
        let sha = ::redis::Script::new(&text).get_hash().to_owned();
        Arc::new(Script { text, sha })
    }
}

/// The scripts for mutexes, hashed once per factory.
#[derive(Debug)]
pub(super) struct Scripts {
    pub(super) acquire: Arc<Script>,
    pub(super) renew: Arc<Script>,
    pub(super) release: Arc<Script>,
    pub(super) withdraw: Arc<Script>,
    pub(super) observe: Arc<Script>,
    pub(super) run: Arc<Script>,
}

impl Scripts {
    pub(super) fn new() -> Scripts {
        let script = |text: &str| {
            let hand_over = include_str!("../../../lua/hand_over.lua");
            Script::new(text.replace("--@hand_over\n", hand_over))
        };
        Scripts {
            acquire: script(include_str!("../../../lua/acquire.lua")),
            renew: script(include_str!("../../../lua/renew.lua")),
            release: script(include_str!("../../../lua/release.lua")),
            withdraw: script(include_str!("../../../lua/withdraw.lua")),
            observe: script(include_str!("../../../lua/observe.lua")),
            run: script(include_str!("../../../lua/record_run.lua")),
        }
    }
}

/// A script with its keys and arguments, or a plain command, for the server that has a slot. May be sent twice.
#[derive(Clone, Debug)]
pub(super) struct Command {
    pub(super) slot: u16,
    script: Option<Arc<Script>>,
    keys: Arc<[String]>,
    arguments: Vec<Vec<u8>>,
    not_after: bool,
    optional_queue: bool,
    /// How many replicas must have a grant.
    pub(super) replicas: u32,
}

impl Command {
    /// A script with its keys, which all lie in `slot`.
    pub(super) fn script(script: &Arc<Script>, slot: u16, keys: &[&str]) -> Command {
        Command {
            script: Some(Arc::clone(script)),
            keys: keys.iter().map(|key| (*key).to_owned()).collect(),
            ..Command::plain(slot, &[])
        }
    }

    /// A plain command.
    pub(super) fn plain(slot: u16, words: &[&[u8]]) -> Command {
        Command {
            slot,
            script: None,
            keys: Arc::default(),
            arguments: words.to_redis_args(),
            not_after: false,
            optional_queue: false,
            replicas: 0,
        }
    }

    /// Appends one argument, or several.
    pub(super) fn arg(mut self, argument: impl ToRedisArgs) -> Command {
        self.arguments.extend(argument.to_redis_args());
        self
    }

    /// Has the time appended up to which the reply is waited for, in ms of the server's clock; 0 while that clock is
    /// not known.
    pub(super) fn not_after(mut self) -> Command {
        self.not_after = true;
        self
    }

    /// Marks the last key, the queue: it may be left out.
    pub(super) fn optional_queue(mut self) -> Command {
        self.optional_queue = true;
        self
    }

    /// The same request without the queue, if that is optional. Where a slot is on its way, a script may name only
    /// keys that exist.
    pub(super) fn without_queue(&self) -> Option<Command> {
        let (_, keys) = self.keys.split_last()?;
        self.optional_queue.then(|| Command {
            keys: keys.into(),
            optional_queue: false,
            ..self.clone()
        })
    }

    /// The bytes to send. A server that does not know the script yet is sent its text, and remembers it from then on:
    /// one round trip, and no right to `SCRIPT LOAD` needed.
    pub(super) fn packed(&self, as_text: bool, not_after: u64) -> Vec<u8> {
        let mut command = Cmd::new();
        if let Some(script) = &self.script {
            let (verb, code) = if as_text {
                ("EVAL", &script.text)
            } else {
                ("EVALSHA", &script.sha)
            };
            command.arg(verb).arg(code);
            command.arg(self.keys.len()).arg(&*self.keys);
        }
        command.arg(&self.arguments);
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
    id: Arc<str>,
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
        let Value::Array(fields) = answer.value else {
            return Err(not_understood());
        };
        let Ok(outcome) = u64::try_from(integer(fields.first())?) else {
            let error = Error::new(ErrorKind::Timeout, "redis: the request came too late");
            return Err(match answer.doubt {
                Some(_) => error,
                None => error.not_sent(),
            });
        };
        let text = |at: usize| match fields.get(at) {
            Some(Value::BulkString(text)) => Ok(&text[..]),
            None => Ok(&b""[..]),
            _ => Err(not_understood()),
        };
        let fence = match text(3)? {
            b"" => None,
            _ => Some(unsigned(fields.get(3))?),
        };
        Ok(Reply {
            outcome,
            now: unsigned(fields.get(1))? / 1000,
            id: String::from_utf8_lossy(text(2)?).into(),
            fence,
            left: integer(fields.get(4).or(Some(&Value::Int(0))))?,
            place: text(5)?.to_vec(),
            received: Moment::now(),
            replicas: answer.replicas,
        })
    }

    /// The owner that this contender became, or is still.
    pub(super) fn granted(&self, id: &Arc<str>, fence: u64, lease: Lease) -> MutexOwner {
        MutexOwner::new(
            Arc::clone(id),
            acquired_at(fence, self.now).unwrap_or(self.now),
            self.now + ms(lease.ttl()),
            self.now + ms(lease.total()),
            fence,
        )
        .observed_at(self.now, self.received)
    }

    /// The owner that the script saw; `NONE` where the mutex is only handed over. An owner does not tell
    /// its lease: `lease` stands in.
    pub(super) fn owner(&self, lease: Lease) -> MutexOwner {
        if self.id.is_empty() || self.fence == Some(0) {
            return MutexOwner::NONE;
        }
        let fence = self.fence.unwrap_or(0);
        let transition_at = self.now + ms(self.left().unwrap_or(lease.total()));
        let acquired_at = acquired_at(fence, self.now).unwrap_or_else(|| {
            let at = transition_at.saturating_sub(ms(lease.total()));
            at.min(self.now)
        });
        let ttl_at = transition_at.saturating_sub(ms(lease.transition()));
        MutexOwner::new(
            Arc::clone(&self.id),
            acquired_at,
            ttl_at,
            transition_at,
            fence,
        )
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

/// A fence is the server's time of the acquisition in microseconds, unless the last one was higher or
/// Simba counted it.
fn acquired_at(fence: u64, now: u64) -> Option<u64> {
    const IN_2001: u64 = 1_000_000_000_000;
    let at = fence / 1000;
    (at > IN_2001).then_some(at.min(now))
}

pub(super) fn integer(value: Option<&Value>) -> Result<i64> {
    match value {
        Some(Value::Int(number)) => Ok(*number),
        Some(Value::BulkString(text)) => std::str::from_utf8(text)
            .ok()
            .and_then(|text| text.parse().ok())
            .ok_or_else(not_understood),
        _ => Err(not_understood()),
    }
}

fn unsigned(value: Option<&Value>) -> Result<u64> {
    u64::try_from(integer(value)?).map_err(|_| not_understood())
}

pub(super) fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(words: &[&str]) -> Vec<u8> {
        let mut command = Cmd::new();
        command.arg(words);
        command.get_packed_command()
    }

    #[test]
    fn request_is_sent_by_hash_by_text_and_without_queue() {
        let script = Script::new("return 1".into());
        let request = Command::script(&script, 7, &["m", "t", "q"])
            .arg("id")
            .arg(5);
        let sha = &*script.sha;
        let by_hash = packed(&["EVALSHA", sha, "3", "m", "t", "q", "id", "5"]);
        assert_eq!(request.packed(false, 9), by_hash);
        let by_text = packed(&["EVAL", "return 1", "3", "m", "t", "q", "id", "5"]);
        assert_eq!(request.packed(true, 9), by_text);
        assert!(request.without_queue().is_none());
        let request = request.optional_queue().not_after();
        let shorter = packed(&["EVALSHA", sha, "2", "m", "t", "id", "5", "9"]);
        let without = request.without_queue().unwrap();
        assert_eq!(without.packed(false, 9), shorter);
        assert!(without.without_queue().is_none());
        let late = packed(&["EVALSHA", sha, "3", "m", "t", "q", "id", "5", "9"]);
        assert_eq!(request.packed(false, 9), late);
    }

    #[test]
    fn hand_over_is_in_the_scripts_that_name_it() {
        let scripts = Scripts::new();
        for script in [&scripts.acquire, &scripts.release, &scripts.withdraw] {
            assert!(script.text.contains("local function hand_over"));
            assert!(!script.text.contains("--@"));
        }
    }
}
