//! `contend revoke`: takes a mutex away from its owner.

use clap::Args;
use contend::{Error, ErrorKind};

use crate::console::{Console, now_ms};
use crate::exit::Failure;
use crate::options::Connection;

/// Takes a mutex away from its owner.
///
/// The mutex is free at once, as if an operator had deleted it on the server: the owner steps down when it
/// next checks, and the next contender takes over. Until then both may believe that they own the mutex, and
/// only a checked fence keeps them apart. --fence makes sure that no later owner is hit: without it, contend
/// only shows who owns the mutex.
#[derive(Args)]
#[command(after_long_help = include_str!("help/revoke.txt"))]
pub struct Revoke {
    /// The name of the mutex.
    mutex: String,

    /// The fence of the ownership to end, as `contend status` shows it.
    #[arg(long, value_name = "FENCE")]
    fence: Option<u64>,
}

impl Revoke {
    pub fn run(&self, connection: &Connection, console: Console) -> Result<u8, Failure> {
        let factory = connection.factory()?;
        let mutex = &*self.mutex;
        let Some(fence) = self.fence else {
            let owner = factory.owner(mutex)?;
            if !owner.has_owner() {
                return Err(not_found(format!("{mutex}: it has no owner")));
            }
            let (id, fence) = (owner.owner_id(), owner.fence());
            return Err(Failure::Usage(format!(
                "{mutex}: owned by {id:?}; to take it away, give --fence {fence}"
            )));
        };
        if !factory.revoke(mutex, fence)? {
            return Err(not_found(format!(
                "{mutex}: no owner has the fence {fence}"
            )));
        }
        console.record(&[
            ("at_ms", now_ms().into()),
            ("mutex", mutex.into()),
            ("event", "revoked".into()),
            ("fence", fence.into()),
        ])?;
        Ok(0)
    }
}

fn not_found(message: String) -> Failure {
    Error::new(ErrorKind::NotFound, message).into()
}
