//! Leader election, to look at and to operate with: `cargo run --example elect`.
//!
//! Without options, three contenders in this process take turns on the memory backend. With `--url`
//! of a server, one contender leads until it is told to stop; run it twice and end one of them.

mod options;

use std::io::Write;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use contend::{Error, Event, EventKind, Factory, Moment, MutexContendService};
use crossbeam_channel::{Receiver, Select, bounded};
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

/// One contender and its part in the summary.
struct Candidate {
    service: MutexContendService,
    events: Receiver<Event>,
    leads_since: Option<Moment>,
    turns: u32,
    led: Duration,
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

    let mut candidates = candidates(options, &factory, mutex, embedded)?;
    let interrupted = interrupts();
    let mut show = Show::new(options.flag("--json"), mutex);
    show.headline(&factory, candidates.len());
    let start = Moment::now();
    let end = length.map_or(Moment::FAR, |length| start + length);
    for candidate in &candidates {
        show.event("started", candidate.service.id(), "", None);
        candidate.service.start()?;
    }

    while Moment::now() < end {
        let resigns = candidates
            .iter()
            .filter_map(|candidate| Some(candidate.leads_since? + lead?));
        let wake = resigns.min().unwrap_or(Moment::FAR).min(end);
        match next_event(&candidates, &interrupted, wake) {
            Wake::Event(index, event) => candidates[index].hear(&event, &mut show),
            Wake::Interrupted => break,
            Wake::Time => {}
        }
        for candidate in &mut candidates {
            let is_due = |since: Moment| lead.is_some_and(|lead| since + lead <= Moment::now());
            if candidate.leads_since.is_some_and(is_due) && Moment::now() < end {
                candidate.resign(&mut show)?;
                candidate.service.start()?;
            }
        }
    }

    // Who waits goes first, or it would lead for a moment when the leader has gone.
    candidates.sort_by_key(|candidate| candidate.leads_since.is_some());
    for candidate in &mut candidates {
        candidate.resign(&mut show)?;
        show.event("stopped", candidate.service.id(), "", None);
    }
    candidates.sort_by(|a, b| a.service.id().cmp(b.service.id()));
    show.summary(&candidates, Moment::now() - start);
    Ok(())
}

fn period(options: &Options, name: &str, default: Option<Duration>) -> Option<Duration> {
    match options.text(name) {
        Some("forever") => None,
        Some(_) => options.duration(name),
        None => default,
    }
}

fn candidates(
    options: &Options,
    factory: &Factory,
    mutex: &str,
    embedded: bool,
) -> Result<Vec<Candidate>, Error> {
    let count: usize = options
        .number("--contenders")
        .unwrap_or(if embedded { 3 } else { 1 });
    if !(1..=1000).contains(&count) {
        options.fail("--contenders: 1 to 1000");
    }
    (1..=count)
        .map(|number| {
            let mut builder = factory.contend(mutex).failures(true);
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
            builder = match (options.text("--id"), embedded) {
                (Some(id), _) if count == 1 => builder.id(id),
                (Some(id), _) => builder.id(&format!("{id}-{number}")),
                (None, true) if count <= 26 => {
                    builder.id(&char::from(b'a' + number as u8 - 1).to_string())
                }
                (None, true) => builder.id(&format!("contender-{number}")),
                (None, false) => builder,
            };
            let (service, events) = builder.channel()?;
            Ok(Candidate {
                service,
                events,
                leads_since: None,
                turns: 0,
                led: Duration::ZERO,
            })
        })
        .collect()
}

impl Candidate {
    fn hear(&mut self, event: &Event, show: &mut Show) {
        let (id, owner) = (self.service.id(), event.state.after().owner_id());
        match event.kind {
            EventKind::Acquired => {
                self.leads_since = Some(Moment::now());
                self.turns += 1;
                show.led(event.fence());
                show.event("acquired", id, owner, event.fence());
            }
            EventKind::Released => {
                let led = self
                    .leads_since
                    .take()
                    .map_or(Duration::ZERO, |since| Moment::now() - since);
                self.led += led;
                show.vacant();
                show.event("released", id, owner, event.fence());
            }
            EventKind::OwnerChanged if !owner.is_empty() => {
                show.event("owner", id, owner, event.fence())
            }
            EventKind::Failed => {
                if let Some(error) = &event.error {
                    eprintln!("elect: {id}: {error}");
                }
            }
            _ => {}
        }
    }

    /// Gives leadership up, in order: Released is heard before the next contender can lead.
    fn resign(&mut self, show: &mut Show) -> Result<(), Error> {
        self.service.stop()?;
        while let Ok(event) = self.events.try_recv() {
            self.hear(&event, show);
        }
        Ok(())
    }
}

enum Wake {
    Event(usize, Box<Event>),
    Interrupted,
    Time,
}

fn next_event(candidates: &[Candidate], interrupted: &Receiver<()>, until: Moment) -> Wake {
    let mut select = Select::new();
    for candidate in candidates {
        select.recv(&candidate.events);
    }
    let last = select.recv(interrupted);
    let patience = until.remaining().min(Duration::from_secs(3600));
    match select.select_timeout(patience) {
        Err(_) => Wake::Time,
        Ok(ready) if ready.index() == last => {
            let _ = ready.recv(interrupted);
            Wake::Interrupted
        }
        Ok(ready) => {
            let index = ready.index();
            match ready.recv(&candidates[index].events) {
                Ok(event) => Wake::Event(index, Box::new(event)),
                Err(_) => Wake::Interrupted,
            }
        }
    }
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

/// What the terminal shows.
struct Show {
    json: bool,
    mutex: String,
    start: Moment,
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
            vacant_since: None,
            hand_offs: Vec::new(),
            fences: Vec::new(),
        }
    }

    fn headline(&self, factory: &Factory, count: usize) {
        if !self.json {
            let who = if count == 1 {
                "1 contender".to_owned()
            } else {
                format!("{count} contenders")
            };
            println!(
                "{who} for the mutex {:?} on {}\n",
                self.mutex,
                factory.realm()
            );
        }
    }

    fn led(&mut self, fence: Option<u64>) {
        self.fences.extend(fence);
        if let Some(since) = self.vacant_since.take() {
            self.hand_offs.push(Moment::now() - since);
        }
    }

    fn vacant(&mut self) {
        self.vacant_since = Some(Moment::now());
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

    fn summary(&mut self, candidates: &[Candidate], length: Duration) {
        if self.json {
            return;
        }
        println!("\ncontender    turns   led");
        for candidate in candidates {
            println!(
                "{:<12} {:>5}   {:.2} s",
                candidate.service.id(),
                candidate.turns,
                candidate.led.as_secs_f64()
            );
        }
        let led: Duration = candidates.iter().map(|candidate| candidate.led).sum();
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
