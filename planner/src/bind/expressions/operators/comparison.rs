//! Comparisons: of which types there are any, and what their operands become.

use datafusion::arrow::datatypes::DataType;
use datafusion::common::{DFSchema, Result, ScalarValue};
use datafusion::logical_expr::{BinaryExpr, Expr, ExprSchemable, Operator, lit};
use millrace_common::SqlType;
use millrace_common::types::CHAR_LENGTH;
use millrace_functions::error::external;
use millrace_functions::{byte_order, functions};

use super::coercion::cast_expr;
use super::{OperatorPlanner, describe, is_text, no_operator, type_of};

impl OperatorPlanner {
    pub(super) fn comparison(
        &self,
        op: Operator,
        left: Expr,
        right: Expr,
        schema: &DFSchema,
    ) -> Result<Expr> {
        let (left, right) = self.comparable(op, left, right, schema)?;
        let types = (type_of(&left, schema)?, type_of(&right, schema)?);
        let by_value = !matches!(op, Operator::IsDistinctFrom | Operator::IsNotDistinctFrom);
        let ordered = matches!(op, Operator::Lt | Operator::LtEq | Operator::Gt | Operator::GtEq);
        let to_zero = |order: Expr| {
            Expr::BinaryExpr(BinaryExpr::new(Box::new(order), op, Box::new(lit(0i32))))
        };
        let (left, right) = match types {
            // By value: 1 is 1.0.
            (DataType::LargeUtf8, DataType::LargeUtf8) if by_value => {
                return Ok(to_zero(self.call("jsonb_cmp", vec![left, right], schema)?));
            }
            // A NULL element is greater than all others; equal intervals may have other parts.
            (DataType::List(item), DataType::List(_))
                if (ordered || (by_value && byte_order::by_value(item.data_type())))
                    && let Some(order) = functions().scalar("array_cmp") =>
            {
                return Ok(to_zero(order.call(vec![left, right])));
            }
            // Compared by length: 24 hours are a day, 30 days a month.
            (DataType::Interval(_), DataType::Interval(_)) => (
                self.call("interval_span", vec![left], schema)?,
                self.call("interval_span", vec![right], schema)?,
            ),
            _ => (left, right),
        };
        Ok(Expr::BinaryExpr(BinaryExpr::new(Box::new(left), op, Box::new(right))))
    }

    /// The operands of a comparison, of types that compare.
    pub(super) fn comparable(
        &self,
        op: Operator,
        left: Expr,
        right: Expr,
        schema: &DFSchema,
    ) -> Result<(Expr, Expr)> {
        let (left, right) = match (is_char(&left, schema)?, is_char(&right, schema)?) {
            (true, false) => (left, without_blanks(right)),
            (false, true) => (without_blanks(left), right),
            _ => (left, right),
        };
        let (lt, rt) = (self.seen(&left, schema)?, self.seen(&right, schema)?);
        match (&lt, &rt) {
            (Some(a), None) if SqlType::from_arrow(a).is_ok() => {
                let right = self.coerce_unknown_like(right, a)?;
                Ok((left, right))
            }
            (None, Some(b)) if SqlType::from_arrow(b).is_ok() => {
                let left = self.coerce_unknown_like(left, b)?;
                Ok((left, right))
            }
            (Some(a), Some(b)) if !compare(a, b) => {
                let symbol = match op {
                    Operator::IsDistinctFrom | Operator::IsNotDistinctFrom => "=".to_owned(),
                    Operator::NotEq => "<>".to_owned(),
                    op => op.to_string(),
                };
                Err(external(no_operator(&describe(&symbol, &lt, &rt))))
            }
            (Some(a), Some(b)) if let Some(common) = compared_as(a, b) => {
                let left = cast_expr(left, a, common).map_err(external)?;
                Ok((left, cast_expr(right, b, common).map_err(external)?))
            }
            (None, None) => {
                let left = self.coerce_unknown(left, SqlType::Text)?;
                let right = self.coerce_unknown(right, SqlType::Text)?;
                Ok((left, right))
            }
            _ => Ok((left, right)),
        }
    }
}

/// Whether an expression is a `char(n)`.
pub(super) fn is_char(e: &Expr, schema: &DFSchema) -> Result<bool> {
    Ok(match e {
        Expr::Column(_)
        | Expr::OuterReferenceColumn(_, _)
        | Expr::Alias(_)
        | Expr::Literal(_, Some(_)) => e.to_field(schema)?.1.metadata().contains_key(CHAR_LENGTH),
        Expr::ScalarFunction(f) => f.func.name() == "cast_to_bpchar",
        _ => false,
    })
}

/// A literal to be compared with a `char(n)`: blanks at its end mean nothing.
fn without_blanks(e: Expr) -> Expr {
    match e {
        Expr::Literal(ScalarValue::Utf8(Some(text)), metadata) => {
            let text = text.trim_end_matches(' ').to_owned();
            Expr::Literal(ScalarValue::Utf8(Some(text)), metadata)
        }
        e => e,
    }
}

/// Whether PostgreSQL has comparisons of two known types.
pub fn compare(a: &DataType, b: &DataType) -> bool {
    use DataType as D;
    let datetime = |t: &D| matches!(t, D::Date32 | D::Timestamp(_, _));
    let simple = |t: &D| SqlType::from_arrow(t).is_ok();
    if !simple(a) || !simple(b) {
        return true; // Lists and structs: DataFusion decides.
    }
    match (a, b) {
        (a, b) if a.is_numeric() && b.is_numeric() => true,
        (a, b) if is_text(a) && is_text(b) => true,
        (a, b) if datetime(a) && datetime(b) => true,
        (D::Time64(_), D::Time64(_)) | (D::Interval(_), D::Interval(_)) => true,
        (D::List(a), D::List(b)) => compare(a.data_type(), b.data_type()),
        (a, b) => a == b,
    }
}

/// The type that PostgreSQL compares two types in, where that is not for DataFusion to decide: floats with other
/// numbers as floats, dates with times as times.
fn compared_as(a: &DataType, b: &DataType) -> Option<SqlType> {
    use DataType as D;
    let time = |t: &D| match t {
        D::Timestamp(_, Some(_)) => Some(SqlType::Timestamptz),
        D::Timestamp(_, None) => Some(SqlType::Timestamp),
        _ => None,
    };
    match (a, b) {
        (a, b) if a == b => None,
        (a, b) if (a.is_floating() || b.is_floating()) && a.is_numeric() && b.is_numeric() => {
            Some(SqlType::Double)
        }
        (D::Date32, t) | (t, D::Date32) => time(t),
        _ => None,
    }
}
