//! A server of any kind: a process with ports, a folder, a log, and a way to ask whether it is up.

use std::fmt;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::port::Port;
use crate::proc;
use crate::process::{Output, Process};
use crate::sync::lock;
use crate::temp_dir::TempDir;
use crate::wait::holds_within;

/// How long a server may take to start or to end on a loaded machine. Idle, all take under 3 s.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// How many lines of the log a failure shows.
const TAIL: usize = 40;

/// How often another port is tried before it must be something else.
const PORT_ATTEMPTS: usize = 5;

/// Asks a server on this port, in its own protocol and with a short timeout, whether it serves.
pub(crate) type Probe = fn(u16) -> bool;

/// Connects to a port on loopback, to read within `limit`.
pub(crate) fn dial(port: u16, limit: Duration) -> io::Result<TcpStream> {
    let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let stream = TcpStream::connect_timeout(&addr, limit)?;
    stream.set_read_timeout(Some(limit))?;
    Ok(stream)
}

/// A throw-away server on loopback. The kinds of server all deref to this.
///
/// It may be shared between threads and kept in a `static`. It is killed when dropped, and by the
/// kernel when the process ends; ports and folder stay its own over any number of restarts.
pub struct Server {
    kind: &'static str,
    command: Command,
    probe: Probe,
    /// The process, and where in the log its own lines begin.
    running: Mutex<Option<(Process, usize)>>,
    /// The first one is for clients. After `running`, so that a port is given up after the process.
    ports: Vec<Port>,
    folder: TempDir,
}

impl Server {
    /// Starts it (again) on the same port and folder, and waits until it serves.
    ///
    /// # Panics
    /// When it is running, or does not come up; then with the end of its log.
    pub fn start(&self) {
        if let Err(failure) = self.try_start() {
            panic!("{failure}");
        }
    }

    /// Kills it if it is running, and starts it again on the same port and folder.
    pub fn restart(&self) {
        self.kill();
        self.start();
    }

    /// Kills it with SIGKILL and waits until it is gone. Does nothing if it is not running.
    pub fn kill(&self) {
        // Out of the lock first, so that a slow end does not block who only asks for the pid.
        let process = lock(&self.running).take();
        if let Some((process, _)) = process {
            process.kill();
        }
    }

    /// Asks it with SIGTERM to shut down, and waits until it has.
    ///
    /// # Panics
    /// When it is not running, or does not end.
    pub fn terminate(&self) -> ExitStatus {
        let process = lock(&self.running).take();
        let (process, _) = process.unwrap_or_else(|| panic!("{self:?} is not running"));
        process.terminate(PATIENCE)
    }

    /// Stops it with SIGSTOP: it keeps its connections and answers nothing.
    ///
    /// # Panics
    /// When it is not running.
    pub fn pause(&self) {
        self.with_process(Process::pause);
    }

    /// Lets it go on after [`pause`](Self::pause).
    ///
    /// # Panics
    /// When it is not running.
    pub fn resume(&self) {
        self.with_process(Process::resume);
    }

    /// Whether its process has not ended (a paused one has not).
    pub fn is_running(&self) -> bool {
        let running = lock(&self.running);
        running
            .as_ref()
            .is_some_and(|(process, _)| process.is_running())
    }

    /// The number of its process.
    ///
    /// # Panics
    /// When it is not running.
    pub fn pid(&self) -> u32 {
        self.with_process(Process::pid)
    }

    /// The port that clients connect to.
    pub fn port(&self) -> u16 {
        self.ports[0].number()
    }

    /// The address that clients connect to.
    pub fn addr(&self) -> SocketAddr {
        self.ports[0].addr()
    }

    /// The folder that it keeps its data in.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// All that it has logged.
    pub fn log(&self) -> String {
        let bytes = fs::read(self.log_file()).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// A server that is not started yet.
    pub(crate) fn new(
        kind: &'static str,
        folder: TempDir,
        ports: Vec<Port>,
        command: Command,
        probe: Probe,
    ) -> Self {
        Self {
            kind,
            command,
            probe,
            running: Mutex::new(None),
            ports,
            folder,
        }
    }

    /// Starts the process without waiting for it to serve.
    pub(crate) fn spawn(&self) {
        let mut running = lock(&self.running);
        assert!(
            !running
                .as_ref()
                .is_some_and(|(process, _)| process.is_running()),
            "{self:?} is running already"
        );
        let begin = fs::metadata(self.log_file()).map_or(0, |file| file.len() as usize);
        let process = Process::spawn(&self.command, &Output::Log(self.log_file()))
            .unwrap_or_else(|error| panic!("cannot run {:?}: {error}", self.command));
        *running = Some((process, begin));
    }

    /// Waits until it serves.
    pub(crate) fn wait_ready(&self) -> Result<(), StartFailure> {
        let (pid, begin) = {
            let running = lock(&self.running);
            let (process, begin) = running.as_ref().expect("a process was spawned");
            (process.pid(), *begin)
        };
        let start = Instant::now();
        let mut ended = false;
        let ready = holds_within(PATIENCE, || {
            ended = !self.is_running();
            // Who answers must be our own child, not a stranger on the same port.
            ended || (proc::listens(pid, self.port()) && (self.probe)(self.port()))
        });
        if ready && !ended {
            return Ok(());
        }
        let log = self.log();
        let own = log.get(begin..).unwrap_or(&log);
        let lines: Vec<&str> = own.lines().collect();
        let tail = &lines[lines.len().saturating_sub(TAIL)..];
        let how = if ended { "ended" } else { "did not serve" };
        Err(StartFailure {
            port_taken: own.to_lowercase().contains("address already in use"),
            message: format!(
                "{} {how} within {:?} of its start on port {}. Command: {:?}\nEnd of its log:\n{}",
                self.kind,
                start.elapsed(),
                self.port(),
                self.command,
                tail.join("\n")
            ),
        })
    }

    pub(crate) fn try_start(&self) -> Result<(), StartFailure> {
        self.spawn();
        self.wait_ready()
    }

    fn with_process<T>(&self, f: impl FnOnce(&Process) -> T) -> T {
        let running = lock(&self.running);
        let (process, _) = running
            .as_ref()
            .unwrap_or_else(|| panic!("{self:?} is not running"));
        f(process)
    }

    fn log_file(&self) -> PathBuf {
        self.folder.path().join("server.log")
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on port {}", self.kind, self.port())
    }
}

/// Why a server did not come up.
#[derive(Debug)]
pub(crate) struct StartFailure {
    /// Another process listened on its port.
    port_taken: bool,
    message: String,
}

impl fmt::Display for StartFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// Runs `attempt`, which chooses ports and starts servers on them, again with other ports when one
/// of them turned out to be taken.
pub(crate) fn on_free_ports<T>(attempt: impl Fn() -> Result<T, StartFailure>) -> T {
    for _ in 1..PORT_ATTEMPTS {
        match attempt() {
            Err(failure) if failure.port_taken => {}
            Err(failure) => panic!("{failure}"),
            Ok(started) => return started,
        }
    }
    attempt().unwrap_or_else(|failure| panic!("{failure}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::redis;
    use std::cell::RefCell;
    use std::net::TcpListener;

    #[test]
    fn taken_port_is_exchanged_for_another() {
        let thief = RefCell::new(None);
        let server = on_free_ports(|| {
            let server = redis::server(&[]);
            if thief.borrow().is_none() {
                *thief.borrow_mut() = Some(TcpListener::bind(server.addr()).unwrap());
            }
            server.try_start().map(|()| server)
        });
        let stolen = thief.into_inner().unwrap().local_addr().unwrap();
        assert_ne!(server.addr(), stolen);
        assert!(server.is_running());
    }

    #[test]
    #[should_panic(expected = "Bad directive or wrong number of arguments")]
    fn failed_server_shows_its_log() {
        redis::server(&["--no-such-option", "x"]).start();
    }
}
