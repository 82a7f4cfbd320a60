//! `contend elect`: leader election, for a command or to look at.

use clap::Args;
use contend::{Event, EventKind, MutexContendService};
use crossbeam_channel::{Receiver, bounded, select, unbounded};
use serde_json::json;
use signal_hook::consts::{SIGCHLD, SIGINT, SIGTERM};

use crate::child::{self, End, Terms};
use crate::console::{Console, Reporter};
use crate::exit::Failure;
use crate::options::{Connection, Contender, ContenderOptions};
use crate::signals;

/// Contends for leadership, and runs a command while this contender leads.
///
/// The environment variable CONTEND_FENCE tells the command the fence of the leadership, and CONTEND_MUTEX the
/// mutex. If leadership is lost, the command is ended (SIGTERM, then SIGKILL before the transition is over), and it
/// is started again when this contender leads again. It is also ended if contend is killed. When the command exits by
/// itself, leadership is given up and contend exits with its code, whatever the command leaves running. Signals are
/// passed on to it. `contend lock --help` says which processes are ended with a command.
///
/// Without a command, it prints events until SIGTERM or SIGINT stops it.
#[derive(Args)]
#[command(after_long_help = include_str!("help/elect.txt"))]
pub struct Elect {
    /// The name of the mutex.
    mutex: String,

    #[command(flatten)]
    contender: ContenderOptions,

    /// A command to run while leading, and its arguments.
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

impl Elect {
    pub fn run(&self, connection: &Connection, console: Console) -> Result<u8, Failure> {
        let signals = signals::receive(&[SIGCHLD, SIGTERM, SIGINT]);
        let factory = connection.checked_factory()?;
        let contender = self.contender.on(&factory);
        let (sender, acquired) = unbounded();
        let (unread, no_reader) = bounded(1);
        let reporter = Reporter {
            console: console.beside(&self.command),
            mutex: self.mutex.clone(),
            id: contender.id.clone(),
            unread,
        };
        // Callbacks and not a channel, so that what is printed is true at the time that is printed: the callback for
        // Released has run before the release is sent.
        let callback = {
            let reporter = reporter.clone();
            move |event: &Event| {
                if event.kind == EventKind::Acquired {
                    let _ = sender.send(event.fence());
                }
                tell(&reporter, event);
            }
        };
        let service = factory
            .contend(&self.mutex)
            .id(&contender.id)
            .ttl(contender.ttl)
            .transition(contender.transition)
            .on_acquired(callback.clone())
            .on_released(callback.clone())
            .on_owner_changed(callback)
            .build()?;
        reporter.tell("started", json!({"owner": null, "fence": null}));
        service.start()?;
        let code = self.lead(&service, &contender, &acquired, &signals, &no_reader);
        service.stop()?;
        reporter.tell("stopped", json!({"owner": null, "fence": null}));
        code
    }

    /// Runs the command while this contender leads.
    fn lead(
        &self,
        service: &MutexContendService,
        contender: &Contender,
        acquired: &Receiver<Option<u64>>,
        signals: &Receiver<i32>,
        no_reader: &Receiver<Failure>,
    ) -> Result<u8, Failure> {
        loop {
            let fence = select! {
                recv(acquired) -> fence => fence.ok().flatten(),
                recv(signals) -> signal => match signal {
                    Ok(SIGCHLD) => None,
                    _ => return Ok(0),
                },
                recv(no_reader) -> failure => return failure.map_or(Ok(0), Err),
            };
            let Some(fence) = fence.filter(|_| !self.command.is_empty()) else {
                continue;
            };
            let leads = || service.fence() == Some(fence);
            if !leads() {
                continue;
            }
            let terms = Terms {
                revoked: &|| (!leads()).then_some("no longer the leader"),
                grace: contender.grace(),
                signals,
            };
            let environment = [
                ("CONTEND_FENCE", fence.to_string()),
                ("CONTEND_MUTEX", self.mutex.clone()),
            ];
            match child::run(&self.command, environment, &terms)? {
                End::Exited(code) => return Ok(code),
                // The command took the signal too, but it was meant for contend.
                End::Ended { interrupted, .. } if interrupted => return Ok(0),
                End::Ended { .. } => {}
            }
        }
    }
}

fn tell(reporter: &Reporter, event: &Event) {
    let owner = Some(event.state.after().owner_id()).filter(|owner| !owner.is_empty());
    let what = match event.kind {
        EventKind::Acquired => "acquired",
        EventKind::Released => "released",
        EventKind::OwnerChanged if owner.is_some() => "owner",
        _ => return,
    };
    reporter.tell(what, json!({"owner": owner, "fence": event.fence()}));
}
