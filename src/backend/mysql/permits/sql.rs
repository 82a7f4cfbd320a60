//! The statements, their tables filled in, and what they answer.
//!
//! Statements are sent as text, several in one message where they belong together: an acquire is two
//! round trips however many statements it has, and the rows are locked for one of them. The server stops
//! at the first statement that fails, so a COMMIT at the end is reached only by a whole success. Every
//! text value goes in as a hexadecimal literal ([`quote`]), which can be nothing but data.

use std::fmt::Write;
use std::time::Duration;

use mysql::prelude::FromRow;

use crate::backend::mysql::error::RequestError;
use crate::backend::mysql::table::strip;
use crate::error::{Error, ErrorKind, Result};

/// What the tables' names begin with unless told otherwise, as in [`INIT_SQL`].
pub(in crate::backend::mysql) const DEFAULT_PREFIX: &str = "contend_";

/// The file that makes the tables, with their default names: to be applied by hand, too.
const INIT_SQL: &str = include_str!("../../../../sql/init-semaphore.sql");

/// Ends a transaction that `semaphore-begin.sql` began.
pub(super) const COMMIT: &str = "COMMIT;\nSET wait_timeout = 86400";
pub(super) const ROLLBACK: &str = "ROLLBACK;\nSET wait_timeout = 86400";

macro_rules! statements {
    ($($name:ident: $file:literal,)*) => {
        /// The statements of the files in `sql/`, for one prefix.
        #[derive(Debug)]
        pub(super) struct Statements {
            prefix: String,
            $(pub(super) $name: String,)*
        }

        impl Statements {
            fn read(prefix: &str) -> Statements {
                let file = |text: &str| tables(&strip(text), prefix);
                Statements {
                    prefix: prefix.to_owned(),
                    $($name: file(include_str!(concat!("../../../../sql/", $file, ".sql"))),)*
                }
            }
        }
    };
}

statements! {
    begin: "semaphore-begin",
    lock: "semaphore-lock",
    change_counters: "semaphore-change-counters",
    usage: "semaphore-usage",
    holders: "semaphore-holders",
    audit: "semaphore-audit",
    read: "request-read",
    take_over_lock: "request-take-over-lock",
    insert_requests: "request-insert",
    insert_permits: "permit-insert",
    take_over: "request-take-over",
    release: "request-release",
    release_lock: "request-release-lock",
    release_locked: "request-release-locked",
    renew_lock: "request-renew-lock",
    renew: "request-renew",
    expired: "request-expired",
    semaphores: "request-semaphores",
}

impl Statements {
    /// # Errors
    /// `InvalidInput` for a prefix that cannot be part of a table's name.
    pub(super) fn new(prefix: &str) -> Result<Statements> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        if prefix.len() > 32 || !prefix.bytes().all(plain) {
            return Err(Error::invalid(format!(
                "table_prefix {prefix:?} cannot begin the names of tables; allowed are up to 32 letters, \
                 digits and underscores"
            )));
        }
        Ok(Statements::read(prefix))
    }

    /// Fills the names of the tables into a statement.
    pub(super) fn tables(&self, sql: &str) -> String {
        tables(sql, &self.prefix)
    }

    /// The statements that make the tables.
    pub(super) fn init(&self) -> Vec<String> {
        let name = |prefix: &str| format!("EXISTS `{prefix}");
        let sql = strip(INIT_SQL).replace(&name(DEFAULT_PREFIX), &name(&self.prefix));
        let statements = sql.split_terminator(';').map(str::to_owned);
        statements.collect()
    }

    /// The names of the tables: semaphores, requests, permits, history.
    pub(super) fn names(&self) -> [String; 4] {
        SUFFIXES.map(|(_, suffix)| format!("{}{suffix}", self.prefix))
    }

    /// What a failed statement means to a caller.
    pub(super) fn explain(&self, error: RequestError) -> Error {
        if error.is_missing_table() {
            return Error::new(
                ErrorKind::Misconfigured,
                format!(
                    "there are no tables {} of semaphores in the database, or this user may not see them: \
                     call create_tables, apply sql/init-semaphore.sql, or set table_prefix",
                    self.names().join(", ")
                ),
            );
        }
        if error.is_missing_grant() {
            let error = error.into_error();
            let text = error.to_string();
            // A user without a grant does not see tables that are there.
            let make = match text.contains("CREATE command") {
                true => {
                    "apply sql/init-semaphore.sql as a user that has CREATE, if that was not done, and "
                }
                false => "",
            };
            let names = self.names().join(", ");
            let cure = format!("{make}grant SELECT, INSERT, UPDATE and DELETE on {names}");
            return Error::new(error.kind(), format!("{text}; {cure}"));
        }
        if error.is_schema() {
            let cause = error.into_error();
            return Error::new(
                ErrorKind::Misconfigured,
                format!(
                    "the tables {} are not those of this version of contend ({cause}); rename them, or \
                     set another table_prefix, and call create_tables",
                    self.names().join(", ")
                ),
            );
        }
        error.into_error()
    }

    /// As [`explain`](Statements::explain), for a transaction that acquires.
    pub(super) fn failure(&self, error: RequestError) -> Error {
        if error.is_duplicate() {
            return Error::new(
                ErrorKind::Unavailable,
                "another call used the external id at the same moment; try again",
            );
        }
        self.explain(error)
    }
}

const SUFFIXES: [(&str, &str); 4] = [
    ("{semaphore}", "semaphore"),
    ("{request}", "permit_request"),
    ("{permit}", "permit"),
    ("{history}", "semaphore_capacity_change"),
];

fn tables(sql: &str, prefix: &str) -> String {
    let mut sql = sql.to_owned();
    for (placeholder, suffix) in SUFFIXES {
        sql = sql.replace(placeholder, &format!("`{prefix}{suffix}`"));
    }
    sql
}

/// What one statement answered.
#[derive(Debug, Default)]
pub(super) struct Answer {
    pub(super) rows: Vec<mysql::Row>,
    pub(super) matched: u64,
    pub(super) last_insert_id: u64,
}

/// The answer to the statement at `place` of a script.
pub(super) fn answer(answers: &mut [Answer], place: usize) -> Result<Answer> {
    answers.get_mut(place).map(std::mem::take).ok_or_else(|| {
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

/// All rows of an answer.
pub(super) fn rows<T: FromRow>(answer: Answer) -> Result<Vec<T>> {
    answer.rows.into_iter().map(columns).collect()
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

/// A statement with its placeholders filled.
pub(super) fn fill(sql: &str, values: &[(&str, &str)]) -> String {
    let mut statement = sql.to_owned();
    for (placeholder, value) in values {
        statement = statement.replace(placeholder, value);
    }
    statement
}

/// Microseconds, as far as the server's arithmetic reaches.
pub(super) fn micros(age: Duration) -> u64 {
    u64::try_from(age.as_micros())
        .unwrap_or(u64::MAX)
        .min(1_000 * 366 * 24 * 3_600 * 1_000_000)
}

/// Microseconds of the server as a duration; a time that has passed is zero.
pub(super) fn duration(micros: Option<i64>) -> Option<Duration> {
    micros.map(|micros| Duration::from_micros(u64::try_from(micros).unwrap_or(0)))
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

    #[test]
    fn a_prefix_can_not_become_sql_and_every_statement_names_its_tables() {
        for bad in ["a`b", "a b", "a;", "ü", &"x".repeat(33)] {
            let error = Statements::new(bad).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{bad}");
        }
        let statements = Statements::new("jobs_").unwrap();
        assert!(statements.lock.contains("`jobs_semaphore`"));
        let all = format!("{statements:?}");
        for (placeholder, _) in SUFFIXES {
            assert!(!all.contains(placeholder), "{placeholder}");
        }
        let made = statements.init();
        assert_eq!(made.len(), 4);
        for (statement, name) in made.iter().zip(statements.names()) {
            let begins = format!("CREATE TABLE IF NOT EXISTS `{name}` (");
            assert!(statement.trim_start().starts_with(&begins), "{statement}");
        }
    }
}
