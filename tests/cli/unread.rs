//! A standard error that is full and that nobody reads holds nothing up: no end of a command, no stop.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use testbed::{RedisServer, is_alive, wait_until, within};

use crate::CONTEND;
use crate::mysql_ground::HANG;
use crate::program::PATIENCE;

const TTL: Duration = Duration::from_secs(2);
const TRANSITION: Duration = Duration::from_secs(2);

/// A `contend` whose standard error is full from the start, killed on drop.
struct Unread {
    child: Child,
    /// Open, so that a write to it blocks and does not fail.
    _reader: UnixStream,
}

impl Unread {
    fn start(url: &str, args: &[&str]) -> Unread {
        let (mut writer, reader) = UnixStream::pair().unwrap();
        writer.set_nonblocking(true).unwrap();
        for size in [4096, 1] {
            let full = loop {
                if let Err(error) = writer.write_all(&vec![b'x'; size]) {
                    break error;
                }
            };
            assert_eq!(full.kind(), ErrorKind::WouldBlock);
        }
        writer.set_nonblocking(false).unwrap();
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", CONTEND])
            .args(args)
            .env("CONTEND_URL", url)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(OwnedFd::from(writer))
            .spawn()
            .unwrap();
        Unread {
            child,
            _reader: reader,
        }
    }

    /// The process id that its command prints.
    fn command(&mut self) -> u32 {
        let mut line = String::new();
        let mut stdout = BufReader::new(self.child.stdout.take().unwrap());
        stdout.read_line(&mut line).unwrap();
        line.trim().parse().unwrap()
    }

    fn terminate(&self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
    }

    fn code(&mut self) -> Option<i32> {
        wait_until(PATIENCE, "it ends", || {
            self.child.try_wait().unwrap().is_some()
        });
        self.child.wait().unwrap().code()
    }
}

impl Drop for Unread {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_command_ends_in_time_though_nobody_reads_that_its_lock_was_lost() {
    within(HANG, || {
        // Deaf to SIGTERM, so that both signals are needed.
        let command = ["sh", "-c", "trap '' TERM; echo $$; sleep 60; sleep 60"];
        for (args, code) in [
            (&["lock", "m"][..], 76),
            (&["elect", "m"], 0),
            (&["schedule", "m", "--every", "1h"], 0),
        ] {
            let server = RedisServer::start();
            let lease = ["--ttl", "2s", "--transition", "2s", "-vvv", "--"];
            let args = [args, &lease, &command].concat();
            let mut program = Unread::start(&server.url(), &args);
            let command = program.command();
            let lost = Instant::now();
            server.kill();
            wait_until(PATIENCE, "the command has ended", || !is_alive(command));
            let took = lost.elapsed();
            println!("{args:?}: ended {took:?} after the server was killed");
            // The lease was renewed at the latest when the server died.
            assert!(took < TTL + TRANSITION, "{args:?}: {took:?}");
            if code == 0 {
                program.terminate();
            }
            assert_eq!(program.code(), Some(code), "{args:?}");
        }
    });
}

#[test]
fn a_stop_is_obeyed_though_nobody_reads_standard_error() {
    within(HANG, || {
        let server = RedisServer::start();
        let command = ["--", "sh", "-c", "echo $$; exec sleep 60"];
        for (args, code) in [
            (&["lock", "m"][..], 128 + 15),
            (&["elect", "m"], 128 + 15),
            (&["schedule", "m", "--every", "1h"], 0),
        ] {
            let mut program = Unread::start(&server.url(), &[args, &command].concat());
            let command = program.command();
            program.terminate();
            assert_eq!(program.code(), Some(code), "{args:?}");
            assert!(!is_alive(command), "{args:?}: its command outlives it");
        }
    });
}
