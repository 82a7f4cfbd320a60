//! `contend status`: who owns what, since when, and who waits.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use clap::Args;
use contend::{Error, ErrorKind, Factory, MutexOwner, Participant};
use crossbeam_channel::Receiver;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::console::{Console, date, now, span, wall_ms};
use crate::exit::{Failure, with_error};
use crate::json::Json;
use crate::options::{Connection, Mutexes, duration};
use crate::signals;

/// Shows who owns which mutex, since when, with which fence, and who waits.
///
/// Without names, it shows all mutexes that have an owner or a waiter. It changes nothing.
#[derive(Args)]
#[command(after_long_help = "\
With --watch on a terminal, the table is redrawn; otherwise it is printed whenever something has changed,
and with --json a line is printed for each mutex that changed, and {\"at_ms\", \"realm\", \"error\", \"kind\",
\"code\"} when the server goes away, with the error null when it answers again.
With --json, each line is {\"at_ms\", \"mutex\", \"owner\", \"fence\", \"since_ms\", \"ttl_left_ms\",
\"transition_left_ms\", \"waiting\": [{\"id\", \"since_ms\"}]}; a free mutex has the owner null.
LEASE LEFT and \"transition_left_ms\" say how long nobody else can own the mutex if the owner does not renew.
Redis stores only that, so \"ttl_left_ms\" is that minus the transition of this command's URL; ZooKeeper stores
neither, and both are what the URL asks for.

Examples:
  contend status
  contend status backup report --watch
  contend status --json | jq 'select(.owner == null) | .mutex'")]
pub struct Status {
    #[command(flatten)]
    mutexes: Mutexes,

    /// Keeps showing changes until it is stopped.
    #[arg(long)]
    watch: bool,

    /// How often to look with --watch.
    #[arg(long, value_parser = duration, default_value = "1s", value_name = "DURATION")]
    interval: Duration,
}

/// One mutex as the server knows it.
struct Row {
    mutex: String,
    owner: MutexOwner,
    waiting: Vec<Participant>,
}

/// What of a picture is worth a line when it changes: time alone is not.
#[derive(Default, PartialEq)]
struct Essence {
    /// By mutex: owner, fence and who waits.
    rows: BTreeMap<String, String>,
    error: Option<String>,
}

/// What the server answered last, and what has become of it since.
#[derive(Default)]
struct Picture {
    rows: Vec<Row>,
    took: Duration,
    /// Since when the server gives no answer, and why.
    trouble: Option<(Instant, Error)>,
}

impl Status {
    pub fn run(&self, connection: &Connection, console: &Console) -> Result<u8, Failure> {
        let factory = connection.factory()?;
        if self.watch {
            let ended = signals::receive(&[SIGTERM, SIGINT], console);
            return self.watch(&factory, &ended, console);
        }
        let picture = self.look(&factory)?;
        if console.is_json() {
            for row in &picture.rows {
                console.line(&row.json().end())?;
            }
        } else {
            console.text(&picture.table(factory.realm()))?;
        }
        Ok(0)
    }

    fn watch(
        &self,
        factory: &Factory,
        ended: &Receiver<i32>,
        console: &Console,
    ) -> Result<u8, Failure> {
        let mut picture = Picture::default();
        let mut shown = None;
        loop {
            let began = Instant::now();
            match self.look(factory) {
                Ok(new) => picture = new,
                // A name that is not allowed stays so.
                Err(Failure::Library(error)) if error.kind() != ErrorKind::InvalidInput => {
                    let since = picture.trouble.take().map_or(began, |(since, _)| since);
                    picture.trouble = Some((since, error));
                }
                Err(failure) => return Err(failure),
            }
            if console.is_terminal() {
                console.text(&screen(&picture.table(factory.realm())))?;
            } else {
                let essence = picture.essence();
                if shown.as_ref() != Some(&essence) {
                    let last = shown.unwrap_or_default();
                    picture.print_changes(factory.realm(), &last, console)?;
                }
                shown = Some(essence);
            }
            let rest = self.interval.saturating_sub(began.elapsed());
            if ended.recv_timeout(rest).is_ok() {
                return Ok(0);
            }
        }
    }

    fn look(&self, factory: &Factory) -> Result<Picture, Failure> {
        let began = Instant::now();
        let given = self.mutexes.all();
        let names = match given.is_empty() {
            true => factory.list()?,
            false => given.into_iter().map(Into::into).collect(),
        };
        let rows = names.into_iter().map(|mutex| {
            Ok(Row {
                owner: factory.owner(&*mutex)?,
                waiting: factory.participants(&*mutex)?,
                mutex: mutex.to_string(),
            })
        });
        Ok(Picture {
            rows: rows.collect::<Result<_, Failure>>()?,
            took: began.elapsed(),
            trouble: None,
        })
    }
}

impl Row {
    /// A mutex that is not listed any more: nobody owns it or waits.
    fn free(mutex: &str) -> Row {
        Row {
            mutex: mutex.to_owned(),
            owner: MutexOwner::NONE,
            waiting: Vec::new(),
        }
    }

    fn json(&self) -> Json {
        let owner = Some(&self.owner).filter(|owner| owner.has_owner());
        let left = |end: u64| end.saturating_sub(self.owner.backend_now());
        let waiting = self.waiting.iter().map(|one| {
            let json = Json::new().with("id", &*one.id);
            json.with("since_ms", one.since)
        });
        now()
            .with("mutex", &self.mutex)
            .with("owner", owner.map(MutexOwner::owner_id))
            .with("fence", owner.map(MutexOwner::fence))
            .with("since_ms", owner.map(MutexOwner::acquired_at))
            .with("ttl_left_ms", owner.map(|owner| left(owner.ttl_at())))
            .with(
                "transition_left_ms",
                owner.map(|owner| left(owner.transition_at())),
            )
            .with("waiting", waiting.collect::<Vec<_>>())
    }

    fn essence(&self) -> String {
        let waiting: Vec<&str> = self.waiting.iter().map(|one| &*one.id).collect();
        let owner = match self.owner.has_owner() {
            true => format!("{} {}", self.owner.owner_id(), self.owner.fence()),
            false => String::new(),
        };
        format!("{owner}\n{}", waiting.join("\n"))
    }

    fn cells(&self) -> [String; 6] {
        let owner = &self.owner;
        let waiting = match &self.waiting[..] {
            [] => "-".to_owned(),
            [first] => format!("1: {}", first.id),
            [first, rest @ ..] => format!("{}: {}, ...", rest.len() + 1, first.id),
        };
        let mutex = self.mutex.clone();
        if !owner.has_owner() {
            let dash = || "-".to_owned();
            return [mutex, "(free)".to_owned(), dash(), dash(), dash(), waiting];
        }
        let now = owner.backend_now();
        let until = |end: u64| span(Duration::from_millis(end.saturating_sub(now)));
        // Not the end of the ttl, of which Redis does not know how long it is.
        let lease = until(owner.transition_at());
        let held = span(Duration::from_millis(
            now.saturating_sub(owner.acquired_at()),
        ));
        let (id, fence) = (owner.owner_id().to_owned(), owner.fence().to_string());
        [mutex, id, fence, held, lease, waiting]
    }
}

impl Picture {
    fn table(&self, realm: &str) -> String {
        let mut text = format!("{realm}  {}  ", date(wall_ms()));
        match &self.trouble {
            None => text += &format!("answered in {:.1} ms\n\n", self.took.as_secs_f64() * 1e3),
            Some((since, error)) => {
                let what = match error.kind() {
                    ErrorKind::Unreachable | ErrorKind::Timeout => "NO ANSWER",
                    _ => "NOT SERVED",
                };
                // The first look that failed.
                let since = match since.elapsed() {
                    short if short < Duration::from_secs(1) => String::new(),
                    since => format!(" for {}", span(since)),
                };
                text += &format!("{what}{since}\n{error}\n");
                if self.rows.is_empty() {
                    return text;
                }
                text += "as it was before:\n\n";
            }
        }
        if self.rows.is_empty() {
            return text + "no mutex has an owner or a waiter\n";
        }
        let head = ["MUTEX", "OWNER", "FENCE", "HELD", "LEASE LEFT", "WAITING"];
        let mut lines = vec![head.map(str::to_owned)];
        lines.extend(self.rows.iter().map(Row::cells));
        let width = |column: usize| {
            let cells = lines.iter().map(|line| line[column].chars().count());
            cells.max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..head.len()).map(width).collect();
        for line in &lines {
            let cells: Vec<String> = line
                .iter()
                .zip(&widths)
                .map(|(cell, width)| format!("{cell:<width$}"))
                .collect();
            text += cells.join("  ").trim_end();
            text.push('\n');
        }
        text
    }

    fn essence(&self) -> Essence {
        let rows = self.rows.iter();
        Essence {
            rows: rows.map(|row| (row.mutex.clone(), row.essence())).collect(),
            error: self.trouble.as_ref().map(|(_, error)| error.to_string()),
        }
    }

    /// Prints what differs from the `last` one.
    fn print_changes(&self, realm: &str, last: &Essence, console: &Console) -> Result<(), Failure> {
        if !console.is_json() {
            return console.text(&format!("{}\n", self.table(realm)));
        }
        let essence = self.essence();
        if essence.error != last.error {
            let line = now().with("realm", realm);
            let line = match &self.trouble {
                Some((_, error)) => with_error(line, error),
                None => line.with("error", None::<u64>),
            };
            console.line(&line.end())?;
        }
        if essence.error.is_some() {
            return Ok(());
        }
        let gone = last
            .rows
            .keys()
            .filter(|mutex| !essence.rows.contains_key(*mutex));
        let gone: Vec<Row> = gone.map(|mutex| Row::free(mutex)).collect();
        let changed = self.rows.iter();
        let changed =
            changed.filter(|row| last.rows.get(&row.mutex) != essence.rows.get(&row.mutex));
        for row in changed.chain(&gone) {
            console.line(&row.json().end())?;
        }
        Ok(())
    }
}

/// The table in the place of the last one, without flicker: each line is drawn over.
fn screen(table: &str) -> String {
    let lines: String = table
        .lines()
        .map(|line| format!("{line}\x1b[K\n"))
        .collect();
    format!("\x1b[H{lines}\x1b[J")
}
