//! A command that must not outlive what it runs under: a lock, a leadership or permits.
//!
//! If that is lost, the command is ended: SIGTERM at once, SIGKILL before another contender can have it. If this
//! program is killed, the guardian ends the command. Only a program that is *paused* can do neither, and there
//! only a checked fence keeps two commands apart.

use std::io::{self, IsTerminal, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use contend::{Error, ErrorKind};
use crossbeam_channel::{Receiver, after, never, select, tick};
use rustix::process::{Pid, Signal, getpid, kill_process, kill_process_group};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::console;
use crate::exit::{Failure, LOST, by_signal};

/// The first argument of the guardian's process.
pub const GUARDIAN: &str = "--guardian";

/// Tells the guardian that the command has ended.
const DONE: &str = "done";

/// How often the command's right to run is checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// What the command is to run under.
pub struct Terms<'a> {
    /// Returns why the command may not run on, if it may not.
    pub revoked: &'a dyn Fn() -> Option<&'static str>,
    /// How long after SIGTERM a command that may not run on is ended with SIGKILL: half of the time in which no other
    /// contender can own. A quarter may have passed when the loss is seen.
    pub grace: Duration,
    /// Signals to pass on to the command.
    pub signals: &'a Receiver<i32>,
}

/// How a command came to its end.
pub struct End {
    pub code: u8,
    /// It was ended, because it might not run on.
    pub revoked: bool,
    /// This program was told to end meanwhile.
    pub interrupted: bool,
}

impl End {
    /// The exit code, given how the release of what the command ran under ended.
    pub fn code_after(self, released: impl IntoIterator<Item = Result<(), Error>>) -> u8 {
        let mut code = if self.revoked { LOST } else { self.code };
        for error in released.into_iter().filter_map(Result::err) {
            match error.kind() {
                ErrorKind::Lost => code = LOST,
                // It was held when the command had ended.
                _ => console::message(&format!("released without an answer: {error}")),
            }
        }
        code
    }
}

/// The command, and the process that ends it should this one die.
struct Running {
    child: Child,
    guardian: Guardian,
    /// The command shares this terminal: a process group of its own could not read from it. What it has started is
    /// not ended, as the help of `lock` says: this group may be that of a whole pipeline.
    shares_terminal: bool,
}

/// Runs a program and its arguments to their end under `terms`.
pub fn run(
    command: &[String],
    environment: [(&str, String); 2],
    terms: &Terms<'_>,
) -> Result<End, Failure> {
    let Some((program, arguments)) = command.split_first() else {
        return Err(Failure::usage("no command; write it after --"));
    };
    let running = Running::start(Command::new(program).args(arguments).envs(environment));
    let running = running.map_err(|error| Failure::command(program, &error))?;
    Ok(running.wait(terms))
}

impl Running {
    fn start(command: &mut Command) -> io::Result<Running> {
        // First: a command that cannot be guarded is not started.
        let guardian = Guardian::start()?;
        let shares_terminal = io::stdin().is_terminal();
        if !shares_terminal {
            // The guardian's group: it need not be told of a command that was just started when this program is
            // killed.
            command.process_group(guardian.pid().as_raw_nonzero().get());
        }
        let mut running = Running {
            child: command.spawn()?,
            guardian,
            shares_terminal,
        };
        if shares_terminal {
            let pid = Pid::from_child(&running.child).to_string();
            if let Err(error) = running.guardian.write(&pid) {
                running.send(Signal::KILL);
                let _ = running.child.wait();
                return Err(error);
            }
        }
        Ok(running)
    }

    /// From the start of the command to its end.
    fn wait(mut self, terms: &Terms<'_>) -> End {
        let shortest = Duration::from_millis(1);
        let look = tick((terms.grace / 4).clamp(shortest, CHECK_INTERVAL));
        let mut kill = never();
        let mut revoked = None;
        let mut interrupted = false;
        let status = loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                break status;
            }
            if revoked.is_none() {
                revoked = (terms.revoked)();
                if let Some(why) = revoked {
                    // First: nothing may come between the loss and the command's end.
                    self.send(Signal::TERM);
                    kill = after(terms.grace);
                    // Not here: where standard error is not read, SIGKILL would wait for the write.
                    let say = move || console::message(&format!("{why}; ending the command"));
                    let _ = thread::Builder::new().spawn(say);
                }
            }
            select! {
                recv(terms.signals) -> signal => {
                    interrupted |= matches!(signal, Ok(SIGTERM | SIGINT));
                    match signal {
                        Ok(SIGTERM) => self.send(Signal::TERM),
                        // Ctrl-C has reached a command that shares this terminal already.
                        Ok(SIGINT) if !self.shares_terminal => self.send(Signal::INT),
                        // SIGCHLD: look.
                        _ => {}
                    }
                }
                recv(kill) -> _ => {
                    self.send(Signal::KILL);
                    kill = never();
                }
                recv(look) -> _ => {}
            }
        };
        let revoked = revoked.is_some() || (terms.revoked)().is_some();
        if revoked && !self.shares_terminal {
            // What the command started may not have ended with it.
            self.send(Signal::KILL);
        }
        let _ = self.guardian.write(DONE);
        End {
            code: exit_code(status),
            revoked,
            interrupted,
        }
    }

    fn send(&self, signal: Signal) {
        // Fails only if the process is gone.
        let _ = match self.shares_terminal {
            true => kill_process(Pid::from_child(&self.child), signal),
            false => kill_process_group(self.guardian.pid(), signal),
        };
    }
}

/// This side of the guardian: a process whose standard input ends when this program does.
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
            _ => Err(io::Error::other("its guardian did not start")),
        }
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
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

/// The guardian's own program: only from outside can the command of a program that was killed with SIGKILL be ended.
pub fn guardian() {
    // Signals to the group are for the command.
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        let _ = signal_hook::flag::register(signal, Arc::default());
    }
    let mut out = io::stdout();
    let _ = out.write_all(b"\n").and_then(|()| out.flush());
    let words: Vec<String> = io::stdin().lines().map_while(Result::ok).collect();
    if words.last().is_some_and(|word| word == DONE) {
        return;
    }
    // The command, where it is not in this group.
    let pid = words.first().and_then(|pid| pid.parse().ok());
    if let Some(pid) = pid.and_then(Pid::from_raw) {
        let _ = kill_process(pid, Signal::KILL);
    }
    let _ = kill_process_group(getpid(), Signal::KILL);
}

fn exit_code(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => u8::try_from(code).unwrap_or(u8::MAX),
        (None, signal) => signal.map_or(1, by_signal),
    }
}
