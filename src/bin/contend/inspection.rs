//! `contend list`, `contend revoke` and `contend ping`: single questions to the server.

use std::time::{Duration, Instant};

use clap::Args;
use contend::{Error, ErrorKind};

use crate::connection::{Connection, Mutexes, duration};
use crate::console::{Console, now};
use crate::exit::{Failure, code, with_error};
use crate::json::Json;

/// Lists the mutexes that have an owner or a waiter.
#[derive(Args)]
#[command(after_long_help = "\
With --json, each line is {\"mutex\"}.

Examples:
  contend list
  contend list --json | jq -r .mutex")]
pub struct List {}

/// Takes a mutex away from its owner.
///
/// The mutex is free at once, as if an operator had deleted it on the server: the owner learns of it at its
/// next look and steps down, and the next contender follows. Until then both may believe that they own, and
/// only a checked fence keeps them apart. The fence makes sure that nobody is hit who came later: without
/// it, contend shows who owns the mutex and does nothing.
#[derive(Args)]
#[command(after_long_help = "\
Exits with 66 if nobody owns the mutex with that fence.

Examples:
  contend revoke backup
  contend revoke backup --fence 1731812345678901")]
pub struct Revoke {
    #[command(flatten)]
    mutex: Mutexes,

    /// The fence of the ownership to end, as `contend status` shows it.
    #[arg(long, value_name = "FENCE")]
    fence: Option<u64>,
}

/// Asks the server one question.
#[derive(Args)]
#[command(after_long_help = "\
With --json, the line is {\"at_ms\", \"realm\", \"reachable\", \"took_us\", \"error\"}, and \"kind\" and
\"code\" of the error, if there is one.
Exits with 0 if the server answered, 69 if it cannot be reached, 77 if it denied access, 78 if it is not
set up, such as by a missing table.

Examples:
  contend ping
  contend ping --timeout 1s || exit 1")]
pub struct Ping {
    /// How long to wait for the server's answer.
    #[arg(long, value_parser = duration, default_value = "5s", value_name = "DURATION")]
    timeout: Duration,
}

impl List {
    pub fn run(&self, connection: &Connection, console: &Console) -> Result<u8, Failure> {
        let factory = connection.factory()?;
        for mutex in factory.list()? {
            console.either(|| Json::new().with("mutex", &mutex), || mutex.to_string())?;
        }
        Ok(0)
    }
}

impl Revoke {
    pub fn run(&self, connection: &Connection, console: &Console) -> Result<u8, Failure> {
        let factory = connection.factory()?;
        let mutex = &*self.mutex.one(None)?;
        let Some(fence) = self.fence else {
            let owner = factory.owner(mutex)?;
            return Err(Failure::Usage(if owner.has_owner() {
                let (id, fence) = (owner.owner_id(), owner.fence());
                format!("{mutex}: owned by {id:?}; to take it away, give --fence {fence}")
            } else {
                format!("{mutex}: nobody owns it")
            }));
        };
        if !factory.revoke(mutex, fence)? {
            let message = format!("{mutex}: nobody owns it with fence {fence}");
            return Err(Error::new(ErrorKind::NotFound, message).into());
        }
        console.either(
            || {
                now()
                    .with("mutex", mutex)
                    .with("event", "revoked")
                    .with("fence", fence)
            },
            || format!("{mutex}: revoked, fence {fence}"),
        )?;
        Ok(0)
    }
}

impl Ping {
    pub fn run(&self, connection: &Connection, console: &Console) -> Result<u8, Failure> {
        let factory = connection.factory()?;
        let realm = factory.realm();
        let began = Instant::now();
        let outcome = factory.ping(self.timeout);
        match outcome {
            Ok(()) => {
                let took = began.elapsed();
                let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
                let json = || answer(realm, true).with("took_us", us);
                console.either(
                    || json().with("error", None::<u64>),
                    || format!("{realm}: answered in {:.2} ms", took.as_secs_f64() * 1e3),
                )?;
                Ok(0)
            }
            Err(error) if console.is_json() => {
                let line = answer(realm, false).with("took_us", None::<u64>);
                console.line(&with_error(line, &error).end())?;
                Ok(code(error.kind()))
            }
            Err(error) => Err(error.into()),
        }
    }
}

fn answer(realm: &str, reachable: bool) -> Json {
    now().with("realm", realm).with("reachable", reachable)
}
