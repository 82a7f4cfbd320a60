//! `contend ping`: checks that the server answers.

use std::time::{Duration, Instant};

use clap::Args;
use contend::Error;
use serde_json::json;

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
        if let Some(error) = error.as_ref().filter(|_| !console.json) {
            return Err(error.clone().into());
        }
        let (realm, kind) = (factory.realm(), error.as_ref().map(Error::kind));
        let code = kind.map(code);
        let json = json!({
            "at_ms": now_ms(), "realm": realm, "reachable": error.is_none(),
            "took_us": error.is_none().then_some(took.as_micros() as u64),
            "error": error.map(|error| error.to_string()),
            "kind": kind.map(|kind| kind.to_string()), "code": code,
        });
        console.record(&json)?;
        Ok(code.unwrap_or(0))
    }
}
