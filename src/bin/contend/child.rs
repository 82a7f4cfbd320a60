//! A command that must not outlive what it runs under: a lock, a leadership or permits.
//!
//! If that is lost, the command is ended: SIGTERM at once, SIGKILL before anybody else can have it. If this
//! program is killed, the guardian ends the command. Only a program that is *paused* can do neither, and
//! there only a checked fence keeps two commands apart.

use std::io::{self, IsTerminal, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use crossbeam_channel::{Receiver, after, never, select, tick};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::console::{Console, now};
use crate::exit::{Failure, by_signal};

/// The first argument of the guardian's process.
pub const GUARDIAN: &str = "--guardian";

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
    Ended,
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
    /// The command and what it started.
    Group(Pid),
    /// The command alone: it shares our terminal, and a group of its own could not read from it.
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
            command.process_group(0);
        }
        let mut child = command.spawn()?;
        let pid = Pid::from_child(&child);
        let target = if shares_terminal {
            Target::One(pid)
        } else {
            Target::Group(pid)
        };
        if let Err(error) = guardian.watch(target) {
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

    fn see_through(mut self, terms: &Terms<'_>, console: &Console) -> End {
        let look = tick(LOOK.min((terms.grace / 4).max(Duration::from_millis(1))));
        let mut kill = never();
        let mut lost = false;
        let status = loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                break status;
            }
            if !lost && let Some(why) = (terms.over)() {
                lost = true;
                let event = now().with("event", "lost").with("message", why);
                console.message(event, &format!("{why}; ending the command"));
                self.target.send(Signal::TERM);
                kill = after(terms.grace);
            }
            select! {
                recv(terms.signals) -> signal => match signal {
                    Ok(SIGTERM) => self.target.send(Signal::TERM),
                    // Ctrl-C has reached a command that shares our terminal already.
                    Ok(SIGINT) if self.target.is_group() => self.target.send(Signal::INT),
                    Ok(SIGHUP) => self.target.send(Signal::HUP),
                    // SIGCHLD: look.
                    _ => {}
                },
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
            End::Ended
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

/// Our side of the guardian: a process whose standard input ends when we do.
struct Guardian(Child);

impl Guardian {
    fn start() -> io::Result<Guardian> {
        Command::new(std::env::current_exe()?)
            .arg(GUARDIAN)
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map(Guardian)
    }

    fn watch(&mut self, target: Target) -> io::Result<()> {
        self.write(&target.to_text())
    }

    /// The command has ended.
    fn dismiss(&mut self) {
        let _ = self.write("done");
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
    let mut target = None;
    for word in io::stdin().lines().map_while(Result::ok) {
        target = Target::from_text(&word);
    }
    if let Some(target) = target {
        target.send(Signal::KILL);
    }
}

fn exit_code(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => u8::try_from(code).unwrap_or(u8::MAX),
        (None, Some(signal)) => by_signal(signal),
        (None, None) => 1,
    }
}
