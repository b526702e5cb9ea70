//! COPY … FROM … WHERE: which of the input's rows enter.

use std::ops::ControlFlow;

use arrow::array::{ArrayRef, AsArray, RecordBatch, UInt32Array};
use arrow::datatypes::Int64Type;
use millrace_common::{SqlError, SqlState};
use millrace_rpc::catalog::{Column, Relation, RelationKind};
use sqlparser::ast::{Expr, Query, Visitor};

use crate::dml::{rewrite, rows};
use crate::query::SessionCatalog;
use crate::session::{Session, params};
use millrace_planner::parser::walk;

/// A condition that has been checked.
pub struct Condition {
    query: Query,
}

impl Condition {
    /// Checks a condition over a table's columns.
    pub fn new(session: &Session, table: &Relation, expr: Expr) -> Result<Condition, SqlError> {
        if params::count(&expr) > 0 {
            return Err(params::undefined(1));
        }
        if walk::visit(&expr, &mut FindQuery).is_break() {
            let message = "cannot use subquery in COPY FROM WHERE condition";
            return Err(SqlError::new(SqlState::FEATURE_NOT_SUPPORTED, message));
        }
        let mut query = rewrite::empty_query()?;
        let select = rewrite::select_of(&mut query)?;
        let number = rewrite::column(&table.name, rows::ROW_NUMBER);
        select.projection = vec![rewrite::item(number, "n")];
        select.from = vec![rewrite::table_ref(None, &table.name)];
        select.selection = Some(expr);
        let over = over(table);
        let none = RecordBatch::new_empty(rows::nullable(over.arrow_schema()?.as_ref()));
        let view = catalog(session, &over, &none)?;
        session.bind(&view, &query, &[]).map_err(worded)?;
        Ok(Condition { query })
    }

    /// The rows that meet the condition, ascending. `columns` are all of the table's.
    pub async fn kept(
        &self,
        session: &Session,
        table: &Relation,
        columns: &[ArrayRef],
        count: usize,
    ) -> Result<Vec<usize>, SqlError> {
        let over = over(table);
        let schema = rows::nullable(over.arrow_schema()?.as_ref());
        let view = catalog(session, &over, &rows::batch(&schema, columns.to_vec(), count)?)?;
        let (_, batches) = session.collect(&view, &self.query).await?;
        let mut kept = Vec::with_capacity(count);
        for batch in &batches {
            let numbers = batch.column(0).as_primitive::<Int64Type>();
            kept.extend(numbers.values().iter().filter_map(|n| usize::try_from(*n).ok()));
        }
        // In the order of the rows, whatever the engine made of it.
        kept.sort_unstable();
        Ok(kept)
    }
}

/// The kept rows of columns.
pub fn only(columns: &[ArrayRef], kept: &[usize]) -> Result<Vec<ArrayRef>, SqlError> {
    let kept = UInt32Array::from_iter_values(kept.iter().map(|row| *row as u32));
    let taken = |c: &ArrayRef| arrow::compute::take(c, &kept, None).map_err(rows::arrow_error);
    columns.iter().map(taken).collect()
}

/// The rows' relation: the table's columns, and nothing that would have the table itself read.
fn over(table: &Relation) -> Relation {
    let stripped = |c: &Column| Column { generated_sql: None, ..c.clone() };
    Relation {
        name: table.name.clone(),
        kind: RelationKind::Source as i32,
        append_only: true,
        columns: table.columns.iter().map(stripped).collect(),
        ..Relation::default()
    }
}

/// A catalog in which the table's name means these rows, numbered.
fn catalog(
    session: &Session,
    over: &Relation,
    batch: &RecordBatch,
) -> Result<SessionCatalog, SqlError> {
    let numbers = UInt32Array::from_iter_values(0..batch.num_rows() as u32);
    let (relation, numbered) = rows::with_row_number(over, &over.name, batch, numbers)?;
    let mut view = session.catalog_view();
    view.add_temporary(relation, rows::mem_table(numbered)?);
    Ok(view)
}

/// PostgreSQL's words: it is not the WHERE of a query.
fn worded(mut e: SqlError) -> SqlError {
    if let Some(what) = e.message.strip_suffix(" are not allowed in WHERE") {
        e.message = format!("{what} are not allowed in COPY FROM WHERE conditions");
    }
    e
}

struct FindQuery;

impl Visitor for FindQuery {
    type Break = ();

    fn pre_visit_query(&mut self, _: &Query) -> ControlFlow<()> {
        ControlFlow::Break(())
    }
}
