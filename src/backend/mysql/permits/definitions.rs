//! The semaphores themselves: their tables, names and capacities, and how full they are.

use std::sync::Arc;

use super::MysqlPermits;
use super::sql::{
    Answer, COMMIT, INIT_SQL, answer, columns, duration, fill, quote, quote_all, quote_option, rows,
};
use crate::backend::mysql::connection::Connection;
use crate::backend::mysql::table::strip;
use crate::backend::permit_store::{
    CapacityChange, Holder, Usage, free, no_such_semaphore, semaphore_in_use,
};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::pool::Lane;

/// The columns that the statements name, by table.
const COLUMNS: [&[&str]; 4] = [
    &["id", "name", "capacity", "used", "created_at", "updated_at"],
    &[
        "id",
        "external_id",
        "token",
        "owner",
        "state",
        "ttl_seconds",
        "expires_at",
        "reclaim_at",
        "created_at",
        "updated_at",
    ],
    &["id", "semaphore_id", "permit_request_id", "count", "state"],
    &[
        "id",
        "semaphore_id",
        "semaphore_name",
        "changed_by",
        "changed_at",
        "old_capacity",
        "new_capacity",
    ],
];

impl MysqlPermits {
    /// Makes the tables where they are missing, unless some of those there are somebody else's.
    pub(super) fn make_tables(&self, by: Moment) -> Result<()> {
        self.check_tables(by)?;
        // One by one: each may take as long as an answer may.
        for statement in self.statements.tables(&strip(INIT_SQL)).split(';') {
            self.connections.ask(&self.statements, statement, by)?;
        }
        self.check_tables(by)
    }

    /// Refuses tables of the same names that lack what the statements name.
    fn check_tables(&self, by: Moment) -> Result<()> {
        let names = self.statements.names();
        let sql = format!(
            "SELECT c.TABLE_NAME, c.COLUMN_NAME, t.ENGINE FROM information_schema.COLUMNS c \
             JOIN information_schema.TABLES t USING (TABLE_SCHEMA, TABLE_NAME) \
             WHERE c.TABLE_SCHEMA = DATABASE() AND c.TABLE_NAME IN ({})",
            quote_all(&names)
        );
        let found = rows::<(String, String, Option<String>)>(self.one(&sql, by)?)?;
        for (name, wanted) in names.iter().zip(COLUMNS) {
            let own: Vec<_> = found.iter().filter(|(table, ..)| table == name).collect();
            if own.is_empty() {
                continue;
            }
            let has = |column: &str| {
                own.iter()
                    .any(|(_, other, _)| other.eq_ignore_ascii_case(column))
            };
            let missing: Vec<&str> = wanted
                .iter()
                .filter(|column| !has(column))
                .copied()
                .collect();
            let wrong = if !missing.is_empty() {
                format!("lacks the columns {}", missing.join(", "))
            } else if own
                .iter()
                .any(|(.., engine)| engine.as_deref() != Some("InnoDB"))
            {
                "is not an InnoDB table".to_owned()
            } else {
                continue;
            };
            return Err(Error::new(
                ErrorKind::Misconfigured,
                format!(
                    "the table {name:?} {wrong}: it is somebody else's, or of an older version; rename \
                     it, or set another table_prefix. Nothing was changed"
                ),
            ));
        }
        Ok(())
    }

    pub(super) fn define(&self, name: &str, capacity: u32, by: Moment) -> Result<bool> {
        let sql = self.statements.tables(&format!(
            "INSERT INTO {{semaphore}} (name, capacity) VALUES ({}, {capacity})",
            quote(name)
        ));
        let mut connection = self.connections.checkout(Lane::Other, by)?;
        match self.connections.send(&mut connection, &sql) {
            Ok(_) => Ok(true),
            Err(error) if error.is_duplicate() => Ok(false),
            Err(error) => Err(self.statements.explain(error)),
        }
    }

    pub(super) fn change_capacity(
        &self,
        name: &str,
        capacity: u32,
        changed_by: Option<&str>,
        by: Moment,
    ) -> Result<u32> {
        self.with_locked(name, by, |id, old, _, connection| {
            if old != capacity {
                let sql = self.statements.tables(&format!(
                    "UPDATE {{semaphore}} SET capacity = {capacity}, updated_at = SYSDATE(6) \
                     WHERE id = {id};\
                     INSERT INTO {{history}} \
                     (semaphore_id, semaphore_name, changed_by, old_capacity, new_capacity) \
                     VALUES ({id}, {}, {}, {old}, {capacity})",
                    quote(name),
                    quote_option(changed_by)
                ));
                self.send(connection, &sql)?;
            }
            Ok(old)
        })
    }

    pub(super) fn undefine(&self, name: &str, by: Moment) -> Result<bool> {
        let outcome = self.with_locked(name, by, |id, capacity, used, connection| {
            // Not the counter alone: this is the one decision that no repair could correct.
            let look = self.statements.tables(&format!(
                "SELECT 1 FROM {{permit}} WHERE semaphore_id = {id} AND state = 'ACQUIRED' LIMIT 1"
            ));
            let held = answer(&mut self.send(connection, &look)?, 0)?;
            if used != 0 || !held.rows.is_empty() {
                return Err(semaphore_in_use(name, used, capacity));
            }
            let sql = format!("DELETE FROM {{semaphore}} WHERE id = {id}");
            self.send(connection, &self.statements.tables(&sql))?;
            Ok(true)
        });
        match outcome {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            outcome => outcome,
        }
    }

    /// Runs `work` with a semaphore locked: its id, capacity and counter.
    pub(super) fn with_locked<T>(
        &self,
        name: &str,
        by: Moment,
        work: impl FnOnce(u64, u32, i64, &mut Connection) -> Result<T>,
    ) -> Result<T> {
        let mut connection = self.connections.checkout(Lane::Other, by)?;
        let lock = fill(&self.statements.lock, &[("{names}", &quote(name))]);
        let script = format!("{};\n{lock}", self.statements.begin);
        let outcome = self
            .send(&mut connection, &script)
            .and_then(|mut answers| answer(&mut answers, 3))
            .and_then(|found: Answer| {
                let row = found.rows.into_iter().next();
                let row = row.ok_or_else(|| no_such_semaphore(name))?;
                columns::<(u64, String, u32, i64, u64)>(row)
            })
            .and_then(|(id, _, capacity, used, _)| work(id, capacity, used, &mut connection))
            .and_then(|value| {
                self.send(&mut connection, COMMIT)?;
                Ok(value)
            });
        if outcome.is_err() {
            self.connections.roll_back(&mut connection);
        }
        outcome
    }

    pub(super) fn read_usage(&self, name: Option<&str>, by: Moment) -> Result<Vec<Usage>> {
        let which = match name {
            Some(name) => format!("s.name = {}", quote(name)),
            None => "TRUE".to_owned(),
        };
        let found = self.one(&fill(&self.statements.usage, &[("{which}", &which)]), by)?;
        let found = rows::<(String, u32, i64, u64)>(found)?;
        let usage = |(name, capacity, held, requests): (String, u32, i64, u64)| Usage {
            semaphore: Arc::from(name),
            capacity,
            held: u64::try_from(held).unwrap_or(0),
            free: free(capacity, held),
            requests,
        };
        Ok(found.into_iter().map(usage).collect())
    }

    pub(super) fn read_holders(&self, name: &str, by: Moment) -> Result<Vec<Holder>> {
        type Columns = (
            u64,
            Option<String>,
            Option<String>,
            Option<u32>,
            Option<u64>,
            Option<i64>,
            Option<i64>,
        );
        let sql = fill(&self.statements.holders, &[("{name}", &quote(name))]);
        let found = rows::<Columns>(self.one(&sql, by)?)?;
        if found.is_empty() {
            return Err(no_such_semaphore(name));
        }
        let holder = |(_, id, owner, count, fence, age, left): Columns| {
            Some(Holder {
                external_id: Arc::from(id?),
                owner: owner.map(Arc::from),
                count: count?,
                fence: fence?,
                held_for: duration(age).unwrap_or_default(),
                expires_in: duration(left),
            })
        };
        Ok(found.into_iter().filter_map(holder).collect())
    }

    pub(super) fn read_history(&self, name: &str, by: Moment) -> Result<Vec<CapacityChange>> {
        type Columns = (String, Option<String>, u64, u32, u32);
        let sql = self.statements.tables(&format!(
            "SELECT semaphore_name, changed_by, \
             CAST(UNIX_TIMESTAMP(changed_at) * 1000 AS UNSIGNED), old_capacity, new_capacity \
             FROM {{history}} WHERE semaphore_name = {} ORDER BY id",
            quote(name)
        ));
        let found = rows::<Columns>(self.one(&sql, by)?)?;
        let change = |(name, changed_by, changed_at, from, to): Columns| CapacityChange {
            semaphore: Arc::from(name),
            changed_by: changed_by.map(Arc::from),
            changed_at,
            from,
            to,
        };
        Ok(found.into_iter().map(change).collect())
    }
}
