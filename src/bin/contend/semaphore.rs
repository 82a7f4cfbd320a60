//! `contend semaphore`: counting semaphores from a shell.

use std::time::Duration;

use clap::{Args, Subcommand};
use contend::semaphore::{
    Acquisition, Exhausted, Permit, PermitRenewal, PermitRequest, Release, Semaphores, Usage, Wait,
};
use contend::{Cancel, ContenderIdGenerator, Error, ErrorKind};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};

use crate::advice;
use crate::child::{self, End, Terms};
use crate::console::{Console, count, span};
use crate::exit::{ALREADY_RELEASED, Failure, HELD, LOST, NO_SUCH, by_signal};
use crate::json::Json;
use crate::options::{Connection, Patience, duration};
use crate::signals;
use crate::wait_notice::Waiting;

/// What was not renewed for so long is swept.
const STALE: Duration = Duration::from_secs(24 * 3600);

/// Counting semaphores: at most N at once, across machines.
#[derive(Subcommand)]
#[command(after_long_help = "\
Exits with 66 if there is no such semaphore or request, 73 if the external id was released already, 75 if
a semaphore is exhausted, 65 if the external id holds something else, or the semaphore to create exists with
another capacity.

Examples:
  contend semaphore create downloads 5
  contend semaphore set-capacity downloads 8
  contend semaphore run downloads -- ./download.sh
  contend semaphore run downloads --no-wait -- ./download.sh
  contend semaphore acquire job-123 downloads:2 gpu --ttl 10m
  contend semaphore release job-123")]
pub enum Semaphore {
    /// Creates a semaphore, and the tables if they are missing. One that exists keeps its capacity.
    Create {
        /// The name of the semaphore.
        name: String,
        /// How many permits it has.
        #[arg(allow_negative_numbers = true)]
        capacity: u32,
    },
    /// Changes the capacity of a semaphore.
    ///
    /// Lowered below what is held, it takes nothing away, but nothing is granted until enough is released.
    SetCapacity {
        /// The name of the semaphore.
        name: String,
        /// How many permits it has from now on.
        #[arg(allow_negative_numbers = true)]
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
        /// How long the permits are held without a renewal [default: none: until they are released or swept].
        #[arg(long, value_parser = duration, value_name = "DURATION")]
        ttl: Option<Duration>,
        /// How long to wait for the permits [default: not at all].
        #[arg(long, value_parser = duration, value_name = "DURATION")]
        timeout: Option<Duration>,
    },
    /// Releases the permits of a request.
    Release {
        /// The id under which the permits are held.
        external_id: String,
    },
    /// Restarts the ttl of a request.
    Renew {
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
        /// taken back [default: that of the URL, or 30s if it sets none or one too short for permits].
        #[arg(long, value_parser = duration, value_name = "DURATION")]
        ttl: Option<Duration>,
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
    match text.rsplit_once(':') {
        None => Ok((text.to_owned(), 1)),
        Some((name, count)) => match count.parse() {
            Ok(count) => Ok((name.to_owned(), count)),
            Err(_) => Err("not NAME:COUNT".to_owned()),
        },
    }
}

impl Wanted {
    fn request(&self, external_id: &str, ttl: Option<Duration>) -> PermitRequest {
        let mut request = PermitRequest::new(external_id);
        for (name, count) in &self.permits {
            request = request.permits(name.as_str(), *count);
        }
        if let Some(owner) = &self.owner {
            request = request.owner(owner.as_str());
        }
        if let Some(ttl) = ttl {
            request = request.ttl(ttl);
        }
        request
    }
}

/// Connects with a URL that the other commands use too: what it says about mutexes is checked and not used.
///
/// Only its ttl is that of the permits as well, unless they need a longer one to be renewed in.
fn connect(url: &str) -> Result<Semaphores, Failure> {
    let factory = contend::connect(url)?;
    let semaphores = factory.semaphores()?;
    let parameters = url.split_once('?').map_or("", |(_, parameters)| parameters);
    let sets_ttl = parameters.split('&').any(|pair| pair.starts_with("ttl="));
    Ok(match semaphores.clone().with_ttl(factory.lease().ttl()) {
        Ok(with_ttl) if sets_ttl => with_ttl,
        _ => semaphores,
    })
}

impl Semaphore {
    pub fn run(&self, connection: &Connection, console: &Console) -> Result<u8, Failure> {
        let shell = Shell {
            semaphores: connect(connection.url()?)?,
            console,
        };
        match self {
            Semaphore::Create { name, capacity } => shell.create(name, *capacity),
            Semaphore::SetCapacity { name, capacity } => shell.set_capacity(name, *capacity),
            Semaphore::Usage { name } => shell.usage(name.as_deref()),
            Semaphore::Holders { name } => shell.holders(name),
            Semaphore::Acquire {
                external_id,
                wanted,
                ttl,
                timeout,
            } => {
                let request = wanted.request(external_id, *ttl);
                shell.acquire(&request, timeout.unwrap_or_default())
            }
            Semaphore::Release { external_id } => shell.release(external_id),
            Semaphore::Renew { external_id } => shell.renew(external_id),
            Semaphore::Sweep => shell.sweep(),
            Semaphore::Run {
                wanted,
                ttl,
                patience,
                command,
            } => shell.run(wanted, *ttl, patience, command),
        }
    }
}

struct Shell<'a> {
    semaphores: Semaphores,
    console: &'a Console,
}

impl Shell<'_> {
    fn create(&self, name: &str, capacity: u32) -> Result<u8, Failure> {
        self.semaphores.create_tables()?;
        let created = self.semaphores.create(name, capacity)?;
        let usage = self.semaphores.usage(name)?;
        if !created && usage.capacity != capacity {
            let message = format!(
                "{name}: exists with capacity {}; `contend semaphore set-capacity {name} {capacity}` \
                 changes it",
                usage.capacity
            );
            return Err(Error::new(ErrorKind::Conflict, message).into());
        }
        self.show_usage(&usage)?;
        Ok(0)
    }

    fn set_capacity(&self, name: &str, capacity: u32) -> Result<u8, Failure> {
        let user = std::env::var("USER").ok().filter(|user| !user.is_empty());
        let before = self
            .semaphores
            .set_capacity(name, capacity, user.as_deref())?;
        // What was changed is changed, whether or not anybody reads it.
        let _ = self.console.either(
            || {
                let json = Json::new().with("semaphore", name);
                json.with("before", before).with("capacity", capacity)
            },
            || format!("{name}: capacity {before} -> {capacity}"),
        );
        Ok(0)
    }

    fn usage(&self, name: Option<&str>) -> Result<u8, Failure> {
        match name {
            Some(name) => self.show_usage(&self.semaphores.usage(name)?)?,
            None => {
                for usage in self.semaphores.list()? {
                    self.show_usage(&usage)?;
                }
            }
        }
        Ok(0)
    }

    fn holders(&self, name: &str) -> Result<u8, Failure> {
        for holder in self.semaphores.holders(name)? {
            let (id, owner) = (&holder.external_id, holder.owner.as_deref());
            let (count, fence, held_for) = (holder.count, holder.fence, holder.held_for);
            self.console.either(
                || {
                    Json::new()
                        .with("external_id", id)
                        .with("owner", owner)
                        .with("count", count)
                        .with("fence", fence)
                        .with("held_ms", held_for)
                        .with("expires_in_ms", holder.expires_in)
                },
                || {
                    let owner = owner.map_or(String::new(), |owner| format!(" of {owner}"));
                    let end = match holder.expires_in {
                        Some(Duration::ZERO) => {
                            "expired: the next request that needs them gets them".to_owned()
                        }
                        Some(left) => format!("expires in {}", span(left)),
                        None => "without a ttl".to_owned(),
                    };
                    let held = span(held_for);
                    format!("{id}{owner}: {count}, fence {fence}, held for {held}, {end}")
                },
            )?;
        }
        Ok(0)
    }

    fn acquire(&self, request: &PermitRequest, timeout: Duration) -> Result<u8, Failure> {
        let answer = self.semaphores.acquire_for(request, timeout)?;
        // What was granted is granted, whether or not anybody reads it.
        Ok(match answer {
            Acquisition::Acquired(permits) => self.show_permits("acquired", &permits),
            Acquisition::AlreadyAcquired { permits, .. } => {
                self.show_permits("already_acquired", &permits)
            }
            Acquisition::AlreadyReleased => {
                self.show_result("already_released");
                ALREADY_RELEASED
            }
            Acquisition::Exhausted(exhausted) => self.show_exhausted(&exhausted),
            _ => ALREADY_RELEASED,
        })
    }

    fn release(&self, external_id: &str) -> Result<u8, Failure> {
        let (result, code) = match self.semaphores.release(external_id)? {
            Release::Released => ("released", 0),
            Release::AlreadyReleased => ("already_released", 0),
            _ => ("unknown", NO_SUCH),
        };
        self.show_result(result);
        Ok(code)
    }

    fn renew(&self, external_id: &str) -> Result<u8, Failure> {
        let (result, code) = match self.semaphores.renew(external_id)? {
            PermitRenewal::Renewed => ("renewed", 0),
            PermitRenewal::AlreadyReleased => ("already_released", ALREADY_RELEASED),
            _ => ("unknown", NO_SUCH),
        };
        self.show_result(result);
        Ok(code)
    }

    fn sweep(&self) -> Result<u8, Failure> {
        let mut swept = self.semaphores.sweep_expired()?;
        swept.extend(self.semaphores.sweep_stale(STALE)?);
        let rows = swept.iter().map(|one| {
            let reason = format!("{:?}", one.reason).to_lowercase();
            (&one.external_id, reason)
        });
        self.console.either(
            || {
                let rows = rows.clone().map(|(id, reason)| {
                    Json::new().with("external_id", id).with("reason", &reason)
                });
                Json::new()
                    .with("result", "swept")
                    .with("requests", rows.collect::<Vec<_>>())
            },
            || {
                let rows = rows.clone().map(|(id, reason)| format!("{id}: {reason}\n"));
                rows.collect::<String>() + &count(swept.len(), "request") + " swept"
            },
        )?;
        Ok(0)
    }

    fn run(
        &self,
        wanted: &Wanted,
        ttl: Option<Duration>,
        patience: &Patience,
        command: &[String],
    ) -> Result<u8, Failure> {
        let external_id = ContenderIdGenerator::Host.generate();
        let request = wanted.request(&external_id, ttl);
        // From here on, signals end the wait or the command, and not us.
        let signals = signals::receive(&[SIGCHLD, SIGTERM, SIGINT, SIGHUP], self.console);
        let cancel = Cancel::new();
        let cancelling = signals::cancel_on(&signals, &cancel);
        let wait = match patience.timeout {
            _ if patience.no_wait => Wait::at_most(Duration::ZERO),
            Some(timeout) => Wait::at_most(timeout),
            None => Wait::forever(),
        };
        let waiting = Waiting::for_permits(&self.semaphores, &wanted.permits, self.console);
        let guard = self.semaphores.guard(&request, wait.cancel(&cancel));
        drop(waiting);
        let guard = match (guard, cancelling.end()) {
            (guard, None) => guard?,
            (_, Some(signal)) => return Ok(by_signal(signal)),
        };
        let terms = Terms {
            over: &|| (!guard.is_valid()).then_some("the permits were lost"),
            // They are taken back a quarter of the ttl after their end at the earliest. Of a ttl that was
            // not given here, what is left of it just after the grant is known.
            grace: ttl.unwrap_or_else(|| guard.valid_for()) / 8,
            signals: &signals,
        };
        let fences: Vec<String> = guard
            .permits()
            .iter()
            .map(|permit| permit.fence.to_string())
            .collect();
        let environment = [
            ("CONTEND_FENCE", fences.join(",")),
            ("CONTEND_EXTERNAL_ID", guard.external_id().to_string()),
        ];
        match child::run(command, &environment, &terms, self.console)? {
            End::Exited(code) => match guard.release() {
                Ok(()) => Ok(code),
                Err(error) if error.kind() == ErrorKind::Lost => Ok(LOST),
                Err(error) => {
                    // They were ours when the command had ended.
                    let why = advice::message(&error);
                    let text = format!("the permits: released without an answer: {why}");
                    self.console.log(&text);
                    Ok(code)
                }
            },
            End::Ended { .. } => Ok(LOST),
        }
    }

    fn show_permits(&self, result: &str, permits: &[Permit]) -> u8 {
        let _ = self.console.either(
            || {
                let rows = permits.iter().map(|permit| {
                    Json::new()
                        .with("semaphore", &permit.semaphore)
                        .with("count", permit.count)
                        .with("fence", permit.fence)
                });
                Json::new()
                    .with("result", result)
                    .with("permits", rows.collect::<Vec<_>>())
            },
            || {
                let rows = permits.iter().map(|permit| {
                    let (name, count, fence) = (&permit.semaphore, permit.count, permit.fence);
                    format!("\n  {name}: {count}, fence {fence}")
                });
                result.replace('_', " ") + &rows.collect::<String>()
            },
        );
        0
    }

    fn show_exhausted(&self, exhausted: &Exhausted) -> u8 {
        let _ = self.console.either(
            || {
                Json::new()
                    .with("result", "exhausted")
                    .with("semaphore", &exhausted.semaphore)
                    .with("capacity", exhausted.capacity)
                    .with("held", exhausted.held)
                    .with("wanted", exhausted.wanted)
            },
            || advice::exhausted(&exhausted.to_string()),
        );
        HELD
    }

    fn show_usage(&self, usage: &Usage) -> Result<(), Failure> {
        let (name, capacity, held) = (&usage.semaphore, usage.capacity, usage.held);
        let (expired, free, requests) = (usage.expired, usage.free, usage.requests);
        self.console.either(
            || {
                Json::new()
                    .with("semaphore", name)
                    .with("capacity", capacity)
                    .with("held", held)
                    .with("expired", expired)
                    .with("free", free)
                    .with("requests", requests)
            },
            || {
                let requests = count(requests, "request");
                let expired = match expired {
                    0 => String::new(),
                    expired => {
                        format!(" ({expired} expired: the next request that needs them gets them)")
                    }
                };
                format!("{name}: {held} of {capacity} held by {requests}{expired}, {free} free")
            },
        )
    }

    fn show_result(&self, result: &str) {
        let _ = self.console.either(
            || Json::new().with("result", result),
            || result.replace('_', " "),
        );
    }
}
