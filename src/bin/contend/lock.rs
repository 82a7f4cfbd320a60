//! `contend lock`: runs a command under a lock, like `flock`, but across machines.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use clap::Args;
use contend::{Cancel, ErrorKind, Factory, Guard, Locker};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};

use crate::child::{self, End, Terms};
use crate::console::Console;
use crate::exit::{self, Failure, LOST};
use crate::options::{Connection, Mutexes, Patience, duration, no_mutex};
use crate::signals;
use crate::wait_notice::Waiting;

/// How long `--no-wait` gives the server to take the first connection.
const CONNECT: Duration = Duration::from_secs(5);

/// Runs a command under a lock, like flock, but across machines.
///
/// The environment variable CONTEND_FENCE tells the command the fence of its lock, and CONTEND_MUTEX the mutex;
/// with several mutexes, both list all of them, in the order in which the mutexes are given, separated by
/// commas. If the lock is lost while the command runs, the command is ended: SIGTERM at the end of the ttl,
/// SIGKILL before the transition ends. It is also ended if contend is killed. While contend waits, it says on
/// standard error who holds the lock, or that the server is unreachable.
///
/// Processes that the command has started are ended with it, unless they have left its process group, as
/// daemons do. If standard input is a terminal, only the command itself is ended, and processes that it has
/// started may outlive the lock: the command shares the terminal, and therefore contend's process group.
/// Where that matters, redirect standard input, for example from /dev/null.
///
/// When the command exits, the mutex is released, whatever the command leaves running: a command that puts
/// itself into the background does not keep the lock. Run it in the foreground.
///
/// Several mutexes are locked in sorted order, so that two commands that name the same ones in a different
/// order cannot deadlock.
#[derive(Args)]
#[command(after_long_help = "\
Exits with the command's code, with 128 + n if signal n ended it, with 75 if the lock could not be acquired
in time, and with 76 if it was lost; `contend --help` lists all exit codes.

Examples:
  contend lock backup -- ./backup.sh
  contend lock backup --no-wait -- ./backup.sh
  contend lock db files --timeout 30s -- sh -c './migrate.sh $CONTEND_FENCE'")]
pub struct Lock {
    #[command(flatten)]
    mutexes: Mutexes,

    #[command(flatten)]
    patience: Patience,

    /// This contender's id [default: generated].
    #[arg(long)]
    id: Option<String>,

    /// How long the lock is held without a renewal [default: that of the URL, or 10s].
    #[arg(long, value_parser = duration, value_name = "DURATION")]
    ttl: Option<Duration>,

    /// How much longer nobody else can lock, so that the command has time to end [default: that of the URL,
    /// or 6s].
    #[arg(long, value_parser = duration, value_name = "DURATION")]
    transition: Option<Duration>,

    /// Stops renewing the lock after this long [default: when the command ends].
    #[arg(long, value_parser = duration, value_name = "DURATION")]
    max_hold: Option<Duration>,

    /// The command and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

impl Lock {
    pub fn run(&self, connection: &Connection, console: &Console) -> Result<u8, Failure> {
        let factory = connection.factory()?;
        // From here on, signals end the wait or the command, and not us.
        let signals = signals::receive(&[SIGCHLD, SIGTERM, SIGINT, SIGHUP], console);
        let cancel = Cancel::new();
        let cancelling = signals::cancel_on(&signals, &cancel);
        let guards = self.lock_all(&factory, &cancel, console);
        let guards = match (guards, cancelling.end()) {
            (guards, None) => guards?,
            // The wait has left no trace; guards that came just then are released here.
            (_, Some(signal)) => return Ok(exit::by_signal(signal)),
        };
        let terms = Terms {
            over: &|| (!guards.values().all(Guard::is_valid)).then_some("the lock was lost"),
            // At most a quarter of the transition may have passed when the loss is seen.
            grace: self.transition(&factory) / 2,
            signals: &signals,
        };
        let mutexes = self.mutexes.all();
        let fences: Vec<String> = mutexes
            .iter()
            .filter_map(|mutex| Some(guards.get(mutex)?.fence().to_string()))
            .collect();
        let environment = [
            ("CONTEND_FENCE", fences.join(",")),
            ("CONTEND_MUTEX", mutexes.join(",")),
        ];
        let End::Exited(mut code) = child::run(&self.command, &environment, &terms, console)?
        else {
            return Ok(LOST);
        };
        for (mutex, guard) in guards.into_iter().rev() {
            match guard.unlock() {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::Lost => code = LOST,
                Err(error) => {
                    // It was ours when the command had ended.
                    console.log(&format!("{mutex}: released without an answer: {error}"));
                }
            }
        }
        Ok(code)
    }

    /// All of them, or an error: then those that were had already are free again.
    fn lock_all(
        &self,
        factory: &Factory,
        cancel: &Cancel,
        console: &Console,
    ) -> Result<BTreeMap<&str, Guard>, Failure> {
        let mut lockers = BTreeMap::new();
        for mutex in self.mutexes.all() {
            let locker = self.locker(factory, cancel, mutex)?;
            if lockers.insert(mutex, locker).is_some() {
                let message = format!("the mutex {mutex:?} is given twice");
                return Err(Failure::Usage(message));
            }
        }
        if lockers.is_empty() {
            return Err(no_mutex());
        }
        if self.patience.no_wait {
            // So that the one attempt has a connection, and its time is for the question alone.
            factory.ping(CONNECT)?;
        }
        let began = Instant::now();
        let mut guards = BTreeMap::new();
        // As it was given: it stands in the message.
        let timeout = self.patience.timeout;
        let mut left = timeout;
        for (mutex, locker) in lockers {
            let _waiting = Waiting::start(factory, &locker, console);
            let guard = match left {
                _ if self.patience.no_wait => locker.try_lock()?,
                Some(left) => locker.try_lock_for(left)?,
                None => locker.lock()?,
            };
            guards.insert(mutex, guard);
            left = timeout.map(|all| all.saturating_sub(began.elapsed()));
        }
        Ok(guards)
    }

    fn locker(&self, factory: &Factory, cancel: &Cancel, mutex: &str) -> Result<Locker, Failure> {
        let mut builder = factory
            .locker(mutex)
            .cancel(cancel)
            .transition(self.transition(factory));
        if let Some(id) = &self.id {
            builder = builder.id(id);
        }
        if let Some(ttl) = self.ttl {
            builder = builder.ttl(ttl);
        }
        if let Some(max_hold) = self.max_hold {
            builder = builder.max_hold(max_hold);
        }
        Ok(builder.build()?)
    }

    fn transition(&self, factory: &Factory) -> Duration {
        self.transition.unwrap_or(factory.lease().transition())
    }
}
