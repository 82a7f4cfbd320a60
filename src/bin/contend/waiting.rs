//! Says on standard error for whom a lock waits, and that the server is unreachable.

use std::thread;
use std::time::Duration;

use contend::{Event, EventKind, Factory, MutexOwner};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, select, tick};

use crate::console::{Console, date, now, span};
use crate::json::Json;

/// A lock that is had within this time needs no word.
const SILENCE: Duration = Duration::from_millis(400);

/// Reports until it is dropped.
pub struct Waiting {
    _over: Sender<()>,
}

impl Waiting {
    /// Reports on the wait for `mutex`, from a thread that nobody waits for.
    pub fn start(factory: &Factory, mutex: &str, console: &Console) -> Waiting {
        let (sender, over) = bounded(0);
        let reporter = Reporter {
            factory: factory.clone(),
            mutex: mutex.to_owned(),
            console: *console,
        };
        thread::spawn(move || {
            if over.recv_timeout(SILENCE) == Err(RecvTimeoutError::Timeout) {
                reporter.report(&over);
            }
        });
        Waiting { _over: sender }
    }
}

struct Reporter {
    factory: Factory,
    mutex: String,
    console: Console,
}

impl Reporter {
    fn report(&self, over: &Receiver<()>) {
        let observed = self.factory.observe(&self.mutex).failures(true).channel();
        let Ok((service, events)) = observed else {
            return;
        };
        if service.start().is_err() {
            return;
        }
        let look = tick(Duration::from_secs(1));
        let mut unreachable = false;
        loop {
            select! {
                recv(over) -> _ => break,
                recv(events) -> event => match event {
                    Ok(event) => unreachable = self.tell(&event),
                    Err(_) => break,
                },
                recv(look) -> _ => {
                    // An owner that is still the same is no event.
                    if unreachable && service.last_error().is_none() {
                        unreachable = false;
                        let text = format!("{}: the server answers again; waiting", self.mutex);
                        self.say(self.event("reachable"), &text);
                    }
                }
            }
        }
    }

    /// Returns whether the server is unreachable.
    fn tell(&self, event: &Event) -> bool {
        match (&event.kind, &event.error) {
            (EventKind::Failed, Some(error)) => {
                let text = format!("{}: still waiting, but {error}", self.mutex);
                self.say(
                    self.event("unreachable").with("error", &error.to_string()),
                    &text,
                );
                true
            }
            _ => {
                self.owner(event.state.after());
                false
            }
        }
    }

    fn owner(&self, owner: &MutexOwner) {
        if !owner.has_owner() {
            return;
        }
        let since = owner.acquired_at();
        let held = Duration::from_millis(owner.backend_now().saturating_sub(since));
        let event = self
            .event("waiting")
            .with("owner", owner.owner_id())
            .with("fence", owner.fence())
            .with("since_ms", since);
        let since = match since {
            0 => String::new(),
            since => format!(" since {} ({})", date(since), span(held)),
        };
        let text = format!(
            "waiting for {}: held by {:?}{since}, fence {}",
            self.mutex,
            owner.owner_id(),
            owner.fence()
        );
        self.say(event, &text);
    }

    fn event(&self, event: &str) -> Json {
        now().with("event", event).with("mutex", &self.mutex)
    }

    fn say(&self, event: Json, text: &str) {
        self.console.message(event, text);
    }
}
