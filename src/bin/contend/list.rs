//! `contend list`: the mutexes that have an owner or a waiter.

use clap::Args;

use crate::console::Console;
use crate::exit::Failure;
use crate::json::Json;
use crate::options::Connection;

/// Lists the mutexes that have an owner or a waiter.
#[derive(Args)]
#[command(after_long_help = "\
With --json, each line is {\"mutex\"}.

Examples:
  contend list
  contend list --json | jq -r .mutex")]
pub struct List {}

impl List {
    pub fn run(&self, connection: &Connection, console: &Console) -> Result<u8, Failure> {
        let factory = connection.factory()?;
        for mutex in factory.list()? {
            console.either(|| Json::new().with("mutex", &mutex), || mutex.to_string())?;
        }
        Ok(0)
    }
}
