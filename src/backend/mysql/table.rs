//! The table of mutexes: its name, whether its columns are those that contend needs, and the statements made
//! for it.

use std::collections::BTreeMap;
use std::sync::Arc;

use mysql::prelude::Queryable;
use parking_lot::Mutex;

use super::connection::Connection;
use super::error::RequestError;
use super::token::Token;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};

/// The script that creates the mutex table, `sql/init-mutex.sql`.
pub const INIT_SQL: &str = include_str!("../../../sql/init-mutex.sql");

/// The script that upgrades a mutex table of Simba, `sql/upgrade-mutex.sql`.
pub const UPGRADE_SQL: &str = include_str!("../../../sql/upgrade-mutex.sql");

/// The statement that wakes a process.
pub(super) const WAKE: &str = include_str!("../../../sql/mutex-wake.sql");

/// The table's name in those files.
pub(super) const DEFAULT_NAME: &str = "simba_mutex";

/// The longest list of waiting tokens that has room for one more of 19 characters.
pub(super) const ROOM: usize = 3990 - 19;

/// What several statements share. `now` is the clock when the statement began: a lease counts from there. `clock` is
/// the clock now: during a wait for a row lock NOW() has stood still. `claim` is the claim time.
const FRAGMENTS: [(&str, &str); 8] = [
    (
        "{takeable}",
        "(owner_id = :id OR owner_id = CONCAT('~', :token) OR (transition_at < {now} AND (waiters = '' \
         OR SUBSTRING(waiters, 2, 18) = :token OR transition_at + {claim} < {now})))",
    ),
    (
        "{quiet}",
        "(mutex = {mutex} AND {listed} AND NOT (transition_at < {now} \
         AND (SUBSTRING(waiters, 2, 18) IN ({tokens}) OR transition_at + {claim} < {now})))",
    ),
    (
        "{owned}",
        "fencing_token = :fence AND owner_id <> '' AND owner_id NOT LIKE '~%' AND transition_at >= {clock}",
    ),
    ("{changed}", "IF(version < 2147483647, version + 1, 1)"),
    ("{now}", "CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS UNSIGNED)"),
    (
        "{clock}",
        "CAST(UNIX_TIMESTAMP(SYSDATE(3)) * 1000 AS UNSIGNED)",
    ),
    (
        "{micros}",
        "CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS UNSIGNED)",
    ),
    ("{claim}", "500"),
];

/// The table, and whether it has been looked at.
#[derive(Debug)]
pub(super) struct Table {
    name: String,
    pub(super) sql: Statements,
    /// Whether to make or change it if it is not as it must be.
    create: bool,
    /// Checked with the first request, and again when the table turns out to be another one.
    checked: Mutex<Option<WakeupsOff>>,
}

/// Why no contender can be woken on a server, if its settings say so.
pub(super) type WakeupsOff = Option<&'static str>;

/// The statements for a table, ready to be prepared.
#[derive(Debug)]
pub(super) struct Statements {
    pub(super) acquire: String,
    pub(super) renew: String,
    pub(super) release: String,
    pub(super) release_any: String,
    pub(super) revoke: String,
    pub(super) pass_on: String,
    pub(super) pass_on_from_dead: String,
    pub(super) register: String,
    pub(super) unregister: String,
    pub(super) look: String,
    pub(super) insert: String,
    pub(super) record_run: String,
    pub(super) list: String,
    pub(super) ping: String,
    look_many: String,
    wait: String,
    quiet: String,
}

impl Table {
    pub(super) fn new(name: &str, create: bool) -> Result<Table> {
        let fits = (1..=64).contains(&name.len());
        if !fits || name.contains(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '$')) {
            return Err(Error::invalid(format!(
                "{name:?} is not a table name; allowed are 1 to 64 ASCII letters, digits, _ and $"
            )));
        }
        Ok(Table {
            name: name.to_owned(),
            sql: Statements::new(name),
            create,
            checked: Mutex::new(None),
        })
    }

    /// Prepares on a new connection what owners and waiters have no time to prepare where the server is far away.
    pub(super) fn prepare(&self, connection: &mut Connection) -> Result<()> {
        self.check(connection, Moment::FAR)?;
        let sql = &self.sql;
        for text in [
            &sql.acquire,
            &sql.renew,
            &sql.release,
            &sql.look,
            &sql.register,
        ] {
            connection.prepare(Moment::FAR, text)?;
        }
        Ok(())
    }

    /// The statement that makes the table, under its name.
    pub(super) fn create_statement(&self) -> String {
        strip(INIT_SQL).replace(DEFAULT_NAME, &self.name)
    }

    /// The table is not what it was: look again next time.
    pub(super) fn forget(&self) {
        self.checked.lock().take();
    }

    /// Looks at the table and its server, once per factory.
    pub(super) fn check(&self, connection: &mut Connection, by: Moment) -> Result<WakeupsOff> {
        if let Some(checked) = *self.checked.lock() {
            return Ok(checked);
        }
        let mut cure = self.cure(connection, by)?;
        if let (true, Some(statement)) = (self.create, &cure) {
            let applied = connection.run(by, |conn| conn.query_drop(statement));
            // Another process may have been faster: what matters is how the table is now.
            cure = self.cure(connection, by)?;
            if cure.is_some() {
                applied.map_err(|error| self.explain(error))?;
            }
        }
        if let Some(statement) = cure {
            let message = format!(
                "the table {} is missing, or not as contend needs it, or this user has no grant on it: apply \
                 sql/init-mutex.sql or sql/upgrade-mutex.sql, which here is {statement}; or add \
                 ?create_table=true to the URL",
                self.name
            );
            return Err(Error::new(ErrorKind::Misconfigured, message));
        }
        let wakeups_off = check_server(connection, by)?;
        *self.checked.lock() = Some(wakeups_off);
        Ok(wakeups_off)
    }

    /// Maps the error of a statement on this table.
    pub(super) fn explain(&self, error: RequestError) -> Error {
        if error.is_schema() {
            self.forget();
        }
        let needed = if error.is_missing_table() {
            "apply sql/init-mutex.sql, or add ?create_table=true to the URL"
        } else if error.is_missing_grant() {
            "grant SELECT, INSERT and UPDATE on the table; to make or change it, CREATE or ALTER too"
        } else {
            return error.into_error();
        };
        let error = error.into_error();
        Error::new(error.kind(), format!("{error}; {needed}"))
    }

    /// The statement that makes the table what it must be, unless it is.
    fn cure(&self, connection: &mut Connection, by: Moment) -> Result<Option<String>> {
        // A table's name can be nothing else.
        let sql = format!(
            "SELECT LOWER(column_name), COALESCE(character_maximum_length, 0), COALESCE(collation_name, '_bin'), \
             column_key = 'PRI' FROM information_schema.columns \
             WHERE table_schema = DATABASE() AND table_name = '{}'",
            self.name
        );
        let found: Vec<(String, usize, String, bool)> =
            connection.run(by, |conn| conn.query(sql))?;
        if found.is_empty() {
            return Ok(Some(self.create_statement()));
        }
        // Those lines of the script that name what is missing here, or too short, or not compared byte by byte.
        let script = strip(UPGRADE_SQL);
        let is_needed = |line: &&str| {
            let name = line.split(' ').nth(2).unwrap_or_default();
            let column = found.iter().find(|(found, ..)| found == name);
            column.is_none_or(|(_, length, collation, _)| {
                let least = if name == "owner_id" { 128 } else { 66 };
                line.starts_with("MODIFY") && (*length < least || !collation.ends_with("_bin"))
            })
        };
        let lines = script.lines().skip(1);
        let lines = lines.map(|line| line.trim().trim_end_matches([',', ';']));
        let mut changes: Vec<&str> = lines.filter(is_needed).collect();
        // With another key there may be two rows for one mutex.
        let keys = found.iter().filter(|(.., is_key)| *is_key);
        let keys: Vec<&str> = keys.map(|(name, ..)| name.as_str()).collect();
        match keys[..] {
            ["mutex"] => {}
            [] => changes.push("ADD PRIMARY KEY (mutex)"),
            _ => changes.push("DROP PRIMARY KEY, ADD PRIMARY KEY (mutex)"),
        }
        let alter = format!("ALTER TABLE `{}` {}", self.name, changes.join(", "));
        Ok((!changes.is_empty()).then_some(alter))
    }
}

/// Refuses a server whose SYSDATE stands still.
fn check_server(connection: &mut Connection, by: Moment) -> Result<WakeupsOff> {
    let sql = "SELECT SLEEP(0.002), SYSDATE(6) > NOW(6)";
    let moves: Option<(i64, bool)> = connection.run(by, |conn| conn.query_first(sql))?;
    if !moves.is_some_and(|(_, moves)| moves) {
        let message = "the MySQL server runs with --sysdate-is-now: a lease could not be told from one that ran \
                       out while a statement waited; run it without";
        return Err(Error::new(ErrorKind::Misconfigured, message));
    }
    let sql = "SHOW VARIABLES WHERE (Variable_name = 'wsrep_on' AND Value IN ('ON', '1')) \
               OR (Variable_name = 'group_replication_single_primary_mode' AND Value IN ('OFF', '0'))";
    let several: Option<(String, String)> = connection.run(by, |conn| conn.query_first(sql))?;
    let why = "this server is one of several primaries (Galera, group replication), where a release wakes only \
               contenders on the same one";
    Ok(several.map(|_| why))
}

impl Statements {
    fn new(table: &str) -> Statements {
        let fill = |sql: &str| {
            let sql = strip(sql).replace("{table}", &format!("`{table}`"));
            let fill = |sql: String, (name, text): &(&str, &str)| sql.replace(name, text);
            FRAGMENTS.iter().fold(sql, fill)
        };
        let release = |first: &str, whose: &str| {
            let sql = strip(include_str!("../../../sql/mutex-release.sql"));
            fill(&sql.replace("{first}", first).replace("{whose}", whose))
        };
        let handed = "owner_id = CONCAT('~', :token)";
        let dead = "waiters = REGEXP_REPLACE(waiters, CONCAT(':', SUBSTRING(:token, 1, 12), '[0-9]*'), ''),";
        Statements {
            acquire: fill(include_str!("../../../sql/mutex-acquire.sql")),
            renew: fill(include_str!("../../../sql/mutex-renew.sql")),
            release: release(
                "",
                "owner_id = :id AND fencing_token = :fence AND transition_at >= {clock}",
            ),
            release_any: release("", "owner_id = :id"),
            revoke: release("", "{owned}"),
            pass_on: release("", handed),
            pass_on_from_dead: release(dead, handed),
            register: fill(include_str!("../../../sql/mutex-register.sql")),
            unregister: fill(include_str!("../../../sql/mutex-unregister.sql")),
            look: fill(include_str!("../../../sql/mutex-look.sql")),
            insert: fill(include_str!("../../../sql/mutex-insert.sql")),
            record_run: fill(include_str!("../../../sql/mutex-record-run.sql")),
            list: fill(include_str!("../../../sql/mutex-list.sql")),
            ping: fill("SELECT 1 FROM {table} LIMIT 0"),
            look_many: fill(include_str!("../../../sql/mutex-look-many.sql")),
            // What is quiet differs from mutex to mutex.
            wait: strip(include_str!("../../../sql/mutex-wait.sql"))
                .replace("{table}", &format!("`{table}`")),
            quiet: fill("{quiet}"),
        }
    }

    /// The statement that reads the rows of `mutexes`.
    pub(super) fn look_many(&self, mutexes: &[Arc<str>]) -> String {
        let names: Vec<String> = mutexes.iter().map(|mutex| literal(mutex)).collect();
        self.look_many.replace("{mutexes}", &names.join(", "))
    }

    /// The statement that waits until one of the tokens has something to do.
    pub(super) fn wait(&self, process: u64, listed: &BTreeMap<Arc<str>, Vec<Token>>) -> String {
        let quiet = |(mutex, tokens): (&Arc<str>, &Vec<Token>)| {
            let all = |separator: &str, each: &dyn Fn(&Token) -> String| {
                tokens.iter().map(each).collect::<Vec<_>>().join(separator)
            };
            let listed = all(" AND ", &|token| format!("LOCATE(':{token}', waiters) > 0"));
            self.quiet
                .replace("{mutex}", &literal(mutex))
                .replace("{listed}", &listed)
                .replace("{tokens}", &all(", ", &|token| format!("'{token}'")))
        };
        let quiet: Vec<String> = listed.iter().map(quiet).collect();
        self.wait
            .replace("{process}", &process.to_string())
            .replace("{count}", &listed.len().to_string())
            .replace("{quiet}", &quiet.join(" OR "))
    }
}

/// A name as a literal that can be nothing else.
fn literal(name: &str) -> String {
    let hex: String = name.bytes().map(|byte| format!("{byte:02x}")).collect();
    format!("_utf8mb4 x'{hex}'")
}

/// A file's statement without its comments.
pub(crate) fn strip(sql: &str) -> String {
    let lines = sql
        .lines()
        .filter(|line| !line.trim_start().starts_with("--"));
    lines.collect::<Vec<_>>().join("\n").trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_name_cannot_become_sql() {
        for bad in ["", "a b", "a`b", "a;b", "a.b", "ü", &"x".repeat(65)] {
            let error = Table::new(bad, false).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{bad}");
        }
        assert!(Table::new("simba_mutex", false).is_ok());
    }

    #[test]
    fn statements_have_no_placeholder_and_no_comment() {
        let statements = Statements::new("t");
        let (one, two) = (
            Token::new(123_456_789_012, 1),
            Token::new(123_456_789_012, 2),
        );
        let listed = [("a'b".into(), vec![one, two]), ("ü".into(), vec![one])];
        let listed: BTreeMap<Arc<str>, _> = listed.into();
        let wait = statements.wait(123_456_789_012, &listed);
        assert!(wait.contains("mutex = _utf8mb4 x'612762'"), "{wait}");
        assert!(wait.contains("IN ('123456789012000001', '123456789012000002')"));
        assert!(wait.ends_with("= 2, 1, 0))"), "{wait}");
        for sql in [
            &statements.acquire,
            &statements.renew,
            &statements.release,
            &statements.release_any,
            &statements.revoke,
            &statements.pass_on,
            &statements.pass_on_from_dead,
            &statements.register,
            &statements.unregister,
            &statements.look,
            &statements.insert,
            &statements.record_run,
            &statements.list,
            &wait,
            &statements.look_many(&["ü".into()]),
        ] {
            assert!(!sql.contains(['{', '}']) && !sql.contains("--"), "{sql}");
        }
        let create = Table::new("other", false).unwrap().create_statement();
        assert!(create.starts_with("CREATE TABLE IF NOT EXISTS `other`"));
    }

    #[test]
    fn sql_says_what_constants_say() {
        let claim = crate::backend::CLAIM_TIME.as_millis().to_string();
        assert!(FRAGMENTS.contains(&("{claim}", claim.as_str())));
        let register = Statements::new("t").register;
        assert!(register.contains(&format!("LENGTH(waiters) <= {ROOM}")));
    }
}
