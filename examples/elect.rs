//! Leader election, to look at and to operate with: `cargo run --example elect`.
//!
//! Without options, three contenders in this process take turns on the memory backend. With `--url`
//! of a server, one contender leads until it is told to stop; run it twice and end one of them.

mod options;

use std::io::Write;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use contend::{Error, Event, EventKind, Factory, Moment, MutexContendService};
use crossbeam_channel::{Receiver, Sender, bounded, select};
use options::Options;

const USAGE: &str = "\
usage: elect [options]
  --url URL            where the mutex is (default memory://; redis://..., mysql://..., zk://...)
  --mutex NAME         what is contended for (default demo)
  --id ID              this contender's id; with several contenders, ID-1, ID-2, ...
  --contenders N       how many contend in this process (default 3 on memory, 1 on a server)
  --ttl 2s             how long a leader may believe without a renewal (default 2s on memory)
  --transition 500ms   how long after that nobody else can lead (default 500ms on memory)
  --lead DURATION      resign after leading that long, then rejoin; or: forever
                       (default 1s on memory, forever on a server)
  --for DURATION       how long it all lasts, or: forever (default 10s on memory, forever on a server)
  --json               one JSON object a line";

fn main() -> ExitCode {
    let options = Options::from_args(
        USAGE,
        &[
            "--url",
            "--mutex",
            "--id",
            "--contenders",
            "--ttl",
            "--transition",
            "--lead",
            "--for",
        ],
        &["--json"],
    );
    if let Some(word) = options.words.first() {
        options.fail(format_args!("unexpected {word:?}"));
    }
    match elect(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("elect: {error}");
            ExitCode::FAILURE
        }
    }
}

fn elect(options: &Options) -> Result<(), Error> {
    let url = options.text("--url").unwrap_or("memory://");
    let embedded = url.starts_with("memory:");
    let mutex = options.text("--mutex").unwrap_or("demo");
    let factory = contend::connect(url)?;
    let lead = period(
        options,
        "--lead",
        embedded.then_some(Duration::from_secs(1)),
    );
    let length = period(
        options,
        "--for",
        embedded.then_some(Duration::from_secs(10)),
    );

    let (changed, changes) = bounded(1);
    let show = Shared::new(Show::new(options.flag("--json"), mutex), changed);
    let services = services(options, &factory, mutex, embedded, &show)?;
    let interrupted = interrupts();
    show.lock().headline(&factory);
    let start = Moment::now();
    let end = length.map_or(Moment::FAR, |length| start + length);
    for service in &services {
        show.lock().event("started", service.id(), "", None);
        service.start()?;
    }

    while Moment::now() < end {
        let resigns = lead.and_then(|lead| Some(show.lock().leads_since()?.1 + lead));
        let patience = resigns.unwrap_or(Moment::FAR).min(end).remaining();
        select! {
            recv(changes) -> _ => {}
            recv(interrupted) -> _ => break,
            default(patience.min(Duration::from_secs(3600))) => {}
        }
        let leader = show.lock().leads_since();
        if let (Some((index, since)), Some(lead)) = (leader, lead)
            && since + lead <= Moment::now()
            && Moment::now() < end
        {
            services[index].stop()?;
            services[index].start()?;
        }
    }

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
    show.lock().summary(Moment::now() - start);
    Ok(())
}

fn period(options: &Options, name: &str, default: Option<Duration>) -> Option<Duration> {
    match options.text(name) {
        Some("forever") => None,
        Some(_) => options.duration(name),
        None => default,
    }
}

fn services(
    options: &Options,
    factory: &Factory,
    mutex: &str,
    embedded: bool,
    show: &Shared,
) -> Result<Vec<MutexContendService>, Error> {
    let count: usize = options
        .number("--contenders")
        .unwrap_or(if embedded { 3 } else { 1 });
    if !(1..=1000).contains(&count) {
        options.fail("--contenders: 1 to 1000");
    }
    (0..count)
        .map(|index| {
            let mut builder = factory.contend(mutex);
            if let Some(ttl) = options
                .duration("--ttl")
                .or(embedded.then_some(Duration::from_secs(2)))
            {
                builder = builder.ttl(ttl);
            }
            let transition = options.duration("--transition");
            if let Some(transition) = transition.or(embedded.then_some(Duration::from_millis(500)))
            {
                builder = builder.transition(transition);
            }
            let number = index + 1;
            builder = match (options.text("--id"), embedded) {
                (Some(id), _) if count == 1 => builder.id(id),
                (Some(id), _) => builder.id(&format!("{id}-{number}")),
                (None, true) if count <= 26 => {
                    builder.id(&char::from(b'a' + index as u8).to_string())
                }
                (None, true) => builder.id(&format!("contender-{number}")),
                (None, false) => builder,
            };
            let hear = show.ear(index);
            let service = builder
                .on_acquired(hear.clone())
                .on_released(hear.clone())
                .on_owner_changed(hear.clone())
                .on_failure(hear)
                .build()?;
            show.lock().standings.push(Standing::new(service.id()));
            Ok(service)
        })
        .collect()
}

/// A message for SIGTERM and for SIGINT.
fn interrupts() -> Receiver<()> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    let (sender, receiver) = bounded(1);
    match signal_hook::iterator::Signals::new([SIGTERM, SIGINT]) {
        Ok(mut signals) => {
            thread::spawn(move || {
                for _ in signals.forever() {
                    let _ = sender.try_send(());
                }
            });
        }
        Err(error) => {
            // Without them the lease still runs out by itself.
            eprintln!("elect: signals are not handled: {error}");
            std::mem::forget(sender);
        }
    }
    receiver
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
    leads_since: Option<Moment>,
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
    json: bool,
    mutex: String,
    start: Moment,
    standings: Vec<Standing>,
    vacant_since: Option<Moment>,
    hand_offs: Vec<Duration>,
    fences: Vec<u64>,
}

impl Show {
    fn new(json: bool, mutex: &str) -> Show {
        Show {
            json,
            mutex: mutex.to_owned(),
            start: Moment::now(),
            standings: Vec::new(),
            vacant_since: None,
            hand_offs: Vec::new(),
            fences: Vec::new(),
        }
    }

    fn headline(&self, factory: &Factory) {
        if !self.json {
            let who = match self.standings.len() {
                1 => "1 contender".to_owned(),
                count => format!("{count} contenders"),
            };
            println!(
                "{who} for the mutex {:?} on {}\n",
                self.mutex,
                factory.realm()
            );
        }
    }

    /// Who of this process leads, and since when.
    fn leads_since(&self) -> Option<(usize, Moment)> {
        let mut standings = self.standings.iter().enumerate();
        standings.find_map(|(index, standing)| Some((index, standing.leads_since?)))
    }

    fn hear(&mut self, index: usize, event: &Event) {
        let now = Moment::now();
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
            EventKind::Failed => {
                if let Some(error) = &event.error {
                    eprintln!("elect: {}: {error}", standing.id);
                }
                return;
            }
            _ => return,
        };
        let id = standing.id.clone();
        self.event(what, &id, event.state.after().owner_id(), event.fence());
    }

    fn event(&mut self, event: &str, contender: &str, owner: &str, fence: Option<u64>) {
        let line = if self.json {
            let now = SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default();
            let fence = fence.map_or("null".to_owned(), |fence| fence.to_string());
            let owner = if owner.is_empty() {
                "null".to_owned()
            } else {
                quoted(owner)
            };
            format!(
                "{{\"at_ms\":{},\"mutex\":{},\"contender\":{},\"event\":{},\"owner\":{owner},\"fence\":{fence}}}",
                now.as_millis(),
                quoted(&self.mutex),
                quoted(contender),
                quoted(event),
            )
        } else {
            let at = (Moment::now() - self.start).as_secs_f64();
            let what = match event {
                "acquired" => "leads".to_owned(),
                "released" => "resigns".to_owned(),
                "owner" => format!("sees {owner} lead"),
                other => other.to_owned(),
            };
            let fence = fence.map_or(String::new(), |fence| format!("  fence {fence}"));
            format!("{at:9.3} s  {contender:<8} {what:<14}{fence}")
        };
        // One line a write, so that whoever reads a pipe sees it at once. A reader that has gone away
        // is no reason to give leadership up in disorder.
        let mut out = std::io::stdout().lock();
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    }

    fn summary(&mut self, length: Duration) {
        if self.json {
            return;
        }
        println!("\ncontender    turns   led");
        for standing in &self.standings {
            println!(
                "{:<12} {:>5}   {:.2} s",
                standing.id,
                standing.turns,
                standing.led.as_secs_f64()
            );
        }
        let led: Duration = self.standings.iter().map(|standing| standing.led).sum();
        let share = 100.0 * led.as_secs_f64() / length.as_secs_f64().max(f64::EPSILON);
        self.hand_offs.sort_unstable();
        if let Some(median) = self.hand_offs.get(self.hand_offs.len() / 2) {
            println!(
                "\n{} hand-offs, {:.2} ms in the median from one leader's end to the next one's start",
                self.hand_offs.len(),
                median.as_secs_f64() * 1e3
            );
        }
        let order = if self.fences.is_sorted_by(|a, b| a < b) {
            "every fence larger than the last"
        } else {
            "FENCES OUT OF ORDER"
        };
        println!("led {share:.1}% of {:.1} s; {order}", length.as_secs_f64());
    }
}

fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c.is_control() => out.push_str(&format!("\\u{:04x}", c as u32)),
            c => out.push(c),
        }
    }
    out + "\""
}
