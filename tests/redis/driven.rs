//! A contender driven by hand, and other things that several modules here need.

use std::time::Duration;

use contend::backend::{Attempt, Contender, Grant, OnRefusal, Purpose, RawContender, Refusal};
use contend::redis::Builder;
use contend::{Factory, Lease, Moment, Parker, Unparked};
use testbed::RedisServer;

pub const PATIENCE: Duration = Duration::from_secs(40);
pub const HANG: Duration = Duration::from_secs(170);

pub const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub fn soon() -> Moment {
    Moment::now() + Duration::from_secs(20)
}

/// A number from the environment: small by default, large for a long run.
pub fn from_env(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// A factory with the default lease.
pub fn factory(address: impl ToString) -> Factory {
    Builder::new(address.to_string()).build().unwrap()
}

/// How many connections are subscribed to a channel.
pub fn listeners(server: &RedisServer, channel: &str) -> u64 {
    let count = server.cli(&["PUBSUB", "NUMSUB", channel]);
    count.lines().last().unwrap().parse().unwrap()
}

/// How often the server was sent a command, or all commands whose names begin so.
pub fn calls(server: &RedisServer, command: &str) -> u64 {
    let stats = server.cli(&["INFO", "commandstats"]);
    let lines = stats
        .lines()
        .filter_map(|line| line.strip_prefix("cmdstat_")?.strip_prefix(command));
    let counts = lines.filter_map(|line| line.split(['=', ',']).nth(1));
    counts.map(|count| count.parse::<u64>().unwrap()).sum()
}

/// A contender and the parker that the backend unparks for it.
pub struct Driven {
    pub raw: Box<dyn RawContender>,
    pub parker: Parker,
}

impl Driven {
    pub fn at(factory: &Factory, mutex: &str, id: &str) -> Driven {
        Driven::with(factory, mutex, id, Lease::default())
    }

    pub fn with(factory: &Factory, mutex: &str, id: &str, lease: Lease) -> Driven {
        let contender = Contender {
            mutex: mutex.into(),
            id: id.into(),
            lease,
            purpose: Purpose::Lock,
        };
        let (backend, parker) = (factory.backend().unwrap(), Parker::new());
        Driven {
            raw: backend.contender(&contender, &parker.unparker()).unwrap(),
            parker,
        }
    }

    pub fn attempt(&mut self, on_refusal: OnRefusal) -> Attempt {
        self.raw.acquire(on_refusal, soon()).unwrap()
    }

    pub fn own(&mut self) -> u64 {
        match self.attempt(OnRefusal::Leave) {
            Attempt::Granted(grant) => grant.owner.fence(),
            Attempt::Refused(refusal) => panic!("refused: {refusal:?}"),
        }
    }

    pub fn refused(&mut self, on_refusal: OnRefusal) -> Refusal {
        match self.attempt(on_refusal) {
            Attempt::Refused(refusal) => refusal,
            Attempt::Granted(grant) => panic!("granted: {grant:?}"),
        }
    }

    /// Is refused, and waits.
    pub fn queue(&mut self) -> Refusal {
        self.refused(OnRefusal::Enqueue)
    }

    /// Waits to be woken, and owns.
    pub fn take_turn(&mut self) -> Grant {
        assert_eq!(self.parker.park(Moment::now() + PATIENCE), Unparked::Wake);
        match self.attempt(OnRefusal::Enqueue) {
            Attempt::Granted(grant) => grant,
            Attempt::Refused(refusal) => panic!("woken, and refused: {refusal:?}"),
        }
    }

    /// As a worker does: tries, waits until it is unparked or the refusal says so, tries again.
    pub fn owns_within(&mut self, patience: Duration) -> Grant {
        let end = Moment::now() + patience;
        loop {
            match self.attempt(OnRefusal::Enqueue) {
                Attempt::Granted(grant) => return grant,
                Attempt::Refused(refusal) => {
                    assert!(!end.remaining().is_zero(), "not within {patience:?}");
                    self.parker.park(Moment::now() + refusal.retry_in);
                }
            }
        }
    }

    pub fn release(&mut self, fence: u64) {
        assert!(self.raw.release(fence, soon()).unwrap());
    }
}

/// Subscribes as an observer of `mutex` does, and returns why that fails.
pub fn subscribe(factory: &Factory, mutex: &str, by: Moment) -> contend::Result<()> {
    let unparker = Parker::new().unparker();
    let observer = factory.backend()?.observer(&mutex.into(), &unparker);
    observer?.observe(by).map(drop)
}
