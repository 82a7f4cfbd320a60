//! A backend that tells of every call, around a real one, and lets a test fail or delay it.

#![allow(dead_code)]

use std::fmt;
use std::sync::Arc;

use contend::backend::{Attempt, Backend, Entry, Place, Renewal, Seat, Watch};
use contend::{Factory, Moment, Result, Waker};
use parking_lot::Mutex;

/// One call to a seat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Listen,
    Acquire(Entry),
    Renew,
    Release,
    Withdraw,
}

/// When a hook is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// An error keeps the call from being made.
    Before,
    /// An error takes the place of its outcome: the call took effect, the reply was lost.
    After,
}

type Hook = Arc<dyn Fn(When, Call, &Place, Moment) -> Result<()> + Send + Sync>;

/// The same factory, whose seats ask `hook` before and after every call.
pub fn around(
    factory: &Factory,
    hook: impl Fn(When, Call, &Place, Moment) -> Result<()> + Send + Sync + 'static,
) -> Factory {
    let hooked = Hooked {
        inner: Arc::clone(factory.backend().unwrap()),
        hook: Arc::new(hook),
    };
    Factory::new(Arc::new(hooked), factory.lease())
}

/// The same factory, and the list of all calls that are made through it.
pub fn counting(factory: &Factory) -> (Factory, Arc<Mutex<Vec<Call>>>) {
    let calls = Arc::new(Mutex::new(Vec::new()));
    let list = Arc::clone(&calls);
    let factory = around(factory, move |when, call, _, _| {
        if when == When::Before {
            list.lock().push(call);
        }
        Ok(())
    });
    (factory, calls)
}

struct Hooked {
    inner: Arc<dyn Backend>,
    hook: Hook,
}

impl fmt::Debug for Hooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hooked({:?})", self.inner)
    }
}

impl Backend for Hooked {
    fn realm(&self) -> &str {
        self.inner.realm()
    }

    fn seat(&self, place: &Place) -> Result<Box<dyn Seat>> {
        Ok(Box::new(HookedSeat {
            inner: self.inner.seat(place)?,
            place: place.clone(),
            hook: Arc::clone(&self.hook),
        }))
    }

    fn watch(&self, mutex: &Arc<str>) -> Result<Box<dyn Watch>> {
        self.inner.watch(mutex)
    }
}

struct HookedSeat {
    inner: Box<dyn Seat>,
    place: Place,
    hook: Hook,
}

impl HookedSeat {
    fn call<T>(
        &mut self,
        call: Call,
        by: Moment,
        make: impl FnOnce(&mut dyn Seat) -> Result<T>,
    ) -> Result<T> {
        (self.hook)(When::Before, call, &self.place, by)?;
        let outcome = make(&mut *self.inner)?;
        (self.hook)(When::After, call, &self.place, by)?;
        Ok(outcome)
    }
}

impl Seat for HookedSeat {
    fn listen(&mut self, waker: &Waker, by: Moment) -> Result<()> {
        self.call(Call::Listen, by, |seat| seat.listen(waker, by))
    }

    fn acquire(&mut self, entry: Entry, by: Moment) -> Result<Attempt> {
        self.call(Call::Acquire(entry), by, |seat| seat.acquire(entry, by))
    }

    fn renew(&mut self, fence: u64, by: Moment) -> Result<Renewal> {
        self.call(Call::Renew, by, |seat| seat.renew(fence, by))
    }

    fn release(&mut self, fence: u64, by: Moment) -> Result<bool> {
        self.call(Call::Release, by, |seat| seat.release(fence, by))
    }

    fn withdraw(&mut self, by: Moment) -> Result<()> {
        self.call(Call::Withdraw, by, |seat| seat.withdraw(by))
    }
}
