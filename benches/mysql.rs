//! MariaDB, beside *bare*: the very same statements (`sql/`), in the same order, on plain connections
//! of the driver; and beside *floor*: two plain conditional UPDATEs by key.
#![allow(missing_docs)]

mod common;

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use common::eight::{Cycle, contended_8, lockers};
use common::hand_off::{Lockers, Services, Waiter, asleep};
use common::{beside, in_turns, timed};
use contend::backend::{Attempt, Contender, OnRefusal, Purpose, Renewal};
use contend::{Factory, Lease, Moment, Parker};
use criterion::Criterion;
use mysql::consts::CapabilityFlags;
use mysql::prelude::Queryable;
use mysql::{Conn, Opts, OptsBuilder, Params, params};
use testbed::MariaDbServer;

static SERVER: LazyLock<MariaDbServer> = LazyLock::new(|| {
    let server = MariaDbServer::start();
    server.create_database("bench");
    plain(&server).query_drop(contend::mysql::INIT_SQL).unwrap();
    server
});

fn main() {
    let mut criterion = common::criterion();
    lock_cycle(&mut criterion);
    renew(&mut criterion);
    hand_off(&mut criterion);
    contended(&mut criterion);
    criterion.final_summary();
    SERVER.kill();
}

fn lock_cycle(criterion: &mut Criterion) {
    let sides = ["bare", "contend", "floor"];
    beside(criterion, "mysql", "lock_cycle", sides, |budget| {
        let mut bare = Bare::at("bare", "0:1@127.0.0.1");
        let mut floor = Bare::at("floor", "0:1@127.0.0.1");
        let locker = factory().locker("ours").build().unwrap();
        in_turns(
            budget,
            10,
            [
                &mut || timed(|| bare.cycle()),
                &mut || timed(|| drop(locker.lock().unwrap())),
                &mut || timed(|| floor.floor_cycle()),
            ],
        )
    });
}

fn renew(criterion: &mut Criterion) {
    beside(criterion, "mysql", "renew", ["bare", "contend"], |budget| {
        let mut bare = Bare::at("bare", "a");
        let fence_of_bare = bare.acquire(NO_TOKEN).unwrap();
        let place = Contender {
            mutex: "renewed".into(),
            id: "a".into(),
            lease: Lease::default(),
            purpose: Purpose::Lead,
        };
        let factory = factory();
        let mut contender = factory
            .backend()
            .unwrap()
            .contender(&place, &Parker::new().unparker())
            .unwrap();
        let Attempt::Granted(grant) = contender.acquire(OnRefusal::Leave, soon()).unwrap() else {
            panic!("nobody else is there");
        };
        let fence = grant.owner.fence();
        let tapes = in_turns(
            budget,
            10,
            [&mut || timed(|| bare.renew(fence_of_bare)), &mut || {
                timed(|| {
                    let renewal = contender.renew(fence, soon()).unwrap();
                    assert!(matches!(renewal, Renewal::Renewed(_)));
                })
            }],
        );
        bare.release(fence_of_bare);
        contender.release(fence, soon()).unwrap();
        tapes
    });
}

/// Between two factories, which are two processes to the server: release, KILL, the waiter's statement ends,
/// acquire.
fn hand_off(criterion: &mut Criterion) {
    let sides = ["bare", "contend", "locker"];
    beside(criterion, "mysql", "handoff", sides, |budget| {
        let (from, to) = (factory(), factory());
        let mut bare = BareHandOff::new("bare-handoff");
        let mut services = Services::between([&from, &to], "services");
        let mut lockers = Lockers::between([&from, &to], "lockers");
        in_turns(
            budget,
            1,
            [
                &mut || bare.hand_off(),
                &mut || services.hand_off(),
                // Its waiter enters the server's queue within milliseconds.
                &mut || lockers.hand_off(|| std::thread::sleep(Duration::from_millis(5))),
            ],
        )
    });
}

/// *bare* is one contender that nobody disturbs, and that hands over to nobody.
fn contended(criterion: &mut Criterion) {
    let sides = ["bare", "contend"];
    beside(criterion, "mysql", "contended_8", sides, |budget| {
        let alone = |mutex: &str, _| -> Cycle {
            let mut bare = Bare::at(mutex, "a");
            Box::new(move || bare.cycle())
        };
        let ours = lockers(factory());
        contended_8("mysql", budget, [(1, &alone), (8, &ours)])
    });
}

fn factory() -> Factory {
    contend::connect(&SERVER.url("bench")).unwrap()
}

fn soon() -> Moment {
    Moment::now() + Duration::from_secs(10)
}

/// The token of one that does not wait, and that of the bare waiter.
const NO_TOKEN: &str = "0";
const TOKEN: &str = "123456789012345678";
const PROCESS: &str = "123456789012";

/// The statements as they are sent, on a plain connection.
struct Bare {
    conn: Conn,
    acquire: String,
    renew: String,
    release: String,
    mutex: String,
    id: String,
}

impl Bare {
    fn at(mutex: &str, id: &str) -> Bare {
        let mut conn = plain(&SERVER);
        // Its row, as ours makes it on first use.
        let insert = statement(include_str!("../sql/mutex-insert.sql"));
        let _exists_already = conn.exec_drop(insert, params! { "mutex" => mutex });
        Bare {
            conn,
            acquire: statement(include_str!("../sql/mutex-acquire.sql")),
            renew: statement(include_str!("../sql/mutex-renew.sql")),
            release: statement(include_str!("../sql/mutex-release.sql")),
            mutex: mutex.to_owned(),
            id: id.to_owned(),
        }
    }

    fn cycle(&mut self) {
        let fence = self.acquire(NO_TOKEN).unwrap();
        self.release(fence);
    }

    fn acquire(&mut self, token: &str) -> Option<u64> {
        let params = params! {
            "mutex" => &self.mutex, "id" => &self.id, "ttl" => 10_000, "transition" => 6_000,
            "token" => token, "not_after" => u64::MAX >> 1,
        };
        update(&mut self.conn, &self.acquire, params)
    }

    fn renew(&mut self, fence: u64) {
        let params = params! { "mutex" => &self.mutex, "id" => &self.id, "fence" => fence, "ttl" => 10_000, "transition" => 6_000 };
        update(&mut self.conn, &self.renew, params).unwrap();
    }

    /// Returns the token that the mutex was handed over to.
    fn release(&mut self, fence: u64) -> u64 {
        let params = params! { "mutex" => &self.mutex, "id" => &self.id, "fence" => fence };
        update(&mut self.conn, &self.release, params).unwrap()
    }

    /// The cheapest statements that exclude at all.
    fn floor_cycle(&mut self) {
        let now = "CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS UNSIGNED)";
        let acquire = format!(
            "UPDATE simba_mutex SET owner_id = :id, transition_at = {now} + 16000 \
             WHERE mutex = :mutex AND transition_at < {now}"
        );
        let release = "UPDATE simba_mutex SET owner_id = '', transition_at = 0 \
                       WHERE mutex = :mutex AND owner_id = :id";
        for sql in [acquire.as_str(), release] {
            let params = params! { "mutex" => &self.mutex, "id" => &self.id };
            update(&mut self.conn, sql, params).unwrap();
        }
    }
}

/// One UPDATE: the last insert id it set, or `None` where no row matched.
fn update(conn: &mut Conn, sql: &str, params: Params) -> Option<u64> {
    let result = conn.exec_iter(sql, params).unwrap();
    (result.affected_rows() > 0).then(|| result.last_insert_id().unwrap_or(0))
}

/// Release, KILL; the statement in which the waiter waits ends, and it acquires.
struct BareHandOff {
    owner: Bare,
    /// Holds the name that the waiter waits for.
    _blocker: Conn,
    register: String,
    waiter: Waiter,
}

impl BareHandOff {
    fn new(mutex: &str) -> BareHandOff {
        let mut blocker = plain(&SERVER);
        hold(&mut blocker, &format!("contend:wait:{PROCESS}"));
        let mut waiting = plain(&SERVER);
        hold(&mut waiting, &format!("contend:{PROCESS}"));
        let mut next = Bare::at(mutex, "b");
        let hex: String = mutex.bytes().map(|byte| format!("{byte:02x}")).collect();
        let wait = statement(include_str!("../sql/mutex-wait.sql"))
            .replace(
                "{each_quiet}",
                "(mutex = {mutex} AND LOCATE(':{token}', waiters) > 0 AND NOT (transition_at < {now} \
                 AND (SUBSTRING(waiters, 2, 18) IN ('{token}') OR transition_at + 500 < {now})))",
            )
            .replace("{process}", PROCESS)
            .replace("{token}", TOKEN)
            .replace("{mutex}", &format!("_utf8mb4 x'{hex}'"))
            .replace("{count}", "1")
            .replace("{now}", "CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS UNSIGNED)");
        BareHandOff {
            owner: Bare::at(mutex, "a"),
            _blocker: blocker,
            register: statement(include_str!("../sql/mutex-register.sql")),
            waiter: Waiter::new(move || {
                loop {
                    let _woken = waiting.query_drop(&wait);
                    if let Some(fence) = next.acquire(TOKEN) {
                        let at = Instant::now();
                        next.release(fence);
                        return at;
                    }
                }
            }),
        }
    }

    fn hand_off(&mut self) -> Duration {
        let fence = self.owner.acquire(NO_TOKEN).unwrap();
        let params = params! { "mutex" => &self.owner.mutex, "token" => TOKEN };
        self.owner.conn.exec_drop(&self.register, params).unwrap();
        self.waiter.go();
        asleep();
        asleep();
        let began = Instant::now();
        let token = self.owner.release(fence);
        let kill = statement(include_str!("../sql/mutex-wake.sql"));
        let kill = kill.replace("{process}", &(token / 1_000_000).to_string());
        let _spared = self.owner.conn.query_drop(kill);
        self.waiter.done() - began
    }
}

fn hold(conn: &mut Conn, name: &str) {
    let got: Option<Option<i64>> = conn.exec_first("SELECT GET_LOCK(?, 60)", (name,)).unwrap();
    assert_eq!(got.flatten(), Some(1));
}

/// A file of `sql/` for the table that `sql/init-mutex.sql` makes.
fn statement(sql: &str) -> String {
    const BY_OWNER: &str = "owner_id = :id AND fencing_token = :fence AND transition_at >= {clock}";
    const TAKEABLE: &str = "(owner_id IN (:id, CONCAT('~', :token)) \
        OR transition_at + IF(SUBSTRING(waiters, 2, 18) IN ('', :token), 0, {claim}) < {now})";
    let lines: Vec<&str> = sql
        .lines()
        .filter(|line| !line.trim_start().starts_with("--"))
        .collect();
    lines
        .join("\n")
        .trim()
        .replace("{takeable}", TAKEABLE)
        .replace("{changed}", "version % 2147483647 + 1")
        .replace("{first}", "")
        .replace("{whose}", BY_OWNER)
        .replace("{room}", "3971")
        .replace("{table}", "`simba_mutex`")
        .replace("{claim}", "500")
        .replace(
            "{micros}",
            "CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS UNSIGNED)",
        )
        .replace("{now}", "CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS UNSIGNED)")
        .replace(
            "{clock}",
            "CAST(UNIX_TIMESTAMP(SYSDATE(3)) * 1000 AS UNSIGNED)",
        )
}

fn plain(server: &MariaDbServer) -> Conn {
    let opts = Opts::from_url(&server.url("bench")).unwrap();
    // Rows matched, not rows changed: a renewal within the same millisecond changes nothing.
    let opts = OptsBuilder::from_opts(opts)
        .prefer_socket(false)
        .additional_capabilities(CapabilityFlags::CLIENT_FOUND_ROWS);
    let mut conn = Conn::new(opts).unwrap();
    conn.query_drop("SET time_zone = '+00:00', autocommit = 1")
        .unwrap();
    conn
}
