//! `Health`: whether a factory's backend answers, without asking it.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Backend, PoolUse, Wakeups};
use crate::clock::Moment;
use crate::error::Error;
use crate::json::{or_null, string};
use crate::shared::{Contact, Link};

/// The health of a factory's backend, as far as its services, lockers and `ping` have found out. Returned by
/// `Factory::health`, which does no I/O: what has not been tried yet is [`Contact::Untried`], and not
/// fine.
///
/// ```
/// let factory = contend::connect("memory://health-doc")?;
/// assert!(!factory.health().is_fine()); // not tried yet
/// factory.ping(std::time::Duration::from_secs(1))?;
/// assert!(factory.health().is_fine());
/// println!("{}", factory.health().to_json());
/// # Ok::<(), contend::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Health {
    /// The location of the mutexes, without credentials.
    pub realm: Arc<str>,
    /// Whether the last call to the backend was answered, from any part of the factory.
    pub contact: Contact,
    /// How long ago the backend answered last; `None` if it never did.
    pub last_contact: Option<Duration>,
    /// How waiting contenders learn of a release.
    pub wakeups: Wakeups,
    /// The use of the connection pool, if there is one.
    pub pool: Option<PoolUse>,
}

impl Health {
    pub(crate) fn new(backend: &dyn Backend, link: Link) -> Health {
        let condition = backend.condition();
        Health {
            realm: backend.realm().into(),
            contact: link.contact(),
            last_contact: link.last_answer.map(|last| Moment::now() - last),
            wakeups: condition.wakeups,
            pool: condition.pool,
        }
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
        }
    }

    /// Returns `true` if the last call to the backend was answered.
    ///
    /// ```
    /// let factory = contend::connect("memory://is-fine-doc")?;
    /// assert!(!factory.health().is_fine()); // not tried yet
    /// factory.ping(std::time::Duration::from_secs(1))?;
    /// assert!(factory.health().is_fine());
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn is_fine(&self) -> bool {
        matches!(self.contact, Contact::Fine)
    }

    /// Returns `true` if it [is fine](Health::is_fine) and the last answer is no older than `age`: for the readiness
    /// probe of a program that may be idle, which can `ping` otherwise.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// let factory = contend::connect("memory://is-fine-within-doc")?;
    /// let second = Duration::from_secs(1);
    /// let is_fine = factory.health().is_fine_within(10 * second);
    /// assert!(is_fine || factory.ping(second).is_ok());
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn is_fine_within(&self, age: Duration) -> bool {
        self.is_fine() && self.last_contact.is_some_and(|last| last <= age)
    }

    /// Returns one JSON object on one line: `realm`, `contact` (`"untried"`, `"fine"`, `"failing"`),
    /// `error`, `failing_ms`, `last_contact_ms` (how long ago), `wakeups` (`"untried"`, `"working"`,
    /// `"polling"`), `polling_because` and `pool` (`open`, `idle`, `size`, or null).
    ///
    /// ```
    /// let factory = contend::connect("memory://to-json-doc")?;
    /// let json = factory.health().to_json();
    /// assert!(json.starts_with(r#"{"realm":"memory://to-json-doc","contact":"untried""#));
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn to_json(&self) -> String {
        let (wakeups, why) = match &self.wakeups {
            Wakeups::Untried => ("untried", None),
            Wakeups::Working => ("working", None),
            Wakeups::Polling(why) => ("polling", Some(&**why)),
        };
        let (contact, error, lasting) = match &self.contact {
            Contact::Untried => ("untried", None, None),
            Contact::Fine => ("fine", None, None),
            Contact::Failing { error, lasting } => {
                ("failing", Some(error.to_string()), Some(*lasting))
            }
        };
        let pool = self.pool.map(|PoolUse { open, idle, size }| {
            format!(r#"{{"open":{open},"idle":{idle},"size":{size}}}"#)
        });
        let ms = |duration: Option<Duration>| or_null(duration.map(|it| it.as_millis()));
        let fields = [
            ("realm", string(&self.realm)),
            ("contact", string(contact)),
            ("error", or_null(error.map(|error| string(&error)))),
            ("failing_ms", ms(lasting)),
            ("last_contact_ms", ms(self.last_contact)),
            ("wakeups", string(wakeups)),
            ("polling_because", or_null(why.map(string))),
            ("pool", or_null(pool)),
        ];
        let fields = fields.map(|(name, value)| format!("\"{name}\":{value}"));
        format!("{{{}}}", fields.join(","))
    }
}
