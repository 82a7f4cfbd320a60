//! A backend that tells of every call, around a real one, and lets a test fail or delay it.

#![allow(dead_code)]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use contend::backend::{
    Attempt, Backend, Condition, Contender, OnRefusal, Participant, Purpose, RawContender,
    RawObserver, Renewal,
};
use contend::{Error, ErrorKind, Factory, Lease, Moment, MutexOwner, Probe, Result, Unparker};
use parking_lot::Mutex;

/// One call to a contender, or about the runs of its mutex.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Acquire(OnRefusal),
    Renew,
    Release,
    Withdraw,
    LastRun,
    RecordRun,
    /// Only told, after a `RecordRun`: the run of this fence is on record.
    RunRecorded(u64),
}

/// When a hook is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// An error keeps the call from being made.
    Before,
    /// An error takes the place of its outcome: the call took effect, the reply was lost.
    After,
}

type Hook = Arc<dyn Fn(When, Call, &Contender, Moment) -> Result<()> + Send + Sync>;

type Wrap = Arc<dyn Fn(Box<dyn RawContender>, &Contender) -> Box<dyn RawContender> + Send + Sync>;

/// The same factory, whose contenders ask `hook` before and after every call.
pub fn around(
    factory: &Factory,
    hook: impl Fn(When, Call, &Contender, Moment) -> Result<()> + Send + Sync + 'static,
) -> Factory {
    let hook: Hook = Arc::new(hook);
    let its = Arc::clone(&hook);
    let wrap = move |inner, place: &Contender| -> Box<dyn RawContender> {
        Box::new(HookedContender {
            inner,
            place: place.clone(),
            hook: Arc::clone(&its),
        })
    };
    let hooked = Hooked {
        hook,
        wrap: Arc::new(wrap),
        ..Hooked::plain(factory)
    };
    Factory::new(Arc::new(hooked), factory.lease())
}

/// The same factory, with what `wrap` makes of its contenders.
pub fn wrapping(
    factory: &Factory,
    wrap: impl Fn(Box<dyn RawContender>, &Contender) -> Box<dyn RawContender> + Send + Sync + 'static,
) -> Factory {
    let hooked = Hooked {
        wrap: Arc::new(wrap),
        ..Hooked::plain(factory)
    };
    Factory::new(Arc::new(hooked), factory.lease())
}

/// What a test turns on and off while a hook looks.
#[derive(Clone, Debug, Default)]
pub struct Switch(Arc<AtomicBool>);

impl Switch {
    pub fn on(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    pub fn off(&self) {
        self.0.store(false, Ordering::SeqCst);
    }

    pub fn is_on(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// Turns it off, and returns whether it was on.
    pub fn take(&self) -> bool {
        self.0.swap(false, Ordering::SeqCst)
    }
}

/// The same factory: while the switch is on, all calls fail. Only leaving works.
pub fn failing(factory: &Factory) -> (Factory, Switch) {
    let broken = Switch::default();
    let is_broken = broken.clone();
    let factory = around(factory, move |when, call, _, _| {
        if when == When::Before && call != Call::Withdraw && is_broken.is_on() {
            return Err(Error::new(ErrorKind::Unreachable, "broken on request"));
        }
        Ok(())
    });
    (factory, broken)
}

/// The same factory: while the switch is on, the calls that `which` names take as long as they may, and have no
/// answer.
pub fn hanging(
    factory: &Factory,
    which: impl Fn(Call, &Contender) -> bool + Send + Sync + 'static,
) -> (Factory, Switch) {
    let hung = Switch::default();
    let is_hung = hung.clone();
    let factory = around(factory, move |when, call, place, by| {
        if when == When::Before && is_hung.is_on() && which(call, place) {
            thread::sleep(by.remaining());
            return Err(no_answer());
        }
        Ok(())
    });
    (factory, hung)
}

/// The same factory: while the switch is on, renewals have no answer.
pub fn renewing_in_vain(factory: &Factory) -> (Factory, Switch) {
    let broken = Switch::default();
    let is_broken = broken.clone();
    let factory = around(factory, move |when, call, _, _| {
        if (when, call) == (When::Before, Call::Renew) && is_broken.is_on() {
            return Err(no_answer());
        }
        Ok(())
    });
    (factory, broken)
}

/// The same factory: the next grant after the switch is turned on takes effect, and its reply is lost.
pub fn losing_a_grant(factory: &Factory) -> (Factory, Switch) {
    let lossy = Switch::default();
    let loses = lossy.clone();
    let factory = around(factory, move |when, call, _, _| {
        if when == When::After && matches!(call, Call::Acquire(_)) && loses.take() {
            return Err(no_answer());
        }
        Ok(())
    });
    (factory, lossy)
}

/// What a call without an answer ends with.
pub fn no_answer() -> Error {
    Error::new(ErrorKind::Timeout, "no answer on request")
}

/// The same mutexes as another process sees them: what this process knows of ids and threads does not
/// hold there.
pub fn as_another_process(factory: &Factory) -> Factory {
    let mut hooked = Hooked::plain(factory);
    hooked.realm.push_str(" of another process");
    Factory::new(Arc::new(hooked), factory.lease())
}

/// The same factory, whose lockers queue in the process.
pub fn one_per_process(factory: &Factory) -> Factory {
    let mut hooked = Hooked::plain(factory);
    hooked.one_per_process = true;
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
    realm: String,
    one_per_process: bool,
    hook: Hook,
    wrap: Wrap,
}

impl fmt::Debug for Hooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hooked({:?})", self.inner)
    }
}

impl Backend for Hooked {
    fn realm(&self) -> &str {
        &self.realm
    }

    fn one_per_process(&self) -> bool {
        self.one_per_process
    }

    fn contender(&self, place: &Contender, wake: &Unparker) -> Result<Box<dyn RawContender>> {
        Ok((self.wrap)(self.inner.contender(place, wake)?, place))
    }

    fn observer(&self, mutex: &Arc<str>, wake: &Unparker) -> Result<Box<dyn RawObserver>> {
        self.inner.observer(mutex, wake)
    }

    fn last_run(&self, mutex: &Arc<str>, by: Moment) -> Result<Option<Duration>> {
        let place = self.place(mutex);
        (self.hook)(When::Before, Call::LastRun, &place, by)?;
        let age = self.inner.last_run(mutex, by)?;
        (self.hook)(When::After, Call::LastRun, &place, by)?;
        Ok(age)
    }

    fn record_run(&self, mutex: &Arc<str>, fence: u64, keep: Duration, by: Moment) -> Result<bool> {
        let place = self.place(mutex);
        (self.hook)(When::Before, Call::RecordRun, &place, by)?;
        let recorded = self.inner.record_run(mutex, fence, keep, by)?;
        (self.hook)(When::After, Call::RecordRun, &place, by)?;
        if recorded {
            (self.hook)(When::After, Call::RunRecorded(fence), &place, by)?;
        }
        Ok(recorded)
    }

    fn ping(&self, by: Moment) -> Result<()> {
        self.inner.ping(by)
    }

    fn owner(&self, mutex: &Arc<str>, by: Moment) -> Result<MutexOwner> {
        self.inner.owner(mutex, by)
    }

    fn participants(&self, mutex: &Arc<str>, by: Moment) -> Result<Vec<Participant>> {
        self.inner.participants(mutex, by)
    }

    fn list(&self, by: Moment) -> Result<Vec<Arc<str>>> {
        self.inner.list(by)
    }

    fn revoke(&self, mutex: &Arc<str>, fence: u64, by: Moment) -> Result<bool> {
        self.inner.revoke(mutex, fence, by)
    }

    fn condition(&self) -> Condition {
        self.inner.condition()
    }

    fn set_probe(&self, probe: Arc<dyn Probe>) {
        self.inner.set_probe(probe);
    }
}

impl Hooked {
    /// Changes nothing yet.
    fn plain(factory: &Factory) -> Hooked {
        let inner = factory.backend().unwrap();
        Hooked {
            realm: inner.realm().to_owned(),
            inner,
            one_per_process: false,
            hook: Arc::new(|_, _, _, _| Ok(())),
            wrap: Arc::new(|inner, _| inner),
        }
    }

    /// What a hook is told of a call that no contender makes.
    fn place(&self, mutex: &Arc<str>) -> Contender {
        Contender {
            mutex: Arc::clone(mutex),
            id: "".into(),
            lease: Lease::default(),
            purpose: Purpose::Lead,
        }
    }
}

struct HookedContender {
    inner: Box<dyn RawContender>,
    place: Contender,
    hook: Hook,
}

impl HookedContender {
    fn call<T>(
        &mut self,
        call: Call,
        by: Moment,
        make: impl FnOnce(&mut dyn RawContender) -> Result<T>,
    ) -> Result<T> {
        (self.hook)(When::Before, call, &self.place, by)?;
        let outcome = make(&mut *self.inner)?;
        (self.hook)(When::After, call, &self.place, by)?;
        Ok(outcome)
    }
}

impl RawContender for HookedContender {
    fn acquire(&mut self, entry: OnRefusal, by: Moment) -> Result<Attempt> {
        self.call(Call::Acquire(entry), by, |contender| {
            contender.acquire(entry, by)
        })
    }

    fn renew(&mut self, fence: u64, by: Moment) -> Result<Renewal> {
        self.call(Call::Renew, by, |contender| contender.renew(fence, by))
    }

    fn release(&mut self, fence: u64, by: Moment) -> Result<bool> {
        self.call(Call::Release, by, |contender| contender.release(fence, by))
    }

    fn withdraw(&mut self, by: Moment) -> Result<()> {
        self.call(Call::Withdraw, by, |contender| contender.withdraw(by))
    }
}
