//! `Session`: a connection on loan, on which scripts are sent.

use mysql::prelude::Queryable;

use super::MysqlPermits;
use super::sql::{Answer, COMMIT, ROLLBACK, answer};
use crate::backend::mysql::connection::Connector;
use crate::backend::mysql::error::RequestError;
use crate::clock::Moment;
use crate::error::Result;
use crate::pool::Checkout;

/// A connection on loan, and until when its requests may take.
pub(super) struct Session<'s> {
    pub(super) store: &'s MysqlPermits,
    pub(super) connection: Checkout<Connector>,
    pub(super) by: Moment,
}

impl Session<'_> {
    /// Sends statements in one message and reads their answers.
    pub(super) fn send(&mut self, sql: &str) -> Result<Vec<Answer>, RequestError> {
        let outcome = self
            .connection
            .run_within(self.store.patience, self.by, |conn| {
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
            });
        if let Err(error) = &outcome
            && error.is_poison()
        {
            let pool = &self.store.rows.pool;
            pool.lost(&error.clone().into_error());
            pool.discard_idle(self.connection.sent());
        }
        outcome
    }

    /// As [`send`](Session::send), with an error for the caller.
    pub(super) fn ask(&mut self, sql: &str) -> Result<Vec<Answer>> {
        self.send(sql)
            .map_err(|error| self.store.statements.explain(error))
    }

    /// As [`ask`](Session::ask), for the answer to the last statement.
    pub(super) fn ask_last(&mut self, sql: &str) -> Result<Answer> {
        answer(self.ask(sql)?.pop())
    }

    /// Sends a whole transaction in one message. What `sql` answers comes after what BEGIN does.
    pub(super) fn commit(&mut self, sql: &str) -> Result<Vec<Answer>> {
        let begin = &self.store.statements.begin;
        let outcome = self.ask(&format!("{begin};\n{sql};\n{COMMIT}"));
        self.or_roll_back(outcome)
    }

    /// Ends the transaction if it failed: a lock wait timeout or a duplicate key leaves it open.
    pub(super) fn or_roll_back<T>(&mut self, outcome: Result<T>) -> Result<T> {
        if outcome.is_err() {
            self.roll_back();
        }
        outcome
    }

    /// Ends a transaction without a trace; gives the connection up where that is not sure.
    pub(super) fn roll_back(&mut self) {
        self.by = Moment::FAR;
        if !self.connection.is_poisoned() && self.send(ROLLBACK).is_err() {
            self.connection.poison();
        }
    }
}
