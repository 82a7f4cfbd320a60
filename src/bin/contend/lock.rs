//! `contend lock`: runs a command under a lock, like `flock`, but across machines.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use clap::Args;
use contend::{Cancel, Error, Factory, Guard, Locker};
use signal_hook::consts::{SIGCHLD, SIGINT, SIGTERM};

use crate::child::{self, Terms};
use crate::console::Console;
use crate::exit::Failure;
use crate::options::{Connection, Contender, ContenderOptions, Patience, duration};
use crate::signals;

/// Runs a command under a lock, like flock, but across machines.
///
/// The environment variable CONTEND_FENCE tells the command the fence of its lock, and CONTEND_MUTEX the mutex.
/// With several mutexes, both list all of them, in the order in which the mutexes are given, separated by
/// commas. If the lock is lost while the command runs, the command is ended: SIGTERM at the end of the ttl,
/// SIGKILL before the transition ends. It is also ended if contend is killed. If contend has to wait, it says on
/// standard error for what.
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
#[command(after_long_help = include_str!("help/lock.txt"))]
pub struct Lock {
    /// The names of the mutexes.
    #[arg(required = true, value_name = "MUTEX")]
    mutexes: Vec<String>,

    #[command(flatten)]
    patience: Patience,

    #[command(flatten)]
    contender: ContenderOptions,

    /// Stops renewing the lock after this long [default: when the command ends].
    #[arg(long, value_parser = duration, value_name = "DURATION")]
    max_hold: Option<Duration>,

    /// The command and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

impl Lock {
    pub fn run(&self, connection: &Connection, _: Console) -> Result<u8, Failure> {
        let factory = connection.factory()?;
        let contender = self.contender.on(&factory);
        // From here on, signals end the wait or the command, and not this program.
        let (signals, cancel) = signals::receive(&[SIGCHLD, SIGTERM, SIGINT]);
        let guards = self.lock_all(&factory, &contender, &cancel);
        let guards = signals::unless_told(&signals, guards)?;
        let fence = |mutex: &String| Some(guards.get(&**mutex)?.fence().to_string());
        let fences: Vec<String> = self.mutexes.iter().filter_map(fence).collect();
        let environment = [
            ("CONTEND_FENCE", fences.join(",")),
            ("CONTEND_MUTEX", self.mutexes.join(",")),
        ];
        let terms = Terms {
            revoked: &|| (!guards.values().all(Guard::is_valid)).then_some("the lock was lost"),
            grace: contender.transition / 2,
            signals: &signals,
        };
        let end = child::run(&self.command, environment, &terms)?;
        Ok(end.code_after(guards.into_values().rev().map(Guard::unlock)))
    }

    /// All of them, or an error: then those that were locked already are free again.
    fn lock_all(
        &self,
        factory: &Factory,
        contender: &Contender,
        cancel: &Cancel,
    ) -> Result<BTreeMap<&str, Guard>, Error> {
        let began = Instant::now();
        let mut guards = BTreeMap::new();
        // As it was given: it stands in the message.
        let mut left = self.patience.timeout;
        for mutex in self.mutexes.iter().collect::<BTreeSet<_>>() {
            let locker = factory.locker(mutex).cancel(cancel).id(&contender.id);
            let locker = locker.ttl(contender.ttl).transition(contender.transition);
            let locker = match self.max_hold {
                Some(max_hold) => locker.max_hold(max_hold),
                None => locker,
            };
            guards.insert(&**mutex, self.lock(&locker.build()?, left)?);
            let timeout = self.patience.timeout;
            left = timeout.map(|timeout| timeout.saturating_sub(began.elapsed()));
        }
        Ok(guards)
    }

    fn lock(&self, locker: &Locker, timeout: Option<Duration>) -> Result<Guard, Error> {
        match locker.try_lock() {
            Err(error) if self.patience.waits_after(&error) => {
                timeout.map_or_else(|| locker.lock(), |timeout| locker.try_lock_for(timeout))
            }
            locked => locked,
        }
    }
}
