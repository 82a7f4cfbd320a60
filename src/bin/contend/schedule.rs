//! `contend schedule`: runs a command at its times, on the leader only.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use clap::Args;
use contend::{Context, Factory, Missed, Weekday};
use crossbeam_channel::{Sender, bounded, never, select};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::child::{self, End, Terms};
use crate::console::{Console, now};
use crate::exit::{Failure, LOST, at_the_end, refused};
use crate::json::Json;
use crate::options::{Connection, OneMutex, duration};
use crate::signals;

/// How often a schedule without a command runs, to look at.
const DEMO: Duration = Duration::from_secs(1);

/// Runs a command on a schedule, on the leader only.
///
/// Start it on several machines: one of them leads and runs the command, and another one takes over when the
/// leader stops. The environment variable CONTEND_FENCE tells the command the fence of the leadership, and
/// CONTEND_MUTEX the mutex. If leadership is lost while the command runs, or contend is told to stop, the
/// command is ended: SIGTERM, then SIGKILL. It is also ended if contend is killed. `contend lock --help` says
/// which processes are ended with a command. Without a command, each run prints a line instead.
///
/// The time of the last run is stored with the mutex: a new leader continues where the last one stopped, and
/// a rolling deploy runs nothing twice. A run counts once it begins, with --delay once it ends: if it fails, or is
/// cut short, the command runs again at its next time, not before.
#[derive(Args)]
#[command(after_long_help = "\
Without a command, the mutex defaults to schedule-demo, the pace to --every 1s and the server to memory; with
one, all three must be given.
With a command, contend's own lines go to standard error, so that standard output is the command's; without
one, they go to standard output.
With --json, each line is {\"at_ms\", \"mutex\", \"contender\", \"event\", \"fence\", \"code\"}; the events are
started, run (a run begins), ended (with the command's exit code, or 76 if leadership was lost before the
command ended) and stopped.
If the server refuses it when it starts, it exits with 77 or 78. When SIGTERM or SIGINT stops it, it exits with
0, with 69 if the server has never answered, or with 77 or 78 if the server does not let it lead. Without a
command, it also ends when its output can no longer be written.

Examples:
  contend schedule report --every 1h -- ./report.sh
  contend schedule sync --delay 30s -- ./sync.sh
  contend schedule backup --daily-at 02:30 --zone +01:00 -- ./backup.sh
  contend schedule invoices --daily-at 06:00 --days mon,thu -- ./invoices.sh")]
pub struct Schedule {
    #[command(flatten)]
    mutex: OneMutex,

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

    /// Runs only on these days of the week, such as mon,thu [default: every day].
    #[arg(
        long,
        requires = "daily_at",
        // What conflicts with the required one would count in its place.
        conflicts_with_all = ["every", "delay"],
        value_delimiter = ',',
        value_name = "DAY,.."
    )]
    days: Vec<Weekday>,

    /// Skips runs that could not start in time, instead of making up for them with one run.
    #[arg(long)]
    skip_missed: bool,

    /// This contender's id [default: generated].
    #[arg(long)]
    id: Option<String>,

    /// How long a leader stays leader without a renewal [default: that of the URL, or 10s].
    #[arg(long, value_parser = duration, value_name = "DURATION")]
    ttl: Option<Duration>,

    /// How much longer nobody else can lead, so that the command has time to end [default: that of the URL,
    /// or 6s].
    #[arg(long, value_parser = duration, value_name = "DURATION")]
    transition: Option<Duration>,

    /// The command and its arguments.
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

#[derive(Args)]
#[group(multiple = false)]
struct Pace {
    /// Starts a run this often [default: 1s without a command; with one, this, --delay or --daily-at must be
    /// given].
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
    pub fn run(self, connection: &Connection, console: &Console) -> Result<u8, Failure> {
        let factory = contend::connect(connection.url_or_memory(&self.command)?)?;
        // A command needs one of its own: two that shared a default one would never run beside each other.
        let demo = self.command.is_empty().then_some("schedule-demo");
        let mutex = self.mutex.name(demo)?;
        let schedule = self.schedule(&mutex)?;
        let times = schedule.to_string();
        let interrupted = signals::receive(&[SIGINT, SIGTERM, SIGHUP], console);
        let mut builder = factory
            .scheduler(&mutex)
            .transition(self.transition(&factory));
        if let Some(id) = &self.id {
            builder = builder.id(id);
        }
        if let Some(ttl) = self.ttl {
            builder = builder.ttl(ttl);
        }
        let own = console.beside(&self.command);
        let (unread, no_reader) = bounded(1);
        let job = Job {
            mutex,
            contender: OnceLock::new(),
            grace: self.transition(&factory) / 2,
            command: self.command,
            own,
            unread,
        };
        let job = Arc::new(job);
        let work = Arc::clone(&job);
        let scheduler = builder.build(schedule, move |context| work.run(context))?;
        let id = scheduler.id();
        // Before the first run, which names it.
        let _ = job.contender.set(id.to_owned());
        scheduler.start()?;
        own.either(
            || job.event("started"),
            || {
                let realm = factory.realm();
                format!("{id} started; runs {times} on {realm}; stop it with Ctrl-C")
            },
        )?;
        let (mut unread, mut refusal) = (None, None);
        select! {
            recv(interrupted) -> _ => {}
            recv(no_reader) -> failure => unread = failure.ok(),
            recv(refused(&factory)) -> error => refusal = error.ok(),
        };
        // Asked while it still runs. The log has said what is wrong when it began.
        let error = scheduler.last_error();
        scheduler.stop()?;
        // It has done what it was told to, whether or not anybody reads that.
        let _ = own.either(|| job.event("stopped"), || format!("{id} stopped"));
        match unread {
            Some(failure) => Err(failure),
            None => at_the_end(&factory, error.as_ref(), refusal),
        }
    }

    fn schedule(&self, mutex: &str) -> Result<contend::Schedule, Failure> {
        let pace = &self.pace;
        let schedule = match (pace.every, pace.delay, &pace.daily_at) {
            (_, _, Some(time)) if !self.days.is_empty() => {
                contend::Schedule::weekly_at(self.days.iter().copied(), time, &self.zone)?
            }
            (_, _, Some(time)) => contend::Schedule::daily_at(time, &self.zone)?,
            (_, Some(delay), _) => contend::Schedule::with_delay(delay),
            (Some(every), ..) => contend::Schedule::every(every),
            (None, ..) if self.command.is_empty() => contend::Schedule::every(DEMO),
            // No pace suits every command, and a wrong one may do harm.
            (None, ..) => {
                return Err(Failure::Usage(format!(
                    "no pace: give --every DURATION, --delay DURATION or --daily-at HH:MM, as in \
                     `contend schedule {mutex} --every 1h -- COMMAND`"
                )));
            }
        };
        Ok(match self.skip_missed {
            true => schedule.missed(Missed::Skip),
            false => schedule,
        })
    }

    fn transition(&self, factory: &Factory) -> Duration {
        self.transition.unwrap_or(factory.lease().transition())
    }
}

/// What runs on the leader.
struct Job {
    mutex: String,
    /// The id of the scheduler that runs it, which is built around it.
    contender: OnceLock<String>,
    command: Vec<String>,
    grace: Duration,
    own: Console,
    /// Ends the schedule: nobody reads what it prints.
    unread: Sender<Failure>,
}

impl Job {
    /// Says itself how the command ended: an error returned from here would be logged beside that.
    fn run(&self, context: &Context) {
        let fence = context.fence();
        let event = |event| self.event(event).with("fence", fence);
        let line = self.own.either(
            || event("run"),
            || format!("{} runs with fence {fence}", self.contender()),
        );
        let Some(program) = self.command.first() else {
            // Without a reader there is nothing to lead for. Full is fine: the first failure ends it.
            if let Err(failure) = line {
                let _ = self.unread.try_send(failure);
            }
            return;
        };
        let terms = Terms {
            over: &|| match (context.is_leader(), context.is_cancelled()) {
                (false, _) => Some("no longer the leader"),
                (true, true) => Some("told to stop"),
                (true, false) => None,
            },
            grace: self.grace,
            signals: &never(),
        };
        let environment = [
            ("CONTEND_FENCE", fence.to_string()),
            ("CONTEND_MUTEX", self.mutex.clone()),
        ];
        let code = match child::run(&self.command, &environment, &terms, &self.own) {
            Ok(End::Exited(code)) => code,
            // Told to stop, which took nothing from the command.
            Ok(End::Ended { code, .. }) if context.is_leader() => code,
            Ok(End::Ended { .. }) => LOST,
            Err(failure) => {
                failure.show(&self.own);
                if !self.own.is_json() {
                    return;
                }
                failure.code()
            }
        };
        let _ = self.own.either(
            || event("ended").with("code", u32::from(code)),
            || format!("{program} ended with code {code}"),
        );
    }

    fn event(&self, event: &str) -> Json {
        let json = now().with("mutex", &self.mutex);
        json.with("contender", self.contender())
            .with("event", event)
    }

    fn contender(&self) -> &str {
        self.contender.get().map_or("", String::as_str)
    }
}
