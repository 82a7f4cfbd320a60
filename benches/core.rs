//! The machine itself, without a backend: one decision, and one event to its receiver.
#![allow(missing_docs)]

mod common;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use contend::backend::{
    Attempt, Backend, Contender, Grant, OnRefusal, RawContender, RawObserver, Renewal,
};
use contend::machine::contention::{Contention, Step};
use contend::{
    ContendPeriod, Error, ErrorKind, EventKind, Factory, Lease, Moment, MutexOwner, Result,
    Unparker,
};
use criterion::Criterion;

fn main() {
    let mut criterion = common::criterion();
    decide(&mut criterion);
    event(&mut criterion);
    criterion.final_summary();
}

/// The whole of a renewal: the step that asks for it, its outcome, and the step that waits for the next.
fn decide(criterion: &mut Criterion) {
    let lease = Lease::default();
    let mut now = Moment::from_origin(Duration::from_secs(1));
    let id: Arc<str> = "0:1@127.0.0.1".into();
    let mut contention = Contention::new(Arc::clone(&id), lease, ContendPeriod::new(lease), now);
    let owner = MutexOwner::new(id, 1_000, 11_000, 17_000, 7);
    let grant = Grant { owner, until: None };
    assert!(matches!(contention.step(now), Step::Acquire { .. }));
    contention.acquired(now, now, Ok(Attempt::Granted(grant.clone())), 0.5);
    criterion
        .benchmark_group("core")
        .bench_function("decide", |bencher| {
            bencher.iter(|| {
                let Step::Wait { until } = contention.step(now) else {
                    panic!("an owner waits for its renewal");
                };
                now = until;
                let Step::Renew { fence, .. } = contention.step(now) else {
                    panic!("it is time");
                };
                let renewal = Ok(Renewal::Renewed(grant.clone()));
                contention.renewed(now, now, renewal, 0.5);
                fence
            });
        });
}

/// From the moment at which the backend has said that the mutex is lost, to the moment at which the
/// receiver of the channel has Released.
fn event(criterion: &mut Criterion) {
    let switch = Switch::default();
    let factory = Factory::new(Arc::new(switch.clone()), Lease::default());
    let (service, events) = factory.contend("m").channel().unwrap();
    service.start().unwrap();
    let next = |kind| loop {
        let event = events.recv_timeout(Duration::from_secs(60)).unwrap();
        if event.kind == kind {
            return Instant::now();
        }
    };
    next(EventKind::Acquired);
    criterion
        .benchmark_group("core")
        .bench_function("event", |bencher| {
            bencher.iter_custom(|iterations| {
                let mut took = Duration::ZERO;
                for _ in 0..iterations {
                    // Rung, the owner looks, hears that it has lost, and acquires anew.
                    switch.unparker().unpark();
                    let heard = next(EventKind::Released);
                    took += heard - switch.lost_at();
                    next(EventKind::Acquired);
                }
                took
            });
        });
    service.stop().unwrap();
}

/// A backend that grants every attempt and refuses every renewal.
#[derive(Clone, Debug, Default)]
struct Switch {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug, Default)]
struct Inner {
    lost_at: Option<Instant>,
    unparker: Option<Unparker>,
    id: Arc<str>,
    fence: u64,
}

impl Switch {
    fn unparker(&self) -> Unparker {
        self.inner.lock().unwrap().unparker.clone().unwrap()
    }

    fn lost_at(&self) -> Instant {
        self.inner.lock().unwrap().lost_at.unwrap()
    }
}

impl Backend for Switch {
    fn realm(&self) -> &str {
        "switch"
    }

    fn contender(&self, place: &Contender, wake: &Unparker) -> Result<Box<dyn RawContender>> {
        let mut inner = self.inner.lock().unwrap();
        inner.id = Arc::clone(&place.id);
        inner.unparker = Some(wake.clone());
        Ok(Box::new(self.clone()))
    }

    fn observer(&self, _mutex: &Arc<str>, _wake: &Unparker) -> Result<Box<dyn RawObserver>> {
        Err(Error::new(
            ErrorKind::InvalidInput,
            "there are no observers",
        ))
    }

    fn owner(&self, _mutex: &Arc<str>, _by: Moment) -> Result<MutexOwner> {
        Ok(MutexOwner::NONE)
    }
}

impl RawContender for Switch {
    fn acquire(&mut self, _entry: OnRefusal, _by: Moment) -> Result<Attempt> {
        let mut inner = self.inner.lock().unwrap();
        inner.fence += 1;
        let owner = MutexOwner::new(Arc::clone(&inner.id), 1_000, 11_000, 17_000, inner.fence);
        Ok(Attempt::Granted(Grant { owner, until: None }))
    }

    fn renew(&mut self, _fence: u64, _by: Moment) -> Result<Renewal> {
        self.inner.lock().unwrap().lost_at = Some(Instant::now());
        Ok(Renewal::Lost(MutexOwner::NONE))
    }

    fn release(&mut self, _fence: u64, _by: Moment) -> Result<bool> {
        Ok(true)
    }

    fn withdraw(&mut self, _by: Moment) -> Result<()> {
        Ok(())
    }
}
