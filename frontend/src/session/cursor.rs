//! Cursors: DECLARE, FETCH, MOVE, CLOSE. A cursor is a portal that SQL names.

use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, RecordBatch, StringArray};
use arrow::datatypes::Int64Type;
use futures::StreamExt;
use millrace_common::{SqlError, SqlState};
use millrace_planner::parser::folded;
use millrace_planner::{ParsedStatement, Statement};
use parking_lot::Mutex;
use sqlparser::ast::{CloseCursor, Declare, FetchDirection, Statement as Sql};

use super::prepare::{Declared, Portal, PortalState, Running, cannot_run};
use super::scroll::{Fetched, Movement, Scroll, forward_only, store};
use super::{Outcome, RowSet, Session};
use crate::catalog::procedures::procedure_name;
use crate::encoding::Column;
use crate::query::catalog_view::fold;
use crate::wire::Field;

impl Session {
    /// `written`: the statement as it was written.
    pub async fn declare(&mut self, declare: &Declare, written: &str) -> Result<String, SqlError> {
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
        let refused = "DECLARE CURSOR must not contain data-modifying statements in WITH";
        crate::dml::with::refuse(query, refused)?;
        let name = fold(name);
        if self.portals.contains_key(&name) || self.feeds.contains_key(&name) {
            return Err(SqlError::new(
                SqlState("42P03"),
                format!("cursor \"{name}\" already exists"),
            ));
        }
        let text = folded::to_sql(query)?;
        let statement = Statement::Sql(Box::new(Sql::Query(query.clone())));
        // The text is not the client's, so nothing has a position in it; DECLARE's own errors do.
        let inner = ParsedStatement { statement, text, offset: 0, source: Arc::from("") };
        let prepared = Arc::new(self.describe(inner, &[])?);
        let rows = self.query(query).await?;
        let scrolls = declare.scroll.unwrap_or(false);
        let state = self.opened(rows, scrolls).await?;
        let declared = Some(Declared {
            statement: written.to_owned(),
            binary: declare.binary.unwrap_or(false),
            scroll: scrolls,
            at: chrono::Utc::now().timestamp_micros(),
            depth: self.depth(),
        });
        let (values, formats) = (Vec::new(), Vec::new());
        let portal = Portal { prepared, values, _held: None, formats, state, hold, declared };
        self.portals.insert(name, portal);
        Ok("DECLARE CURSOR".to_owned())
    }

    /// The rows of a new cursor. Outside a block its transaction ends with the statement: what fails, fails here.
    async fn opened(&self, rows: RowSet, scrolls: bool) -> Result<PortalState, SqlError> {
        let ends = !self.in_block();
        if scrolls {
            let memory = self.engine().reservation("a SCROLL cursor");
            let mut scroll = Scroll::new(rows.stream, memory);
            if ends {
                scroll.read_all().await?;
            }
            return Ok(PortalState::Scroll(Box::new(Mutex::new(scroll))));
        }
        let mut running = Running::new(rows);
        if ends {
            store(&mut running, self.engine().reservation(HELD)).await?;
        }
        Ok(PortalState::Running(Box::new(Mutex::new(running))))
    }

    /// Reads what is left of the cursors WITH HOLD of a block that is being committed: afterwards they read nothing,
    /// and what fails, fails here. One that has failed before ends with the block.
    pub(super) async fn store_cursors(&mut self) -> Result<(), SqlError> {
        let in_block = |p: &Portal| p.declared.as_ref().is_some_and(|d| d.depth > 0);
        self.portals.retain(|_, p| !(in_block(p) && matches!(p.state, PortalState::Failed)));
        let shared = Arc::clone(&self.shared);
        for portal in self.portals.values_mut().filter(|p| p.hold && in_block(p)) {
            match &mut portal.state {
                PortalState::Running(running) => {
                    store(running.get_mut(), shared.engine.reservation(HELD)).await?;
                }
                PortalState::Scroll(scroll) => scroll.get_mut().read_all().await?,
                PortalState::Ready | PortalState::Done | PortalState::Failed => {}
            }
        }
        Ok(())
    }

    pub async fn fetch(
        &mut self,
        name: &str,
        direction: &FetchDirection,
    ) -> Result<RowSet, SqlError> {
        let movement = Movement::of(direction)?;
        if self.feeds.contains_key(name) {
            let wanted = match movement {
                Movement::Forward(n) => n,
                Movement::Relative(0) => 0,
                _ => {
                    let what = format!("FETCH {direction} from a subscription cursor");
                    return Err(SqlError::unsupported(what).with_hint(
                        "Changes come in their order: FETCH NEXT, FETCH n or FETCH ALL.",
                    ));
                }
            };
            return self.fetch_changes(name, wanted, None).await;
        }
        let (fields, fetched) = self.go(name, movement, true).await?;
        Ok(fetched.into_rows(fields))
    }

    /// MOVE: how many rows FETCH would give.
    pub async fn pass(
        &mut self,
        name: &str,
        direction: &FetchDirection,
    ) -> Result<usize, SqlError> {
        if !self.feeds.contains_key(name) {
            let (_, fetched) = self.go(name, Movement::of(direction)?, false).await?;
            return Ok(fetched.rows());
        }
        let mut rows = self.fetch(name, direction).await?.stream;
        let mut passed = 0;
        while let Some(batch) = rows.next().await {
            passed += batch?.num_rows();
        }
        Ok(passed)
    }

    /// Rows that were fetched, as the client sees them.
    pub fn shown(&self, fetched: Fetched, fields: Vec<Field>) -> Outcome {
        self.in_zone(Outcome::Rows(fetched.into_rows(fields)))
    }

    /// Moves a cursor of a query; its columns, and the rows it has come by. One that fails on its way, or is cut
    /// off there, has lost rows: it is not read any more. Nor, as in PostgreSQL, is one that was to go where it cannot.
    async fn go(
        &mut self,
        name: &str,
        movement: Movement,
        keep: bool,
    ) -> Result<(Vec<Field>, Fetched), SqlError> {
        let mut fetched = Fetched::new(self.engine().reservation("rows of a FETCH"), keep);
        let portal = self.portals.get_mut(name).ok_or_else(|| no_cursor(name))?;
        let fields = portal.prepared.fields.clone().unwrap_or_default();
        portal.state = match std::mem::replace(&mut portal.state, PortalState::Failed) {
            PortalState::Failed => return Err(cannot_run(name)),
            PortalState::Running(mut running) => {
                forward_only(running.get_mut(), movement, &mut fetched).await?;
                PortalState::Running(running)
            }
            PortalState::Scroll(mut scroll) => {
                scroll.get_mut().fetch(movement, &mut fetched).await?;
                PortalState::Scroll(scroll)
            }
            state @ (PortalState::Ready | PortalState::Done) => state,
        };
        Ok((fields, fetched))
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

/// How memory for rows is called that outlive their transaction.
const HELD: &str = "a cursor WITH HOLD";

/// Columns of a batch, ready to be written.
pub fn columns_of(batch: &RecordBatch, fields: &[Field]) -> Result<Vec<Column>, SqlError> {
    let oid = |i: usize| fields.get(i).map_or(0, |f| f.type_oid);
    let column = |(i, c): (usize, &ArrayRef)| match fields.get(i) {
        Some(f) if f.type_oid == CHAR_OID && f.typmod > 4 => {
            Column::of_type(&padded(c, (f.typmod - 4) as usize), f.type_oid)
        }
        Some(f) if f.type_oid == REGPROC_OID => functions(c),
        _ => Column::of_type(c, oid(i)),
    };
    batch.columns().iter().enumerate().map(column).collect()
}

/// `char`.
const CHAR_OID: u32 = 1042;
/// `regproc`.
const REGPROC_OID: u32 = 24;

/// Functions by their numbers, shown by their names.
fn functions(column: &ArrayRef) -> Result<Column, SqlError> {
    let Some(oids) = column.as_primitive_opt::<Int64Type>() else {
        return Column::of_type(column, REGPROC_OID);
    };
    let number = |oid: i64| u32::try_from(oid).unwrap_or(0);
    Ok(Column::Named {
        numbers: oids.iter().map(|oid| oid.map(number)).collect(),
        names: oids.iter().map(|oid| oid.map(procedure_name)).collect(),
    })
}

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
