//! The scripts, and a call of one as the bytes that go over the wire.

use std::sync::Arc;

use super::keys::Keys;

macro_rules! script {
    ($file:literal) => {
        concat!(
            include_str!("../../../lua/mutex.lua"),
            "\n",
            include_str!(concat!("../../../lua/", $file))
        )
    };
}

/// One script: its text and the SHA1 by which a server that has it knows it.
#[derive(Debug)]
pub(super) struct Script {
    text: &'static str,
    sha: String,
}

/// The three scripts, hashed once per factory.
#[derive(Debug)]
pub(super) struct Scripts {
    pub(super) acquire: Arc<Script>,
    pub(super) renew: Arc<Script>,
    pub(super) release: Arc<Script>,
}

impl Scripts {
    pub(super) fn new() -> Scripts {
        let script = |text| {
            Arc::new(Script {
                text,
                sha: ::redis::Script::new(text).get_hash().to_owned(),
            })
        };
        Scripts {
            acquire: script(script!("acquire.lua")),
            renew: script(script!("renew.lua")),
            release: script(script!("release.lua")),
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
    /// Where the deadline goes.
    timed: usize,
    /// Where the part begins that `EVALSHA` and `EVAL` have in common.
    tail: usize,
}

impl Call {
    /// `last` is the number of arguments that each call appends, the deadline included.
    pub(super) fn new(script: &Arc<Script>, keys: &Keys, first: &[&[u8]], last: usize) -> Call {
        let count = 3 + 3 + first.len() + last;
        let mut bytes = format!("*{count}\r\n").into_bytes();
        push(&mut bytes, b"EVALSHA");
        push(&mut bytes, script.sha.as_bytes());
        let tail = bytes.len();
        push(&mut bytes, b"3");
        for key in [&keys.mutex, &keys.queue, &keys.lease] {
            push(&mut bytes, key.as_bytes());
        }
        for argument in first {
            push(&mut bytes, argument);
        }
        Call {
            script: Arc::clone(script),
            count,
            fixed: bytes.len(),
            timed: bytes.len(),
            bytes,
            tail,
        }
    }

    /// Sets the last arguments.
    pub(super) fn set(&mut self, last: &[&[u8]]) -> &mut Call {
        self.bytes.truncate(self.fixed);
        for argument in last {
            push(&mut self.bytes, argument);
        }
        self.timed = self.bytes.len();
        self
    }

    /// Sets the deadline, the very last argument, in milliseconds of the server's time.
    pub(super) fn until(&mut self, deadline_ms: u64) -> &Call {
        use std::io::Write;
        self.bytes.truncate(self.timed);
        let mut digits = [0_u8; 20];
        let mut rest = digits.as_mut_slice();
        let _ = write!(rest, "{deadline_ms}");
        let unused = rest.len();
        let used = digits.len() - unused;
        push(&mut self.bytes, digits.get(..used).unwrap_or_default());
        self
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

/// A whole command.
pub(super) fn command(arguments: &[&[u8]]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", arguments.len()).into_bytes();
    for argument in arguments {
        push(&mut bytes, argument);
    }
    bytes
}

fn push(bytes: &mut Vec<u8>, argument: &[u8]) {
    use std::io::Write;
    // Writing to a vector cannot fail.
    let _ = write!(bytes, "${}\r\n", argument.len());
    bytes.extend_from_slice(argument);
    bytes.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_packed_as_the_driver_packs_it() {
        let script = Arc::new(Script {
            text: "return 1",
            sha: "0123".into(),
        });
        let mut call = Call::new(&script, &Keys::of("p", "m"), &[b"id"], 1);
        for last in ["7", "1234567890"] {
            let driver = |name: &str, code: &str| {
                ::redis::cmd(name)
                    .arg(code)
                    .arg(3)
                    .arg(&["p:{m}", "p:{m}:contender", "p:{m}:lease", "id", last])
                    .get_packed_command()
            };
            let call = &*call.set(&[last.as_bytes()]);
            assert_eq!(call.by_hash(), driver("EVALSHA", "0123"));
            assert_eq!(call.by_text(), driver("EVAL", "return 1"));
        }
        let fixed = call.set(&[]).until(1_234_567_890_123).by_hash().to_vec();
        assert!(fixed.ends_with(b"$2\r\nid\r\n$13\r\n1234567890123\r\n"));
        assert_eq!(call.until(1_234_567_890_123).by_hash(), fixed);
    }
}
