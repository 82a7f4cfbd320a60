//! `contend revoke`: takes a mutex away from its owner.

use clap::Args;
use contend::{Error, ErrorKind};

use crate::console::{Console, now};
use crate::exit::Failure;
use crate::options::{Connection, OneMutex};

/// Takes a mutex away from its owner.
///
/// The mutex is free at once, as if an operator had deleted it on the server: the owner steps down when it
/// next checks, and the next contender takes over. Until then both may believe that they own the mutex, and
/// only a checked fence keeps them apart. --fence makes sure that no later owner is hit: without it, contend
/// only shows who owns the mutex.
#[derive(Args)]
#[command(after_long_help = "\
Exits with 66 if nobody owns the mutex or its owner has another fence, and with 64 if no fence is given; in
either case nothing is changed.

Examples:
  contend revoke backup
  contend revoke backup --fence 1731812345678901")]
pub struct Revoke {
    #[command(flatten)]
    mutex: OneMutex,

    /// The fence of the ownership to end, as `contend status` shows it.
    #[arg(long, value_name = "FENCE")]
    fence: Option<u64>,
}

impl Revoke {
    pub fn run(&self, connection: &Connection, console: &Console) -> Result<u8, Failure> {
        let factory = connection.factory()?;
        let mutex = &*self.mutex.name(None)?;
        let Some(fence) = self.fence else {
            let owner = factory.owner(mutex)?;
            if !owner.has_owner() {
                return Err(nobody(format!("{mutex}: nobody owns it")));
            }
            let (id, fence) = (owner.owner_id(), owner.fence());
            return Err(Failure::Usage(format!(
                "{mutex}: owned by {id:?}; to take it away, give --fence {fence}"
            )));
        };
        if !factory.revoke(mutex, fence)? {
            return Err(nobody(format!(
                "{mutex}: nobody owns it with fence {fence}"
            )));
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

fn nobody(message: String) -> Failure {
    Error::new(ErrorKind::NotFound, message).into()
}
