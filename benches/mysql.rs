//! MariaDB, beside *bare*: the very same statements (`sql/`), in the same order, on plain connections
//! of the driver; a bare waiter blocks on the named lock as ours does.
#![allow(missing_docs)]

mod beside;

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use beside::eight::{Cycle, contended_8, lockers};
use beside::hand_off::{Lockers, Services, Waiter, asleep};
use beside::{beside, in_turns, timed};
use contend::backend::{Attempt, Entry, Hold, Place, Renewal};
use contend::{Factory, Lease, Moment};
use criterion::Criterion;
use ground::MariaDbServer;
use mysql::consts::CapabilityFlags;
use mysql::prelude::Queryable;
use mysql::{Conn, Opts, OptsBuilder, Params, params};

static SERVER: LazyLock<MariaDbServer> = LazyLock::new(|| {
    let server = MariaDbServer::start();
    server.create_database("bench");
    plain(&server).query_drop(contend::mysql::INIT_SQL).unwrap();
    server
});

fn main() {
    let mut criterion = beside::criterion();
    lock_cycle(&mut criterion);
    renew(&mut criterion);
    hand_off(&mut criterion);
    contended(&mut criterion);
    criterion.final_summary();
    SERVER.kill();
}

fn lock_cycle(criterion: &mut Criterion) {
    beside(
        criterion,
        "mysql",
        "lock_cycle",
        ["bare", "contend"],
        |budget| {
            let mut bare = Bare::at("bare", "0:1@127.0.0.1");
            let locker = factory().locker("ours").build().unwrap();
            in_turns(
                budget,
                10,
                [&mut || timed(|| bare.cycle()), &mut || {
                    timed(|| drop(locker.lock().unwrap()))
                }],
            )
        },
    );
}

fn renew(criterion: &mut Criterion) {
    beside(criterion, "mysql", "renew", ["bare", "contend"], |budget| {
        let mut bare = Bare::at("bare", "a");
        let fence_of_bare = bare.acquire(true).unwrap();
        let place = Place {
            mutex: "renewed".into(),
            id: "a".into(),
            lease: Lease::default(),
            hold: Hold::Long,
        };
        let factory = factory();
        let mut seat = factory.backend().unwrap().seat(&place).unwrap();
        let Attempt::Granted(grant) = seat.acquire(Entry::Try, soon()).unwrap() else {
            panic!("nobody else is there");
        };
        let fence = grant.owner.fence();
        let tapes = in_turns(
            budget,
            10,
            [&mut || timed(|| bare.renew(fence_of_bare)), &mut || {
                timed(|| {
                    let renewal = seat.renew(fence, soon()).unwrap();
                    assert!(matches!(renewal, Renewal::Renewed(_)));
                })
            }],
        );
        bare.release(fence_of_bare);
        seat.release(fence, soon()).unwrap();
        tapes
    });
}

/// The named lock wakes the waiter of an owner that holds it: a service does (DESIGN: a locker's
/// extra request would cost more than the lock), so here the service is *contend*.
fn hand_off(criterion: &mut Criterion) {
    let sides = ["bare", "contend", "locker"];
    beside(criterion, "mysql", "handoff", sides, |budget| {
        let factory = factory();
        let mut bare = BareHandOff::new("bare-handoff");
        let mut services = Services::new(&factory, "services");
        let mut lockers = Lockers::new(&factory, "lockers");
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

/// The statements as they are sent, on a plain connection.
struct Bare {
    conn: Conn,
    politely: String,
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
        let insert = statement(include_str!("../sql/mutex-insert.sql"), "");
        let _exists_already = conn.exec_drop(insert, params! { "mutex" => mutex });
        let acquire = include_str!("../sql/mutex-acquire.sql");
        Bare {
            conn,
            politely: statement(
                acquire,
                "AND (transition_at > 0 OR (IS_FREE_LOCK(:wake_name) AND IS_FREE_LOCK(:queue_name)))",
            ),
            acquire: statement(acquire, ""),
            renew: statement(include_str!("../sql/mutex-renew.sql"), ""),
            release: statement(include_str!("../sql/mutex-release.sql"), ""),
            mutex: mutex.to_owned(),
            id: id.to_owned(),
        }
    }

    fn cycle(&mut self) {
        let fence = self.acquire(true).unwrap();
        self.release(fence);
    }

    fn acquire(&mut self, politely: bool) -> Option<u64> {
        let (mutex, id) = (&self.mutex, &self.id);
        if politely {
            let params = params! { "mutex" => mutex, "id" => id, "ttl" => 10_000, "total" => 16_000, "wake_name" => wake_name(mutex), "queue_name" => wake_name(mutex) + "-first" };
            update(&mut self.conn, &self.politely, params)
        } else {
            let params =
                params! { "mutex" => mutex, "id" => id, "ttl" => 10_000, "total" => 16_000 };
            update(&mut self.conn, &self.acquire, params)
        }
    }

    fn renew(&mut self, fence: u64) {
        let params = params! { "mutex" => &self.mutex, "id" => &self.id, "fence" => fence, "ttl" => 10_000, "total" => 16_000 };
        update(&mut self.conn, &self.renew, params).unwrap();
    }

    fn release(&mut self, fence: u64) {
        let params = params! { "mutex" => &self.mutex, "id" => &self.id, "fence" => fence };
        update(&mut self.conn, &self.release, params).unwrap();
    }
}

/// One UPDATE: the last insert id it set, or `None` where no row matched.
fn update(conn: &mut Conn, sql: &str, params: Params) -> Option<u64> {
    let result = conn.exec_iter(sql, params).unwrap();
    (result.affected_rows() > 0).then(|| result.last_insert_id().unwrap_or(0))
}

/// Release, `RELEASE_LOCK`; the blocked `GET_LOCK` of the waiter returns, and it acquires.
struct BareHandOff {
    owner: Bare,
    name: String,
    waiter: Waiter,
}

impl BareHandOff {
    fn new(mutex: &str) -> BareHandOff {
        let name = wake_name(mutex);
        let mut next = Bare::at(mutex, "b");
        let wait_for = name.clone();
        BareHandOff {
            owner: Bare::at(mutex, "a"),
            name,
            waiter: Waiter::new(move || {
                get_lock(&mut next.conn, &wait_for);
                let fence = next.acquire(false).unwrap();
                let at = Instant::now();
                next.release(fence);
                release_lock(&mut next.conn, &wait_for);
                at
            }),
        }
    }

    fn hand_off(&mut self) -> Duration {
        get_lock(&mut self.owner.conn, &self.name);
        let fence = self.owner.acquire(false).unwrap();
        self.waiter.go();
        asleep();
        asleep();
        let began = Instant::now();
        self.owner.release(fence);
        release_lock(&mut self.owner.conn, &self.name);
        self.waiter.done() - began
    }
}

fn get_lock(conn: &mut Conn, name: &str) {
    let got: Option<Option<i64>> = conn.exec_first("SELECT GET_LOCK(?, 60)", (name,)).unwrap();
    assert_eq!(got.flatten(), Some(1));
}

fn release_lock(conn: &mut Conn, name: &str) {
    conn.exec_drop("DO RELEASE_LOCK(?)", (name,)).unwrap();
}

/// As long as ours, and nobody else's.
fn wake_name(mutex: &str) -> String {
    format!("contend:{mutex:0>32}")
}

/// A file of `sql/` for the table that `sql/init-mutex.sql` makes.
fn statement(sql: &str, politely: &str) -> String {
    let lines: Vec<&str> = sql
        .lines()
        .filter(|line| !line.trim_start().starts_with("--"))
        .collect();
    let filled = lines
        .join("\n")
        .trim()
        .replace("{table}", "`simba_mutex`")
        .replace("{mutex_is}", "mutex = :mutex")
        .replace("{mutex_like}", "mutex = :mutex")
        .replace("{owner_is}", "owner_id = :id")
        .replace(
            "{fence_now}",
            "CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS UNSIGNED)",
        )
        .replace("{politely}", politely)
        .replace("{now}", "CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS UNSIGNED)")
        .replace(
            "{clock}",
            "CAST(UNIX_TIMESTAMP(SYSDATE(3)) * 1000 AS UNSIGNED)",
        );
    assert!(!filled.contains('{'), "not all is filled in: {filled}");
    filled
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
