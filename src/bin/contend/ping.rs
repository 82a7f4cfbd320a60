//! `contend ping`: checks that the server answers.

use std::time::{Duration, Instant};

use clap::Args;

use crate::console::{Console, now};
use crate::exit::{Failure, code, with_error};
use crate::json::Json;
use crate::options::{Connection, duration};

/// Checks that the server answers.
#[derive(Args)]
#[command(after_long_help = "\
With --json, the line is {\"at_ms\", \"realm\", \"reachable\", \"took_us\", \"error\"}, and \"kind\" and
\"code\" of the error, if there is one; \"reachable\" is true if there is none.
Exits with 0 if the server answered, 69 if it cannot be reached, 77 if it denied access, 78 if it answers as
another kind of server. On MySQL it also checks the table of mutexes: 78 if it is missing or not visible to this
user, 77 if this user may not read it. A missing right to write shows only with the first lock.

Examples:
  contend ping
  contend ping --timeout 1s || exit 1")]
pub struct Ping {
    /// How long to wait for the server's answer.
    #[arg(long, value_parser = duration, default_value = "5s", value_name = "DURATION")]
    timeout: Duration,
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
