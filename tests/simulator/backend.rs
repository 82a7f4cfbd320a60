//! The simulated backend: the contract, over the model and the network of a schedule.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use contend::backend::{
    Attempt, Backend, Contender, Grant, OnRefusal, RawContender, RawObserver, Refusal, Renewal,
    View,
};
use contend::{Error, ErrorKind, Moment, MutexOwner, Result, Unparker};

use crate::model::{Answer, Ask, Held};
use crate::process::Process;
use crate::stage::Stage;

pub struct SimulatedBackend {
    process: Arc<Process>,
    realm: String,
}

impl SimulatedBackend {
    pub fn new(process: &Arc<Process>) -> SimulatedBackend {
        // An address of its own for each incarnation: what a crashed one holds in this process is not seen.
        let realm = format!("simulated://{:p}", Arc::as_ptr(process));
        SimulatedBackend {
            process: Arc::clone(process),
            realm,
        }
    }
}

impl fmt::Debug for SimulatedBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.realm)
    }
}

impl Backend for SimulatedBackend {
    fn realm(&self) -> &str {
        &self.realm
    }

    fn contender(&self, _contender: &Contender) -> Result<Box<dyn RawContender>> {
        Ok(Box::new(Line::new(&self.process)))
    }

    fn observer(&self, _mutex: &Arc<str>) -> Result<Box<dyn RawObserver>> {
        Ok(Box::new(Line::new(&self.process)))
    }
}

/// A contender's or observer's line to the backend.
struct Line {
    process: Arc<Process>,
    listening: bool,
    /// Listening was tried since the last attempt.
    tried: bool,
    /// When it was refused, with nobody to wake it.
    deaf_since: Option<(Moment, u64)>,
}

impl Line {
    fn new(process: &Arc<Process>) -> Line {
        Line {
            process: Arc::clone(process),
            listening: false,
            tried: false,
            deaf_since: None,
        }
    }

    fn failed() -> Error {
        Error::new(ErrorKind::Timeout, "no answer")
    }

    /// Asks, and waits for the answer until `by`. Returns when it was asked, too.
    fn ask(&mut self, ask: Ask, by: Moment) -> Result<(Moment, Answer)> {
        let process = &self.process;
        if process.is_crashed() {
            return Err(Line::failed());
        }
        let stage = process.stage();
        let begun = process.local();
        let belief = process.belief();
        stage
            .lock()
            .note_call(process.number, ask, begun, by, belief);
        // Between reading the clock and sending.
        process.maybe_pause();
        if process.is_crashed()
            || !stage
                .lock()
                .begin_call(Stage::seat(), process.number, ask, by)
        {
            return Err(Line::failed());
        }
        stage.finish_call();
        let answer = stage.lock().take_answer(Stage::seat());
        stage.lock().note_answer(process.number, ask, begun, answer);
        // Between the arrival of a reply and what is done about it.
        process.maybe_pause();
        if matches!(answer, Answer::Granted(..)) {
            // Only a pause makes a grant come too late.
            process.maybe_pause();
            process.maybe_pause();
        }
        match answer {
            Answer::Failed => Err(Line::failed()),
            answer => Ok((begun, answer)),
        }
    }

    fn owner(&self, held: Held, ms: u64) -> MutexOwner {
        let id = self.process.stage().lock().name(held.id);
        MutexOwner::new(
            id,
            held.acquired_at,
            held.ttl_at,
            held.transition_at,
            held.fence,
        )
        .observed_at(ms, self.process.local())
    }

    fn seen(&self, held: Option<Held>, ms: u64) -> MutexOwner {
        held.map_or(MutexOwner::NONE, |held| self.owner(held, ms))
    }

    fn grant(&self, held: Held, ms: u64, begun: Moment) -> Grant {
        let session = self.process.stage().lock().plan.session;
        Grant {
            owner: self.owner(held, ms),
            until: session.then(|| begun + self.process.lease.belief()),
        }
    }

    fn subscribe(&mut self, unparker: &Unparker, by: Moment) -> Result<()> {
        self.tried = true;
        let process = &self.process;
        if process.is_crashed() {
            return Err(Line::failed());
        }
        let stage = process.stage();
        let (fails, hangs, takes) = {
            let mut world = stage.lock();
            let fails = world.faulty && world.dice.chance(150);
            (fails, fails && world.dice.chance(500), world.short_delay())
        };
        let until = process.local() + Duration::from_nanos(takes);
        let until = if hangs { by } else { until.min(by) };
        process.sleep((until - process.local()).as_nanos() as u64);
        if fails || process.is_crashed() {
            return Err(Error::new(ErrorKind::Unreachable, "cannot subscribe"));
        }
        self.listening = true;
        stage.lock().subscribe(process.number, process.id, unparker);
        Ok(())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if self.listening {
            self.process.stage().lock().unsubscribe(self.process.number);
        }
    }
}

impl RawContender for Line {
    fn listen(&mut self, unparker: &Unparker, by: Moment) -> Result<()> {
        self.subscribe(unparker, by)
    }

    fn acquire(&mut self, on_refusal: OnRefusal, by: Moment) -> Result<Attempt> {
        let process = Arc::clone(&self.process);
        if on_refusal == OnRefusal::Enqueue {
            let deaf = self.deaf_since.take();
            process
                .stage()
                .lock()
                .note_queueing(process.number, self.listening, self.tried, deaf);
            self.tried = false;
        }
        let (begun, answer) = self.ask(Ask::Acquire(on_refusal), by)?;
        Ok(match answer {
            Answer::Granted(held, ms) => {
                process.stage().lock().notes[process.number].hears = self.listening;
                Attempt::Granted(self.grant(held, ms, begun))
            }
            Answer::Refused(held, ms, retry_ms) => {
                if !self.listening && on_refusal == OnRefusal::Enqueue {
                    let pauses = process.stage().lock().notes[process.number].pauses;
                    self.deaf_since = Some((process.local(), pauses));
                }
                Attempt::Refused(Refusal {
                    owner: self.seen(held, ms),
                    retry_in: Duration::from_millis(retry_ms),
                    asked: true,
                })
            }
            _ => return Err(Line::failed()),
        })
    }

    fn renew(&mut self, fence: u64, by: Moment) -> Result<Renewal> {
        let (begun, answer) = self.ask(Ask::Renew(fence), by)?;
        Ok(match answer {
            Answer::Renewed(held, ms) => Renewal::Renewed(self.grant(held, ms, begun)),
            Answer::Lost(held, ms) => Renewal::Lost(self.seen(held, ms)),
            _ => return Err(Line::failed()),
        })
    }

    fn release(&mut self, fence: u64, by: Moment) -> Result<bool> {
        match self.ask(Ask::Release(fence), by)? {
            (_, Answer::Released(released)) => Ok(released),
            _ => Err(Line::failed()),
        }
    }

    fn withdraw(&mut self, by: Moment) -> Result<bool> {
        self.deaf_since = None;
        if std::mem::take(&mut self.listening) {
            self.process.stage().lock().unsubscribe(self.process.number);
        }
        self.ask(Ask::Withdraw, by).map(|_| true)
    }
}

impl RawObserver for Line {
    fn listen(&mut self, unparker: &Unparker, by: Moment) -> Result<()> {
        self.subscribe(unparker, by)
    }

    fn observe(&mut self, by: Moment) -> Result<View> {
        match self.ask(Ask::Observe, by)? {
            (_, Answer::Seen(held, ms)) => Ok(View {
                owner: self.seen(held, ms),
                look_in: Duration::from_millis(
                    held.map_or(1_000, |held| held.transition_at.saturating_sub(ms) + 1),
                ),
            }),
            _ => Err(Line::failed()),
        }
    }
}
