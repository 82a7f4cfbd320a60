//! What the ZooKeeper tests share.

#![allow(dead_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use crate::conformance::{HANG, PATIENCE, name};
use contend::backend::{Attempt, Contender, Grant, OnRefusal, Purpose, RawContender};
use contend::zk::{Mode, Outcome, Reply, Request, SessionState, Stat};
use contend::{Error, ErrorKind, Factory, Lease, Moment, MutexContendService, Parker, zk};
use testbed::wait_until;

/// A deadline for calls in which nothing goes wrong.
pub fn soon() -> Moment {
    Moment::now() + Duration::from_secs(20)
}

/// How many requests the server has received; pings and questions like this one are among them.
pub fn packets(server: &testbed::ZooKeeperServer) -> u64 {
    let answer = server.four_letter("srvr").unwrap();
    let line = answer
        .lines()
        .find_map(|line| line.strip_prefix("Received: "));
    line.unwrap().trim().parse().unwrap()
}

pub fn wait_leads(service: &MutexContendService) {
    wait_until(PATIENCE, "it leads", || service.is_owner());
}

pub fn builder(address: impl ToString, timeout: Duration) -> zk::Builder {
    zk::Builder::new(address.to_string())
        .session_timeout(timeout)
        // A busy machine may take its time. A quarter of the session timeout stays the limit while
        // something rests on the session.
        .connect_timeout(Duration::from_secs(10))
}

pub fn factory(address: impl ToString, timeout: Duration) -> Factory {
    builder(address, timeout).build().unwrap()
}

pub fn session(address: impl ToString, timeout: Duration) -> zk::Session {
    let session = builder(address, timeout).session().unwrap();
    wait_for(&session, SessionState::Connected);
    session
}

/// # Panics
/// When the session is not in this state in time, or has come to an end that is another one.
#[track_caller]
pub fn wait_for(session: &zk::Session, state: SessionState) {
    let mut seen = session.state();
    let final_states = [SessionState::Expired, SessionState::Closed];
    wait_until(PATIENCE, &format!("the session is {state:?}"), || {
        seen = session.state();
        seen == state || final_states.contains(&seen)
    });
    assert_eq!(seen, state);
}

/// Who may do what with a node.
pub type Permissions = &'static [(i32, &'static str, &'static str)];
pub const OPEN: Permissions = &[(31, "world", "anyone")];
pub const CREATOR: Permissions = &[(31, "auth", "")];

/// The requests of the tests, without a chroot.
pub trait Verbs {
    fn outcome(&self, request: Request, by: Moment) -> Result<Outcome, Error>;

    fn done(&self, request: Request, by: Moment) -> Result<Reply, Error> {
        let what = format!("{request:?}");
        self.outcome(request, by)?.map_err(|code| code.error(&what))
    }

    fn create(
        &self,
        path: &str,
        data: &[u8],
        mode: Mode,
        by: Moment,
    ) -> Result<(String, Stat), Error> {
        self.create_for(OPEN, path, data, mode, by)
    }

    fn create_for(
        &self,
        who: Permissions,
        path: &str,
        data: &[u8],
        mode: Mode,
        by: Moment,
    ) -> Result<(String, Stat), Error> {
        let made = self.done(Request::create(path, data, mode, who), by)?;
        Ok((made.path, made.stat))
    }

    fn delete(&self, path: &str, by: Moment) -> Result<(), Error> {
        self.done(Request::Delete(path.into()), by).map(drop)
    }

    fn exists(&self, path: &str, by: Moment) -> Result<Option<Stat>, Error> {
        match self.outcome(Request::Exists(path.into()), by)? {
            Ok(reply) => Ok(Some(reply.stat)),
            Err(code) => match code.error(path) {
                error if error.kind() == ErrorKind::NotFound => Ok(None),
                error => Err(error),
            },
        }
    }

    fn get_data(&self, path: &str, by: Moment) -> Result<(Vec<u8>, Stat), Error> {
        let read = self.done(Request::Data(path.into()), by)?;
        Ok((read.data, read.stat))
    }

    fn get_children(&self, path: &str, by: Moment) -> Result<Vec<String>, Error> {
        let read = self.done(Request::Children(path.into()), by)?;
        let line = &read.line;
        Ok(line.members.iter().chain(&line.others).cloned().collect())
    }

    fn sync(&self, by: Moment) -> Result<(), Error> {
        self.done(Request::Sync, by).map(drop)
    }
}

impl Verbs for zk::Session {
    fn outcome(&self, request: Request, by: Moment) -> Result<Outcome, Error> {
        self.ask(request, by)
    }
}

/// The names of the contenders' nodes. Asked for again where the connection fails: no answer is not an
/// empty line.
pub fn line(session: &zk::Session, mutex: &str) -> Vec<String> {
    let mut names = Vec::new();
    wait_until(PATIENCE, "the line can be read", || {
        match session.get_children(&format!("/simba/{mutex}"), soon()) {
            Ok(known) => names = known,
            Err(error) => return error.kind() == ErrorKind::NotFound,
        }
        true
    });
    names
}

pub fn contender(
    factory: &Factory,
    mutex: &str,
    id: &str,
    lease: Lease,
    purpose: Purpose,
) -> Box<dyn RawContender> {
    seat(factory, mutex, id, lease, purpose).0
}

pub fn long_seat(factory: &Factory, mutex: &str, id: &str) -> Box<dyn RawContender> {
    contender(factory, mutex, id, factory.lease(), Purpose::Lead)
}

/// A seat whose wake-ups are seen.
pub fn woken_seat(factory: &Factory, mutex: &str, id: &str) -> (Box<dyn RawContender>, Parker) {
    seat(factory, mutex, id, factory.lease(), Purpose::Lead)
}

fn seat(
    factory: &Factory,
    mutex: &str,
    id: &str,
    lease: Lease,
    purpose: Purpose,
) -> (Box<dyn RawContender>, Parker) {
    let place = Contender {
        mutex: mutex.into(),
        id: id.into(),
        lease,
        purpose,
    };
    let parker = Parker::new();
    let backend = factory.backend().unwrap();
    let raw = backend.contender(&place, &parker.unparker()).unwrap();
    (raw, parker)
}

#[track_caller]
pub fn granted(contender: &mut dyn RawContender, entry: OnRefusal) -> Grant {
    match contender.acquire(entry, soon()).unwrap() {
        Attempt::Granted(grant) => grant,
        Attempt::Refused(refusal) => panic!("{refusal:?}"),
    }
}

#[track_caller]
pub fn refused(contender: &mut dyn RawContender, entry: OnRefusal) -> contend::MutexOwner {
    match contender.acquire(entry, soon()).unwrap() {
        Attempt::Refused(refusal) => refusal.owner,
        Attempt::Granted(grant) => panic!("{grant:?}"),
    }
}

/// Contenders for one mutex, each with a session of its own, and a witness that looks at their belief
/// all the time.
pub struct Rivals {
    pub services: Vec<Arc<MutexContendService>>,
    over: Arc<AtomicBool>,
    witness: Option<JoinHandle<usize>>,
}

impl Rivals {
    /// Starts one after the other: the first leads, the others stand in line.
    pub fn start(factories: &[Factory], fact: &str) -> Rivals {
        let mutex = name(fact);
        let services: Vec<_> = factories
            .iter()
            .enumerate()
            .map(|(number, factory)| {
                let service = factory
                    .contend(&mutex)
                    .id(format!("rival-{number}"))
                    .build()
                    .unwrap();
                Arc::new(service)
            })
            .collect();
        for (number, service) in services.iter().enumerate() {
            service.start().unwrap();
            wait_until(PATIENCE, "it leads or stands in line", || {
                service.is_owner() || (number > 0 && service.state().after().has_owner())
            });
        }
        Rivals::watch(services)
    }

    /// Watches services that contend for one mutex.
    pub fn watch(services: Vec<Arc<MutexContendService>>) -> Rivals {
        let over = Arc::new(AtomicBool::new(false));
        let witness = std::thread::spawn({
            let (services, over) = (services.clone(), Arc::clone(&over));
            move || witness(&services, &over)
        });
        Rivals {
            services,
            over,
            witness: Some(witness),
        }
    }

    pub fn leader(&self) -> Option<usize> {
        self.services.iter().position(|service| service.is_owner())
    }

    /// Waits for a leader among those that `count`; returns it and how long it took.
    pub fn wait_for_leader(&self, counts: impl Fn(usize) -> bool) -> (usize, Duration) {
        let began = Instant::now();
        let mut leader = None;
        wait_until(PATIENCE, "one leads", || {
            leader = self.leader().filter(|leader| counts(*leader));
            leader.is_some()
        });
        (leader.unwrap(), began.elapsed())
    }

    /// Ends the test: no two ever believed at once.
    pub fn judge(mut self) {
        self.over.store(true, Ordering::SeqCst);
        let looks = self.witness.take().unwrap().join().expect("two leaders");
        assert!(looks > 20, "the witness looked away: {looks} looks");
    }
}

/// Looks again and again. Two believed at the same instant if one did before and after, with the same
/// fence, while the other did in between.
fn witness(services: &[Arc<MutexContendService>], over: &AtomicBool) -> usize {
    let mut looks = 0;
    let mut highest = 0;
    while !over.load(Ordering::SeqCst) {
        for (number, service) in services.iter().enumerate() {
            let Some(fence) = service.fence() else {
                continue;
            };
            assert!(fence >= highest, "fence {fence} after {highest}");
            highest = fence;
            for (other, rival) in services.iter().enumerate().filter(|(n, _)| *n != number) {
                let also = rival.fence();
                assert!(
                    also.is_none() || service.fence() != Some(fence),
                    "{number} leads with {fence} while {other} leads with {also:?}"
                );
            }
        }
        looks += 1;
        std::thread::sleep(Duration::from_millis(1));
    }
    looks
}
