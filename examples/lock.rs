//! Runs a command under a lock, as `flock` does, across machines:
//!
//! ```text
//! cargo run --features redis --example lock -- --url redis://127.0.0.1 --mutex backup -- ./backup.sh
//! ```
//!
//! The command finds the fence of its lock in `CONTEND_FENCE`. If the lock is lost while it runs, it is
//! ended: SIGTERM at the end of the ttl, SIGKILL before the transition ends. It is ended too if this
//! program is killed. Only a program that is *paused* cannot do that, and there only a checked fence
//! keeps two commands apart.

mod options;

use std::io::{self, IsTerminal, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio, exit};
use std::thread;
use std::time::Duration;

use contend::{Error, Guard, Locker};
use crossbeam_channel::{Receiver, after, never, select, unbounded};
use options::Options;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};

const USAGE: &str = "\
usage: lock --url URL --mutex NAME [options] -- COMMAND ARGS...
  --url URL            where the mutex is (redis://..., mysql://..., zk://...)
  --mutex NAME         what to lock
  --timeout 5s         how long to wait for it (default: for ever)
  --id ID              this contender's id (default: generated)
  --ttl 10s            how long the lock is ours without a renewal
  --transition 6s      how long after that nobody else can lock: the time for the command to end in
  --max-hold 1h        how long it is renewed (default: as long as the command runs)
exits with the command's code, or 128 + the signal that ended it, or:
  64 for a command line that is not understood, 75 if the lock could not be had in time,
  76 if it was lost, 126 if the command cannot be run, 1 for any other error";

/// `EX_TEMPFAIL`: somebody else holds the lock.
const NOT_LOCKED: i32 = 75;
const LOST: i32 = 76;
const NOT_RUN: i32 = 126;

fn main() {
    let mut args = std::env::args().skip(1);
    if args.next().as_deref() == Some("--guardian") {
        return guardian(&args.next().unwrap_or_default());
    }
    let options = Options::from_args(
        USAGE,
        &[
            "--url",
            "--mutex",
            "--timeout",
            "--id",
            "--ttl",
            "--transition",
            "--max-hold",
        ],
        &[],
    );
    exit(lock_and_run(&options).unwrap_or_else(|error| {
        eprintln!("lock: {error}");
        if error.is_transient() { NOT_LOCKED } else { 1 }
    }));
}

fn lock_and_run(options: &Options) -> Result<i32, Error> {
    let Some((program, args)) = options.words.split_first() else {
        options.fail("no command; write it after --");
    };
    let (locker, transition) = locker(options)?;
    let guard = match options.duration("--timeout") {
        Some(timeout) => locker.try_lock_for(timeout)?,
        None => locker.lock()?,
    };
    let signals = signals();
    let mut command = Command::new(program);
    command
        .args(args)
        .env("CONTEND_FENCE", guard.fence().to_string());
    let mut running = match Running::start(&mut command) {
        Ok(running) => running,
        Err(error) => {
            eprintln!("lock: {program}: {error}");
            return Ok(NOT_RUN);
        }
    };
    let code = running.see_through(&guard, transition, &signals);
    if code != LOST {
        match guard.unlock() {
            Ok(true) => {}
            Ok(false) => return Ok(LOST),
            // It was ours when the command had ended.
            Err(error) => eprintln!("lock: released without an answer: {error}"),
        }
    }
    Ok(code)
}

fn locker(options: &Options) -> Result<(Locker, Duration), Error> {
    let (Some(url), Some(mutex)) = (options.text("--url"), options.text("--mutex")) else {
        options.fail("--url and --mutex are needed");
    };
    let factory = contend::connect(url)?;
    let mut builder = factory.locker(mutex);
    if let Some(id) = options.text("--id") {
        builder = builder.id(id);
    }
    if let Some(ttl) = options.duration("--ttl") {
        builder = builder.ttl(ttl);
    }
    let transition = options.duration("--transition");
    let transition = transition.unwrap_or(factory.lease().transition());
    if let Some(max_hold) = options.duration("--max-hold") {
        builder = builder.max_hold(max_hold);
    }
    Ok((builder.transition(transition).build()?, transition))
}

/// Signals as they come. From here on they do not end this program, but the command.
fn signals() -> Receiver<i32> {
    let (sender, receiver) = unbounded();
    match signal_hook::iterator::Signals::new([SIGCHLD, SIGTERM, SIGINT, SIGHUP]) {
        Ok(mut signals) => {
            thread::spawn(move || {
                for signal in signals.forever() {
                    let _ = sender.send(signal);
                }
            });
            receiver
        }
        Err(error) => {
            eprintln!("lock: signals are not handled: {error}");
            never()
        }
    }
}

/// The command, and who ends it should we die.
struct Running {
    child: Child,
    target: Target,
    guardian: Option<Child>,
}

/// Whom signals go to.
#[derive(Clone, Copy)]
enum Target {
    /// The command and what it started.
    Group(Pid),
    /// The command alone: it shares our terminal, and a group of its own could not read from it.
    One(Pid),
}

impl Running {
    fn start(command: &mut Command) -> io::Result<Running> {
        let alone = io::stdin().is_terminal();
        if !alone {
            command.process_group(0);
        }
        let child = command.spawn()?;
        let pid = Pid::from_child(&child);
        let target = if alone {
            Target::One(pid)
        } else {
            Target::Group(pid)
        };
        let mut running = Running {
            child,
            target,
            guardian: None,
        };
        let guardian = Command::new(std::env::current_exe()?)
            .args(["--guardian", &target.to_text()])
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        match guardian {
            Ok(guardian) => running.guardian = Some(guardian),
            Err(error) => {
                running.target.send(Signal::KILL);
                let _ = running.child.wait();
                return Err(error);
            }
        }
        Ok(running)
    }

    /// From the start of the command to its end, and the code to exit with.
    fn see_through(&mut self, guard: &Guard, transition: Duration, signals: &Receiver<i32>) -> i32 {
        let (mut lost, mut kill) = (guard.lost(), never());
        // Should a signal be missed, it is seen a little later.
        let look = crossbeam_channel::tick(Duration::from_millis(200));
        let status = loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                break status;
            }
            select! {
                recv(signals) -> signal => match signal {
                    Ok(SIGTERM) => self.target.send(Signal::TERM),
                    Ok(SIGINT) => self.target.send(Signal::INT),
                    Ok(SIGHUP) => self.target.send(Signal::HUP),
                    _ => {}
                },
                recv(lost) -> _ => {
                    eprintln!("lock: the lock was lost; ending the command");
                    self.target.send(Signal::TERM);
                    // It is told within the first quarter of the transition.
                    kill = after(transition / 2);
                    lost = never();
                }
                recv(kill) -> _ => {
                    self.target.send(Signal::KILL);
                    kill = never();
                }
                recv(look) -> _ => {}
            }
        };
        if !guard.is_valid() {
            // What the command started may not have ended with it.
            self.target.send(Signal::KILL);
            return LOST;
        }
        exit_code(status)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut guardian) = self.guardian.take() {
            if let Some(mut stdin) = guardian.stdin.take() {
                let _ = stdin.write_all(b"done");
            }
            let _ = guardian.wait();
        }
    }
}

impl Target {
    fn send(self, signal: Signal) {
        // Who is gone already needs no signal.
        let _ = match self {
            Target::Group(pid) => kill_process_group(pid, signal),
            Target::One(pid) => kill_process(pid, signal),
        };
    }

    fn to_text(self) -> String {
        match self {
            Target::Group(pid) => format!("group:{pid}"),
            Target::One(pid) => format!("one:{pid}"),
        }
    }

    fn from_text(text: &str) -> Option<Target> {
        let (kind, pid) = text.split_once(':')?;
        let pid = Pid::from_raw(pid.parse().ok()?)?;
        match kind {
            "group" => Some(Target::Group(pid)),
            "one" => Some(Target::One(pid)),
            _ => None,
        }
    }
}

/// Waits beside us, in a process of its own, for our death: only from outside can the command of a
/// program that was killed with SIGKILL be ended.
fn guardian(target: &str) {
    let mut word = Vec::new();
    let _ = io::stdin().read_to_end(&mut word);
    if word != b"done"
        && let Some(target) = Target::from_text(target)
    {
        target.send(Signal::KILL);
    }
}

fn exit_code(status: ExitStatus) -> i32 {
    let ended_by = status.signal().map(|signal| 128 + signal);
    status.code().or(ended_by).unwrap_or(1)
}
