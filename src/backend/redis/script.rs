//! The scripts, a request as it goes over the wire, and what comes back.

use std::sync::Arc;
use std::time::Duration;

use ::redis::{Cmd, ToRedisArgs, Value};

use super::error::not_understood;
use super::server::Answer;
use crate::clock::Moment;
use crate::error::Result;
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

/// `{outcome, now, ...}`, as `acquire.lua`, `renew.lua` and `observe.lua` return it.
pub(super) struct Reply {
    fields: Vec<Value>,
    /// The fence, 1, 0 or -1: see the script.
    pub(super) outcome: i64,
    /// The server's time, in milliseconds.
    now: u64,
    received: Moment,
    /// As in [`Answer`].
    pub(super) replicas: Option<u32>,
}

impl Reply {
    pub(super) fn read(answer: Answer) -> Result<Reply> {
        let Value::Array(fields) = answer.value else {
            return Err(not_understood());
        };
        Ok(Reply {
            outcome: integer(fields.first())?,
            now: unsigned(fields.get(1))? / 1000,
            fields,
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
    pub(super) fn owner(&self, lease: Lease) -> Result<MutexOwner> {
        let (Some(Value::BulkString(id)), Some(Value::BulkString(fence))) =
            (self.fields.get(2), self.fields.get(3))
        else {
            return Err(not_understood());
        };
        if id.is_empty() || fence == b"0" {
            return Ok(MutexOwner::NONE);
        }
        let id: Arc<str> = String::from_utf8_lossy(id).into();
        let fence = if fence.is_empty() {
            0
        } else {
            unsigned(self.fields.get(3))?
        };
        let left = self.left()?.unwrap_or(lease.total());
        let transition_at = self.now + ms(left);
        let acquired_at = acquired_at(fence, self.now).unwrap_or_else(|| {
            let at = transition_at.saturating_sub(ms(lease.total()));
            at.min(self.now)
        });
        let ttl_at = transition_at.saturating_sub(ms(lease.transition()));
        let owner = MutexOwner::new(id, acquired_at, ttl_at, transition_at, fence);
        Ok(owner.observed_at(self.now, self.received))
    }

    /// How long the lease or hand-over lasts; `None` if it has no end (an operator's doing).
    pub(super) fn left(&self) -> Result<Option<Duration>> {
        let left = integer(self.fields.get(4))?;
        Ok(u64::try_from(left).ok().map(Duration::from_millis))
    }

    /// Returns `true` if the script met as many dead waiters as it looks at in one go: there may be more.
    pub(super) fn is_unfinished(&self) -> bool {
        self.outcome == 0
            && matches!(self.fields.get(2), Some(Value::BulkString(id)) if id.is_empty())
            && matches!(self.fields.get(4), Some(Value::Int(0)))
    }

    /// The place in the queue.
    pub(super) fn place(&mut self) -> Result<Vec<u8>> {
        match self.fields.get_mut(5) {
            Some(Value::BulkString(place)) => Ok(std::mem::take(place)),
            _ => Err(not_understood()),
        }
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
