//! Whole rows: the columns of a table that is named where a value is expected.

use datafusion::common::{Column, DFSchema, Result, ScalarValue};
use datafusion::logical_expr::{Expr, lit};
use millrace_common::SqlError;
use millrace_functions::error::external;
use millrace_functions::strings::ROW_TEXT;

use super::OperatorPlanner;
use crate::bind::names::shown;

/// [`columns_of`] of a row that is a value; an error where an outer join may have left the row out.
pub(super) fn whole_row(
    name: &Expr,
    table: &Expr,
    padded: bool,
    schema: &DFSchema,
) -> Result<Option<Vec<(String, Expr)>>> {
    let columns = columns_of(name, table, schema);
    if padded && columns.is_some() {
        let e = SqlError::unsupported("a whole row that an outer join may leave out");
        return Err(external(e.with_hint("Use one of its columns.")));
    }
    Ok(columns)
}

/// The columns of the table of a name, by their names, if the name is no column's.
fn columns_of(name: &Expr, table: &Expr, schema: &DFSchema) -> Option<Vec<(String, Expr)>> {
    let (Expr::Column(c), Expr::Literal(ScalarValue::Utf8(Some(table)), _)) = (name, table) else {
        return None;
    };
    if c.relation.is_some() || schema.has_column(c) {
        return None;
    }
    let of_table = schema.iter().filter(|(q, _)| q.is_some_and(|q| q.table() == table.as_str()));
    let columns: Vec<(String, Expr)> = of_table
        .map(|field| {
            let column = Column::from(field);
            (shown(&column.name).to_owned(), Expr::Column(column))
        })
        .collect();
    (!columns.is_empty()).then_some(columns)
}

/// Whether a value is NULL, or all columns of a row are; or else that none is.
pub(super) fn test(name: Expr, table: &Expr, not_null: bool, schema: &DFSchema) -> Expr {
    let one = |e: Expr| if not_null { e.is_not_null() } else { e.is_null() };
    let all = columns_of(&name, table, schema).into_iter().flatten().map(|(_, column)| one(column));
    match all.reduce(Expr::and) {
        Some(all) => all,
        None => one(name),
    }
}

impl OperatorPlanner {
    /// A row as a document.
    pub(super) fn row(&self, columns: Vec<(String, Expr)>, schema: &DFSchema) -> Result<Expr> {
        let args = columns.into_iter().flat_map(|(name, column)| [lit(name), column]);
        self.call("jsonb_build_object", args.collect(), schema)
    }

    /// A row as PostgreSQL shows it.
    pub(super) fn row_text(&self, columns: Vec<(String, Expr)>, schema: &DFSchema) -> Result<Expr> {
        let args = columns.into_iter().map(|(_, column)| column);
        self.call(ROW_TEXT, args.collect(), schema)
    }
}
