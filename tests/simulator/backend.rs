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

    fn contender(&self, _: &Contender, wake: &Unparker) -> Result<Box<dyn RawContender>> {
        Ok(Box::new(Line::new(&self.process, wake)))
    }

    fn observer(&self, _: &Arc<str>, wake: &Unparker) -> Result<Box<dyn RawObserver>> {
        Ok(Box::new(Line::new(&self.process, wake)))
    }

    fn owner(&self, _: &Arc<str>, by: Moment) -> Result<MutexOwner> {
        let mut line = Line::new(&self.process, &contend::Parker::new().unparker());
        match line.ask(Ask::Observe, by)? {
            (_, Answer::Seen(held, ms)) => Ok(line.seen(held, ms)),
            _ => Err(Line::failed()),
        }
    }
}

/// A contender's or observer's line to the backend.
struct Line {
    process: Arc<Process>,
    unparker: Unparker,
    listening: bool,
}

impl Line {
    fn new(process: &Arc<Process>, unparker: &Unparker) -> Line {
        Line {
            process: Arc::clone(process),
            unparker: unparker.clone(),
            listening: false,
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
        let panics = {
            let mut world = stage.lock();
            world.faulty && world.dice.chance(3)
        };
        if panics && !process.is_crashed() {
            stage.lock().tally.panics += 1;
            std::panic::resume_unwind(Box::new("on purpose: a backend that panics"));
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

    /// Subscribes in at most half of the time; a contender that cannot polls.
    fn subscribe(&mut self, by: Moment) {
        let process = &self.process;
        if process.is_crashed() || self.listening {
            return;
        }
        let stage = process.stage();
        let by = process.local() + (by - process.local()) / 2;
        let (fails, hangs, takes) = {
            let mut world = stage.lock();
            let fails = world.faulty && world.dice.chance(150);
            (fails, fails && world.dice.chance(500), world.short_delay())
        };
        let until = process.local() + Duration::from_nanos(takes);
        let until = if hangs { by } else { until.min(by) };
        process.sleep((until - process.local()).as_nanos() as u64);
        if fails || process.is_crashed() {
            return;
        }
        self.listening = true;
        stage
            .lock()
            .subscribe(process.number, process.id, &self.unparker);
    }

    fn retry_in(&self, ms: u64) -> Duration {
        let retry_in = Duration::from_millis(ms);
        if self.listening {
            retry_in
        } else {
            retry_in.min(self.process.lease.request_limit())
        }
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
    fn acquire(&mut self, on_refusal: OnRefusal, by: Moment) -> Result<Attempt> {
        if on_refusal == OnRefusal::Enqueue {
            self.subscribe(by);
        }
        let process = Arc::clone(&self.process);
        let (begun, answer) = self.ask(Ask::Acquire(on_refusal), by)?;
        Ok(match answer {
            Answer::Granted(held, ms) => {
                process.stage().lock().notes[process.number].hears = self.listening;
                Attempt::Granted(self.grant(held, ms, begun))
            }
            Answer::Refused(held, ms, retry_ms) => Attempt::Refused(Refusal {
                owner: self.seen(held, ms),
                retry_in: self.retry_in(retry_ms),
            }),
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

    fn withdraw(&mut self, by: Moment) -> Result<()> {
        if std::mem::take(&mut self.listening) {
            self.process.stage().lock().unsubscribe(self.process.number);
        }
        self.ask(Ask::Withdraw, by).map(drop)
    }
}

impl RawObserver for Line {
    fn observe(&mut self, by: Moment) -> Result<View> {
        self.subscribe(by);
        match self.ask(Ask::Observe, by)? {
            (_, Answer::Seen(held, ms)) => Ok(View {
                owner: self.seen(held, ms),
                look_in: self
                    .retry_in(held.map_or(1_000, |held| held.transition_at.saturating_sub(ms) + 1)),
            }),
            _ => Err(Line::failed()),
        }
    }
}
