//! What the builders of all contenders share: for which mutex, under which id, with which lease.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Contender, Purpose};
use crate::error::Result;
use crate::factory;
use crate::id::{ContenderIdGenerator, LiveId};
use crate::lease::Lease;
use crate::machine::period::ContendPeriod;
use crate::name::{check_id, check_mutex};
use crate::parker::Parker;

/// What a builder was given, not validated yet.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) factory: Result<Arc<factory::Core>>,
    pub(crate) mutex: Arc<str>,
    pub(crate) id: Option<Arc<str>>,
    pub(crate) ids: ContenderIdGenerator,
    pub(crate) ttl: Duration,
    pub(crate) transition: Duration,
    pub(crate) renew_after: Option<Duration>,
    pub(crate) jitter: Option<Duration>,
}

/// The same, validated; the id is this contender's alone for as long as it keeps the [`LiveId`].
pub(crate) struct Validated {
    pub(crate) factory: Arc<factory::Core>,
    pub(crate) contender: Contender,
    pub(crate) period: ContendPeriod,
    pub(crate) live: LiveId,
}

impl Settings {
    pub(crate) fn new(factory: Result<Arc<factory::Core>>, mutex: Arc<str>) -> Settings {
        let lease = factory.as_ref().map(|it| it.lease).unwrap_or_default();
        Settings {
            factory,
            mutex,
            id: None,
            ids: ContenderIdGenerator::default(),
            ttl: lease.ttl(),
            transition: lease.transition(),
            renew_after: None,
            jitter: None,
        }
    }

    pub(crate) fn validate(self, purpose: Purpose) -> Result<Validated> {
        let factory = self.factory?;
        check_mutex(&self.mutex)?;
        let id = self.id.unwrap_or_else(|| Arc::from(self.ids.generate()));
        check_id(&id)?;
        let lease = Lease::new(self.ttl, self.transition)?;
        let mut period = ContendPeriod::new(lease);
        if let Some(renew_after) = self.renew_after {
            period = period.renew_after(renew_after)?;
        }
        if let Some(jitter) = self.jitter {
            period = period.jitter(jitter)?;
        }
        let contender = Contender {
            mutex: self.mutex,
            id,
            lease,
            purpose,
        };
        let live = LiveId::new(&factory.registry, &contender.mutex, &contender.id)?;
        // What this backend cannot keep is refused now, not at the first attempt. The id is taken first: dropping
        // this contender withdraws its id, which must not be that of a live one.
        factory
            .backend
            .contender(&contender, &Parker::new().unparker())?;
        Ok(Validated {
            factory,
            contender,
            period,
            live,
        })
    }
}

/// The setters of a builder whose field `settings`, or the one named, is a [`Settings`].
macro_rules! contender_setters {
    () => {
        contender_setters!(settings);
    };
    ($($settings:ident).+) => {
        /// Sets the id to contend under. Defaults to a generated one. No other contender of the mutex, in
        /// any process, may use it.
        ///
        /// ```
        /// let factory = contend::connect("memory://id-doc")?;
        /// let guard = factory.locker("reports").id("host-7/importer").build()?.lock()?;
        /// assert_eq!(factory.owner("reports")?.owner_id(), "host-7/importer");
        /// # drop(guard);
        /// # Ok::<(), contend::Error>(())
        /// ```
        pub fn id(mut self, id: impl AsRef<str>) -> Self {
            self.$($settings).+.id = Some(id.as_ref().into());
            self
        }

        /// Sets how the id is generated. Defaults to
        /// [`ContenderIdGenerator::Host`](crate::ContenderIdGenerator::Host).
        ///
        /// ```
        /// use contend::ContenderIdGenerator;
        ///
        /// let factory = contend::connect("memory://id-generator-doc")?;
        /// let builder = factory.locker("reports").id_generator(ContenderIdGenerator::Uuid);
        /// assert_eq!(builder.build()?.id().len(), 32);
        /// # Ok::<(), contend::Error>(())
        /// ```
        pub fn id_generator(mut self, ids: $crate::ContenderIdGenerator) -> Self {
            self.$($settings).+.ids = ids;
            self
        }

        /// Sets how long an owner may believe that it owns without a renewal. Defaults to that of the
        /// factory, which defaults to 10 s.
        ///
        /// ```
        /// use std::time::Duration;
        ///
        /// let factory = contend::connect("memory://ttl-doc")?;
        /// let guard = factory.locker("reports").ttl(Duration::from_secs(30)).build()?.lock()?;
        /// assert!(guard.valid_for() > Duration::from_secs(20));
        /// # Ok::<(), contend::Error>(())
        /// ```
        pub fn ttl(mut self, ttl: std::time::Duration) -> Self {
            self.$($settings).+.ttl = ttl;
            self
        }

        /// Sets how long after the ttl no other contender can own: the time to wind down work. Defaults to
        /// that of the factory, which defaults to 6 s.
        ///
        /// ```
        /// use std::time::Duration;
        ///
        /// let factory = contend::connect("memory://transition-doc")?;
        /// let locker = factory.locker("reports").transition(Duration::from_secs(1)).build()?;
        /// let guard = locker.lock()?;
        /// let owner = factory.owner("reports")?;
        /// assert_eq!(owner.transition_at() - owner.ttl_at(), 1_000);
        /// # drop(guard);
        /// # Ok::<(), contend::Error>(())
        /// ```
        pub fn transition(mut self, transition: std::time::Duration) -> Self {
            self.$($settings).+.transition = transition;
            self
        }

        /// Sets how long after a grant the lease is renewed. Defaults to a third of the ttl.
        ///
        /// ```
        /// use std::time::Duration;
        ///
        /// let factory = contend::connect("memory://renew-after-doc")?;
        /// let locker = factory.locker("reports").renew_after(Duration::from_secs(2)).build()?;
        /// let late = factory.locker("reports").renew_after(Duration::from_secs(10)).build();
        /// assert!(late.is_err()); // the ttl of 10 s would have ended
        /// # drop(locker);
        /// # Ok::<(), contend::Error>(())
        /// ```
        pub fn renew_after(mut self, renew_after: std::time::Duration) -> Self {
            self.$($settings).+.renew_after = Some(renew_after);
            self
        }

        /// Sets the time over which contenders spread their attempts when a lease has ended. Defaults to
        /// a twentieth of the ttl, at most 50 ms.
        ///
        /// ```
        /// use std::time::Duration;
        ///
        /// let factory = contend::connect("memory://jitter-doc")?;
        /// let locker = factory.locker("reports").jitter(Duration::from_millis(500)).build()?;
        /// # drop(locker);
        /// # Ok::<(), contend::Error>(())
        /// ```
        pub fn jitter(mut self, jitter: std::time::Duration) -> Self {
            self.$($settings).+.jitter = Some(jitter);
            self
        }
    };
}
pub(crate) use contender_setters;
