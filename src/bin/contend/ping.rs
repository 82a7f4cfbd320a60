//! `contend ping`: checks that the server answers.

use std::time::{Duration, Instant};

use clap::Args;

use crate::console::{Console, now_ms};
use crate::exit::{Failure, code};
use crate::options::{Connection, duration};

/// Checks that the server answers.
#[derive(Args)]
#[command(after_long_help = include_str!("help/ping.txt"))]
pub struct Ping {
    /// How long to wait for the server's answer.
    #[arg(long, value_parser = duration, default_value = "5s", value_name = "DURATION")]
    timeout: Duration,
}

impl Ping {
    pub fn run(&self, connection: &Connection, console: Console) -> Result<u8, Failure> {
        let factory = connection.factory()?;
        let began = Instant::now();
        let error = factory.ping(self.timeout).err();
        let took = began.elapsed();
        if let Some(error) = error.as_ref().filter(|_| !console.is_json()) {
            return Err(error.clone().into());
        }
        let code = error.as_ref().map(|error| code(error.kind()));
        console.record(&[
            ("at_ms", now_ms().into()),
            ("realm", factory.realm().into()),
            ("reachable", error.is_none().into()),
            (
                "took_us",
                error.is_none().then_some(took.as_micros() as u64).into(),
            ),
            ("error", error.as_ref().map(ToString::to_string).into()),
            ("kind", error.map(|error| error.kind().to_string()).into()),
            ("code", code.into()),
        ])?;
        Ok(code.unwrap_or(0))
    }
}
