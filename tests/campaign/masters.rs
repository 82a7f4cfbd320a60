//! Who is the master, looked at all the time: when another server takes its place, only the fence protects.
//!
//! Replicas follow asynchronously, so what the old master granted may be unknown to the new one, and as long as
//! both call themselves master both grant. It does not matter who asked for the change: on a busy machine a pause
//! of half a second is enough for one that nobody asked for. What matters is when it was, and for that the servers
//! are asked, not the sentinels or the rest of the cluster, which learn of it later.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use testbed::RedisServer;

use crate::SetOnDrop;
use crate::history::{Journal, Nanos, Record, now};

/// The kind of fault that a change of masters is in the records.
pub const MASTER_CHANGE: &str = "master-change";

/// The time between two looks: short beside a ttl, which is how long an excuse lasts anyway.
const PAUSE: Duration = Duration::from_millis(50);

/// How long a server that stands still holds a look up.
const PATIENCE: Duration = Duration::from_millis(100);

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
                // It keeps its place: back on its data before anybody took it, it has lost nothing.
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

/// Looks at servers of which others may take the place of a master.
#[derive(Debug)]
pub struct Watch<'a> {
    servers: &'a [RedisServer],
    journal: &'a Journal,
    over: AtomicBool,
    /// When the last whole look began.
    looked: AtomicU64,
}

impl<'a> Watch<'a> {
    /// Watches `servers`, of which a campaign may have none.
    pub fn new(servers: &'a [RedisServer], journal: &'a Journal) -> Watch<'a> {
        Watch {
            servers,
            journal,
            over: AtomicBool::new(false),
            looked: AtomicU64::new(0),
        }
    }

    /// Does `work`, looks meanwhile, and writes each change of masters down once it is over. At rest `places` of the
    /// servers are masters, and the others follow them.
    pub fn during<T>(&self, places: usize, work: impl FnOnce() -> T) -> T {
        thread::scope(|scope| {
            scope.spawn(|| self.run(places));
            let _over = SetOnDrop(&self.over);
            work()
        })
    }

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
            self.looked.store(began, Ordering::SeqCst);
            thread::sleep(PAUSE);
        }
        self.write(changes.and_then(|changes| changes.end(now())));
    }

    /// Waits until a look that began after this call is over.
    #[cfg(test)]
    fn wait_look(&self) {
        let from = now();
        testbed::wait_until(Duration::from_secs(60), "a look is over", || {
            self.looked.load(Ordering::SeqCst) > from
        });
    }

    fn write(&self, change: Option<(Nanos, Nanos)>) {
        if let Some((begin, end)) = change {
            self.journal.write(&Record::Fault {
                kind: MASTER_CHANGE.to_owned(),
                fence_only: true,
                mutex: None,
                begin,
                end,
            });
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
    use std::time::Instant;

    use testbed::{RedisSentinel, TempDir, wait_until};

    use super::*;
    use crate::history;
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
    fn a_master_that_is_silent_for_a_while_or_comes_back_before_it_is_replaced_has_lost_nothing() {
        assert_eq!(
            changes(&[[Silent, Replica, Replica], [Master, Replica, Replica]]),
            []
        );
        let killed = [
            [Gone, Replica, Replica],
            [Silent, Silent, Replica],
            [Master, Replica, Replica],
        ];
        assert_eq!(changes(&killed), []);
        // Nor has a replica that is killed.
        assert_eq!(
            changes(&[[Master, Gone, Replica], [Master, Replica, Replica]]),
            []
        );
    }

    #[test]
    fn a_change_begins_when_the_new_master_was_surely_none_and_ends_when_the_old_one_surely_is_none()
     {
        let paused = [
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
        ];
        assert_eq!(changes(&paused), [(20, 75)]);
    }

    #[test]
    fn a_change_that_is_not_over_lasts_to_the_end() {
        let open = [[Silent, Master, Replica], [Master, Master, Replica]];
        assert_eq!(changes(&open), [(0, 30)]);
    }

    #[test]
    fn a_master_that_was_replaced_while_it_was_dead_and_returns_as_one_is_a_change_of_its_own() {
        let killed = [
            [Gone, Replica, Replica],
            [Gone, Master, Replica],
            [Gone, Master, Replica],
            [Master, Master, Replica],
            [Master, Master, Replica],
            [Replica, Master, Replica],
        ];
        assert_eq!(changes(&killed), [(10, 25), (30, 65)]);
    }

    #[test]
    fn it_begins_at_rest() {
        let begin = |roles: &[Role]| Changes::new(1, 0, roles).is_some();
        assert!(begin(&[Replica, Master, Replica]));
        assert!(!begin(&[Master, Master, Replica]));
        assert!(!begin(&[Replica, Replica, Replica]));
        assert!(!begin(&[Master, Silent, Replica]));
        assert!(!begin(&[Master, Gone, Replica]));
    }

    /// Section 3, "what only the fence protects": the time of an asynchronous failover, no more and no less.
    #[test]
    fn a_failover_that_the_nemesis_did_not_ask_for_is_written_down_with_its_time() {
        let redis = RedisSentinel::start();
        let folder = TempDir::new();
        let journal = Journal::open(&folder.path().join("nemesis.log")).unwrap();
        let watch = Watch::new(redis.servers(), &journal);
        let old = redis.master();
        let is = |server: usize, role: &str| {
            let said = redis.server(server).role(Duration::from_secs(5));
            said.as_deref() == Some(role)
        };
        let others: Vec<usize> = (0..3).filter(|server| *server != old).collect();
        let (before, promoted, last_of_old, follows) = watch.during(1, || {
            // One look finds them at rest; another one, which began after this, sees nothing yet.
            watch.wait_look();
            let before = now();
            watch.wait_look();
            let mut promoted = 0;
            let mut asked = None;
            let patience = Duration::from_secs(60);
            wait_until(patience, "another server is a master", || {
                // On a busy machine a sentinel gives an attempt up; asked too soon, it makes two changes of one.
                let given_up = |asked: Instant| asked.elapsed() > Duration::from_secs(15);
                if asked.is_none_or(given_up) {
                    redis.sentinels()[0].cli(&["SENTINEL", "FAILOVER", "mymaster"]);
                    asked = Some(Instant::now());
                }
                let is_promoted = others.iter().any(|server| is(*server, "master"));
                promoted = now();
                is_promoted
            });
            let mut last_of_old = before;
            wait_until(patience, "the old master follows", || {
                let at = now();
                if is(old, "master") {
                    last_of_old = at;
                }
                is(old, "slave")
            });
            let follows = now();
            watch.wait_look();
            (before, promoted, last_of_old, follows)
        });
        let changes: Vec<Record> = history::read(folder.path()).unwrap();
        let [
            Record::Fault {
                kind,
                fence_only: true,
                mutex: None,
                begin,
                end,
            },
        ] = changes.as_slice()
        else {
            panic!("{changes:?}");
        };
        assert_eq!(kind, MASTER_CHANGE);
        assert!(
            (before..promoted).contains(begin),
            "asked for at {before}, seen at {promoted}, said to have begun at {begin}"
        );
        // A look of its own may be the first to see it.
        assert!(
            *end > last_of_old && *end < now(),
            "the old master was one at {last_of_old} and followed at {follows}, said to have ended at {end}"
        );
    }
}
