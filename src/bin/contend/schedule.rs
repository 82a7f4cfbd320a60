//! `contend schedule`: runs a command at its times, on the leader only.

use std::cell::OnceCell;
use std::time::{Duration, Instant};

use clap::Args;
use contend::{Context, Missed, Weekday};
use crossbeam_channel::{never, select};
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::child::{self, Terms};
use crate::console::{self, Console, Reporter};
use crate::exit::{Failure, LOST};
use crate::options::{Connection, ContenderOptions, duration};
use crate::signals;

/// Runs a command on a schedule, on the leader only.
///
/// Start it on several machines: one of them leads and runs the command, and another one takes over when the
/// leader stops. The environment variable CONTEND_FENCE tells the command the fence of the leadership, and
/// CONTEND_MUTEX the mutex. If leadership is lost while the command runs, the command is ended: SIGTERM, then
/// SIGKILL. It is also ended if contend is killed. `contend lock --help` says which processes are ended with a
/// command. On SIGTERM, contend begins no more runs, leads on while the command runs, and ends it only after
/// --stop-within. Without a command, each run prints a line instead.
///
/// The time of the last run is stored with the mutex: a new leader continues where the last one stopped, and
/// a rolling deploy runs nothing twice. A run counts once it begins, with --delay once it ends: if it fails, or is
/// cut short, the command runs again at its next time, not before.
#[derive(Args)]
#[command(after_long_help = include_str!("help/schedule.txt"))]
pub struct Schedule {
    /// The name of the mutex.
    mutex: String,

    #[command(flatten)]
    pace: Pace,

    /// The time zone of --daily-at: UTC, or an offset such as +05:30.
    #[arg(
        long,
        default_value = "UTC",
        allow_hyphen_values = true,
        value_name = "ZONE"
    )]
    zone: String,

    /// Runs only on these days of the week [default: every day].
    #[arg(
        long,
        requires = "daily_at",
        conflicts_with_all = ["every", "delay"],
        value_delimiter = ',',
        default_value = "mon,tue,wed,thu,fri,sat,sun",
        hide_default_value = true,
        value_name = "DAY,.."
    )]
    days: Vec<Weekday>,

    /// Skips runs that could not start in time, instead of making up for them with one run.
    #[arg(long, conflicts_with = "delay")]
    skip_missed: bool,

    #[command(flatten)]
    contender: ContenderOptions,

    /// How long a running command may take to end by itself when contend is told to stop.
    #[arg(long, value_parser = duration, default_value = "30s", value_name = "DURATION")]
    stop_within: Duration,

    /// The command and its arguments.
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
struct Pace {
    /// Starts a run this often.
    #[arg(long, value_parser = duration, value_name = "DURATION")]
    every: Option<Duration>,

    /// Waits this long after each run.
    #[arg(long, value_parser = duration, value_name = "DURATION")]
    delay: Option<Duration>,

    /// Runs every day at this time, or on the days of the week that --days names.
    #[arg(long, value_name = "HH:MM")]
    daily_at: Option<String>,
}

impl Schedule {
    pub fn run(self, connection: &Connection, console: Console) -> Result<u8, Failure> {
        let schedule = self.schedule()?;
        let (signals, _) = signals::receive(&[SIGTERM, SIGINT]);
        let factory = connection.checked_factory()?;
        let contender = self.contender.on(&factory);
        let (reporter, no_reader) =
            Reporter::new(console, &self.mutex, &contender.id, &self.command);
        let builder = factory
            .scheduler(&self.mutex)
            .id(&contender.id)
            .ttl(contender.ttl)
            .transition(contender.transition)
            // Long enough for SIGKILL.
            .stop_within(self.stop_within.saturating_add(contender.transition));
        let job = Job {
            options: self,
            reporter: reporter.clone(),
            grace: contender.transition / 2,
        };
        let scheduler = builder.build(schedule, move |context| job.run(context))?;
        reporter.tell("started", json!({"fence": null, "code": null}));
        scheduler.start()?;
        let unread = select! {
            recv(signals) -> _ => None,
            recv(no_reader) -> failure => failure.ok(),
        };
        scheduler.stop()?;
        reporter.tell("stopped", json!({"fence": null, "code": null}));
        unread.map_or(Ok(0), Err)
    }

    fn schedule(&self) -> Result<contend::Schedule, Failure> {
        let pace = &self.pace;
        let schedule = match (pace.every, pace.delay, &pace.daily_at) {
            (Some(every), ..) => contend::Schedule::every(every),
            (_, Some(delay), _) => contend::Schedule::with_delay(delay),
            (.., time) => {
                let (days, time) = (self.days.iter().copied(), time.as_deref());
                contend::Schedule::weekly_at(days, time.unwrap_or_default(), &self.zone)?
            }
        };
        Ok(match self.skip_missed {
            true => schedule.missed(Missed::Skip),
            false => schedule,
        })
    }
}

/// What runs on the leader.
struct Job {
    options: Schedule,
    reporter: Reporter,
    grace: Duration,
}

impl Job {
    /// Says itself how the command ended: an error returned from here would be logged beside that.
    fn run(&self, context: &Context) {
        let fence = context.fence();
        self.reporter
            .tell("run", json!({"fence": fence, "code": null}));
        if self.options.command.is_empty() {
            return;
        }
        let told = OnceCell::new();
        let is_late = || told.get_or_init(Instant::now).elapsed() >= self.options.stop_within;
        let terms = Terms {
            revoked: &|| match (context.is_leader(), context.is_cancelled()) {
                (false, _) => Some("no longer the leader"),
                (true, true) if is_late() => Some("still running after --stop-within"),
                (true, _) => None,
            },
            grace: self.grace,
            signals: &never(),
        };
        let environment = [
            ("CONTEND_FENCE", fence.to_string()),
            ("CONTEND_MUTEX", self.options.mutex.clone()),
        ];
        let code = match child::run(&self.options.command, environment, &terms) {
            Ok(end) if end.revoked && !context.is_leader() => LOST,
            Ok(end) => end.code,
            Err(failure) => {
                console::message(&failure.message);
                failure.code
            }
        };
        self.reporter
            .tell("ended", json!({"fence": fence, "code": code}));
    }
}
