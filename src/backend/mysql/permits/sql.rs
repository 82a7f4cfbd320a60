//! The statements, their tables filled in, and what they answer.
//!
//! Statements are sent as text, several in one message where they belong together. So an acquire is two round trips
//! however many statements it has, and the rows are locked for one of them. The server stops at the first statement
//! that fails, so a COMMIT at the end is reached only by a whole success. Each text goes in as a hexadecimal literal
//! ([`quote`]), which can be nothing but data.

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use mysql::prelude::FromRow;

use crate::backend::mysql::error::RequestError;
use crate::backend::mysql::table::strip;
use crate::backend::permit_store::{GrantId, Permit, RequestStatus};
use crate::error::{Error, ErrorKind, Result};

/// What the tables' names begin with unless told otherwise, as in [`INIT_SQL`].
pub(in crate::backend::mysql) const DEFAULT_PREFIX: &str = "contend_";

/// The file that makes the tables, with their default names: to be applied by hand, too.
const INIT_SQL: &str = include_str!("../../../../sql/init-semaphore.sql");

/// Ends a transaction that `semaphore-begin.sql` began.
pub(super) const COMMIT: &str = "COMMIT;\nSET wait_timeout = 86400";
pub(super) const ROLLBACK: &str = "ROLLBACK;\nSET wait_timeout = 86400";

/// How many statements `semaphore-begin.sql` has.
pub(super) const BEGIN: usize = 3;

const TABLES: [(&str, &str); 4] = [
    ("{semaphore}", "semaphore"),
    ("{request}", "permit_request"),
    ("{permit}", "permit"),
    ("{history}", "semaphore_capacity_change"),
];

macro_rules! statements {
    ($($name:ident: $file:literal,)*) => {
        /// The statements of the files in `sql/`, for one prefix.
        #[derive(Debug)]
        pub(in crate::backend::mysql) struct Statements {
            pub(super) prefix: String,
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
    change_counter: "semaphore-change-counter",
    usage: "semaphore-usage",
    holders: "semaphore-holders",
    audit: "semaphore-audit",
    repair: "semaphore-repair",
    set_capacity: "semaphore-set-capacity",
    delete: "semaphore-delete",
    read: "request-read",
    lock_held: "request-lock-held",
    insert_requests: "request-insert",
    insert_permits: "permit-insert",
    take_over: "request-take-over",
    release: "request-release",
    release_locked: "request-release-locked",
    renew_lock: "request-renew-lock",
    renew: "request-renew",
    expired: "request-expired",
    semaphores: "request-semaphores",
    purge: "request-purge",
    check_tables: "semaphore-tables",
}

impl Statements {
    /// # Errors
    /// `InvalidInput` for a prefix that cannot be part of a table's name.
    pub(in crate::backend::mysql) fn new(prefix: &str) -> Result<Statements> {
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

    /// What makes the tables that are missing.
    pub(super) fn create_tables(&self) -> String {
        let name = |prefix: &str| format!("EXISTS `{prefix}");
        strip(INIT_SQL).replace(&name(DEFAULT_PREFIX), &name(&self.prefix))
    }

    /// What a failed statement means to a caller.
    pub(super) fn explain(&self, error: RequestError) -> Error {
        if error.is_duplicate() {
            return Error::new(
                ErrorKind::Unavailable,
                "another call used the external id at the same moment; try again",
            );
        }
        if !(error.is_missing_table() || error.is_missing_grant() || error.is_schema()) {
            return error.into();
        }
        let cause = Error::from(error);
        let names = TABLES.map(|(_, suffix)| format!("{}{suffix}", self.prefix));
        let text = format!(
            "{cause}; call create_tables or apply sql/init-semaphore.sql, grant SELECT, INSERT, UPDATE and DELETE on {}, \
             or set another table_prefix if these are another program's or of another version",
            names.join(", ")
        );
        Error::new(cause.kind(), text)
    }
}

fn tables(sql: &str, prefix: &str) -> String {
    let mut sql = sql.to_owned();
    for (placeholder, suffix) in TABLES {
        sql = sql.replace(placeholder, &format!("`{prefix}{suffix}`"));
    }
    sql
}

/// What one statement answered.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) rows: Vec<mysql::Row>,
    pub(super) matched: u64,
    pub(super) last_insert_id: u64,
}

/// An answer that must be there.
pub(super) fn answer(answer: Option<Answer>) -> Result<Answer> {
    answer.ok_or_else(|| {
        let text = "the MySQL server answered fewer statements than it was sent";
        Error::new(ErrorKind::Protocol, text)
    })
}

/// All rows of an answer.
pub(super) fn rows<T: FromRow>(answer: Answer) -> Result<Vec<T>> {
    let columns = |row| mysql::from_row_opt(row).map_err(|_| other_type());
    answer.rows.into_iter().map(columns).collect()
}

fn other_type() -> Error {
    let text =
        "a table of the semaphores has a column of another type than in sql/init-semaphore.sql";
    Error::new(ErrorKind::Misconfigured, text)
}

/// A request as `request-read.sql` and `request-lock-held.sql` read it.
#[derive(Clone, Debug)]
pub(super) struct RequestRow {
    pub(super) id: u64,
    pub(super) external_id: Arc<str>,
    pub(super) token: u64,
    /// Its permits are in the order of the semaphores' names.
    pub(super) status: RequestStatus,
}

/// The request, then one of its permits.
type RequestColumns = (
    String,
    u64,
    u64,
    String,
    Option<String>,
    Option<f64>,
    Option<i64>,
    Option<u64>,
    Option<String>,
    Option<u32>,
);

/// All requests of an answer.
pub(super) fn requests(answer: Answer) -> Result<Vec<RequestRow>> {
    let mut found: Vec<RequestRow> = Vec::new();
    for row in rows::<RequestColumns>(answer)? {
        let (external_id, id, token, state, owner, ttl, left, fence, semaphore, count) = row;
        if found.last().is_none_or(|last| last.id != id) {
            let status = RequestStatus {
                held: state == "ACQUIRED",
                permits: Vec::new(),
                owner: owner.map(Arc::from),
                ttl: ttl.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
                expires_in: left.map(duration),
            };
            found.push(RequestRow {
                id,
                external_id: Arc::from(external_id),
                token,
                status,
            });
        }
        // A permit without a semaphore was released, and the semaphore deleted since.
        if let (Some(last), Some(fence), Some(semaphore), Some(count)) =
            (found.last_mut(), fence, semaphore, count)
        {
            // Of a released request, one that was taken over is superseded by the next.
            let permits = &mut last.status.permits;
            permits.retain(|permit| *permit.semaphore != *semaphore);
            permits.push(Permit {
                semaphore: Arc::from(semaphore),
                count,
                fence,
            });
        }
    }
    Ok(found)
}

/// A condition on `r` that names a grant, or whatever its request holds.
pub(super) fn which(grant: &GrantId) -> String {
    let id = quote(&grant.external_id);
    match grant.token {
        Some(token) => format!("(r.external_id = {id} AND r.token = {token})"),
        None => format!("r.external_id = {id}"),
    }
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
    let numbers: Vec<String> = numbers.into_iter().map(|it| it.to_string()).collect();
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
    const MILLENNIUM: u64 = 1_000 * 366 * 24 * 3_600 * 1_000_000;
    u64::try_from(age.as_micros()).map_or(MILLENNIUM, |micros| micros.min(MILLENNIUM))
}

/// Microseconds of the server as a duration; a time that has passed is zero.
pub(super) fn duration(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_become_sql() {
        assert_eq!(quote("a'b"), "_utf8mb4 x'612762'");
        assert_eq!(
            quote_all(["'; DROP", "ü"]),
            "_utf8mb4 x'273b2044524f50', _utf8mb4 x'c3bc'"
        );
        assert_eq!(quote_option(None), "NULL");
    }

    #[test]
    fn prefix_cannot_become_sql_and_statements_name_their_tables() {
        for bad in ["a`b", "a b", "a;", "ü", &"x".repeat(33)] {
            let error = Statements::new(bad).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{bad}");
        }
        let statements = Statements::new("jobs_").unwrap();
        assert!(statements.lock.contains("`jobs_semaphore`"));
        let all = format!("{statements:?}");
        for (placeholder, _) in TABLES {
            assert!(!all.contains(placeholder), "{placeholder}");
        }
        let create = statements.create_tables();
        let begins = "CREATE TABLE IF NOT EXISTS `jobs_permit` (";
        assert!(create.contains(begins), "{create}");
    }
}
