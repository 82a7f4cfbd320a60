//! `contend semaphore`: counting semaphores from a shell.

use std::time::Duration;

use clap::{Args, Subcommand};
use contend::semaphore::{Acquisition, Holder, PermitRequest, Release, Semaphores, Usage, Wait};
use contend::{Error, ErrorKind};
use serde_json::{Value, json};
use signal_hook::consts::{SIGCHLD, SIGINT, SIGTERM};

use crate::child::{self, Terms};
use crate::console::Console;
use crate::exit::{ALREADY_RELEASED, Failure, HELD, NO_SUCH};
use crate::options::{Connection, Patience, duration};
use crate::signals;

/// What was not renewed for so long is swept.
const STALE: Duration = Duration::from_secs(24 * 3600);

/// Counting semaphores: at most N at once, across machines.
#[derive(Subcommand)]
#[command(after_long_help = include_str!("help/semaphore.txt"))]
pub enum Semaphore {
    /// Creates a semaphore, and the tables if they are missing. One that exists keeps its capacity.
    Create {
        /// The name of the semaphore.
        name: String,
        /// How many permits it has.
        capacity: u32,
    },
    /// Changes the capacity of a semaphore.
    ///
    /// Lowered below what is held, it takes nothing away, but nothing is granted until enough is released.
    SetCapacity {
        /// The name of the semaphore.
        name: String,
        /// How many permits it has from now on.
        capacity: u32,
    },
    /// Shows how many permits of a semaphore, or of all of them, are held.
    Usage {
        /// The name of the semaphore [default: all].
        name: Option<String>,
    },
    /// Shows who holds permits of a semaphore, oldest grant first.
    Holders {
        /// The name of the semaphore.
        name: String,
    },
    /// Acquires permits, all of them or none. Does not wait unless --timeout is given.
    Acquire {
        /// The id under which the permits are held: the same one again is the same request.
        external_id: String,
        #[command(flatten)]
        wanted: Wanted,
        /// How long the permits are held [default: until they are released or swept].
        #[arg(long, value_parser = duration, value_name = "DURATION")]
        ttl: Option<Duration>,
        /// How long to wait for the permits.
        #[arg(long, value_parser = duration, default_value = "0s", value_name = "DURATION")]
        timeout: Duration,
    },
    /// Releases the permits of a request.
    Release {
        /// The id under which the permits are held.
        external_id: String,
    },
    /// Takes back permits that have expired or were not renewed for a day.
    Sweep,
    /// Holds permits while a command runs, as `lock` does with a mutex. Waits for them.
    ///
    /// The environment variable CONTEND_FENCE tells the command the fences of its permits, sorted by the names
    /// of the semaphores and separated by commas, and CONTEND_EXTERNAL_ID the external id of the request. If
    /// the permits are lost while it runs, or contend is killed, it is ended; `contend lock --help` says which
    /// processes are ended with it. When it exits, the permits are released, whatever it leaves running.
    Run {
        #[command(flatten)]
        wanted: Wanted,
        /// How long the permits are held without a renewal, as after a crash; a quarter of it later they can be
        /// taken back.
        #[arg(long, value_parser = duration, default_value = "30s", value_name = "DURATION")]
        ttl: Duration,
        #[command(flatten)]
        patience: Patience,
        /// The command and its arguments.
        #[arg(last = true, required = true, value_name = "COMMAND")]
        command: Vec<String>,
    },
}

/// Which permits, and for whom.
#[derive(Args)]
pub struct Wanted {
    /// Semaphores, and how many permits of each [default: 1].
    #[arg(required = true, value_name = "NAME[:COUNT]", value_parser = share)]
    permits: Vec<(String, u32)>,
    /// Who holds the permits, as `holders` shows it.
    #[arg(long)]
    owner: Option<String>,
}

fn share(text: &str) -> Result<(String, u32), String> {
    let (name, count) = text.rsplit_once(':').unwrap_or((text, "1"));
    let count = count.parse().map_err(|_| "not NAME:COUNT".to_owned())?;
    Ok((name.to_owned(), count))
}

impl Wanted {
    fn add_to(&self, mut request: PermitRequest, ttl: Option<Duration>) -> PermitRequest {
        for (name, count) in &self.permits {
            request = request.permits(name.as_str(), *count);
        }
        if let Some(owner) = &self.owner {
            request = request.owner(owner.as_str());
        }
        match ttl {
            Some(ttl) => request.ttl(ttl),
            None => request,
        }
    }
}

impl Semaphore {
    pub fn run(&self, connection: &Connection, console: Console) -> Result<u8, Failure> {
        let semaphores = connection.factory()?.semaphores()?;
        match self {
            Semaphore::Create { name, capacity } => create(&semaphores, console, name, *capacity),
            Semaphore::SetCapacity { name, capacity } => {
                let user = std::env::var("USER").ok().filter(|user| !user.is_empty());
                let before = semaphores.set_capacity(name, *capacity, user.as_deref())?;
                let json = json!({"semaphore": name, "before": before, "capacity": capacity});
                console.record(&json)
            }
            Semaphore::Usage { name: Some(name) } => show_usage(console, &semaphores.usage(name)?),
            Semaphore::Usage { name: None } => {
                for usage in semaphores.list()? {
                    show_usage(console, &usage)?;
                }
                Ok(0)
            }
            Semaphore::Holders { name } => {
                for holder in semaphores.holders(name)? {
                    show_holder(console, &holder)?;
                }
                Ok(0)
            }
            Semaphore::Acquire {
                external_id,
                wanted,
                ttl,
                timeout,
            } => {
                let request = wanted.add_to(PermitRequest::new(external_id.as_str()), *ttl);
                show_acquisition(console, semaphores.acquire_for(&request, *timeout)?)
            }
            Semaphore::Release { external_id } => match semaphores.release(external_id)? {
                Release::Released => show_result(console, "released", 0),
                Release::AlreadyReleased => show_result(console, "already_released", 0),
                _ => show_result(console, "unknown", NO_SUCH),
            },
            Semaphore::Sweep => sweep(&semaphores, console),
            Semaphore::Run {
                wanted,
                ttl,
                patience,
                command,
            } => {
                let request = wanted.add_to(PermitRequest::generated(), Some(*ttl));
                run(&semaphores, &request, *ttl, patience, command)
            }
        }
    }
}

fn create(
    semaphores: &Semaphores,
    console: Console,
    name: &str,
    capacity: u32,
) -> Result<u8, Failure> {
    semaphores.create_tables()?;
    semaphores.create(name, capacity)?;
    let usage = semaphores.usage(name)?;
    if usage.capacity != capacity {
        let message = format!(
            "{name}: exists with capacity {}; `contend semaphore set-capacity {name} {capacity}` changes it",
            usage.capacity
        );
        return Err(Error::new(ErrorKind::Conflict, message).into());
    }
    show_usage(console, &usage)
}

fn sweep(semaphores: &Semaphores, console: Console) -> Result<u8, Failure> {
    let mut swept = semaphores.sweep_expired()?;
    swept.extend(semaphores.sweep_stale(STALE)?);
    for one in &swept {
        let reason = format!("{:?}", one.reason).to_lowercase();
        let json = json!({"result": "swept", "external_id": *one.external_id, "reason": reason});
        console.record(&json)?;
    }
    Ok(0)
}

/// Runs a command under permits.
fn run(
    semaphores: &Semaphores,
    request: &PermitRequest,
    ttl: Duration,
    patience: &Patience,
    command: &[String],
) -> Result<u8, Failure> {
    // From here on, signals end the wait or the command, and not this program.
    let (signals, cancel) = signals::receive(&[SIGCHLD, SIGTERM, SIGINT]);
    let acquire = |wait: Wait| semaphores.guard(request, wait.cancel(&cancel));
    let guard = match acquire(Wait::at_most(Duration::ZERO)) {
        Err(error) if patience.waits_after(&error) => {
            acquire(patience.timeout.map_or_else(Wait::forever, Wait::at_most))
        }
        guard => guard,
    };
    let guard = signals::unless_told(&signals, guard)?;
    let fences = guard
        .permits()
        .into_iter()
        .map(|permit| permit.fence.to_string());
    let environment = [
        ("CONTEND_FENCE", fences.collect::<Vec<_>>().join(",")),
        ("CONTEND_EXTERNAL_ID", guard.external_id().to_string()),
    ];
    let terms = Terms {
        revoked: &|| (!guard.is_valid()).then_some("the permits were lost"),
        // They are taken back a quarter of the ttl after their end at the earliest.
        grace: ttl / 8,
        signals: &signals,
    };
    let end = child::run(command, environment, &terms)?;
    Ok(end.code_after([guard.release()]))
}

fn show_acquisition(console: Console, acquisition: Acquisition) -> Result<u8, Failure> {
    let (result, permits) = match acquisition {
        Acquisition::Acquired(permits) => ("acquired", permits),
        Acquisition::AlreadyAcquired { permits, .. } => ("already_acquired", permits),
        Acquisition::Exhausted(short) => {
            console.record(&json!({
                "result": "exhausted", "semaphore": *short.semaphore,
                "capacity": short.capacity, "held": short.held, "wanted": short.wanted,
            }))?;
            return Ok(HELD);
        }
        _ => return show_result(console, "already_released", ALREADY_RELEASED),
    };
    let permits = permits.iter().map(|permit| {
        json!({"semaphore": *permit.semaphore, "count": permit.count, "fence": permit.fence})
    });
    console.record(&json!({"result": result, "permits": permits.collect::<Value>()}))
}

fn show_result(console: Console, result: &str, code: u8) -> Result<u8, Failure> {
    console.record(&json!({"result": result}))?;
    Ok(code)
}

fn show_usage(console: Console, usage: &Usage) -> Result<u8, Failure> {
    console.record(&json!({
        "semaphore": *usage.semaphore, "capacity": usage.capacity, "held": usage.held,
        "expired": usage.expired, "free": usage.free, "requests": usage.requests,
    }))
}

fn show_holder(console: Console, holder: &Holder) -> Result<u8, Failure> {
    let ms = |duration: Duration| duration.as_millis() as u64;
    console.record(&json!({
        "external_id": *holder.external_id, "owner": holder.owner.as_deref(),
        "count": holder.count, "fence": holder.fence,
        "held_ms": ms(holder.held_for), "expires_in_ms": holder.expires_in.map(ms),
    }))
}
