//! A child process that cannot outlive us.

use std::fmt;
use std::fs::OpenOptions;
use std::io;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::binary;
use crate::proc;
use crate::spawner;
use crate::sync::lock;
use crate::wait::{holds_within, wait_until};

/// The child asks for its death signal first and looks whether we are still there second: if we
/// died in between the signal would never come, and then it must not start.
const GUARD: &str = r#"[ "$PPID" = "$0" ] && exec "$@""#;

/// How long the kernel may take to act on a signal that cannot be refused.
const AT_ONCE: Duration = Duration::from_secs(30);

/// Where the child's output goes.
#[derive(Debug, Clone)]
pub enum Output {
    /// Standard output and error are appended to this file.
    Log(PathBuf),
    /// Standard input and output are pipes ([`Process::take_stdin`], [`Process::take_stdout`]);
    /// standard error is ours.
    Pipe,
}

/// A running child process, killed on drop, and by the kernel when this process ends in any way,
/// SIGKILL included.
///
/// For the latter it is started through `setpriv --pdeathsig KILL` (package `util-linux`, on every
/// Debian), from a thread that lives as long as this process.
pub struct Process {
    name: String,
    pid: u32,
    /// Signals are sent under this lock and only before the child is reaped: never to a stranger
    /// who was given its number.
    child: Mutex<Child>,
}

impl Process {
    /// Starts `command`: its program, arguments, environment and folder are used, its streams are
    /// not.
    pub fn spawn(command: &Command, output: &Output) -> io::Result<Self> {
        let mut guarded = Command::new(binary::find("setpriv", "util-linux"));
        guarded
            .args(["--pdeathsig", "KILL", "--", "/bin/sh", "-c", GUARD])
            .arg(std::process::id().to_string())
            .arg(command.get_program())
            .args(command.get_args());
        for (key, value) in command.get_envs() {
            match value {
                Some(value) => guarded.env(key, value),
                None => guarded.env_remove(key),
            };
        }
        if let Some(folder) = command.get_current_dir() {
            guarded.current_dir(folder);
        }
        match output {
            Output::Log(path) => {
                let log = OpenOptions::new().create(true).append(true).open(path)?;
                guarded.stdin(Stdio::null());
                guarded.stdout(log.try_clone()?);
                guarded.stderr(log);
            }
            Output::Pipe => {
                guarded.stdin(Stdio::piped());
                guarded.stdout(Stdio::piped());
            }
        }
        let child = spawner::spawn(guarded)?;
        Ok(Self {
            name: command.get_program().to_string_lossy().into_owned(),
            pid: child.id(),
            child: Mutex::new(child),
        })
    }

    /// Its process number.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether it has not ended yet (a paused one has not).
    pub fn is_running(&self) -> bool {
        self.try_wait().is_none()
    }

    /// How it ended, or `None` if it has not within `limit`.
    pub fn wait(&self, limit: Duration) -> Option<ExitStatus> {
        let mut status = None;
        holds_within(limit, || {
            status = self.try_wait();
            status.is_some()
        });
        status
    }

    /// Kills it with SIGKILL and waits until it is gone. Does nothing if it has ended.
    pub fn kill(&self) {
        self.signal(Signal::KILL);
        wait_until(AT_ONCE, "a killed process is gone", || !self.is_running());
    }

    /// Asks it with SIGTERM to end, and returns how it did.
    ///
    /// # Panics
    /// When it has not ended within `limit`.
    pub fn terminate(&self, limit: Duration) -> ExitStatus {
        self.signal(Signal::TERM);
        // A stopped process acts on a signal once it is resumed.
        self.signal(Signal::CONT);
        self.wait(limit)
            .unwrap_or_else(|| panic!("{self:?} did not end within {limit:?} of a SIGTERM"))
    }

    /// Stops it with SIGSTOP and waits until it does stand still.
    ///
    /// # Panics
    /// When it has ended.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
        wait_until(AT_ONCE, "a paused process stands still", || {
            assert!(self.is_running(), "{self:?} has ended, it cannot be paused");
            proc::state(self.pid) == Some('T')
        });
    }

    /// Lets it go on after [`pause`](Self::pause).
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// The pipe to its standard input, once, if it was started with [`Output::Pipe`].
    pub fn take_stdin(&self) -> Option<ChildStdin> {
        lock(&self.child).stdin.take()
    }

    /// The pipe from its standard output, once, if it was started with [`Output::Pipe`].
    pub fn take_stdout(&self) -> Option<ChildStdout> {
        lock(&self.child).stdout.take()
    }

    fn try_wait(&self) -> Option<ExitStatus> {
        lock(&self.child)
            .try_wait()
            .unwrap_or_else(|error| panic!("cannot wait for {self:?}: {error}"))
    }

    fn signal(&self, signal: Signal) {
        let mut child = lock(&self.child);
        if matches!(child.try_wait(), Ok(None)) {
            // It may end at any moment, but its number is kept until we reap it.
            let _ = kill_process(Pid::from_child(&child), signal);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Not `kill`: a second panic while a test unwinds would hide the first.
        self.signal(Signal::KILL);
        let _ = lock(&self.child).wait();
    }
}

impl fmt::Debug for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (pid {})", self.name, self.pid)
    }
}
