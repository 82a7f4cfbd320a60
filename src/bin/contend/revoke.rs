//! `contend revoke`: takes a mutex away from its owner.

use clap::Args;
use contend::{Error, ErrorKind};
use serde_json::json;

use crate::console::{Console, now_ms};
use crate::exit::Failure;
use crate::options::Connection;

/// Takes a mutex away from its owner.
///
/// The mutex is free at once, as if an operator had deleted it on the server: the owner steps down when it
/// next checks, and the next contender takes over. Until then both may believe that they own the mutex, and
/// only a checked fence keeps them apart. The fence makes sure that no later owner is hit.
#[derive(Args)]
#[command(after_long_help = include_str!("help/revoke.txt"))]
pub struct Revoke {
    /// The name of the mutex.
    mutex: String,

    /// The fence of the ownership to end, as `contend status` shows it.
    #[arg(long, value_name = "FENCE")]
    fence: u64,
}

impl Revoke {
    pub fn run(&self, connection: &Connection, console: Console) -> Result<u8, Failure> {
        let (mutex, fence) = (&*self.mutex, self.fence);
        if !connection.factory()?.revoke(mutex, fence)? {
            let message = format!("{mutex}: no owner has the fence {fence}");
            return Err(Error::new(ErrorKind::NotFound, message).into());
        }
        let json = json!({"at_ms": now_ms(), "mutex": mutex, "event": "revoked", "fence": fence});
        console.record(&json)
    }
}
