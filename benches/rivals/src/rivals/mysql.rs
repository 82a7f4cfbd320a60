//! MySQL by hand: `GET_LOCK`, and the statements with which Simba contends.

use mysql::prelude::Queryable;
use mysql::{Conn, Opts, OptsBuilder};

use super::{Contender, Rival, TTL};

/// `GET_LOCK` and `RELEASE_LOCK`: a lock lasts as long as its connection; there is no lease and no fence.
pub struct GetLock {
    pub url: String,
}

struct Named {
    conn: Conn,
    name: String,
}

impl Rival for GetLock {
    fn setting(&self) -> &'static str {
        "waits in the server, on a connection for each contender; no lease, no fence"
    }

    fn contender(&self, mutex: &str) -> Box<dyn Contender> {
        Box::new(Named {
            conn: connect(&self.url),
            name: format!("rival-{mutex}"),
        })
    }
}

impl Contender for Named {
    fn lock(&mut self) {
        let got: Option<Option<i64>> = self
            .conn
            .exec_first("SELECT GET_LOCK(?, 60)", (&self.name,))
            .unwrap();
        assert_eq!(got.flatten(), Some(1));
    }

    fn unlock(&mut self) {
        self.conn
            .exec_drop("DO RELEASE_LOCK(?)", (&self.name,))
            .unwrap();
    }
}

/// Acquire, look who owns, release. It is meant for leaders: one that was refused looks again when the
/// owner's lease ends.
pub struct Simba {
    pub url: String,
}

struct Row {
    conn: Conn,
    mutex: String,
}

impl Rival for Simba {
    fn setting(&self) -> &'static str {
        "for leaders: looks again when the lease of the owner ends"
    }

    fn waits(&self) -> bool {
        false
    }

    fn contender(&self, mutex: &str) -> Box<dyn Contender> {
        let mut conn = connect(&self.url);
        let mutex = format!("simba-{mutex}");
        conn.exec_drop(
            "INSERT IGNORE INTO simba_mutex (mutex, acquired_at, ttl_at, transition_at, owner_id, version) \
             VALUES (?, 0, 0, 0, '', 0)",
            (&mutex,),
        )
        .unwrap();
        Box::new(Row { conn, mutex })
    }
}

const ID: &str = "0:1@127.0.0.1";

impl Contender for Row {
    fn lock(&mut self) {
        let now = "CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS UNSIGNED)";
        let acquire = format!(
            "UPDATE simba_mutex SET acquired_at = {now}, ttl_at = {now} + ?, transition_at = {now} + ?, \
             owner_id = ?, version = version + 1 \
             WHERE mutex = ? AND (transition_at < {now} OR (owner_id = ? AND transition_at > {now}))"
        );
        let ttl = TTL.as_millis() as u64;
        let arguments = (ttl, ttl + 6_000, ID, &self.mutex, ID);
        self.conn.exec_drop(acquire, arguments).unwrap();
        let owner: Option<(u64, u64, u64, String)> = self
            .conn
            .exec_first(
                "SELECT acquired_at, ttl_at, transition_at, owner_id FROM simba_mutex WHERE mutex = ?",
                (&self.mutex,),
            )
            .unwrap();
        assert_eq!(owner.unwrap().3, ID);
    }

    fn unlock(&mut self) {
        self.conn
            .exec_drop(
                "UPDATE simba_mutex SET acquired_at = 0, ttl_at = 0, transition_at = 0, owner_id = '', \
                 version = version + 1 WHERE mutex = ? AND owner_id = ?",
                (&self.mutex, ID),
            )
            .unwrap();
    }
}

fn connect(url: &str) -> Conn {
    let opts = OptsBuilder::from_opts(Opts::from_url(url).unwrap()).prefer_socket(false);
    Conn::new(opts).unwrap()
}
