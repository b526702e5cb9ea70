//! Whether a column of a sink's query fits a column of the table that it feeds, whatever its values are.
//!
//! A value that does not fit ends an INSERT with an error; a job has nobody to tell. So only what cannot
//! fail nor be cut is assigned without a cast of the user's.

use datafusion::common::JoinType;
use datafusion::logical_expr::{Distinct, Expr, ExprSchemable, LogicalPlan};
use datafusion::scalar::ScalarValue;
use millrace_common::types::{Element, UNCONSTRAINED_NUMERIC};
use millrace_common::{SqlError, SqlType};
use millrace_functions::call::implicit_cast;
use millrace_functions::cast::check_length;
use millrace_planner::CatalogView;
use millrace_rpc::catalog::{Column, ColumnType, RelationKind};

use crate::dml::assign;
use crate::query::SessionCatalog;

/// Refuses a column of the query, of type `from` as it is bound, for a column of the table.
pub fn check(
    plan: &LogicalPlan,
    at: usize,
    from: SqlType,
    column: &Column,
    catalog: &SessionCatalog,
) -> Result<(), SqlError> {
    let to = column.sql_type()?;
    match misfit(plan, at, from, to, catalog) {
        None => Ok(()),
        Some(from) => Err(assign::mismatch(&column.name, from, to).with_hint(
            "Cast it in the sink's query; what does not fit is NULL then, and counted.",
        )),
    }
}

/// The digits that the seconds of a query's column must be rounded to for a column of the table; `None`: it has no
/// more. A key is not wrapped without need: of what is computed nobody knows that it is unique.
pub fn rounded_to(
    plan: &LogicalPlan,
    at: usize,
    column: &Column,
    catalog: &SessionCatalog,
) -> Option<u32> {
    let digits = column.sql_type.second_digits()?;
    let from = declared(plan, at, catalog).filter(|from| from.oid == column.sql_type.oid);
    let fits = from.and_then(|from| from.second_digits()).is_some_and(|from| from <= digits);
    (!fits).then_some(digits)
}

/// The type of the stored column that a plan's column plainly is.
fn declared(plan: &LogicalPlan, at: usize, catalog: &SessionCatalog) -> Option<ColumnType> {
    let of = |expr: Option<&Expr>, input: &LogicalPlan| match expr?.clone().unalias() {
        Expr::Column(c) => declared(input, input.schema().maybe_index_of_column(&c)?, catalog),
        _ => None,
    };
    match plan {
        LogicalPlan::Projection(p) => of(p.expr.get(at), &p.input),
        LogicalPlan::Aggregate(a) => of(a.group_expr.get(at), &a.input),
        LogicalPlan::SubqueryAlias(s) => declared(&s.input, at, catalog),
        LogicalPlan::Filter(f) => declared(&f.input, at, catalog),
        LogicalPlan::TableScan(scan) => {
            let field = plan.schema().fields().get(at)?;
            let table = catalog.relation(scan.table_name.schema(), scan.table_name.table())?;
            let column = table.columns.iter().find(|c| c.name == *field.name())?;
            (table.kind == RelationKind::Table as i32).then_some(column.sql_type)
        }
        _ => None,
    }
}

/// The type of values in a plan's column that might not fit. A bound plan does not say the length of a
/// varchar: it is looked for where the values come from. `bound`: the column's type as far as it is known.
fn misfit(
    plan: &LogicalPlan,
    at: usize,
    bound: SqlType,
    to: SqlType,
    catalog: &SessionCatalog,
) -> Option<SqlType> {
    let from = plan.schema().fields().get(at).and_then(|f| SqlType::of_field(f).ok());
    let bound = from.unwrap_or(bound);
    if lossless(bound, to) {
        return None;
    }
    let of = |expr: Option<&Expr>, input: &LogicalPlan| match expr {
        Some(expr) => misfit_of(expr, input, bound, to, catalog),
        None => Some(bound),
    };
    let below = |input: &LogicalPlan, at: usize| misfit(input, at, bound, to, catalog);
    match plan {
        LogicalPlan::Projection(p) => of(p.expr.get(at), &p.input),
        LogicalPlan::Aggregate(a) => of(a.group_expr.get(at), &a.input),
        LogicalPlan::Distinct(Distinct::On(d)) => of(d.select_expr.get(at), &d.input),
        LogicalPlan::Distinct(Distinct::All(input)) => below(input, at),
        LogicalPlan::SubqueryAlias(s) => below(&s.input, at),
        LogicalPlan::Filter(f) => below(&f.input, at),
        LogicalPlan::Sort(s) => below(&s.input, at),
        LogicalPlan::Limit(l) => below(&l.input, at),
        LogicalPlan::Window(w) if at < w.input.schema().fields().len() => below(&w.input, at),
        LogicalPlan::Union(u) => u.inputs.iter().find_map(|input| below(input, at)),
        LogicalPlan::Join(j) => {
            let left = j.left.schema().fields().len();
            match j.join_type {
                JoinType::RightSemi | JoinType::RightAnti | JoinType::RightMark => Some(bound),
                _ if at < left => below(&j.left, at),
                JoinType::Inner | JoinType::Left | JoinType::Right | JoinType::Full => {
                    below(&j.right, at - left)
                }
                _ => Some(bound),
            }
        }
        LogicalPlan::TableScan(scan) => {
            let Some(field) = plan.schema().fields().get(at) else { return Some(bound) };
            let table = catalog.relation(scan.table_name.schema(), scan.table_name.table());
            let named = |c: &&Column| c.name == *field.name();
            let column = table.as_ref().and_then(|t| t.columns.iter().find(named));
            let declared = column.and_then(|c| c.sql_type().ok()).unwrap_or(bound);
            (!lossless(declared, to)).then_some(declared)
        }
        _ => Some(bound),
    }
}

/// The same for an expression over `input`.
fn misfit_of(
    expr: &Expr,
    input: &LogicalPlan,
    bound: SqlType,
    to: SqlType,
    catalog: &SessionCatalog,
) -> Option<SqlType> {
    match expr {
        Expr::Alias(a) => misfit_of(&a.expr, input, bound, to, catalog),
        Expr::Column(c) => match input.schema().maybe_index_of_column(c) {
            Some(at) => misfit(input, at, bound, to, catalog),
            None => Some(bound),
        },
        Expr::Literal(value, _) => (!literal_fits(value, to)).then_some(bound),
        // A NULL without a type is made a text.
        Expr::Cast(c) if c.expr.get_type(&**input.schema()).is_ok_and(|t| t.is_null()) => None,
        Expr::ScalarFunction(f) if f.func.name().starts_with("cast_to_varchar") => {
            let length = match f.args.get(1) {
                Some(Expr::Literal(ScalarValue::Int32(Some(n)), _)) => u32::try_from(*n).ok(),
                _ => None,
            };
            let declared = with_length(bound, length);
            (!lossless(declared, to)).then_some(declared)
        }
        _ => Some(bound),
    }
}

/// A text, or an array of them, as the varchar that it was cast to.
fn with_length(bound: SqlType, length: Option<u32>) -> SqlType {
    match bound {
        SqlType::Text => SqlType::Varchar(length),
        SqlType::Array(Element::Text) => SqlType::Array(Element::Varchar(length)),
        other => other,
    }
}

fn literal_fits(value: &ScalarValue, to: SqlType) -> bool {
    if value.is_null() {
        return true;
    }
    match (value, to) {
        (ScalarValue::Utf8(Some(text)), SqlType::Varchar(_) | SqlType::Char(_)) => {
            check_length(text, to).is_ok()
        }
        (ScalarValue::Int32(Some(n)), SqlType::SmallInt) => i16::try_from(*n).is_ok(),
        (ScalarValue::Int64(Some(n)), SqlType::SmallInt) => i16::try_from(*n).is_ok(),
        (ScalarValue::Int64(Some(n)), SqlType::Int) => i32::try_from(*n).is_ok(),
        _ => false,
    }
}

/// Whether every value of a type is one of the other: the implicit casts of PostgreSQL, by length and
/// digits too.
fn lossless(from: SqlType, to: SqlType) -> bool {
    use SqlType as T;
    let whole = |(precision, scale): (u8, i8)| i32::from(precision) - i32::from(scale);
    match (from, to) {
        _ if from == to => true,
        // A sum has all digits there are, and is a numeric to everybody.
        (T::Numeric(Some((p, s))), T::Numeric(None)) => p <= 38 && s <= UNCONSTRAINED_NUMERIC.1,
        (T::Numeric(a), T::Numeric(Some(b))) => {
            let a = a.unwrap_or(UNCONSTRAINED_NUMERIC);
            whole(a) <= whole(b) && a.1 <= b.1
        }
        (T::SmallInt, T::Numeric(Some(n))) => n.1 >= 0 && whole(n) >= 5,
        (T::Int, T::Numeric(Some(n))) => n.1 >= 0 && whole(n) >= 10,
        (T::BigInt, T::Numeric(Some(n))) => n.1 >= 0 && whole(n) >= 19,
        (T::Varchar(Some(m)) | T::Char(m), T::Varchar(Some(n)) | T::Char(n)) => m <= n,
        (T::Text | T::Varchar(_), T::Varchar(Some(_)) | T::Char(_)) => false,
        (T::Text | T::Varchar(_) | T::Char(_), T::Text | T::Varchar(None)) => true,
        (T::Array(a), T::Array(b)) => lossless(a.scalar(), b.scalar()),
        _ => implicit_cast(from, to),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_fail_or_be_cut_is_not_lossless() {
        use SqlType as T;
        let numeric = |p, s| T::Numeric(Some((p, s)));
        for (from, to) in [
            (T::SmallInt, T::Int),
            (T::BigInt, T::Numeric(None)),
            (T::BigInt, numeric(19, 0)),
            (T::Int, numeric(12, 2)),
            (T::Int, T::Double),
            (numeric(4, 1), numeric(6, 2)),
            (numeric(38, 2), T::Numeric(None)),
            (T::Varchar(Some(3)), T::Varchar(Some(3))),
            (T::Varchar(Some(3)), T::Text),
            (T::Char(3), T::Varchar(Some(5))),
            (T::Text, T::Varchar(None)),
            (T::Date, T::Timestamptz),
        ] {
            assert!(lossless(from, to), "{from} to {to}");
        }
        for (from, to) in [
            (T::Int, T::SmallInt),
            (T::Numeric(None), numeric(4, 1)),
            (T::Int, numeric(11, 2)),
            (numeric(6, 2), numeric(6, 1)),
            (numeric(6, 2), numeric(6, 3)),
            (T::Double, T::Real),
            (T::Double, T::Numeric(None)),
            (T::Varchar(Some(5)), T::Varchar(Some(3))),
            (T::Text, T::Varchar(Some(3))),
            (T::Text, T::Char(3)),
            (T::Timestamp, T::Date),
            (T::Text, T::Int),
        ] {
            assert!(!lossless(from, to), "{from} to {to}");
        }
    }
}
