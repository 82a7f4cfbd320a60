//! `contend elect`: leader election, for a command or to look at.

use clap::Args;
use contend::{Event, EventKind, MutexContendService};
use crossbeam_channel::{Receiver, select, unbounded};
use serde_json::json;
use signal_hook::consts::{SIGCHLD, SIGINT, SIGTERM};

use crate::child::{self, Terms};
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
        let (signals, _) = signals::receive(&[SIGCHLD, SIGTERM, SIGINT]);
        let factory = connection.checked_factory()?;
        let contender = self.contender.on(&factory);
        let (sender, acquired) = unbounded();
        let (reporter, no_reader) =
            Reporter::new(console, &self.mutex, &contender.id, &self.command);
        // Callbacks and not a channel, so that what is printed is true at the time that is printed: the callback for
        // Released has run before the release is sent.
        let callback = {
            let reporter = reporter.clone();
            move |event: &Event| {
                tell(&reporter, event);
                if event.kind == EventKind::Acquired {
                    let _ = sender.send(event.fence());
                }
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
            let leads = |fence: &u64| service.fence() == Some(*fence);
            let Some(fence) = fence.filter(|it| leads(it) && !self.command.is_empty()) else {
                continue;
            };
            let terms = Terms {
                revoked: &|| (!leads(&fence)).then_some("no longer the leader"),
                grace: contender.transition / 2,
                signals,
            };
            let environment = [
                ("CONTEND_FENCE", fence.to_string()),
                ("CONTEND_MUTEX", self.mutex.clone()),
            ];
            let end = child::run(&self.command, environment, &terms)?;
            // The command took the signal too, but it was meant for contend.
            if end.interrupted || !end.revoked {
                return Ok(if end.revoked { 0 } else { end.code });
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
