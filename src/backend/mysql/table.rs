//! The table of mutexes: its name, what its columns can hold, and the statements made for it.

use mysql::Value;
use mysql::prelude::Queryable;
use parking_lot::Mutex;
use std::sync::Arc;

use super::link::Link;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};

const ACQUIRE: &str = include_str!("../../../sql/mutex-acquire.sql");
const RENEW: &str = include_str!("../../../sql/mutex-renew.sql");
const RELEASE: &str = include_str!("../../../sql/mutex-release.sql");
const RELEASE_ANY: &str = include_str!("../../../sql/mutex-release-any.sql");
const READ: &str = include_str!("../../../sql/mutex-read.sql");
const INSERT: &str = include_str!("../../../sql/mutex-insert.sql");

/// The file that makes the table.
pub const INIT_SQL: &str = include_str!("../../../sql/init-mutex.sql");

/// The table's name in that file.
pub(super) const DEFAULT_NAME: &str = "simba_mutex";

/// The server's clock in epoch milliseconds, as it was when the statement began.
const NOW_MS: &str = "CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS UNSIGNED)";

/// The same at the moment of looking, and not at the start of the statement.
const CLOCK_MS: &str = "CAST(UNIX_TIMESTAMP(SYSDATE(3)) * 1000 AS UNSIGNED)";

/// The table, and what was found out about it.
#[derive(Debug)]
pub(super) struct Table {
    name: String,
    /// Whether to make it if it is not there.
    create_if_missing: bool,
    /// Found out once, with the first request, and again when the table turns out to be another one.
    known: Mutex<Option<Arc<Statements>>>,
}

/// The statements for a table as it is, ready to be prepared; and its limits.
#[derive(Debug)]
pub(super) struct Statements {
    pub(super) acquire: String,
    /// The same, for one who leaves a released mutex to the waiter woken for it.
    pub(super) acquire_politely: String,
    pub(super) renew: String,
    pub(super) release: String,
    pub(super) release_any: String,
    pub(super) read: String,
    /// What reads many, less the list, and what goes into that for each.
    read_many: (String, String),
    pub(super) insert: String,
    /// The longest id that fits, in bytes.
    pub(super) max_id: usize,
    /// Whether a fence is in the server's microseconds (or seconds).
    pub(super) fence_in_micros: bool,
}

/// What the table's columns are like.
struct Shape {
    mutex_charset: Option<String>,
    /// Names are compared byte by byte.
    exact_mutex: bool,
    exact_owner: bool,
    wide_version: bool,
    max_id: usize,
}

impl Table {
    pub(super) fn new(name: &str, create_if_missing: bool) -> Result<Table> {
        let fits = !name.is_empty() && name.len() <= 64;
        if !fits || name.contains(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '$')) {
            return Err(Error::invalid(format!(
                "{name:?} is not a table name; allowed are 1 to 64 ASCII letters, digits, _ and $"
            )));
        }
        Ok(Table {
            name: name.to_owned(),
            create_if_missing,
            known: Mutex::new(None),
        })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Makes a new connection ready: all that a call needs is known and prepared. What fails here
    /// fails again where somebody hears of it.
    pub(super) fn prepare(&self, link: &mut Link) -> Result<()> {
        let statements = self.statements(link, Moment::FAR)?;
        for sql in statements.common() {
            link.run(Moment::FAR, |conn| conn.prep(sql))?;
        }
        Ok(())
    }

    /// What makes the table, under its name.
    pub(super) fn create(&self) -> String {
        strip(INIT_SQL).replace(DEFAULT_NAME, &self.name)
    }

    /// The statements, if the table has been looked at.
    pub(super) fn known(&self) -> Option<Arc<Statements>> {
        self.known.lock().clone()
    }

    /// The statements; looks at the table first if nobody has, which costs one round trip per factory.
    pub(super) fn statements(&self, link: &mut Link, by: Moment) -> Result<Arc<Statements>> {
        if let Some(known) = self.known() {
            return Ok(known);
        }
        let mut columns = self.columns(link, by)?;
        if columns.is_empty() && self.create_if_missing {
            link.run(by, |conn| conn.query_drop(self.create()))?;
            columns = self.columns(link, by)?;
        }
        let statements = Arc::new(Statements::new(&self.name, &self.shape(columns)?));
        *self.known.lock() = Some(Arc::clone(&statements));
        Ok(statements)
    }

    fn columns(&self, link: &mut Link, by: Moment) -> Result<Vec<Vec<Value>>> {
        let columns = link.run(by, |conn| {
            conn.exec_iter(
                "SELECT column_name, data_type, character_maximum_length, character_set_name, \
                 collation_name FROM information_schema.columns \
                 WHERE table_schema = DATABASE() AND table_name = ?",
                (&self.name,),
            )?
            .map(|row| row.map(mysql::Row::unwrap))
            .collect()
        })?;
        Ok(columns)
    }

    /// The table is not what it was: look again next time.
    pub(super) fn forget(&self) {
        self.known.lock().take();
    }

    /// The error of who finds no table.
    pub(super) fn missing(&self) -> Error {
        Error::new(
            ErrorKind::Misconfigured,
            format!(
                "there is no table {} in the database, or this user may not see it: apply \
                 sql/init-mutex.sql, or add ?create_table=true to the URL",
                self.name
            ),
        )
    }

    fn shape(&self, columns: Vec<Vec<Value>>) -> Result<Shape> {
        if columns.is_empty() {
            return Err(self.missing());
        }
        let mut shape = Shape {
            mutex_charset: None,
            exact_mutex: false,
            exact_owner: false,
            wide_version: false,
            max_id: 0,
        };
        let mut missing = vec![
            "mutex",
            "acquired_at",
            "ttl_at",
            "transition_at",
            "owner_id",
            "version",
        ];
        for column in columns {
            let mut column = column.into_iter();
            let name = text(column.next()).to_ascii_lowercase();
            let kind = text(column.next()).to_ascii_lowercase();
            let length = column
                .next()
                .and_then(|value| mysql::from_value_opt::<usize>(value).ok())
                .unwrap_or(0);
            let charset = text(column.next());
            let collation = text(column.next());
            let exact = collation == "utf8mb4_bin" || charset.is_empty();
            missing.retain(|other| *other != name);
            match name.as_str() {
                "mutex" => {
                    shape.exact_mutex = exact;
                    shape.mutex_charset = Some(charset).filter(|charset| {
                        charset
                            .bytes()
                            .all(|b| b.is_ascii_alphanumeric() || b == b'_')
                    });
                }
                "owner_id" => {
                    shape.exact_owner = exact;
                    shape.max_id = length;
                }
                "version" => shape.wide_version = kind == "bigint",
                _ => {}
            }
        }
        if missing.is_empty() {
            return Ok(shape);
        }
        Err(Error::new(
            ErrorKind::Misconfigured,
            format!(
                "the table {} is not one of mutexes, it has no column {}; sql/init-mutex.sql makes one",
                self.name,
                missing.join(", ")
            ),
        ))
    }
}

impl Statements {
    fn new(table: &str, shape: &Shape) -> Statements {
        // The plain comparison finds the row by its key, the second one makes sure of it.
        let (mutex_like, mutex_is) = if shape.exact_mutex {
            ("mutex = :mutex".to_owned(), "mutex = :mutex".to_owned())
        } else {
            let charset = shape.mutex_charset.as_deref().unwrap_or("utf8mb4");
            let like = format!("mutex = CONVERT(:mutex USING {charset})");
            let is = format!("{like} AND mutex = :mutex COLLATE utf8mb4_bin");
            (like, is)
        };
        let one_of_many = if shape.exact_mutex {
            "?".to_owned()
        } else {
            let charset = shape.mutex_charset.as_deref().unwrap_or("utf8mb4");
            format!("CONVERT(? USING {charset})")
        };
        let owner_is = if shape.exact_owner {
            "owner_id = :id"
        } else {
            "owner_id = :id COLLATE utf8mb4_bin"
        };
        let fence_now = if shape.wide_version {
            "CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS UNSIGNED)"
        } else {
            "UNIX_TIMESTAMP()"
        };
        let fill = |sql: &str, politely: &str| {
            strip(sql)
                .replace("{table}", &format!("`{table}`"))
                .replace("{mutex_like}", &mutex_like)
                .replace("{mutex_is}", &mutex_is)
                .replace("{owner_is}", owner_is)
                .replace("{fence_now}", fence_now)
                .replace("{politely}", politely)
                .replace("{now}", NOW_MS)
                .replace("{clock}", CLOCK_MS)
        };
        Statements {
            acquire: fill(ACQUIRE, ""),
            acquire_politely: fill(
                ACQUIRE,
                "AND (transition_at > 0 OR (IS_FREE_LOCK(:wake_name) AND IS_FREE_LOCK(:queue_name)))",
            ),
            renew: fill(RENEW, ""),
            release: fill(RELEASE, ""),
            release_any: fill(RELEASE_ANY, ""),
            read: fill(READ, ""),
            read_many: (
                fill(&READ.replace("{mutex_like}", "mutex IN "), ""),
                one_of_many,
            ),
            insert: fill(INSERT, ""),
            max_id: shape.max_id,
            fence_in_micros: shape.wide_version,
        }
    }

    /// Those that a contender cannot do without.
    fn common(&self) -> [&str; 5] {
        [
            &self.acquire,
            &self.acquire_politely,
            &self.renew,
            &self.release,
            &self.read,
        ]
    }

    /// What reads `count` rows, their names as positional parameters.
    pub(super) fn read_many(&self, count: usize) -> String {
        let (select, each) = &self.read_many;
        format!("{select}({})", vec![each.as_str(); count].join(", "))
    }
}

/// Without comments: they are for who reads the file, not for the server.
pub(crate) fn strip(sql: &str) -> String {
    let lines: Vec<&str> = sql
        .lines()
        .filter(|line| !line.trim_start().starts_with("--"))
        .collect();
    lines.join("\n").trim().to_owned()
}

fn text(value: Option<Value>) -> String {
    value
        .and_then(|value| mysql::from_value_opt::<String>(value).ok())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_name_can_not_become_sql() {
        for bad in ["", "a b", "a`b", "a;b", "a.b", "ü", &"x".repeat(65)] {
            let error = Table::new(bad, false).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{bad}");
        }
        assert!(Table::new("simba_mutex", false).is_ok());
    }

    #[test]
    fn every_placeholder_is_filled_and_no_comment_is_left() {
        for exact in [true, false] {
            let shape = Shape {
                mutex_charset: Some("latin1".to_owned()),
                exact_mutex: exact,
                exact_owner: exact,
                wide_version: exact,
                max_id: 32,
            };
            let statements = Statements::new("t", &shape);
            for sql in [
                &statements.acquire,
                &statements.acquire_politely,
                &statements.renew,
                &statements.release,
                &statements.release_any,
                &statements.read,
                &statements.insert,
            ] {
                assert!(!sql.contains(['{', '}']) && !sql.contains("--"), "{sql}");
            }
        }
        let create = Table::new("other", false).unwrap().create();
        assert!(create.starts_with("CREATE TABLE IF NOT EXISTS `other`"));
    }
}
