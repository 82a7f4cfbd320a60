//! The table of mutexes: its name, whether its columns are those that we need, and the statements made
//! for it.

use std::fmt::Write;
use std::sync::Arc;

use mysql::Value;
use mysql::prelude::Queryable;
use parking_lot::Mutex;

use super::connection::Connection;
use super::error::RequestError;
use crate::backend::CLAIM_TIME;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};

/// The script that creates the mutex table, `sql/init-mutex.sql`.
pub const INIT_SQL: &str = include_str!("../../../sql/init-mutex.sql");

/// The script that upgrades a mutex table of Simba, `sql/upgrade-mutex.sql`.
pub const UPGRADE_SQL: &str = include_str!("../../../sql/upgrade-mutex.sql");

/// The table's name in those files.
pub(super) const DEFAULT_NAME: &str = "simba_mutex";

/// The server's clock in epoch milliseconds, as it was when the statement began. A lease counts from here.
const NOW: &str = "CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS UNSIGNED)";

/// The same at the moment of looking: after a wait for a row lock `NOW()` has stood still.
const CLOCK: &str = "CAST(UNIX_TIMESTAMP(SYSDATE(3)) * 1000 AS UNSIGNED)";

const MICROS: &str = "CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS UNSIGNED)";

/// Our token stands in the list, the mutex is neither ours to take nor handed over in vain.
const QUIET: &str = "(LOCATE(':{token}', waiters) > 0 \
    AND NOT (transition_at < {now} \
        AND (SUBSTRING(waiters, 2, 18) = '{token}' OR transition_at + {claim} < {now})) \
    AND NOT (owner_id LIKE '~%' AND transition_at > {clock} + {claim}))";

/// An owner has this fence, whatever its id.
const OWNED: &str = "fencing_token = :fence AND owner_id <> '' AND owner_id NOT LIKE '~%' \
    AND transition_at >= {clock}";

/// How long `waiters` is, and a token in it.
pub(super) const WAITERS: usize = 3990;
pub(super) const TOKEN: usize = 19;

/// What each column must be, as in `INIT_SQL`; `version` may be longer.
const COLUMNS: [Column; 9] = [
    Column(
        "mutex",
        "varchar",
        66,
        "VARCHAR(66) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL",
    ),
    Column("acquired_at", "bigint", 0, "BIGINT UNSIGNED NOT NULL"),
    Column("ttl_at", "bigint", 0, "BIGINT UNSIGNED NOT NULL"),
    Column("transition_at", "bigint", 0, "BIGINT UNSIGNED NOT NULL"),
    Column(
        "owner_id",
        "varchar",
        128,
        "VARCHAR(128) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL",
    ),
    Column("version", "int", 0, "INT UNSIGNED NOT NULL"),
    Column(
        "fencing_token",
        "bigint",
        0,
        "BIGINT UNSIGNED NOT NULL DEFAULT 0",
    ),
    Column(
        "waiters",
        "varchar",
        WAITERS,
        "VARCHAR(3990) CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT ''",
    ),
    Column("run_at", "bigint", 0, "BIGINT UNSIGNED NOT NULL DEFAULT 0"),
];

/// Name, type, least length, and what to add where it is missing or to change it to.
struct Column(&'static str, &'static str, usize, &'static str);

impl Column {
    fn fits(&self, found: &Found) -> bool {
        let Column(name, kind, length, definition) = *self;
        // Compared byte by byte, in an encoding that has all names.
        let exact = definition.contains("utf8mb4_bin");
        (found.kind == kind || (name == "version" && found.kind == "bigint"))
            && found.length >= length
            && (!exact
                || (found.collation.starts_with("utf8mb4") && found.collation.ends_with("_bin")))
            && !found.nullable
    }
}

/// A column as the server describes it.
#[derive(Clone, Debug, Default)]
struct Found {
    name: String,
    kind: String,
    length: usize,
    collation: String,
    nullable: bool,
    /// Whether an INSERT that does not name it works.
    has_default: bool,
    in_key: bool,
    engine: String,
}

/// The table, and whether it has been looked at.
#[derive(Debug)]
pub(super) struct Table {
    name: String,
    /// Whether to make or change it if it is not as it must be.
    create: bool,
    /// Checked once, with the first request, and again when the table turns out to be another one.
    checked: Mutex<Option<Arc<Statements>>>,
}

/// The statements for a table, ready to be prepared, and what was found out about its server.
#[derive(Debug)]
pub(super) struct Statements {
    pub(super) acquire: String,
    pub(super) renew: String,
    pub(super) release: String,
    pub(super) release_any: String,
    pub(super) revoke: String,
    pub(super) register: String,
    pub(super) withdraw: String,
    pub(super) undo_hand_over: String,
    pub(super) look: String,
    pub(super) insert: String,
    pub(super) record_run: String,
    pub(super) list: String,
    pub(super) ping: String,
    look_many: String,
    wait: String,
    /// Why nobody can be woken on this server, where that is known from its settings.
    pub(super) no_wakeups: Option<&'static str>,
}

impl Table {
    pub(super) fn new(name: &str, create: bool) -> Result<Table> {
        let fits = !name.is_empty() && name.len() <= 64;
        if !fits || name.contains(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '$')) {
            return Err(Error::invalid(format!(
                "{name:?} is not a table name; allowed are 1 to 64 ASCII letters, digits, _ and $"
            )));
        }
        Ok(Table {
            name: name.to_owned(),
            create,
            checked: Mutex::new(None),
        })
    }

    /// Prepares on a new connection what every cycle needs, and what neither an owner nor whoever waits for one
    /// has the time to prepare where the server is far away.
    pub(super) fn prepare(&self, connection: &mut Connection) -> Result<()> {
        let statements = self.statements(connection, Moment::FAR)?;
        let Statements {
            acquire,
            renew,
            release,
            look,
            register,
            ..
        } = &*statements;
        for sql in [acquire, renew, release, look, register] {
            connection.prepare(Moment::FAR, sql)?;
        }
        Ok(())
    }

    /// The statement that makes the table, under its name.
    pub(super) fn create_statement(&self) -> String {
        strip(INIT_SQL).replace(DEFAULT_NAME, &self.name)
    }

    /// Returns the statements; looks at the table first if nobody has, once per factory.
    pub(super) fn statements(
        &self,
        connection: &mut Connection,
        by: Moment,
    ) -> Result<Arc<Statements>> {
        if let Some(checked) = self.checked.lock().clone() {
            return Ok(checked);
        }
        let mut problem = self.problem(connection, by)?;
        if let (
            true,
            Some(Problem {
                cure: Some(cure), ..
            }),
        ) = (self.create, &problem)
        {
            let applied = connection.run(by, |conn| conn.query_drop(cure));
            applied.map_err(|error| self.explain(error))?;
            problem = self.problem(connection, by)?;
        }
        if let Some(problem) = problem {
            return Err(problem.into_error(&self.name));
        }
        let no_wakeups = check_server(connection, by)?;
        let statements = Arc::new(Statements::new(&self.name, no_wakeups));
        *self.checked.lock() = Some(Arc::clone(&statements));
        Ok(statements)
    }

    /// Returns `true` if the next call makes the table where it is missing.
    pub(super) fn is_to_be_made(&self) -> bool {
        self.create && self.checked.lock().is_none()
    }

    /// The table is not what it was: look again next time.
    pub(super) fn forget(&self) {
        self.checked.lock().take();
    }

    /// Maps the error of a statement on this table.
    pub(super) fn explain(&self, error: RequestError) -> Error {
        if error.is_schema() {
            self.forget();
        }
        if error.is_missing_table() {
            return Problem::missing(self.create_statement()).into_error(&self.name);
        }
        if error.is_missing_grant() {
            let (error, name) = (error.into_error(), &self.name);
            let text = error.to_string();
            // Creating or changing it takes rights that nothing else does.
            let applied = match () {
                () if text.contains("CREATE command") => {
                    "apply sql/init-mutex.sql as a user that has CREATE, and "
                }
                () if text.contains("ALTER command") => {
                    "apply sql/upgrade-mutex.sql as a user that has ALTER, and "
                }
                () => "",
            };
            let cure = format!("{applied}grant SELECT, INSERT and UPDATE on {name}");
            return Error::new(error.kind(), format!("{text}; {cure}"));
        }
        error.into_error()
    }

    /// What is wrong with the table, if anything is.
    fn problem(&self, connection: &mut Connection, by: Moment) -> Result<Option<Problem>> {
        // As text, so that every column comes as text. A table's name can be nothing else.
        let rows: Vec<mysql::Row> = connection.run(by, |conn| {
            conn.query(format!(
                "SELECT c.column_name, c.data_type, c.character_maximum_length, c.collation_name, \
                 c.is_nullable, c.column_default IS NOT NULL OR c.is_nullable = 'YES' \
                    OR c.extra LIKE '%auto_increment%' OR c.extra LIKE '%GENERATED%', \
                 c.column_key = 'PRI', t.engine \
                 FROM information_schema.columns c JOIN information_schema.tables t \
                 ON t.table_schema = c.table_schema AND t.table_name = c.table_name \
                 WHERE c.table_schema = DATABASE() AND c.table_name = '{}'",
                self.name
            ))
        })?;
        let found: Vec<Found> = rows.into_iter().map(Found::read).collect();
        Ok(if found.is_empty() {
            Some(Problem::missing(self.create_statement()))
        } else {
            Problem::of(&self.name, &found)
        })
    }
}

impl Found {
    fn read(row: mysql::Row) -> Found {
        let mut values = row.unwrap().into_iter();
        let mut text = || {
            values
                .next()
                .and_then(|value| mysql::from_value_opt::<String>(value).ok())
                .unwrap_or_default()
        };
        Found {
            name: text().to_ascii_lowercase(),
            kind: text().to_ascii_lowercase(),
            length: text().parse().unwrap_or(0),
            collation: text().to_ascii_lowercase(),
            nullable: text() == "YES",
            has_default: text() == "1",
            in_key: text() == "1",
            engine: text(),
        }
    }
}

/// Why a table cannot be used.
#[derive(Debug)]
struct Problem {
    /// What is wrong, and what to run.
    what: String,
    /// The statement that cures it, where one does.
    cure: Option<String>,
}

impl Problem {
    fn missing(cure: String) -> Problem {
        Problem {
            what: "is not in the database, or this user may not see it: apply sql/init-mutex.sql"
                .to_owned(),
            cure: Some(cure),
        }
    }

    fn of(table: &str, found: &[Found]) -> Option<Problem> {
        let mut wrong = Vec::new();
        let mut changes = Vec::new();
        for column in &COLUMNS {
            let Column(name, _, _, definition) = column;
            match found.iter().find(|found| found.name == *name) {
                None => {
                    wrong.push(format!("has no column {name}"));
                    changes.push(format!("ADD COLUMN {name} {definition}"));
                }
                Some(found) if !column.fits(found) => {
                    wrong.push(format!("has another column {name} than needed"));
                    changes.push(format!("MODIFY COLUMN {name} {definition}"));
                }
                Some(_) => {}
            }
        }
        let key: Vec<&str> = found
            .iter()
            .filter(|found| found.in_key)
            .map(|found| found.name.as_str())
            .collect();
        match key[..] {
            ["mutex"] => {}
            [] => {
                wrong.push("has no primary key".to_owned());
                changes.push("ADD PRIMARY KEY (mutex)".to_owned());
            }
            _ => {
                wrong.push("has another primary key than mutex".to_owned());
                changes.push("DROP PRIMARY KEY, ADD PRIMARY KEY (mutex)".to_owned());
            }
        }
        let engine = found.first().map_or("", |found| &found.engine);
        if !engine.eq_ignore_ascii_case("innodb") {
            wrong.push(format!("is kept by {engine}, not by InnoDB"));
            changes.push("ENGINE = InnoDB".to_owned());
        }
        // Nobody but its owner knows what such a column should hold.
        let mut cured = true;
        for extra in found {
            let known = COLUMNS.iter().any(|column| column.0 == extra.name);
            if !known && !extra.has_default {
                wrong.push(format!("has a column {} without a default", extra.name));
                changes.push(format!("ALTER COLUMN {} SET DEFAULT ...", extra.name));
                cured = false;
            }
        }
        if wrong.is_empty() {
            return None;
        }
        let alter = format!("ALTER TABLE `{table}` {}", changes.join(", "));
        Some(Problem {
            what: format!("{}; run {alter}", wrong.join(", ")),
            cure: cured.then_some(alter),
        })
    }

    fn into_error(self, table: &str) -> Error {
        let or = match self.cure {
            Some(_) => ", or add ?create_table=true to the URL",
            None => "",
        };
        let message = format!("the table {table} {}{or}", self.what);
        Error::new(ErrorKind::Misconfigured, message)
    }
}

/// Refuses a server whose SYSDATE stands still, warns of one that cannot replicate our statements, and
/// returns why nobody can be woken there, if that is known.
fn check_server(connection: &mut Connection, by: Moment) -> Result<Option<&'static str>> {
    // Microseconds pass between the start of a statement and this look at the clock; several tries,
    // because a coarse clock may not show them.
    let mut moves = false;
    for _ in 0..20 {
        let sql = "SELECT SYSDATE(6) > NOW(6)";
        moves = connection.run(by, |conn| conn.query_first(sql))? == Some(true);
        if moves {
            break;
        }
    }
    let settings: Vec<(String, String)> = connection.run(by, |conn| {
        conn.query(
            "SHOW VARIABLES WHERE Variable_name IN ('wsrep_on', 'pxc_strict_mode', 'binlog_format', \
             'log_bin', 'group_replication_single_primary_mode')",
        )
    })?;
    if !moves {
        return Err(Error::new(
            ErrorKind::Misconfigured,
            "the MySQL server runs with --sysdate-is-now: a lease could not be told from one that ran \
             out while a statement waited; run it without",
        ));
    }
    let is = |name: &str, values: &[&str]| {
        settings.iter().any(|(known, value)| {
            known.eq_ignore_ascii_case(name)
                && values.iter().any(|other| value.eq_ignore_ascii_case(other))
        })
    };
    if is("binlog_format", &["STATEMENT"]) && is("log_bin", &["ON", "1"]) {
        log::warn!(
            "the MySQL server logs with binlog_format=STATEMENT, under which replicas compute other \
             times than it: set MIXED or ROW"
        );
    }
    Ok(if is("wsrep_on", &["ON", "1"]) {
        Some("this is a Galera cluster, where a release wakes only who is on the same node")
    } else if is("pxc_strict_mode", &["ENFORCING", "MASTER"]) {
        Some("pxc_strict_mode refuses GET_LOCK")
    } else if is("group_replication_single_primary_mode", &["OFF", "0"]) {
        Some(
            "this is multi-primary group replication, where a release wakes only who is on the same server",
        )
    } else {
        None
    })
}

impl Statements {
    fn new(table: &str, no_wakeups: Option<&'static str>) -> Statements {
        let claim = CLAIM_TIME.as_millis().to_string();
        let room = (WAITERS - TOKEN).to_string();
        let fill = |sql: &str| {
            strip(sql)
                .replace("{quiet}", QUIET)
                .replace("{table}", &format!("`{table}`"))
                .replace("{now}", NOW)
                .replace("{clock}", CLOCK)
                .replace("{micros}", MICROS)
                .replace("{claim}", &claim)
                .replace("{room}", &room)
        };
        let release = |whose: &str| {
            fill(&include_str!("../../../sql/mutex-release.sql").replace("{whose}", whose))
        };
        Statements {
            acquire: fill(include_str!("../../../sql/mutex-acquire.sql")),
            renew: fill(include_str!("../../../sql/mutex-renew.sql")),
            release: release(
                "owner_id = :id AND fencing_token = :fence AND transition_at >= {clock}",
            ),
            release_any: release("owner_id = :id"),
            revoke: release(OWNED),
            register: fill(include_str!("../../../sql/mutex-register.sql")),
            withdraw: fill(include_str!("../../../sql/mutex-withdraw.sql")),
            undo_hand_over: fill(include_str!("../../../sql/mutex-undo-hand-over.sql")),
            look: fill(include_str!("../../../sql/mutex-look.sql")),
            insert: fill(include_str!("../../../sql/mutex-insert.sql")),
            record_run: fill(
                &include_str!("../../../sql/mutex-record-run.sql").replace("{owned}", OWNED),
            ),
            list: fill(include_str!("../../../sql/mutex-list.sql")),
            ping: fill("SELECT 1 FROM {table} LIMIT 0"),
            look_many: fill(include_str!("../../../sql/mutex-look-many.sql")),
            wait: fill(include_str!("../../../sql/mutex-wait.sql")),
            no_wakeups,
        }
    }

    /// The statement that says which of `mutexes` are quiet.
    pub(super) fn look_many(&self, token: &str, mutexes: &[Arc<str>]) -> String {
        self.look_many
            .replace("{token}", token)
            .replace("{mutexes}", &literals(mutexes))
    }

    /// The statement that waits for one of `mutexes`, for at most so many seconds.
    pub(super) fn wait(&self, token: &str, mutexes: &[Arc<str>], seconds: u64) -> String {
        self.wait
            .replace("{token}", token)
            .replace("{mutexes}", &literals(mutexes))
            .replace("{count}", &mutexes.len().to_string())
            .replace("{seconds}", &seconds.to_string())
    }
}

/// The statement that wakes the process with this token.
pub(super) fn kill(token: &str) -> String {
    strip(include_str!("../../../sql/mutex-wake.sql")).replace("{token}", token)
}

/// Names as literals that can be nothing else, whatever they contain.
fn literals(names: &[Arc<str>]) -> String {
    let mut list = String::new();
    for name in names {
        list.push_str(if list.is_empty() {
            "_utf8mb4 x'"
        } else {
            ", _utf8mb4 x'"
        });
        for byte in name.bytes() {
            let _ = write!(list, "{byte:02x}");
        }
        list.push('\'');
    }
    list
}

/// A file's statement without its comments: they are for who reads the file, not for the server.
pub(crate) fn strip(sql: &str) -> String {
    let lines: Vec<&str> = sql
        .lines()
        .filter(|line| !line.trim_start().starts_with("--"))
        .collect();
    lines.join("\n").trim().to_owned()
}

/// Reads a column of a row; what a server should never send counts as missing.
pub(super) fn column<T: mysql::prelude::FromValue>(
    row: &mut mysql::Row,
    index: usize,
) -> Option<T> {
    let value: Value = row.take(index)?;
    mysql::from_value_opt(value).ok()
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
        let statements = Statements::new("t", None);
        let names: [Arc<str>; 2] = ["a'b".into(), "ü".into()];
        let wait = statements.wait("123456789012345678", &names, 1);
        assert!(
            wait.contains("(_utf8mb4 x'612762', _utf8mb4 x'c3bc')"),
            "{wait}"
        );
        for sql in [
            &statements.acquire,
            &statements.renew,
            &statements.release,
            &statements.release_any,
            &statements.revoke,
            &statements.register,
            &statements.withdraw,
            &statements.undo_hand_over,
            &statements.look,
            &statements.insert,
            &statements.record_run,
            &statements.list,
            &wait,
            &statements.look_many("123456789012345678", &names),
            &kill("123456789012345678"),
        ] {
            assert!(!sql.contains(['{', '}']) && !sql.contains("--"), "{sql}");
        }
        let create = Table::new("other", false).unwrap().create_statement();
        assert!(create.starts_with("CREATE TABLE IF NOT EXISTS `other`"));
    }

    #[test]
    fn the_upgrade_script_says_what_the_columns_must_be() {
        for Column(name, _, _, definition) in &COLUMNS {
            if ["mutex", "owner_id", "fencing_token", "waiters", "run_at"].contains(name) {
                assert!(UPGRADE_SQL.contains(definition), "{name}");
            }
        }
    }
}
