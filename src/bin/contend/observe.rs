//! `contend observe`: who owns a mutex, as it changes.

use clap::Args;
use crossbeam_channel::select;
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::console::{Console, now_ms};
use crate::exit::Failure;
use crate::options::Connection;
use crate::signals;

/// Follows who owns a mutex, without contending: prints the owner now, and each change, until SIGTERM or SIGINT.
///
/// It converges on the current owner, and may skip owners in between. While the server does not answer, it prints
/// nothing new; the log on standard error says so.
#[derive(Args)]
#[command(after_long_help = include_str!("help/observe.txt"))]
pub struct Observe {
    /// The name of the mutex.
    mutex: String,
}

impl Observe {
    pub fn run(&self, connection: &Connection, console: Console) -> Result<u8, Failure> {
        let (signals, _) = signals::receive(&[SIGTERM, SIGINT]);
        let factory = connection.checked_factory()?;
        let (observer, owners) = factory.observe(&self.mutex).channel()?;
        observer.start()?;
        loop {
            let event = select! {
                recv(owners) -> event => event.ok(),
                recv(signals) -> _ => None,
            };
            let Some(event) = event else { break };
            let owner = Some(event.state.after().owner_id()).filter(|owner| !owner.is_empty());
            let owner = owner.or((!console.json).then_some("(free)"));
            let (mutex, fence, at) = (&self.mutex, event.fence(), now_ms());
            let json = json!({"at_ms": at, "mutex": mutex, "owner": owner, "fence": fence});
            console.record(&json)?;
        }
        observer.stop()?;
        Ok(0)
    }
}
