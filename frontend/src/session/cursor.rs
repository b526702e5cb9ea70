//! Cursors: DECLARE, FETCH, MOVE, CLOSE. A cursor is a portal that SQL names.

use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, RecordBatch, StringArray};
use futures::StreamExt;
use millrace_common::{SqlError, SqlState};
use millrace_planner::{ParsedStatement, Statement};
use parking_lot::Mutex;
use sqlparser::ast::{CloseCursor, Declare, FetchDirection, Statement as Sql, Value};

use super::prepare::{Portal, PortalState, Running};
use super::{RowSet, Session};
use crate::encoding::Column;
use crate::query::catalog_view::fold;
use crate::wire::Field;

impl Session {
    pub async fn declare(&mut self, declare: &Declare) -> Result<String, SqlError> {
        let (Some(name), Some(query)) = (declare.names.first(), &declare.for_query) else {
            return Err(SqlError::unsupported("this form of DECLARE"));
        };
        let hold = declare.hold.unwrap_or(false);
        if !self.in_block() && !hold {
            return Err(SqlError::new(
                SqlState::NO_ACTIVE_SQL_TRANSACTION,
                "DECLARE CURSOR can only be used in transaction blocks",
            ));
        }
        if declare.scroll.unwrap_or(false) {
            return Err(SqlError::unsupported("a SCROLL cursor"));
        }
        let name = fold(name);
        if self.portals.contains_key(&name) || self.feeds.contains_key(&name) {
            return Err(SqlError::new(
                SqlState("42P03"),
                format!("cursor \"{name}\" already exists"),
            ));
        }
        let text = query.to_string();
        let statement = Statement::Sql(Box::new(Sql::Query(query.clone())));
        // The text is not the client's, so nothing has a position in it; DECLARE's own errors do.
        let inner = ParsedStatement { statement, text, offset: 0, source: Arc::from("") };
        let prepared = Arc::new(self.describe(inner, &[])?);
        let rows = self.query(query).await?;
        let running = Running { rows, current: None, sent: 0 };
        let portal = Portal {
            prepared,
            values: Vec::new(),
            formats: Vec::new(),
            state: PortalState::Running(Box::new(Mutex::new(running))),
            hold,
        };
        self.portals.insert(name, portal);
        Ok("DECLARE CURSOR".to_owned())
    }

    pub async fn fetch(
        &mut self,
        name: &str,
        direction: &FetchDirection,
    ) -> Result<RowSet, SqlError> {
        let count = |v: &Value| v.to_string().parse::<usize>().map_err(|_| backward());
        let wanted = match direction {
            FetchDirection::Next | FetchDirection::Forward { limit: None } => 1,
            FetchDirection::Count { limit } | FetchDirection::Forward { limit: Some(limit) } => {
                count(&limit.value)?
            }
            FetchDirection::All | FetchDirection::ForwardAll => usize::MAX,
            _ => return Err(backward()),
        };
        if self.feeds.contains_key(name) {
            return self.fetch_changes(name, wanted, None).await;
        }
        let portal = self.portals.get_mut(name).ok_or_else(|| no_cursor(name))?;
        let fields = portal.prepared.fields.clone().unwrap_or_default();
        let PortalState::Running(running) = &mut portal.state else {
            return Ok(RowSet::ready(fields, vec![], "FETCH {n}"));
        };
        let running = running.get_mut();
        let mut batches: Vec<RecordBatch> = Vec::new();
        let mut left = wanted;
        while left > 0 {
            let Some(batch) = running.rows.stream.next().await else {
                // What has ended may be asked again.
                running.rows.stream = futures::stream::empty().boxed();
                break;
            };
            let batch = batch?;
            let n = batch.num_rows().min(left);
            left -= n;
            batches.push(batch.slice(0, n));
            if n < batch.num_rows() {
                let rest = batch.slice(n, batch.num_rows() - n);
                let stream =
                    std::mem::replace(&mut running.rows.stream, futures::stream::empty().boxed());
                running.rows.stream =
                    futures::stream::once(async { Ok(rest) }).chain(stream).boxed();
            }
        }
        Ok(RowSet::ready(fields, batches, "FETCH {n}"))
    }

    pub fn close(&mut self, cursor: &CloseCursor) -> Result<String, SqlError> {
        match cursor {
            CloseCursor::All => {
                self.portals.clear();
                self.feeds.clear();
                Ok("CLOSE CURSOR ALL".to_owned())
            }
            CloseCursor::Specific { name } => {
                let name = fold(name);
                if self.feeds.remove(&name).is_some() {
                    return Ok("CLOSE CURSOR".to_owned());
                }
                self.portals.remove(&name).ok_or_else(|| no_cursor(&name))?;
                Ok("CLOSE CURSOR".to_owned())
            }
        }
    }
}

/// Columns of a batch, ready to be written.
pub fn columns_of(batch: &RecordBatch, fields: &[Field]) -> Result<Vec<Column>, SqlError> {
    let oid = |i: usize| fields.get(i).map_or(0, |f| f.type_oid);
    let column = |(i, c): (usize, &ArrayRef)| match fields.get(i) {
        Some(f) if f.type_oid == CHAR_OID && f.typmod > 4 => {
            Column::of_type(&padded(c, (f.typmod - 4) as usize), f.type_oid)
        }
        _ => Column::of_type(c, oid(i)),
    };
    batch.columns().iter().enumerate().map(column).collect()
}

/// `char`.
const CHAR_OID: u32 = 1042;

/// Texts filled up with blanks, as a `char(n)` is shown.
fn padded(column: &ArrayRef, length: usize) -> ArrayRef {
    let Some(texts) = column.as_string_opt::<i32>() else { return column.clone() };
    let text = |t: &str| {
        let missing = length.saturating_sub(t.chars().count());
        format!("{t}{}", " ".repeat(missing))
    };
    Arc::new(texts.iter().map(|t| t.map(text)).collect::<StringArray>())
}

pub fn no_cursor(name: &str) -> SqlError {
    SqlError::new(SqlState::INVALID_CURSOR_NAME, format!("cursor \"{name}\" does not exist"))
}

fn backward() -> SqlError {
    SqlError::new(SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE, "cursor can only scan forward")
        .with_hint("Declare it with SCROLL option to enable backward scan.")
}
