//! The scripts, a call of one as the bytes that go over the wire, and what comes back.

use std::sync::Arc;
use std::time::Duration;

use ::redis::Value;

use super::error::not_understood;
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

/// All scripts, hashed once per factory.
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

/// A script with the keys of one mutex and its first arguments, packed once; what changes from call
/// to call comes last and is appended. So a call costs no formatting but that of its fence.
#[derive(Clone, Debug)]
pub(super) struct Call {
    script: Arc<Script>,
    /// How many arguments the whole command has.
    count: usize,
    /// The packed command; everything after `fixed` belongs to the present call.
    bytes: Vec<u8>,
    fixed: usize,
    /// Where the deadline goes; `None` for a script that takes none.
    deadline_at: Option<usize>,
    /// Where the part begins that `EVALSHA` and `EVAL` have in common.
    tail: usize,
}

impl Call {
    /// Packs a call that takes `last` more arguments.
    pub(super) fn new(script: &Arc<Script>, keys: &[&str], first: &[&str], last: usize) -> Call {
        let count = 3 + keys.len() + first.len() + last;
        let mut bytes = format!("*{count}\r\n").into_bytes();
        push(&mut bytes, b"EVALSHA");
        push(&mut bytes, script.sha.as_bytes());
        let tail = bytes.len();
        push(&mut bytes, keys.len().to_string().as_bytes());
        for text in keys.iter().chain(first) {
            push(&mut bytes, text.as_bytes());
        }
        Call {
            script: Arc::clone(script),
            count,
            fixed: bytes.len(),
            deadline_at: None,
            bytes,
            tail,
        }
    }

    /// Packs a call whose very last argument is a deadline, after `last` other ones.
    pub(super) fn with_deadline(
        script: &Arc<Script>,
        keys: &[&str],
        first: &[&str],
        last: usize,
    ) -> Call {
        let mut call = Call::new(script, keys, first, last + 1);
        call.deadline_at = Some(call.fixed);
        call
    }

    /// Sets the last arguments, without the deadline.
    pub(super) fn set(&mut self, last: &[&[u8]]) -> &mut Call {
        self.bytes.truncate(self.fixed);
        for argument in last {
            push(&mut self.bytes, argument);
        }
        if let Some(at) = &mut self.deadline_at {
            *at = self.bytes.len();
        }
        self
    }

    /// Sets a fence as the last argument.
    pub(super) fn set_fence(&mut self, fence: u64) -> &mut Call {
        let (digits, from) = digits(fence);
        self.set(&[digits.get(from..).unwrap_or_default()])
    }

    /// Sets the deadline, in milliseconds of the server's time; 0 for none.
    pub(super) fn set_deadline(&mut self, deadline_ms: u64) {
        if let Some(at) = self.deadline_at {
            self.bytes.truncate(at);
            let (digits, from) = digits(deadline_ms);
            push(&mut self.bytes, digits.get(from..).unwrap_or_default());
        }
    }

    pub(super) fn has_deadline(&self) -> bool {
        self.deadline_at.is_some()
    }

    /// The command by the script's hash.
    pub(super) fn by_hash(&self) -> &[u8] {
        &self.bytes
    }

    /// The command with the script's text, for a server that does not know it yet. It remembers it
    /// from then on: one round trip, and no right to `SCRIPT LOAD` needed.
    pub(super) fn by_text(&self) -> Vec<u8> {
        let mut bytes = format!("*{}\r\n", self.count).into_bytes();
        push(&mut bytes, b"EVAL");
        push(&mut bytes, self.script.text.as_bytes());
        bytes.extend_from_slice(self.bytes.get(self.tail..).unwrap_or_default());
        bytes
    }
}

/// Packs a whole command.
pub(super) fn command(arguments: &[&[u8]]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", arguments.len()).into_bytes();
    for argument in arguments {
        push(&mut bytes, argument);
    }
    bytes
}

fn push(bytes: &mut Vec<u8>, argument: &[u8]) {
    let (digits, from) = digits(argument.len() as u64);
    bytes.push(b'$');
    bytes.extend_from_slice(digits.get(from..).unwrap_or_default());
    bytes.extend_from_slice(b"\r\n");
    bytes.extend_from_slice(argument);
    bytes.extend_from_slice(b"\r\n");
}

/// Writes a number without the formatter, which takes longer than all the rest of packing. Returns where it
/// begins.
fn digits(mut number: u64) -> ([u8; 20], usize) {
    // 20 digits hold every number.
    let mut digits = [b'0'; 20];
    let mut from = 20;
    for digit in digits.iter_mut().rev() {
        *digit += (number % 10) as u8;
        number /= 10;
        from -= 1;
        if number == 0 {
            break;
        }
    }
    (digits, from)
}

/// `{outcome, now, ...}`, as `acquire.lua`, `renew.lua` and `withdraw.lua` return it.
pub(super) struct Reply {
    fields: Vec<Value>,
    /// The fence, 1, 0 or -1: see the script.
    pub(super) outcome: i64,
    /// The server's time, in milliseconds.
    now: u64,
    received: Moment,
}

impl Reply {
    pub(super) fn read(value: Value) -> Result<Reply> {
        let Value::Array(fields) = value else {
            return Err(not_understood());
        };
        Ok(Reply {
            outcome: integer(fields.first())?,
            now: unsigned(fields.get(1))? / 1000,
            fields,
            received: Moment::now(),
        })
    }

    /// Reads `{now, ...}`, as `observe.lua` returns it.
    pub(super) fn observed(value: Value) -> Result<Reply> {
        let Value::Array(mut fields) = value else {
            return Err(not_understood());
        };
        fields.insert(0, Value::Int(0));
        Reply::read(Value::Array(fields))
    }

    /// The owner that we became, or are still.
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
            transition_at
                .saturating_sub(ms(lease.total()))
                .min(self.now)
        });
        Ok(MutexOwner::new(
            id,
            acquired_at,
            transition_at.saturating_sub(ms(lease.transition())),
            transition_at,
            fence,
        )
        .observed_at(self.now, self.received))
    }

    /// How long the lease or hand-over lasts; `None` if it has no end (an operator's doing).
    pub(super) fn left(&self) -> Result<Option<Duration>> {
        let left = integer(self.fields.get(4))?;
        Ok(u64::try_from(left).ok().map(Duration::from_millis))
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

/// The server's time in a reply, in milliseconds, if it begins as those of acquire, renew and withdraw do.
pub(super) fn server_ms(value: &Value) -> Option<i64> {
    let Value::Array(fields) = value else {
        return None;
    };
    match fields.get(1) {
        Some(Value::Int(micros)) => Some(micros / 1000),
        _ => None,
    }
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

    #[test]
    fn a_call_is_packed_as_the_driver_packs_it() {
        let script = Arc::new(Script {
            text: "return 1".into(),
            sha: "0123".into(),
        });
        let mut call = Call::new(&script, &["p:{m}", "p:{m}:token"], &["id"], 1);
        for last in ["7", "1234567890"] {
            let driver = |name: &str, code: &str| {
                ::redis::cmd(name)
                    .arg(code)
                    .arg(2)
                    .arg(&["p:{m}", "p:{m}:token", "id", last])
                    .get_packed_command()
            };
            let call = &*call.set(&[last.as_bytes()]);
            assert_eq!(call.by_hash(), driver("EVALSHA", "0123"));
            assert_eq!(call.by_text(), driver("EVAL", "return 1"));
        }
        let mut call = Call::with_deadline(&script, &["k"], &["id"], 1);
        for deadline in [1_234_567_890_123, u64::MAX, 0] {
            call.set(&[b"x"]).set_deadline(deadline);
            let text = deadline.to_string();
            let end = format!("$1\r\nx\r\n${}\r\n{text}\r\n", text.len());
            assert!(call.by_hash().ends_with(end.as_bytes()));
        }
    }

    #[test]
    fn the_hand_over_is_in_the_scripts_that_name_it() {
        let scripts = Scripts::new();
        for script in [&scripts.acquire, &scripts.release, &scripts.withdraw] {
            assert!(script.text.contains("local function hand_over"));
            assert!(!script.text.contains("--@"));
        }
    }
}
