//! The connections, and how statements reach the server.
//!
//! Statements are sent as text, several in one message where they belong together: an acquire is two
//! round trips however many statements it has, and the rows are locked for one of them. The server
//! stops at the first statement that fails, so a COMMIT at the end is reached only by a whole success.
//! Every text value goes in as a hexadecimal literal ([`quote`]), which can be nothing but data.

use std::fmt::Write;
use std::time::Duration;

use mysql::prelude::{FromRow, Queryable};

use crate::backend::mysql::fault::Fault;
use crate::backend::mysql::link::{Link, LinkOptions};
use crate::backend::mysql::pool::{Checkout, Pool};
use crate::backend::mysql::server::Server;
use crate::backend::mysql::table::strip;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};

/// The file that makes the tables.
pub const INIT_SQL: &str = include_str!("../../sql/init-semaphore.sql");

/// How much longer than a wait for a lock an answer may take.
const ANSWER: Duration = Duration::from_secs(2);

/// What one statement answered.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) rows: Vec<mysql::Row>,
    pub(super) matched: u64,
    pub(super) last_insert_id: u64,
}

/// The pool and its timing.
#[derive(Debug)]
pub(super) struct Store {
    pool: Pool,
    lock_wait: Duration,
}

impl Store {
    pub(super) fn new(
        server: Server,
        pool_size: u32,
        connect_timeout: Duration,
        lock_wait: Duration,
    ) -> Store {
        let options = LinkOptions {
            prepare: None,
            connect_timeout,
            read_timeout: Some(lock_wait + ANSWER),
            lock_wait,
            init: vec![
                // A read after a lock must see what was committed while we waited for it.
                "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED".to_owned(),
                // A client that vanished without a word must not keep rows locked until TCP notices.
                // MySQL reads only the second half; beyond what the pool keeps an idle connection.
                format!(
                    "SET /*M! idle_transaction_timeout = {}, */ wait_timeout = 660",
                    lock_wait.as_secs().max(1) * 2
                ),
            ],
        };
        Store {
            pool: Pool::new(server, options, pool_size),
            lock_wait,
        }
    }

    /// How long one waits for a connection, for a turn, or for a lock.
    pub(super) fn lock_wait(&self) -> Duration {
        self.lock_wait
    }

    /// A connection, within the lock wait.
    pub(super) fn checkout(&self) -> Result<Checkout> {
        self.pool
            .checkout(Moment::now() + self.lock_wait + self.pool.patience())
    }

    /// Sends statements and reads all their answers.
    pub(super) fn send(&self, link: &mut Link, sql: &str) -> Result<Vec<Answer>, Fault> {
        // Far enough to be sent: how long an answer may take is the connection's read timeout.
        let by = Moment::now() + self.pool.patience() * 2;
        link.run(by, |conn| {
            let mut result = conn.query_iter(sql)?;
            let mut answers = Vec::new();
            while let Some(set) = result.iter() {
                let mut answer = Answer {
                    rows: Vec::new(),
                    matched: set.affected_rows(),
                    last_insert_id: set.last_insert_id().unwrap_or(0),
                };
                for row in set {
                    answer.rows.push(row?);
                }
                answers.push(answer);
            }
            Ok(answers)
        })
    }

    /// Sends statements on a connection of their own; for what commits by itself.
    pub(super) fn send_alone(&self, sql: &str) -> Result<Vec<Answer>> {
        let mut link = self.checkout()?;
        self.send(&mut link, sql).map_err(explain)
    }

    /// Ends the transaction of a link without a trace; gives the link up where that is not sure.
    pub(super) fn roll_back(&self, link: &mut Link) {
        if !link.is_poisoned() && self.send(link, "ROLLBACK").is_err() {
            link.poison();
        }
    }

    /// Runs `work` between BEGIN and COMMIT; for what is neither frequent nor retried.
    pub(super) fn transaction<T>(
        &self,
        work: impl FnOnce(&mut dyn FnMut(&str) -> Result<Vec<Answer>>) -> Result<T>,
    ) -> Result<T> {
        let mut link = self.checkout()?;
        // Room for every statement in it: each may take as long as an answer may.
        let by = Moment::now() + self.pool.patience() * 6;
        link.transaction(by, |link| {
            work(&mut |sql| self.send(link, sql).map_err(explain))
        })
    }

    /// Makes the tables where they are missing.
    pub(super) fn create_tables(&self) -> Result<()> {
        self.send_alone(&strip(INIT_SQL))?;
        Ok(())
    }
}

/// The first of several answers, or only one.
pub(super) fn first(answers: Vec<Answer>) -> Result<Answer> {
    answers.into_iter().next().ok_or_else(|| {
        Error::new(
            ErrorKind::Protocol,
            "the MySQL server answered fewer statements than it was sent",
        )
    })
}

/// The columns of a row.
pub(super) fn columns<T: FromRow>(row: mysql::Row) -> Result<T> {
    mysql::from_row_opt(row).map_err(|_| {
        Error::new(
            ErrorKind::Misconfigured,
            "a table of the semaphores has a column of another type than in sql/init-semaphore.sql",
        )
    })
}

/// What a failed statement means to a caller.
pub(super) fn explain(fault: Fault) -> Error {
    if fault.is_missing_table() {
        return Error::new(
            ErrorKind::Misconfigured,
            "there are no tables of semaphores in the database, or they are not ours to see: apply \
             sql/init-semaphore.sql, or call create_tables",
        );
    }
    fault.into_error()
}

/// A text as a literal that can be nothing else, whatever it contains.
pub(super) fn quote(text: &str) -> String {
    let mut literal = String::with_capacity(text.len() * 2 + 14);
    literal.push_str("_utf8mb4 x'");
    for byte in text.bytes() {
        let _ = write!(literal, "{byte:02x}");
    }
    literal.push('\'');
    literal
}

/// A text that may be missing.
pub(super) fn quote_option(text: Option<&str>) -> String {
    text.map_or_else(|| "NULL".to_owned(), quote)
}

/// Texts as a list of literals.
pub(super) fn quote_all<T: AsRef<str>>(texts: impl IntoIterator<Item = T>) -> String {
    let literals: Vec<String> = texts.into_iter().map(|text| quote(text.as_ref())).collect();
    literals.join(", ")
}

/// Numbers as a list.
pub(super) fn list(numbers: impl IntoIterator<Item = u64>) -> String {
    let numbers: Vec<String> = numbers
        .into_iter()
        .map(|number| number.to_string())
        .collect();
    numbers.join(", ")
}

/// The statement of a file, its placeholders filled.
pub(super) fn fill(sql: &str, values: &[(&str, &str)]) -> String {
    let mut statement = strip(sql);
    for (placeholder, value) in values {
        statement = statement.replace(placeholder, value);
    }
    statement
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_can_not_become_sql() {
        assert_eq!(quote("a'b"), "_utf8mb4 x'612762'");
        assert_eq!(
            quote_all(["'; DROP", "ü"]),
            "_utf8mb4 x'273b2044524f50', _utf8mb4 x'c3bc'"
        );
        assert_eq!(quote_option(None), "NULL");
    }
}
