//! `contend elect`: leader election, to look at and to operate with.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use clap::Args;
use contend::{Error, Event, EventKind, Factory, MutexContendService};
use crossbeam_channel::{Sender, bounded, select};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};

use crate::child::{self, End, Terms};
use crate::console::{Console, count, now};
use crate::exit::{Failure, at_the_end, refused};
use crate::options::{Connection, OneMutex, duration};
use crate::signals;

/// Contends for leadership and prints who leads.
///
/// Without a server, three contenders in this process take turns on the memory backend for ten seconds.
/// With a server, a single contender contends until SIGTERM or SIGINT stops it: start it twice and stop the
/// leader to see the other one take over.
///
/// If a command is given, it runs while this contender leads. The environment variable CONTEND_FENCE tells it
/// the fence of the leadership, and CONTEND_MUTEX the mutex. If leadership is lost, the command is ended
/// (SIGTERM, then SIGKILL before the transition is over), and it is started again when this contender leads
/// again. It is also ended if contend is killed. When the command exits by itself, leadership is given up and
/// contend exits with its code, whatever the command leaves running. Signals are passed on to it. `contend lock
/// --help` says which processes are ended with a command.
#[derive(Args)]
#[command(after_long_help = "\
With --json, each line is {\"at_ms\", \"mutex\", \"contender\", \"event\", \"owner\", \"fence\"}; the events are
started, acquired, released, owner and stopped. With a command they go to standard error.
Without a command, the mutex defaults to demo; with one, it must be named, and a server be given.
Exits with 77 or 78 if the server refuses it when it starts, or does not let it lead when it stops, and with
69 if the server has never answered by then; `contend --help` lists all exit codes.

Examples:
  contend elect
  contend --url redis://10.0.0.5 elect report --json
  contend elect consumer -- ./consume.sh")]
pub struct Elect {
    #[command(flatten)]
    mutex: OneMutex,

    /// This contender's id [default: generated]; with several contenders ID-1, ID-2, ...
    #[arg(long)]
    id: Option<String>,

    /// How many contenders run in this process [default: 1; 3 on memory].
    #[arg(long, conflicts_with = "command", value_parser = clap::value_parser!(u16).range(1..=1000), value_name = "N")]
    contenders: Option<u16>,

    /// How long a leader stays leader without a renewal [default: that of the URL, or 10s; 2s on memory,
    /// without a command].
    #[arg(long, value_parser = duration, value_name = "DURATION")]
    ttl: Option<Duration>,

    /// How much longer nobody else can lead [default: that of the URL, or 6s; 500ms on memory, without a
    /// command].
    #[arg(long, value_parser = duration, value_name = "DURATION")]
    transition: Option<Duration>,

    /// Resigns after leading for this long, then rejoins; or `forever` [default: forever; 1s on memory, without
    /// a command].
    #[arg(long, value_parser = length, value_name = "DURATION")]
    lead: Option<Length>,

    /// How long to run, or `forever` [default: forever; 10s on memory, without a command].
    #[arg(long = "for", value_parser = length, value_name = "DURATION")]
    length: Option<Length>,

    /// A command to run while leading, and its arguments.
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// A duration that may have no end.
#[derive(Clone, Copy)]
enum Length {
    Forever,
    Limited(Duration),
}

fn length(text: &str) -> Result<Length, Error> {
    match text {
        "forever" => Ok(Length::Forever),
        text => duration(text).map(Length::Limited),
    }
}

impl Elect {
    pub fn run(&self, connection: &Connection, console: &Console) -> Result<u8, Failure> {
        let url = connection.url_or_memory(&self.command)?;
        // Something to look at, and not something to rely on.
        let embedded = url.starts_with("memory:") && self.command.is_empty();
        let factory = contend::connect(url)?;
        let lead = limit(self.lead, embedded.then_some(Duration::from_secs(1)));
        let length = limit(self.length, embedded.then_some(Duration::from_secs(10)));

        let (changed, changes) = bounded(1);
        let mutex = self.mutex()?;
        let own = console.beside(&self.command);
        let show = Shared::new(Show::new(own, &mutex), changed);
        let services = self.services(&factory, embedded, &show)?;
        let signals = signals::receive(&[SIGCHLD, SIGTERM, SIGINT, SIGHUP], console);
        let refused = refused(&factory);
        show.lock().headline(&factory, self.command.is_empty());
        let start = Instant::now();
        let end = length.map(|length| start + length);
        let is_over = || end.is_some_and(|end| Instant::now() >= end);
        for service in &services {
            show.lock().event("started", service.id(), "", None);
            service.start()?;
        }

        let (mut exited, mut refusal) = (None, None);
        while exited.is_none() && !is_over() && show.lock().unread.is_none() {
            let resigns = lead.and_then(|lead| Some(show.lock().leads_since()?.1 + lead));
            let next = resigns.into_iter().chain(end).min();
            let patience = next.map_or(Duration::MAX, |next| next - Instant::now());
            select! {
                recv(changes) -> _ => {}
                recv(signals) -> signal => match signal {
                    Ok(SIGCHLD) => {}
                    _ => break,
                },
                recv(refused) -> error => {
                    refusal = error.ok();
                    break;
                }
                default(patience.min(Duration::from_secs(3600))) => {}
            }
            let leader = show.lock().leads_since();
            let Some((index, since)) = leader else {
                continue;
            };
            let has_led = || lead.is_some_and(|lead| since + lead <= Instant::now());
            let service = &services[index];
            if let (false, Some(fence)) = (self.command.is_empty(), service.fence()) {
                let terms = Terms {
                    over: &|| match service.fence() {
                        Some(now) if now == fence && is_over() => Some("the time is over"),
                        Some(now) if now == fence && has_led() => Some("resigning"),
                        Some(now) if now == fence => None,
                        _ => Some("no longer the leader"),
                    },
                    grace: self.transition(&factory, embedded) / 2,
                    signals: &signals,
                };
                let environment = [
                    ("CONTEND_FENCE", fence.to_string()),
                    ("CONTEND_MUTEX", mutex.clone()),
                ];
                match child::run(&self.command, &environment, &terms, &own)? {
                    End::Exited(code) => exited = Some(code),
                    End::Ended {
                        told_to_stop: true, ..
                    } => break,
                    End::Ended { .. } => {}
                }
            }
            if has_led() && !is_over() && exited.is_none() && service.fence().is_some() {
                service.stop()?;
                service.start()?;
            }
        }

        // Asked while they still run. The log has said what is wrong when it began.
        let error = services.iter().find_map(MutexContendService::last_error);
        // Who waits goes first, or it would lead for a moment when the leader has gone.
        let leader = show.lock().leads_since().map(|(index, _)| index);
        let (last, first) = services
            .iter()
            .enumerate()
            .partition::<Vec<_>, _>(|(index, _)| Some(*index) == leader);
        for (_, service) in first.into_iter().chain(last) {
            service.stop()?;
            show.lock().event("stopped", service.id(), "", None);
        }
        let mut show = show.lock();
        if self.command.is_empty() {
            show.summary(Instant::now() - start);
        }
        match (show.unread.take(), exited) {
            (Some(failure), _) => Err(failure),
            (None, Some(code)) => Ok(code),
            (None, None) => at_the_end(&factory, error.as_ref(), refusal),
        }
    }

    /// A command needs a mutex of its own: two that shared a default one would never run beside each other.
    fn mutex(&self) -> Result<String, Failure> {
        self.mutex.name(self.command.is_empty().then_some("demo"))
    }

    /// Short on memory, for a show.
    fn transition(&self, factory: &Factory, embedded: bool) -> Duration {
        let default = match embedded {
            true => Duration::from_millis(500),
            false => factory.lease().transition(),
        };
        self.transition.unwrap_or(default)
    }

    fn services(
        &self,
        factory: &Factory,
        embedded: bool,
        show: &Shared,
    ) -> Result<Vec<MutexContendService>, Failure> {
        let count = self.contenders.unwrap_or(if embedded { 3 } else { 1 });
        let mutex = self.mutex()?;
        let ttl = self.ttl.or(embedded.then_some(Duration::from_secs(2)));
        let transition = self.transition(factory, embedded);
        (0..count)
            .map(|index| {
                let mut builder = factory.contend(&mutex).transition(transition);
                if let Some(ttl) = ttl {
                    builder = builder.ttl(ttl);
                }
                let number = index + 1;
                builder = match (&self.id, embedded) {
                    (Some(id), _) if count == 1 => builder.id(id),
                    (Some(id), _) => builder.id(format!("{id}-{number}")),
                    (None, true) if count <= 26 => {
                        builder.id(char::from(b'a' + index as u8).to_string())
                    }
                    (None, true) => builder.id(format!("contender-{number}")),
                    (None, false) => builder,
                };
                let hear = show.ear(index.into());
                let service = builder
                    .on_acquired(hear.clone())
                    .on_released(hear.clone())
                    .on_owner_changed(hear)
                    .build()?;
                show.lock().standings.push(Standing::new(service.id()));
                Ok(service)
            })
            .collect()
    }
}

fn limit(given: Option<Length>, default: Option<Duration>) -> Option<Duration> {
    match given {
        Some(Length::Forever) => None,
        Some(Length::Limited(duration)) => Some(duration),
        None => default,
    }
}

/// The show, as the callbacks of all contenders and the main thread see it.
///
/// Callbacks and not a channel, so that what is printed is true of the time that is printed: a
/// callback for Released has run before the release is sent, and nobody else can lead before that.
#[derive(Clone)]
struct Shared {
    show: Arc<Mutex<Show>>,
    changed: Sender<()>,
}

impl Shared {
    fn new(show: Show, changed: Sender<()>) -> Shared {
        Shared {
            show: Arc::new(Mutex::new(show)),
            changed,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Show> {
        self.show.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What one contender does with its events.
    fn ear(&self, index: usize) -> impl FnMut(&Event) + Send + Clone + 'static {
        let shared = self.clone();
        move |event| {
            shared.lock().hear(index, event);
            // Full is fine: the main thread looks at everything when it wakes up.
            let _ = shared.changed.try_send(());
        }
    }
}

/// One contender's part in the show.
struct Standing {
    id: String,
    leads_since: Option<Instant>,
    turns: u32,
    led: Duration,
}

impl Standing {
    fn new(id: &str) -> Standing {
        Standing {
            id: id.to_owned(),
            leads_since: None,
            turns: 0,
            led: Duration::ZERO,
        }
    }
}

/// What the terminal shows.
struct Show {
    console: Console,
    mutex: String,
    start: Instant,
    standings: Vec<Standing>,
    vacant_since: Option<Instant>,
    hand_offs: Vec<Duration>,
    fences: Vec<u64>,
    /// Why nobody reads what is printed.
    unread: Option<Failure>,
}

impl Show {
    fn new(console: Console, mutex: &str) -> Show {
        Show {
            console,
            mutex: mutex.to_owned(),
            start: Instant::now(),
            standings: Vec::new(),
            vacant_since: None,
            hand_offs: Vec::new(),
            fences: Vec::new(),
            unread: None,
        }
    }

    fn headline(&mut self, factory: &Factory, is_shown: bool) {
        if !self.console.is_json() {
            let who = count(self.standings.len(), "contender");
            let (mutex, realm) = (&self.mutex, factory.realm());
            // Set off from what follows, but not among the lines of a log.
            let end = if is_shown { "\n" } else { "" };
            self.say(&format!("{who} for the mutex {mutex:?} on {realm}{end}"));
        }
    }

    /// Who of this process leads, and since when.
    fn leads_since(&self) -> Option<(usize, Instant)> {
        let mut standings = self.standings.iter().enumerate();
        standings.find_map(|(index, standing)| Some((index, standing.leads_since?)))
    }

    fn hear(&mut self, index: usize, event: &Event) {
        let now = Instant::now();
        let standing = &mut self.standings[index];
        let what = match event.kind {
            EventKind::Acquired => {
                standing.leads_since = Some(now);
                standing.turns += 1;
                self.fences.extend(event.fence());
                self.hand_offs
                    .extend(self.vacant_since.take().map(|since| now - since));
                "acquired"
            }
            EventKind::Released => {
                let since = standing.leads_since.take();
                standing.led += since.map_or(Duration::ZERO, |since| now - since);
                self.vacant_since = Some(now);
                "released"
            }
            EventKind::OwnerChanged if !event.state.after().owner_id().is_empty() => "owner",
            _ => return,
        };
        let id = standing.id.clone();
        self.event(what, &id, event.state.after().owner_id(), event.fence());
    }

    fn event(&mut self, event: &str, contender: &str, owner: &str, fence: Option<u64>) {
        let line = if self.console.is_json() {
            now()
                .with("mutex", &self.mutex)
                .with("contender", contender)
                .with("event", event)
                .with("owner", Some(owner).filter(|owner| !owner.is_empty()))
                .with("fence", fence)
                .end()
        } else {
            let at = (Instant::now() - self.start).as_secs_f64();
            let what = match event {
                "acquired" => "leads".to_owned(),
                "released" => "steps down".to_owned(),
                "owner" => format!("sees {owner} lead"),
                other => other.to_owned(),
            };
            let fence = fence.map_or(String::new(), |fence| format!("  fence {fence}"));
            let line = format!("{at:9.3} s  {contender:<8} {what:<14}{fence}");
            line.trim_end().to_owned()
        };
        self.say(&line);
    }

    /// Without a reader there is nothing to lead for: the loop ends, and gives leadership up in order.
    fn say(&mut self, line: &str) {
        if let Err(failure) = self.console.line(line) {
            self.unread.get_or_insert(failure);
        }
    }

    fn summary(&mut self, length: Duration) {
        if self.console.is_json() {
            return;
        }
        let head = "contender";
        let widths = self.standings.iter().map(|one| one.id.chars().count());
        let width = widths.chain([head.len()]).max().unwrap_or_default();
        self.say(&format!("\n{head:<width$}  turns        led"));
        for index in 0..self.standings.len() {
            let Standing { id, turns, led, .. } = &self.standings[index];
            let led = led.as_secs_f64();
            self.say(&format!("{id:<width$}  {turns:>5}  {led:>7.2} s"));
        }
        self.say("");
        let led: Duration = self.standings.iter().map(|standing| standing.led).sum();
        let share = 100.0 * led.as_secs_f64() / length.as_secs_f64().max(f64::EPSILON);
        self.hand_offs.sort_unstable();
        if let Some(median) = self.hand_offs.get(self.hand_offs.len() / 2) {
            self.say(&format!(
                "{}, {:.2} ms in the median from one leader's end to the next one's start",
                count(self.hand_offs.len(), "hand-off"),
                median.as_secs_f64() * 1e3
            ));
        }
        let order = match self.fences.len() {
            0 => "never led",
            _ if self.fences.is_sorted_by(|a, b| a < b) => "every fence larger than the last",
            _ => "FENCES OUT OF ORDER",
        };
        self.say(&format!(
            "led {share:.1}% of {:.1} s; {order}",
            length.as_secs_f64()
        ));
    }
}
