//! `Health`: how a factory and its services get on, without asking the server.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use crate::backend::{Backend, PoolUse, Wakeups};
use crate::clock::Moment;
use crate::error::Error;
use crate::json::Json;
use crate::service::Status;
use crate::service::lifecycle::Stage;
use crate::snapshot::{Contact, Failed, Snapshot, Stats};

/// The health of a factory's backend and services, as far as they have found out. Returned by
/// `Factory::health`, which does no I/O: what has not been tried yet is [`Contact::Untried`], and not
/// fine.
///
/// Its `Display` is for people, [`to_json`](Health::to_json) for programs.
///
/// ```
/// use contend::Contact;
///
/// let factory = contend::connect("memory://health-doc")?;
/// let service = factory.contend("demo").id("a").build()?;
/// let health = factory.health();
/// assert!(health.is_fine()); // memory always answers
/// assert!(matches!(health.services[0].contact, Contact::Untried)); // not started yet
/// println!("{health}\n{}", health.to_json());
/// # Ok::<(), contend::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Health {
    /// The location of the mutexes, without credentials.
    pub realm: Arc<str>,
    /// Whether the backend answers, as far as the services, lockers, semaphores and `ping` have found out. It is
    /// failing if a call of any of them failed after the last answer, even if that service was stopped or that
    /// locker was dropped since, and while a running service cannot be notified of releases. A call that finds the
    /// lock held, or the semaphore exhausted or missing, counts as answered. A call that had no time or no free
    /// connection to ask the backend counts for nothing.
    ///
    /// It has been failing since the first of the calls that failed after the last answer was sent, whichever part
    /// sent it.
    pub contact: Contact,
    /// How long ago the backend answered last; `None` if it never did.
    pub last_contact: Option<Duration>,
    /// How waiting contenders learn of a release.
    pub wakeups: Wakeups,
    /// The use of the connection pool, if there is one.
    pub pool: Option<PoolUse>,
    /// The services that are alive, in the order in which they were built.
    pub services: Vec<ServiceHealth>,
}

/// The health of one service of a factory.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServiceHealth {
    /// The mutex.
    pub mutex: Arc<str>,
    /// The contender's id; `None` for an observer.
    pub id: Option<Arc<str>>,
    /// The status of the service.
    pub status: Status,
    /// The fence, while it owns.
    pub fence: Option<u64>,
    /// Whether its calls are answered.
    pub contact: Contact,
}

impl Health {
    /// Returns `true` if the last call to the backend was answered, and so was the last call of every
    /// running service that has made one.
    #[must_use]
    pub fn is_fine(&self) -> bool {
        let mut running = self.services.iter().filter(|it| it.status.is_active());
        matches!(self.contact, Contact::Fine)
            && !running.any(|it| matches!(it.contact, Contact::Failing { .. }))
    }

    /// Returns `true` if it [is fine](Health::is_fine) and the last answer is no older than `age`: for the readiness
    /// probe of a program that may be idle, which can `ping` otherwise.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// let factory = contend::connect("memory://is-fine-within-doc")?;
    /// let second = Duration::from_secs(1);
    /// let is_ready = factory.health().is_fine_within(10 * second) || factory.ping(second).is_ok();
    /// assert!(is_ready);
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn is_fine_within(&self, age: Duration) -> bool {
        self.is_fine() && self.last_contact.is_some_and(|last| last <= age)
    }

    /// Returns the health of a factory that cannot be used in this process.
    pub(crate) fn unusable(error: Error) -> Health {
        Health {
            realm: "".into(),
            contact: Contact::Failing {
                error,
                lasting: Duration::ZERO,
            },
            last_contact: None,
            wakeups: Wakeups::Untried,
            pool: None,
            services: Vec::new(),
        }
    }

    /// Returns one JSON object on one line: `realm`, `contact` (`"untried"`, `"fine"`, `"failing"`),
    /// `error`, `failing_ms`, `last_contact_ms` (how long ago), `wakeups` (`"untried"`, `"working"`,
    /// `"polling"`), `polling_because`, `pool` (`open`, `idle`, `size`, or null) and `services`, each with
    /// `mutex`, `id`, `status`, `fence`, `contact`, `error` and `failing_ms`.
    #[must_use]
    pub fn to_json(&self) -> String {
        let (wakeups, why) = match &self.wakeups {
            Wakeups::Untried => ("untried", None),
            Wakeups::Working => ("working", None),
            Wakeups::Polling(why) => ("polling", Some(&**why)),
        };
        let pool = self.pool.map(|PoolUse { open, idle, size }| {
            let json = Json::new().with("open", open).with("idle", idle);
            json.with("size", size)
        });
        let services = self.services.iter().map(|service| {
            let json = Json::new()
                .with("mutex", &*service.mutex)
                .with("id", service.id.as_deref())
                .with("status", status_word(service.status))
                .with("fence", service.fence);
            with_contact(json, &service.contact)
        });
        with_contact(Json::new().with("realm", &*self.realm), &self.contact)
            .with("last_contact_ms", self.last_contact)
            .with("wakeups", wakeups)
            .with("polling_because", why)
            .with("pool", pool)
            .with("services", services.collect::<Vec<_>>())
            .end()
    }
}

impl fmt::Display for Health {
    /// A line for the backend, and one for each service.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.realm)?;
        show_contact(f, &self.contact)?;
        match self.last_contact {
            Some(last) => write!(f, "; last answer {} ago", Span(last))?,
            None => f.write_str("; never answered")?,
        }
        match &self.wakeups {
            Wakeups::Untried => f.write_str("; wake-ups not tried yet")?,
            Wakeups::Working => f.write_str("; wake-ups work")?,
            Wakeups::Polling(why) => write!(f, "; polling: {why}")?,
        }
        if let Some(PoolUse { open, idle, size }) = self.pool {
            write!(f, "; {open} of {size} connections open, {idle} idle")?;
        }
        for service in &self.services {
            write!(f, "\n  {}: ", service.mutex)?;
            match &service.id {
                Some(id) => write!(f, "contender {id}, ")?,
                None => f.write_str("observer, ")?,
            }
            f.write_str(status_word(service.status))?;
            if let Some(fence) = service.fence {
                write!(f, ", owns with fence {fence}")?;
            }
            f.write_str(", ")?;
            show_contact(f, &service.contact)?;
        }
        Ok(())
    }
}

fn show_contact(f: &mut fmt::Formatter<'_>, contact: &Contact) -> fmt::Result {
    match contact {
        Contact::Untried => f.write_str("not tried yet"),
        Contact::Fine => f.write_str("fine"),
        Contact::Failing { error, lasting } => {
            write!(f, "failing for {}: {error}", Span(*lasting))
        }
    }
}

fn status_word(status: Status) -> &'static str {
    match status {
        Status::Initial => "stopped",
        Status::Starting => "starting",
        Status::Running => "running",
        Status::Stopping => "stopping",
    }
}

/// A duration to the tenth of a second.
struct Span(Duration);

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} s", self.0.as_secs_f64())
    }
}

fn with_contact(json: Json, contact: &Contact) -> Json {
    let (word, error, lasting) = match contact {
        Contact::Untried => ("untried", None, None),
        Contact::Fine => ("fine", None, None),
        Contact::Failing { error, lasting } => ("failing", Some(error.to_string()), Some(*lasting)),
    };
    json.with("contact", word)
        .with("error", error.as_deref())
        .with("failing_ms", lasting)
}

/// The services, lockers and semaphores of a factory, for as long as they live, and how its pings went.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    entries: Vec<Registered>,
    /// What those have done that are gone.
    gone: Stats,
    /// When one of those was answered last.
    gone_answered: Option<Moment>,
    /// The calls of those that failed since.
    gone_failed: Option<Failed>,
    /// When a ping was answered last.
    ping_answered: Option<Moment>,
    /// How the last ping failed, if it did.
    ping_failed: Option<Failed>,
}

#[derive(Debug)]
struct Registered {
    /// Outlives the part it belongs to: what that one has counted is not lost.
    snapshot: Arc<Snapshot>,
    /// `None` for a locker, and for semaphores.
    service: Option<Weak<Monitored>>,
}

/// What a factory reads of one of its services. It owns nothing: whoever reads may be the last to hold it, and must
/// not have to stop the service.
pub(crate) struct Monitored {
    pub(crate) mutex: Arc<str>,
    /// `None` for an observer.
    pub(crate) id: Option<Arc<str>>,
    pub(crate) stage: Arc<Stage>,
    pub(crate) snapshot: Arc<Snapshot>,
}

impl Monitored {
    fn health(&self) -> ServiceHealth {
        ServiceHealth {
            mutex: Arc::clone(&self.mutex),
            id: self.id.clone(),
            status: self.stage.status(),
            fence: self.snapshot.fence(),
            contact: self.snapshot.contact(),
        }
    }
}

impl Registry {
    /// Lists a service for as long as it lives, and counts what it does.
    pub(crate) fn add(&self, service: &Arc<Monitored>) {
        self.register(&service.snapshot, Some(Arc::downgrade(service)));
    }

    /// Counts what a locker or the semaphores do. They are not listed: a factory may have thousands of lockers, and
    /// what goes wrong with one is returned to its caller.
    pub(crate) fn count(&self, snapshot: &Arc<Snapshot>) {
        self.register(snapshot, None);
    }

    fn register(&self, snapshot: &Arc<Snapshot>, service: Option<Weak<Monitored>>) {
        let mut known = self.known.lock();
        // Only when it would grow: so the search costs each newcomer a constant.
        if known.entries.len() == known.entries.capacity() {
            known.forget_the_gone();
        }
        known.entries.push(Registered {
            snapshot: Arc::clone(snapshot),
            service,
        });
    }

    pub(crate) fn pinged(&self, sent: Moment, outcome: Result<(), &Error>) {
        let mut known = self.known.lock();
        match outcome {
            Ok(()) => {
                known.ping_answered = Some(Moment::now());
                known.ping_failed = None;
            }
            Err(error) if error.proves_nothing() => {}
            Err(error) => {
                let earlier = known.ping_failed.as_ref();
                known.ping_failed = Some(Failed::after(earlier, sent, error));
            }
        }
    }

    /// Adds up what all services and lockers have done since the factory was made.
    pub(crate) fn stats(&self) -> Stats {
        let known = self.known.lock();
        let stats = known.entries.iter().map(|entry| entry.snapshot.stats());
        stats.fold(known.gone, Stats::plus)
    }

    pub(crate) fn health(&self, backend: &dyn Backend) -> Health {
        let (services, answered, pinged, failed) = {
            let known = self.known.lock();
            let services = known.entries.iter();
            let services = services.filter_map(|entry| entry.service.as_ref()?.upgrade());
            let services: Vec<_> = services.collect();
            let (answered, pinged) = (known.last_answered(), known.ping_answered);
            (
                services,
                answered,
                pinged,
                known.failed(answered.max(pinged)),
            )
        };
        let condition = backend.condition();
        let now = Moment::now();
        // The backend knows it best, unless it does not keep it.
        let last_contact = condition.last_contact.or(answered).max(pinged);
        let failed = outage(failed, last_contact);
        let active = || services.iter().filter(|it| it.stage.status().is_active());
        // That lasts, whatever else is answered.
        let failed = failed.or_else(|| active().find_map(|service| service.snapshot.deaf()));
        // Whoever waits for another's lease to end makes no call that would find out.
        let cut_off = condition.cut_off.filter(|_| active().next().is_some());
        let failed = failed.or_else(|| {
            let since = last_contact.unwrap_or(now);
            cut_off.map(|error| Failed::after(None, since, &error))
        });
        Health {
            realm: backend.realm().into(),
            contact: match failed {
                Some(Failed { error, since, .. }) => Contact::Failing {
                    error,
                    lasting: now - since,
                },
                None if last_contact.is_some() => Contact::Fine,
                None => Contact::Untried,
            },
            last_contact: last_contact.map(|last| now - last),
            wakeups: condition.wakeups,
            pool: condition.pool,
            services: services.iter().map(|service| service.health()).collect(),
        }
    }
}

impl Known {
    /// When a service or locker was answered last.
    fn last_answered(&self) -> Option<Moment> {
        let entries = self.entries.iter().map(|entry| entry.snapshot.answered());
        entries.fold(self.gone_answered, Option::max)
    }

    /// The calls that failed, of all that there are and were; those under way at the last `answer` count from then.
    fn failed(&self, answer: Option<Moment>) -> Vec<Failed> {
        let calls = self
            .entries
            .iter()
            .filter_map(|entry| entry.snapshot.failed_call());
        let others = self.gone_failed.iter().chain(&self.ping_failed).cloned();
        let calls = calls.chain(others).map(|failed| failed.not_before(answer));
        // That lasts, whatever else is answered.
        let deaf = self
            .entries
            .iter()
            .filter_map(|entry| entry.snapshot.deaf());
        calls.chain(deaf).collect()
    }

    fn forget_the_gone(&mut self) {
        let answered = self.last_answered().max(self.ping_answered);
        // A worker, or a clean-up, may count on after its service or locker is gone.
        let is_gone = |entry: &mut Registered| Arc::strong_count(&entry.snapshot) == 1;
        for Registered { snapshot, .. } in self.entries.extract_if(.., is_gone) {
            self.gone = self.gone.plus(snapshot.stats());
            self.gone_answered = self.gone_answered.max(snapshot.answered());
            let failed = snapshot.failed_call().into_iter().chain(snapshot.deaf());
            self.gone_failed = outage(failed.chain(self.gone_failed.take()), answered);
        }
    }
}

/// What these failed calls amount to, those before the last answer left out: the newest error, since the first was
/// sent.
fn outage(failed: impl IntoIterator<Item = Failed>, answered: Option<Moment>) -> Option<Failed> {
    let failed = failed.into_iter();
    let failed = failed.filter(|failed| answered <= Some(failed.at));
    failed.reduce(|one, other| {
        let since = one.since.min(other.since);
        let newest = if one.at > other.at { one } else { other };
        Failed { since, ..newest }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{Condition, Contender, RawContender, RawObserver};
    use crate::error::{ErrorKind, Result};

    fn failing(lasting: Duration) -> Contact {
        Contact::Failing {
            error: Error::new(ErrorKind::Unreachable, "connection \"refused\""),
            lasting,
        }
    }

    fn health(contact: Contact) -> Health {
        let services = vec![
            ServiceHealth {
                mutex: "a".into(),
                id: Some("id-1".into()),
                status: Status::Running,
                fence: Some(7),
                contact: Contact::Fine,
            },
            ServiceHealth {
                mutex: "b".into(),
                id: None,
                status: Status::Initial,
                fence: None,
                contact: Contact::Untried,
            },
        ];
        Health {
            realm: "redis://127.0.0.1:6379".into(),
            contact,
            last_contact: None,
            wakeups: Wakeups::Polling("no privilege".into()),
            pool: Some(PoolUse::new(2, 1, 10)),
            services,
        }
    }

    #[test]
    fn untried_fine_and_failing_are_three_different_things() {
        let words = [
            (Contact::Untried, "not tried yet", "\"contact\":\"untried\""),
            (Contact::Fine, "fine", "\"contact\":\"fine\""),
            (
                failing(Duration::from_secs(60)),
                "failing for 60.0 s: connection \"refused\"",
                "\"contact\":\"failing\",\"error\":\"connection \\\"refused\\\"\",\"failing_ms\":600",
            ),
        ];
        for (contact, text, json) in words {
            let is_fine = matches!(contact, Contact::Fine);
            let health = health(contact);
            assert_eq!(health.is_fine(), is_fine);
            let shown = health.to_string();
            let first =
                format!("redis://127.0.0.1:6379: {text}; never answered; polling: no privilege");
            assert!(shown.starts_with(&first), "{shown}");
            assert!(health.to_json().contains(json), "{}", health.to_json());
        }
    }

    #[test]
    fn every_part_is_shown() {
        let health = health(Contact::Fine);
        assert_eq!(
            health.to_string(),
            "redis://127.0.0.1:6379: fine; never answered; polling: no privilege; \
             2 of 10 connections open, 1 idle\n  \
             a: contender id-1, running, owns with fence 7, fine\n  \
             b: observer, stopped, not tried yet"
        );
        assert_eq!(
            health.to_json(),
            "{\"realm\":\"redis://127.0.0.1:6379\",\"contact\":\"fine\",\"error\":null,\
             \"failing_ms\":null,\"last_contact_ms\":null,\"wakeups\":\"polling\",\
             \"polling_because\":\"no privilege\",\"pool\":{\"open\":2,\"idle\":1,\"size\":10},\
             \"services\":[{\"mutex\":\"a\",\"id\":\"id-1\",\"status\":\"running\",\"fence\":7,\
             \"contact\":\"fine\",\"error\":null,\"failing_ms\":null},{\"mutex\":\"b\",\"id\":null,\
             \"status\":\"stopped\",\"fence\":null,\"contact\":\"untried\",\"error\":null,\
             \"failing_ms\":null}]}"
        );
    }

    /// A backend that knows nothing about itself.
    #[derive(Debug)]
    struct Silent;

    impl Backend for Silent {
        fn realm(&self) -> &str {
            "silent"
        }

        fn contender(&self, _: &Contender) -> Result<Box<dyn RawContender>> {
            Err(Error::invalid("not made for this"))
        }

        fn observer(&self, _: &Arc<str>) -> Result<Box<dyn RawObserver>> {
            Err(Error::invalid("not made for this"))
        }
    }

    /// It went by when the trouble began: after one answer in between, whatever failed did not count.
    #[test]
    fn the_newest_fact_counts() {
        let registry = Registry::default();
        let (first, second) = (Arc::<Snapshot>::default(), Arc::<Snapshot>::default());
        registry.count(&first);
        registry.count(&second);
        let refused = Error::new(ErrorKind::Unreachable, "refused");
        let sent = Moment::now();
        let is_fine = || registry.health(&Silent).is_fine();
        assert!(matches!(registry.health(&Silent).contact, Contact::Untried));
        first.note_call(sent, Err(&refused));
        assert!(!is_fine());
        second.note_call(sent, Ok(true));
        assert!(is_fine());
        first.note_call(sent, Err(&refused));
        assert!(!is_fine());
    }

    /// Callers in a hurry, or a pool that is too small, made a server that answers unready.
    #[cfg(any(feature = "redis", feature = "mysql"))]
    #[test]
    fn a_call_that_could_not_ask_says_nothing_about_the_backend() {
        let registry = Registry::default();
        let snapshot = Arc::<Snapshot>::default();
        registry.count(&snapshot);
        let busy = Error::new(ErrorKind::Timeout, "all connections were in use").proving_nothing();
        let contact = || registry.health(&Silent).contact;
        let sent = Moment::now();
        snapshot.note_call(sent, Err(&busy));
        snapshot.note_listen(sent, Err(&busy));
        registry.pinged(sent, Err(&busy));
        assert!(matches!(contact(), Contact::Untried), "{:?}", contact());
        // Its caller, or the service, hears of it.
        assert!(snapshot.last_error().is_some());
        snapshot.note_listen(sent, Ok(()));
        snapshot.note_call(sent, Ok(true));
        snapshot.note_call(sent, Err(&busy));
        assert!(registry.health(&Silent).is_fine());
        // Nor does it hide that the backend fails.
        let refused = Error::new(ErrorKind::Unreachable, "refused");
        snapshot.note_call(sent, Err(&refused));
        snapshot.note_call(sent, Err(&busy));
        match contact() {
            Contact::Failing { error, .. } => assert_eq!(error.kind(), ErrorKind::Unreachable),
            contact => panic!("{contact:?}"),
        }
    }

    /// Every locker of an outage counted from its own first call, and the newest one was believed.
    #[test]
    fn an_outage_lasts_from_the_first_call_that_failed_whoever_sent_it() {
        let registry = Registry::default();
        let refused = Error::new(ErrorKind::Unreachable, "refused");
        let ago = |seconds| Moment::now() - Duration::from_secs(seconds);
        let fails = |sent| {
            let snapshot = Arc::<Snapshot>::default();
            registry.count(&snapshot);
            snapshot.note_call(sent, Err(&refused));
        };
        let lasting = || match registry.health(&Silent).contact {
            Contact::Failing { lasting, .. } => lasting.as_secs(),
            contact => panic!("{contact:?}"),
        };
        // As many as are forgotten on the way.
        fails(ago(60));
        for _ in 0..100 {
            fails(ago(1));
        }
        assert!(lasting() >= 60);
        registry.pinged(ago(1), Ok(()));
        assert!(registry.health(&Silent).is_fine());
        // It was under way when that was answered.
        registry.pinged(ago(30), Err(&refused));
        assert!(lasting() < 30);
    }

    fn lasting(health: Health) -> Duration {
        match health.contact {
            Contact::Failing { lasting, .. } => lasting,
            contact => panic!("{contact:?}"),
        }
    }

    /// A backend that has heard from its server just now.
    #[derive(Debug)]
    struct Answering;

    impl Backend for Answering {
        fn realm(&self) -> &str {
            "answering"
        }

        fn contender(&self, _: &Contender) -> Result<Box<dyn RawContender>> {
            Err(Error::invalid("none"))
        }

        fn observer(&self, _: &Arc<str>) -> Result<Box<dyn RawObserver>> {
            Err(Error::invalid("none"))
        }

        fn condition(&self) -> Condition {
            Condition {
                last_contact: Some(Moment::now() - Duration::from_millis(1)),
                ..Condition::default()
            }
        }
    }

    /// A connection that is opened, or comes back in order, is contact, but no answer to the call that fails:
    /// an outage began anew with every one, and no alert on its length came.
    #[test]
    fn a_server_that_answers_with_errors_fails_from_the_first_of_them_on() {
        let registry = Registry::default();
        let snapshot = Arc::<Snapshot>::default();
        registry.count(&snapshot);
        let missing = Error::new(ErrorKind::Misconfigured, "no table");
        let minute = Duration::from_secs(60);
        snapshot.note_call(Moment::now() - minute, Err(&missing));
        snapshot.note_call(Moment::now(), Err(&missing));
        assert!(lasting(registry.health(&Answering)) >= minute);
        // A subscription that is denied lasts, whatever else is answered.
        snapshot.note_listen(Moment::now() - minute, Err(&missing));
        snapshot.note_call(Moment::now(), Ok(true));
        snapshot.note_listen(Moment::now(), Err(&missing));
        assert!(lasting(registry.health(&Answering)) >= minute);
    }

    #[test]
    fn an_outage_outlasts_the_restart_of_a_service() {
        let registry = Registry::default();
        let snapshot = Arc::<Snapshot>::default();
        registry.count(&snapshot);
        let refused = Error::new(ErrorKind::Unreachable, "refused");
        let minute = Duration::from_secs(60);
        snapshot.note_call(Moment::now() - minute, Err(&refused));
        snapshot.clear();
        assert!(lasting(registry.health(&Silent)) >= minute);
        snapshot.note_call(Moment::now(), Err(&refused));
        assert!(lasting(registry.health(&Silent)) >= minute);
        // The service itself counts from its start.
        match snapshot.contact() {
            Contact::Failing { lasting, .. } => assert!(lasting < minute),
            contact => panic!("{contact:?}"),
        }
    }

    #[test]
    fn a_failed_subscription_does_not_hide_since_when_calls_fail() {
        let registry = Registry::default();
        let snapshot = Arc::<Snapshot>::default();
        registry.count(&snapshot);
        let refused = Error::new(ErrorKind::Unreachable, "refused");
        let minute = Duration::from_secs(60);
        snapshot.note_call(Moment::now() - minute, Err(&refused));
        snapshot.note_listen(Moment::now(), Err(&refused));
        assert!(lasting(registry.health(&Silent)) >= minute);
    }
}
