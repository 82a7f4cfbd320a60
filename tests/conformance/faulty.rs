//! A backend that can be made to fail on request, around a real one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use contend::backend::{Attempt, Backend, Entry, Place, Renewal, Seat, Watch};
use contend::{Error, ErrorKind, Factory, Moment, Result, Waker};

#[derive(Debug)]
pub struct Faulty {
    inner: Arc<dyn Backend>,
    broken: Arc<AtomicBool>,
}

impl Faulty {
    /// The same factory, whose calls all fail while the switch is on.
    pub fn around(factory: &Factory) -> (Factory, Arc<AtomicBool>) {
        let broken = Arc::new(AtomicBool::new(false));
        let faulty = Faulty {
            inner: Arc::clone(factory.backend().unwrap()),
            broken: Arc::clone(&broken),
        };
        (Factory::new(Arc::new(faulty), factory.lease()), broken)
    }
}

impl Backend for Faulty {
    fn realm(&self) -> &str {
        self.inner.realm()
    }

    fn seat(&self, place: &Place) -> Result<Box<dyn Seat>> {
        Ok(Box::new(FaultySeat {
            inner: self.inner.seat(place)?,
            broken: Arc::clone(&self.broken),
        }))
    }

    fn watch(&self, mutex: &Arc<str>) -> Result<Box<dyn Watch>> {
        self.inner.watch(mutex)
    }
}

struct FaultySeat {
    inner: Box<dyn Seat>,
    broken: Arc<AtomicBool>,
}

impl FaultySeat {
    fn check(&self) -> Result<()> {
        if self.broken.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Unreachable, "broken on request"));
        }
        Ok(())
    }
}

impl Seat for FaultySeat {
    fn listen(&mut self, waker: &Waker, by: Moment) -> Result<()> {
        self.check()?;
        self.inner.listen(waker, by)
    }

    fn acquire(&mut self, entry: Entry, by: Moment) -> Result<Attempt> {
        self.check()?;
        self.inner.acquire(entry, by)
    }

    fn renew(&mut self, fence: u64, by: Moment) -> Result<Renewal> {
        self.check()?;
        self.inner.renew(fence, by)
    }

    fn release(&mut self, fence: u64, by: Moment) -> Result<bool> {
        self.check()?;
        self.inner.release(fence, by)
    }

    fn withdraw(&mut self, by: Moment) -> Result<()> {
        self.inner.withdraw(by)
    }
}
