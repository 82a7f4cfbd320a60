//! Checks that the tables of the semaphores are ours: their columns and their engine.

use super::MysqlPermits;
use super::sql::{quote_all, rows};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};

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
    /// Refuses tables of the same names that lack what the statements name. Returns `true` if all are there.
    pub(super) fn check_tables(&self, by: Moment) -> Result<bool> {
        let names = self.statements.names();
        let sql = format!(
            "SELECT c.TABLE_NAME, c.COLUMN_NAME, t.ENGINE FROM information_schema.COLUMNS c \
             JOIN information_schema.TABLES t USING (TABLE_SCHEMA, TABLE_NAME) \
             WHERE c.TABLE_SCHEMA = DATABASE() AND c.TABLE_NAME IN ({})",
            quote_all(&names)
        );
        let found = rows::<(String, String, Option<String>)>(self.one(&sql, by)?)?;
        let mut complete = true;
        for (name, wanted) in names.iter().zip(COLUMNS) {
            let own: Vec<_> = found.iter().filter(|(table, ..)| table == name).collect();
            if own.is_empty() {
                complete = false;
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
        Ok(complete)
    }
}
