//! Who is the master, looked at all the time: when another server takes its place, only the fence protects.
//!
//! Replicas follow asynchronously, so what the old master granted may be unknown to the new one, and as long as
//! both call themselves master both grant. A change need not be asked for: on a busy machine a pause of half a second
//! is enough for one. What matters is when it was, and for that the servers are asked, not the sentinels or the rest of
//! the cluster, which learn of it later.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use testbed::RedisServer;

use crate::SetOnDrop;
use crate::history::{ALL, Journal, Kind, Nanos, Record, nanos, now};
use crate::stage::Stage;

/// The kind of fault that a change of masters is in the records.
pub const MASTER_CHANGE: &str = "MasterChange";

/// The time between two looks: short beside a ttl, which is how long an excuse lasts anyway.
const PAUSE: Duration = Duration::from_millis(50);

/// How long a server that stands still holds a look up.
const PATIENCE: Duration = Duration::from_millis(100);

/// A server that takes so long to answer may have cost a contender a call: half of the limit of a request.
const SLOW: Duration = Duration::from_millis(150);

/// What a server said of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Master,
    Replica,
    /// Its process has ended.
    Gone,
    /// It is paused, starting, or has no processor.
    Silent,
}

/// What is known of one server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Known {
    /// It was the last to be a master in its place.
    is_master: bool,
    /// Its process has not ended, as far as we know.
    is_alive: bool,
    /// The last time at which it surely was no master, or was one already.
    sure_at: Nanos,
}

/// Finds the times at which a grant of one master may be unknown to another: facts in, times out.
#[derive(Debug)]
struct Changes {
    servers: Vec<Known>,
    /// How many masters there are at rest.
    places: usize,
    /// When the change that is under way began.
    since: Option<Nanos>,
}

impl Changes {
    /// Begins with servers at rest; `None` if they are not.
    fn new(places: usize, at: Nanos, roles: &[Role]) -> Option<Changes> {
        let masters = roles.iter().filter(|role| **role == Role::Master).count();
        let replicas = roles.iter().filter(|role| **role == Role::Replica).count();
        let at_rest = masters == places && masters + replicas == roles.len();
        let servers = roles.iter().map(|role| Known {
            is_master: *role == Role::Master,
            is_alive: true,
            sure_at: at,
        });
        at_rest.then(|| Changes {
            servers: servers.collect(),
            places,
            since: None,
        })
    }

    /// Takes in what the servers said between `began` and `ended`. Returns the change that is over now: from
    /// the last time at which the new master surely was none to the first at which there was surely no other.
    fn look(&mut self, began: Nanos, ended: Nanos, roles: &[Role]) -> Option<(Nanos, Nanos)> {
        let mut promoted = false;
        for (known, role) in self.servers.iter_mut().zip(roles) {
            match role {
                Role::Master => {
                    if !known.is_master {
                        promoted = true;
                        let since = self.since.unwrap_or(Nanos::MAX);
                        self.since = Some(since.min(known.sure_at));
                    }
                    *known = Known {
                        is_master: true,
                        is_alive: true,
                        sure_at: began,
                    };
                }
                Role::Replica => {
                    *known = Known {
                        is_master: false,
                        is_alive: true,
                        sure_at: began,
                    };
                }
                // It keeps its place: back on its data before it was replaced, it has lost nothing.
                Role::Gone => {
                    known.is_alive = false;
                    known.sure_at = began;
                }
                // It may be what it was, and may be what it is seen to be later.
                Role::Silent => {}
            }
        }
        if promoted {
            for known in self.servers.iter_mut().filter(|known| !known.is_alive) {
                known.is_master = false;
            }
        }
        let grants = |known: &&Known| known.is_master && known.is_alive;
        if self.servers.iter().filter(grants).count() > self.places {
            return None;
        }
        self.since.take().map(|since| (since, ended))
    }

    /// The change that is not over at the end.
    fn end(self, at: Nanos) -> Option<(Nanos, Nanos)> {
        self.since.map(|since| (since, at))
    }
}

/// Looks at servers of which others may take the place of a master, and whether the server answers.
pub struct Watch<'a> {
    stage: &'a Stage,
    servers: &'a [RedisServer],
    journal: &'a Journal,
    over: AtomicBool,
}

impl<'a> Watch<'a> {
    pub fn new(stage: &'a Stage, journal: &'a Journal) -> Watch<'a> {
        Watch {
            stage,
            servers: stage.replicated().0,
            journal,
            over: AtomicBool::new(false),
        }
    }

    /// Does `work`, looks meanwhile, and writes each change of masters down once it is over.
    pub fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        thread::scope(|scope| {
            scope.spawn(|| self.run(self.stage.replicated().1));
            scope.spawn(|| self.ping());
            let _over = SetOnDrop(&self.over);
            work()
        })
    }

    /// Writes down when the server stood still by itself, as on a busy disk: a run may not be on record then.
    fn ping(&self) {
        while !self.over.load(Ordering::SeqCst) {
            let began = now();
            self.stage.ping(Duration::from_secs(1));
            let ended = now();
            if ended - began > nanos(SLOW) {
                let slow = Record::new(Kind::Fault, "Slow", ALL);
                self.journal.write(&slow.at(began).until(ended));
            }
            thread::sleep(PAUSE);
        }
    }

    /// At rest `places` of the servers are masters, and the others follow them.
    fn run(&self, places: usize) {
        let mut before = Vec::new();
        let mut changes = None;
        while !self.servers.is_empty() && !self.over.load(Ordering::SeqCst) {
            let began = now();
            let roles = roles(self.servers);
            if roles != before {
                self.journal.remark(&format!("masters: {roles:?}"));
            }
            match &mut changes {
                None => changes = Changes::new(places, began, &roles),
                Some(changes) => self.write(changes.look(began, now(), &roles)),
            }
            before = roles;
            thread::sleep(PAUSE);
        }
        self.write(changes.and_then(|changes| changes.end(now())));
    }

    fn write(&self, change: Option<(Nanos, Nanos)>) {
        if let Some((begin, end)) = change {
            let change = Record::new(Kind::FenceOnlyFault, MASTER_CHANGE, ALL);
            self.journal.write(&change.at(begin).until(end));
        }
    }
}

fn roles(servers: &[RedisServer]) -> Vec<Role> {
    let role = |server: &RedisServer| match server.role(PATIENCE).as_deref() {
        Some("master") => Role::Master,
        Some("slave") => Role::Replica,
        _ if server.is_running() => Role::Silent,
        _ => Role::Gone,
    };
    servers.iter().map(role).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use Role::{Gone, Master, Replica, Silent};

    /// What three servers with one master said at 10, 20, 30 and so on, each time for 5; and the changes in it.
    fn changes(looks: &[[Role; 3]]) -> Vec<(Nanos, Nanos)> {
        let mut changes = Changes::new(1, 0, &[Master, Replica, Replica]).unwrap();
        let mut found = Vec::new();
        let mut at = 0;
        for roles in looks {
            at += 10;
            found.extend(changes.look(at, at + 5, roles));
        }
        found.extend(changes.end(at + 10));
        found
    }

    #[test]
    fn changes_of_masters_are_found() {
        let cases: [(&[[Role; 3]], &[(Nanos, Nanos)]); 6] = [
            // A master that is silent for a while has lost nothing.
            (
                &[[Silent, Replica, Replica], [Master, Replica, Replica]],
                &[],
            ),
            // Nor has one that comes back on its data before it is replaced.
            (
                &[
                    [Gone, Replica, Replica],
                    [Silent, Silent, Replica],
                    [Master, Replica, Replica],
                ],
                &[],
            ),
            // Nor has a replica that is killed.
            (&[[Master, Gone, Replica], [Master, Replica, Replica]], &[]),
            // A change begins when the new master was surely none, and ends when the old one surely is none.
            (
                &[
                    [Master, Replica, Replica],
                    [Silent, Replica, Replica],
                    // Not seen for a while, it may have become the master just after it was seen last.
                    [Silent, Silent, Replica],
                    [Silent, Master, Replica],
                    // The old one comes back, and does not know yet; nor does its silence say that it does.
                    [Master, Master, Replica],
                    [Silent, Master, Replica],
                    [Replica, Master, Replica],
                    [Replica, Master, Replica],
                ],
                &[(20, 75)],
            ),
            // A change that is not over lasts to the end.
            (
                &[[Silent, Master, Replica], [Master, Master, Replica]],
                &[(0, 30)],
            ),
            // A master that was replaced while it was dead and returns as one is a change of its own.
            (
                &[
                    [Gone, Replica, Replica],
                    [Gone, Master, Replica],
                    [Gone, Master, Replica],
                    [Master, Master, Replica],
                    [Master, Master, Replica],
                    [Replica, Master, Replica],
                ],
                &[(10, 25), (30, 65)],
            ),
        ];
        for (looks, found) in cases {
            assert_eq!(changes(looks), found, "{looks:?}");
        }
    }

    #[test]
    fn watch_begins_at_rest() {
        let begin = |roles: &[Role]| Changes::new(1, 0, roles).is_some();
        assert!(begin(&[Replica, Master, Replica]));
        assert!(!begin(&[Master, Master, Replica]));
        assert!(!begin(&[Replica, Replica, Replica]));
        assert!(!begin(&[Master, Silent, Replica]));
        assert!(!begin(&[Master, Gone, Replica]));
    }
}
