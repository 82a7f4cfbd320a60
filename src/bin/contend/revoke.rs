//! `contend revoke`: takes a mutex away from its owner.

use clap::Args;
use contend::{Error, ErrorKind};

use crate::console::{Console, now};
use crate::exit::Failure;
use crate::options::{Connection, Mutexes};

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
