//! Says on standard error for what a command waits, and that the server is unreachable.

use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use contend::semaphore::{Semaphores, Usage};
use contend::{Error, Event, EventKind, Factory, Locker, MutexOwner};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, select, tick};

use crate::advice;
use crate::console::{Console, count, date, now, span};
use crate::exit::with_error;
use crate::json::Json;

/// A lock that is had within this time needs no word.
const SILENCE: Duration = Duration::from_millis(400);

/// How often the server is asked for what has changed.
const LOOK: Duration = Duration::from_secs(1);

/// How long the end of the program waits for those who report: as long as a factory's drop may take.
const LAST: Duration = Duration::from_secs(1);

/// Those who report, or did.
static REPORTERS: Mutex<Vec<JoinHandle<()>>> = Mutex::new(Vec::new());

/// Waits until nobody reports any more. Whoever drops a factory last waits for its clean-ups: if that is a reporter,
/// the end of the program would cut them short.
pub fn join() {
    let end = Instant::now() + LAST;
    let reporters = REPORTERS.lock().unwrap_or_else(PoisonError::into_inner);
    while Instant::now() < end && !reporters.iter().all(JoinHandle::is_finished) {
        thread::sleep(Duration::from_millis(1));
    }
}

/// Reports until it is dropped.
pub struct Waiting {
    _over: Sender<()>,
}

impl Waiting {
    /// Reports on the wait of this locker, from a thread that only the end of the program waits for.
    pub fn start(factory: &Factory, locker: &Locker, console: &Console) -> Waiting {
        let reporter = Reporter {
            factory: factory.clone(),
            mutex: locker.mutex().to_owned(),
            id: locker.id().to_owned(),
            console: *console,
        };
        Waiting::report(move |over| reporter.report(over))
    }

    /// Reports on the wait for permits: which semaphore is exhausted, once per change.
    pub fn for_permits(
        semaphores: &Semaphores,
        permits: &[(String, u32)],
        console: &Console,
    ) -> Waiting {
        let (semaphores, permits, console) = (semaphores.clone(), permits.to_vec(), *console);
        Waiting::report(move |over| {
            let mut said = None;
            loop {
                let missing = exhausted(&semaphores, &permits);
                let (what, event, text) = match missing {
                    Ok(None) => (None, Json::new(), String::new()),
                    Ok(Some((full, wanted))) => {
                        let (name, capacity) = (full.semaphore.to_string(), full.capacity);
                        let event = now().with("event", "waiting").with("semaphore", &name);
                        let event = event.with("capacity", capacity).with("held", full.held);
                        let event = event.with("wanted", wanted);
                        let mut text = format!(
                            "waiting for {name}: {} of {capacity} permits held by {}",
                            full.held,
                            count(full.requests, "request")
                        );
                        if wanted > capacity {
                            text += &format!(
                                "; {wanted} are wanted, more than the capacity: `contend semaphore \
                                 set-capacity {name} {wanted}` raises it"
                            );
                        }
                        (Some(name), event, text)
                    }
                    Err(error) => {
                        let event = with_error(now().with("event", "unreachable"), &error);
                        let text = format!("still waiting, but {}", advice::message(&error));
                        (Some(error.kind().to_string()), event, text)
                    }
                };
                if what.is_some() && what != said {
                    console.message(event, &text);
                }
                said = what.or(said);
                if over.recv_timeout(LOOK) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        })
    }

    fn report(report: impl FnOnce(&Receiver<()>) + Send + 'static) -> Waiting {
        let (sender, over) = bounded(0);
        let reporter = thread::spawn(move || {
            if over.recv_timeout(SILENCE) == Err(RecvTimeoutError::Timeout) {
                report(&over);
            }
        });
        let reporters = REPORTERS.lock();
        reporters
            .unwrap_or_else(PoisonError::into_inner)
            .push(reporter);
        Waiting { _over: sender }
    }
}

/// The first of the semaphores that has not enough permits left.
fn exhausted(
    semaphores: &Semaphores,
    permits: &[(String, u32)],
) -> Result<Option<(Usage, u32)>, Error> {
    for (name, count) in permits {
        let usage = semaphores.usage(name)?;
        if usage.free < u64::from(*count) {
            return Ok(Some((usage, *count)));
        }
    }
    Ok(None)
}

struct Reporter {
    factory: Factory,
    mutex: String,
    /// The id of the contender that waits.
    id: String,
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
        let look = tick(LOOK);
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
                let why = advice::message(error);
                let text = format!("{}: still waiting, but {why}", self.mutex);
                self.say(with_error(self.event("unreachable"), error), &text);
                true
            }
            _ => {
                self.owner(event.state.after());
                false
            }
        }
    }

    fn owner(&self, owner: &MutexOwner) {
        // Our own id is a lock just had, or what an attempt without an answer has left: nobody to wait for.
        if !owner.has_owner() || owner.is_owner(&self.id) {
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
