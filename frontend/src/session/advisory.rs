//! `SELECT pg_advisory_lock(…)`: waits for the lock, which a function within a query must not do.

use std::time::Duration;

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::compute::{CastOptions, cast_with_options};
use arrow::datatypes::{DataType, Int64Type};
use millrace_common::{SqlError, SqlState};

use super::{RowSet, Session};
use crate::advisory::{Key, Request};
use crate::catalog::functions::{check_numbers, number};
use crate::catalog::rewrite::LockCall;
use crate::dml;

impl Session {
    /// Takes the locks in their order, waiting at most `lock_timeout` for each.
    pub(super) async fn wait_for_locks(&self, calls: &[LockCall<'_>]) -> Result<RowSet, SqlError> {
        let limit = self.settings.millis("lock_timeout").map(Duration::from_millis);
        // Outside a block the transaction is this statement, however it ends.
        let _locks = (!self.in_transaction()).then(|| self.transaction_locks());
        let mut row = Vec::with_capacity(calls.len());
        for call in calls {
            // The functions return nothing, and of a NULL they return NULL and lock nothing.
            let Some(key) = self.lock_key(call).await? else {
                row.push(None);
                continue;
            };
            let request = Request { pid: self.pid, key, mode: call.mode, scope: call.scope };
            self.shared.locks.acquire(&request, limit).await?;
            row.push(Some(String::new()));
        }
        let names: Vec<&str> = calls.iter().map(|c| c.column.as_str()).collect();
        RowSet::text(&names, vec![row], "SELECT {n}")
    }

    /// The lock that a call names; `None`: an argument is NULL.
    async fn lock_key(&self, call: &LockCall<'_>) -> Result<Option<Key>, SqlError> {
        let list: Vec<String> = call.args.iter().map(|e| e.to_string()).collect();
        let query = dml::rewrite::parse_query(&format!("SELECT {}", list.join(", ")))?;
        let (_, batches) = self.collect(&self.catalog_view(), &query).await?;
        let batch = batches.iter().find(|b| b.num_rows() > 0);
        let batch = batch.ok_or_else(|| SqlError::internal("a lock's key has no value"))?;
        let types: Vec<DataType> = batch.columns().iter().map(|c| c.data_type().clone()).collect();
        check_numbers(&call.function, &types)?;
        let numbers = batch.columns().iter().map(first_number).collect::<Result<Vec<_>, _>>()?;
        let numbers: Option<Vec<i64>> = numbers.into_iter().collect();
        numbers.map(|n| Key::of(&n)).transpose()
    }
}

/// The number in a column's first row, of a type that [`check_numbers`] lets pass.
fn first_number(column: &ArrayRef) -> Result<Option<i64>, SqlError> {
    let to = if column.data_type().is_integer() { DataType::Int64 } else { DataType::Utf8 };
    let options = CastOptions { safe: false, ..CastOptions::default() };
    let cast = cast_with_options(&column.slice(0, 1), &to, &options)
        .map_err(|_| SqlError::new(SqlState::NUMERIC_VALUE_OUT_OF_RANGE, "bigint out of range"))?;
    if cast.is_null(0) {
        return Ok(None);
    }
    match to {
        DataType::Int64 => Ok(Some(cast.as_primitive::<Int64Type>().value(0))),
        _ => number(cast.as_string::<i32>().value(0)).map(Some),
    }
}
