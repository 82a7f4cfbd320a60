//! The table of mutexes: its name, whether its columns are those that contend needs, and the statements made
//! for it.

use std::collections::BTreeMap;
use std::sync::Arc;

use mysql::prelude::Queryable;
use parking_lot::Mutex;

use super::connection::Connection;
use super::error::RequestError;
use super::token::Token;
use crate::backend::CLAIM_TIME;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};

/// The script that creates the mutex table, `sql/init-mutex.sql`.
pub const INIT_SQL: &str = include_str!("../../../sql/init-mutex.sql");

/// The script that upgrades a mutex table of Simba, `sql/upgrade-mutex.sql`.
pub const UPGRADE_SQL: &str = include_str!("../../../sql/upgrade-mutex.sql");

/// The statement that wakes a process.
pub(super) const WAKE: &str = include_str!("../../../sql/mutex-wake.sql");

const RELEASE: &str = include_str!("../../../sql/mutex-release.sql");

/// Takes all tokens of a dead process out of the list.
const WITHOUT_DEAD: &str = "waiters = REGEXP_REPLACE(waiters, CONCAT(':', :dead, '[0-9]*'), ''),";

/// The table's name in those files.
pub(super) const DEFAULT_NAME: &str = "simba_mutex";

/// The longest list of waiting tokens that has room for one more of 19 characters.
pub(super) const ROOM: usize = 3990 - 19;

/// The clock when the statement began: a lease counts from there.
const NOW: &str = "CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS UNSIGNED)";

/// The clock now: during a wait for a row lock NOW() has stood still.
const CLOCK: &str = "CAST(UNIX_TIMESTAMP(SYSDATE(3)) * 1000 AS UNSIGNED)";

/// A contender may take the mutex.
const TAKEABLE: &str = "(owner_id IN (:id, CONCAT('~', :token)) \
    OR transition_at + IF(SUBSTRING(waiters, 2, 18) IN ('', :token), 0, {claim}) < {now})";

/// No token of those waited for has anything to do.
const QUIET: &str = "(mutex = {mutex} AND {listed} AND NOT (transition_at < {now} \
    AND (SUBSTRING(waiters, 2, 18) IN ({tokens}) OR transition_at + {claim} < {now})))";

/// The owner with this id has this fence.
const BY_OWNER: &str = "owner_id = :id AND fencing_token = :fence AND transition_at >= {clock}";

/// The mutex has this owner or hand-over, and its owner this fence; each of them unless it is NULL.
const BY_ANY: &str = "(:id IS NULL OR owner_id = :id) AND (:fence IS NULL OR ({owned}))";

/// An owner has this fence.
const OWNED: &str = "fencing_token = :fence AND owner_id <> '' AND owner_id NOT LIKE '~%' \
    AND transition_at >= {clock}";

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

/// The tokens that a WAIT is for, by their mutex.
pub(super) type Listed = BTreeMap<Arc<str>, Vec<Token>>;

/// Why no contender can be woken on a server, if its settings say so.
pub(super) type WakeupsOff = Option<&'static str>;

/// The statements for a table, ready to be prepared.
#[derive(Debug)]
pub(super) struct Statements {
    pub(super) acquire: String,
    pub(super) renew: String,
    pub(super) release: String,
    pub(super) release_any: String,
    pub(super) register: String,
    pub(super) unregister: String,
    pub(super) look: String,
    pub(super) insert: String,
    pub(super) record_run: String,
    pub(super) list: String,
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
            let script = match statement.starts_with("ALTER") {
                true => format!("sql/upgrade-mutex.sql, which here is {statement}"),
                false => "sql/init-mutex.sql".to_owned(),
            };
            let message = format!(
                "the table {} is missing, or not as contend needs it, or this user has no grant on it: add \
                 ?create_table=true to the URL, or apply {script}",
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
            // The table is not what it was: the next call looks at it again.
            self.checked.lock().take();
        }
        if !error.is_missing_grant() {
            return error.into();
        }
        let error = Error::from(error);
        let advice = "grant SELECT, INSERT and UPDATE on the table; to make or change it, CREATE or ALTER too";
        Error::new(error.kind(), format!("{error}; {advice}"))
    }

    /// The statement that makes the table what it must be, unless it is.
    fn cure(&self, connection: &mut Connection, by: Moment) -> Result<Option<String>> {
        // A table's name can be nothing else.
        let sql = format!(
            "SELECT LOWER(column_name), \
             COALESCE(character_maximum_length >= IF(column_name = 'owner_id', 128, 66) \
             AND collation_name LIKE '%bin', FALSE), column_key = 'PRI' FROM information_schema.columns \
             WHERE table_schema = DATABASE() AND table_name = '{}'",
            self.name
        );
        let found: Vec<(String, bool, bool)> = connection.run(by, |conn| conn.query(sql))?;
        if found.is_empty() {
            return Ok(Some(self.create_statement()));
        }
        // Those lines of the script that name what is missing here, or too short, or not compared byte by byte.
        let script = strip(UPGRADE_SQL);
        let is_needed = |line: &&str| {
            let name = line.split(' ').nth(2).unwrap_or_default();
            let column = found.iter().find(|(found, ..)| found == name);
            column.is_none_or(|(_, fits, _)| line.starts_with("MODIFY") && !fits)
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
        let table = format!("`{table}`");
        let (claim, room) = (CLAIM_TIME.as_millis().to_string(), ROOM.to_string());
        let fill = |sql: &str| {
            strip(sql)
                .replace("{table}", &table)
                .replace("{takeable}", TAKEABLE)
                .replace("{owned}", OWNED)
                .replace("{changed}", "version % 2147483647 + 1")
                .replace("{now}", NOW)
                .replace("{clock}", CLOCK)
                .replace("{claim}", &claim)
                .replace("{room}", &room)
        };
        let release =
            |first, whose| fill(&RELEASE.replace("{first}", first).replace("{whose}", whose));
        Statements {
            acquire: fill(include_str!("../../../sql/mutex-acquire.sql")),
            renew: fill(include_str!("../../../sql/mutex-renew.sql")),
            release: release("", BY_OWNER),
            release_any: release(WITHOUT_DEAD, BY_ANY),
            register: fill(include_str!("../../../sql/mutex-register.sql")),
            unregister: fill(include_str!("../../../sql/mutex-unregister.sql")),
            look: fill(include_str!("../../../sql/mutex-look.sql")),
            insert: fill(include_str!("../../../sql/mutex-insert.sql")),
            record_run: fill(include_str!("../../../sql/mutex-record-run.sql")),
            list: fill(include_str!("../../../sql/mutex-list.sql")),
            look_many: fill(include_str!("../../../sql/mutex-look-many.sql")),
            wait: fill(include_str!("../../../sql/mutex-wait.sql")),
            quiet: fill(QUIET),
        }
    }

    /// The statement that reads the rows of what is waited for.
    pub(super) fn look_many(&self, listed: &Listed) -> String {
        let names = listed.keys().map(|mutex| literal(mutex));
        self.look_many.replace("{mutexes}", &join(names, ", "))
    }

    /// The statement that waits until one of the tokens has something to do.
    pub(super) fn wait(&self, process: u64, listed: &Listed) -> String {
        let quiet = listed.iter().map(|(mutex, tokens)| {
            let finds = tokens.iter();
            let finds = finds.map(|token| format!("LOCATE(':{token}', waiters) > 0"));
            let tokens = tokens.iter().map(|token| format!("'{token}'"));
            self.quiet
                .replace("{mutex}", &literal(mutex))
                .replace("{listed}", &join(finds, " AND "))
                .replace("{tokens}", &join(tokens, ", "))
        });
        self.wait
            .replace("{process}", &process.to_string())
            .replace("{count}", &listed.len().to_string())
            .replace("{each_quiet}", &join(quiet, " OR "))
    }
}

/// A name as a literal that can be nothing else.
fn literal(name: &str) -> String {
    let hex = name.bytes().map(|byte| format!("{byte:02x}"));
    format!("_utf8mb4 x'{}'", join(hex, ""))
}

fn join(parts: impl Iterator<Item = String>, separator: &str) -> String {
    parts.collect::<Vec<_>>().join(separator)
}

/// A file's statement without its comments.
pub(crate) fn strip(sql: &str) -> String {
    let lines = sql.lines().map(str::to_owned);
    let code = lines.filter(|line| !line.trim_start().starts_with("--"));
    join(code, "\n").trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::mysql::server::MAX_PACKET;
    use crate::backend::mysql::waiting::MAX_PLACES;

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
        let listed = Listed::from(listed);
        let wait = statements.wait(123_456_789_012, &listed);
        assert!(wait.contains("mutex = _utf8mb4 x'612762'"), "{wait}");
        assert!(wait.contains("IN ('123456789012000001', '123456789012000002')"));
        assert!(wait.ends_with("= 2, 1, 0))"), "{wait}");
        for sql in [
            &statements.acquire,
            &statements.renew,
            &statements.release,
            &statements.release_any,
            &statements.register,
            &statements.unregister,
            &statements.look,
            &statements.insert,
            &statements.record_run,
            &statements.list,
            &wait,
            &statements.look_many(&listed),
        ] {
            assert!(!sql.contains(['{', '}']) && !sql.contains("--"), "{sql}");
        }
        let create = Table::new("other", false).unwrap().create_statement();
        assert!(create.starts_with("CREATE TABLE IF NOT EXISTS `other`"));
    }

    /// The statement that waits exceeded the driver's packet, which kept the waiting connections down.
    #[test]
    fn longest_wait_fits_in_a_packet() {
        let digit = |number: usize| char::from_u32(0x1d100 + number as u32 % 16).unwrap();
        let digits = |number| [12, 8, 4, 0].map(|shift| digit(number >> shift));
        let name = |number| "𝄞".repeat(62) + &String::from_iter(digits(number));
        let token = |number| vec![Token::new(999_999_999_999, number)];
        let listed = (1..=MAX_PLACES).map(|number| (name(number).into(), token(number as u64)));
        let listed: Listed = listed.collect();
        assert_eq!(listed.len(), MAX_PLACES);
        assert!(listed.keys().all(|name| name.len() == 66 * 4));
        let length = Statements::new(&"t".repeat(64))
            .wait(999_999_999_999, &listed)
            .len();
        assert!(length < MAX_PACKET - 1_000, "{length}");
    }
}
