//! `SELECT pg_advisory_lock(…)` and `SELECT pg_try_advisory_lock(…)`: they wait for the lock, or for the process that has
//! it, which a function within a query must not do.

use std::sync::Arc;
use std::time::Duration;

use arrow::array::{Array, ArrayRef, AsArray, BooleanArray, RecordBatch, StringArray};
use arrow::compute::{CastOptions, cast_with_options};
use arrow::datatypes::{DataType, Field as ArrowField, Int64Type, Schema};
use millrace_common::{SqlError, SqlState, SqlType};
use millrace_meta::advisory::Key;

use super::{RowSet, Session, fields_of};
use crate::advisory::LockRequest;
use crate::catalog::functions::{check_numbers, number};
use crate::catalog::rewrite::LockCall;
use crate::dml;

impl Session {
    /// Takes the locks in their order, waiting at most `lock_timeout` for each that is waited for.
    pub(super) async fn take_locks(&self, calls: &[LockCall<'_>]) -> Result<RowSet, SqlError> {
        let limit = self.settings.millis("lock_timeout").map(Duration::from_millis);
        // Outside a block the transaction is this statement, however it ends.
        let _locks = (!self.in_transaction()).then(|| self.transaction_locks());
        let (mut names, mut types, mut columns) = (Vec::new(), Vec::new(), Vec::<ArrayRef>::new());
        for call in calls {
            // Of a NULL the functions return NULL and lock nothing.
            let key = self.lock_key(call).await?;
            let request = key.map(|key| {
                let (pid, mode, scope) = (self.pid, call.mode, call.scope);
                LockRequest { pid, key, mode, scope }
            });
            let locks = &self.shared.locks;
            names.push(call.column.clone());
            match (request, call.waits) {
                (None, true) => columns.push(Arc::new(StringArray::new_null(1))),
                (None, false) => columns.push(Arc::new(BooleanArray::new_null(1))),
                (Some(request), true) => {
                    locks.acquire(&request, limit).await?;
                    columns.push(Arc::new(StringArray::from(vec![""])));
                }
                (Some(request), false) => {
                    let taken = locks.try_acquire(&request).await?;
                    columns.push(Arc::new(BooleanArray::from(vec![taken])));
                }
            }
            types.push(if call.waits { SqlType::Text } else { SqlType::Boolean });
        }
        let arrow = names.iter().zip(&columns);
        let arrow: Vec<ArrowField> =
            arrow.map(|(n, c)| ArrowField::new(n, c.data_type().clone(), true)).collect();
        let batch = RecordBatch::try_new(Arc::new(Schema::new(arrow)), columns)
            .map_err(dml::rows::arrow_error)?;
        Ok(RowSet::ready(fields_of(&names, &types, None), vec![batch], "SELECT {n}"))
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
