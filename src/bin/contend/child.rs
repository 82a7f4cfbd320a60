//! A command that must not outlive what it runs under: a lock, a leadership or permits.
//!
//! If that is lost, the command is ended: SIGTERM at once, SIGKILL before anybody else can have it. If this
//! program is killed, the guardian ends the command. Only a program that is *paused* can do neither, and
//! there only a checked fence keeps two commands apart.

use std::io::{self, IsTerminal, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, after, never, select, tick};
use rustix::process::{Pid, Signal, getpid, kill_process, kill_process_group};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::console::{Console, now};
use crate::exit::{Failure, by_signal};

/// The first argument of the guardian's process.
pub const GUARDIAN: &str = "--guardian";

/// Tells the guardian that the command has ended.
const DONE: &str = "done";

/// How often the command's right to run is checked.
const LOOK: Duration = Duration::from_millis(50);

/// What the command is to run under.
pub struct Terms<'a> {
    /// Returns why the command may not run on, if it may not.
    pub over: &'a dyn Fn() -> Option<&'static str>,
    /// How long after SIGTERM a command that may not run on is ended with SIGKILL.
    pub grace: Duration,
    /// Signals to pass on to the command.
    pub signals: &'a Receiver<i32>,
}

/// How a command came to its end.
pub enum End {
    /// By itself, with this exit code.
    Exited(u8),
    /// It was ended, because it might not run on.
    Ended {
        /// Whether we were told to end meanwhile: the command took the signal, but is not what it was for.
        told_to_stop: bool,
        /// Its exit code nevertheless.
        code: u8,
    },
}

/// The command, and the process that ends it should we die.
struct Running {
    child: Child,
    target: Target,
    guardian: Guardian,
}

/// Whom signals go to.
#[derive(Clone, Copy)]
enum Target {
    /// The command and what it started, in the group of the guardian, which does not mind but SIGKILL.
    Group(Pid),
    /// The command alone: it shares our terminal, and a group of its own could not read from it. What it has
    /// started is not ended, as the help of `lock` says: our group may be that of a whole pipeline.
    One(Pid),
}

/// Runs a program and its arguments to their end under `terms`.
pub fn run(
    command: &[String],
    environment: &[(&str, String)],
    terms: &Terms<'_>,
    console: &Console,
) -> Result<End, Failure> {
    let Some((program, arguments)) = command.split_first() else {
        return Err(Failure::Usage("no command; write it after --".to_owned()));
    };
    let mut command = Command::new(program);
    command.args(arguments);
    for (name, value) in environment {
        command.env(name, value);
    }
    let running = Running::start(&mut command).map_err(|error| Failure::Command {
        program: program.to_owned(),
        error,
    })?;
    Ok(running.see_through(terms, console))
}

impl Running {
    fn start(command: &mut Command) -> io::Result<Running> {
        // First: a command that cannot be guarded is not started.
        let mut guardian = Guardian::start()?;
        let shares_terminal = io::stdin().is_terminal();
        if !shares_terminal {
            // The guardian's group: it need not be told of a command that we have just started when we are
            // killed.
            command.process_group(guardian.pid().as_raw_nonzero().get());
        }
        let mut child = command.spawn()?;
        let target = if shares_terminal {
            Target::One(Pid::from_child(&child))
        } else {
            Target::Group(guardian.pid())
        };
        if let Target::One(pid) = target
            && let Err(error) = guardian.write(&pid.to_string())
        {
            target.send(Signal::KILL);
            let _ = child.wait();
            return Err(error);
        }
        Ok(Running {
            child,
            target,
            guardian,
        })
    }

    /// From the start of the command to its end.
    fn see_through(mut self, terms: &Terms<'_>, console: &Console) -> End {
        let look = tick(LOOK.min((terms.grace / 4).max(Duration::from_millis(1))));
        let mut kill = never();
        let mut lost = false;
        let mut told_to_stop = false;
        let status = loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                break status;
            }
            if !lost && let Some(why) = (terms.over)() {
                lost = true;
                // First: nothing may come between the loss and the command's end.
                self.target.send(Signal::TERM);
                kill = after(terms.grace);
                let event = now().with("event", "lost").with("message", why);
                console.message(event, &format!("{why}; ending the command"));
            }
            select! {
                recv(terms.signals) -> signal => {
                    told_to_stop |= matches!(signal, Ok(SIGTERM | SIGINT | SIGHUP));
                    match signal {
                        Ok(SIGTERM) => self.target.send(Signal::TERM),
                        // Ctrl-C has reached a command that shares our terminal already.
                        Ok(SIGINT) if self.target.is_group() => self.target.send(Signal::INT),
                        Ok(SIGHUP) => self.target.send(Signal::HUP),
                        // SIGCHLD: look.
                        _ => {}
                    }
                }
                recv(kill) -> _ => {
                    self.target.send(Signal::KILL);
                    kill = never();
                }
                recv(look) -> _ => {}
            }
        };
        let end = if lost || (terms.over)().is_some() {
            // What the command started may not have ended with it.
            self.target.send(Signal::KILL);
            let code = exit_code(status);
            End::Ended { told_to_stop, code }
        } else {
            End::Exited(exit_code(status))
        };
        self.guardian.dismiss();
        end
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

    fn is_group(self) -> bool {
        matches!(self, Target::Group(_))
    }
}

/// Our side of the guardian: a process whose standard input ends when we do.
struct Guardian(Child);

impl Guardian {
    fn start() -> io::Result<Guardian> {
        // Not by its name, where that can be helped: an upgrade may have replaced the file.
        let itself = Path::new("/proc/self/exe");
        let program = match itself.exists() {
            true => itself.to_owned(),
            false => std::env::current_exe()?,
        };
        let mut guardian = Command::new(program)
            .arg(GUARDIAN)
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map(Guardian)?;
        let mut ready = guardian.0.stdout.take();
        match ready.as_mut().map(|ready| ready.read(&mut [0])) {
            Some(Ok(1)) => Ok(guardian),
            _ => Err(io::Error::other(
                "the guardian of the command did not start",
            )),
        }
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    /// The command has ended.
    fn dismiss(&mut self) {
        let _ = self.write(DONE);
    }

    fn write(&mut self, word: &str) -> io::Result<()> {
        match &mut self.0.stdin {
            Some(stdin) => writeln!(stdin, "{word}"),
            None => Ok(()),
        }
    }
}

impl Drop for Guardian {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// The guardian's own program: only from outside can the command of a program that was killed with
/// SIGKILL be ended.
pub fn guardian() {
    // Signals to the group are for the command.
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        let _ = signal_hook::flag::register(signal, Arc::default());
    }
    let _ = io::stdout()
        .write_all(b"\n")
        .and_then(|()| io::stdout().flush());
    match io::stdin().lines().map_while(Result::ok).last() {
        Some(word) if word == DONE => {}
        Some(pid) => {
            if let Some(pid) = pid.parse().ok().and_then(Pid::from_raw) {
                Target::One(pid).send(Signal::KILL);
            }
        }
        None => Target::Group(getpid()).send(Signal::KILL),
    }
}

fn exit_code(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => u8::try_from(code).unwrap_or(u8::MAX),
        (None, Some(signal)) => by_signal(signal),
        (None, None) => 1,
    }
}
