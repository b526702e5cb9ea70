//! The arguments of window functions that stand for places: how far `lag` and `lead` look and what they have instead,
//! and which row `nth_value` takes.

use datafusion::arrow::datatypes::DataType;
use datafusion::common::tree_node::Transformed;
use datafusion::common::{DFSchema, Result, ScalarValue};
use datafusion::logical_expr::expr::WindowFunction;
use datafusion::logical_expr::expr_rewriter::NamePreserver;
use datafusion::logical_expr::{Expr, ExprSchemable, LogicalPlan, Window};
use millrace_common::{SqlError, SqlType};
use millrace_functions::error::{external, sql_error_from_datafusion, undefined_function};
use millrace_functions::tree::{Walk, WalkPlan};
use millrace_functions::types::type_name;

use crate::bind::expressions::operators::{compare, is_unknown};
use crate::bind::expressions::zones::Zones;
use crate::bind::relations::series::constant;
use crate::bind::rewrites::plan::PlanRewrite;

/// Whether `lag` or `lead` look by a distance of each row's own or by none: from NULL rows away there is NULL, which
/// DataFusion takes for the row itself.
pub fn own_distance(args: &[Expr]) -> bool {
    let null = |e: &Expr| constant(e).is_some_and(|v| v.is_null());
    args.iter().skip(1).any(Expr::any_column_refs) || args.get(1).is_some_and(null)
}

/// Whether `nth_value` takes a row that is not told by a constant above zero: DataFusion counts others from the end.
pub fn own_number(args: &[Expr]) -> bool {
    let Some(n) = args.get(1) else { return false };
    let number = if n.is_volatile() { None } else { constant(n) };
    let number = number.and_then(|n| n.cast_to(&DataType::Int64).ok());
    !matches!(number, Some(ScalarValue::Int64(Some(n))) if n > 0)
}

/// Reads what `lag` and `lead` have instead of instants, in the session's zone.
pub const READ_WINDOW_DEFAULTS: PlanRewrite =
    PlanRewrite::new("read window defaults", |plan, session| read_defaults(plan, session.zones));

/// Reads the literals that `lag` and `lead` have instead of instants, in the session's zone: DataFusion would in UTC.
fn read_defaults(plan: LogicalPlan, zones: Zones) -> std::result::Result<LogicalPlan, SqlError> {
    if zones.zone.is_none() {
        return Ok(plan);
    }
    let read = plan.rewrite_up_with_subqueries(|node| match node {
        LogicalPlan::Window(Window { input, window_expr, schema }) => {
            let names = NamePreserver::new_for_projection();
            let window_expr = window_expr.into_iter().map(|e| {
                let name = names.save(&e);
                let read = e.rewrite_up(|e| with_default(e, input.schema(), zones))?;
                Ok(name.restore(read.data))
            });
            let window_expr = window_expr.collect::<Result<Vec<_>>>()?;
            Ok(Transformed::yes(LogicalPlan::Window(Window { input, window_expr, schema })))
        }
        other => Ok(Transformed::no(other)),
    });
    read.map(|t| t.data).map_err(sql_error_from_datafusion)
}

fn with_default(e: Expr, schema: &DFSchema, zones: Zones) -> Result<Transformed<Expr>> {
    let mut call = match e {
        Expr::WindowFunction(call) => call,
        other => return Ok(Transformed::no(other)),
    };
    let moved = ["lag", "lead"].contains(&call.fun.name());
    if let ([value, _, default], true) = (call.params.args.as_mut_slice(), moved)
        && let Expr::Literal(ScalarValue::Utf8(Some(text)), None) = &*default
        && matches!(value.get_type(schema)?, DataType::Timestamp(_, Some(_)))
    {
        let read = zones.literal(text, SqlType::Timestamptz).map_err(external)?;
        *default = Expr::Literal(read, None);
        return Ok(Transformed::yes(Expr::WindowFunction(call)));
    }
    Ok(Transformed::no(Expr::WindowFunction(call)))
}

/// Of `lag` and `lead`: an error where PostgreSQL has no such call, or one whose result is not of the value's type.
pub fn check_moved(call: &WindowFunction, schema: &DFSchema) -> Result<()> {
    let args = call.params.args.as_slice();
    let types = args.iter().map(|e| known_type(e, schema)).collect::<Result<Vec<_>>>()?;
    let name = call.fun.name();
    let absent = || {
        let types: Vec<String> = types.iter().map(type_name).collect();
        external(undefined_function(&format!("{name}({})", types.join(", "))))
    };
    if let Some(Some(distance)) = types.get(1)
        && (is_decimal(distance) || distance.is_floating())
    {
        return Err(absent());
    }
    let (Some(Some(value)), Some(Some(default))) = (types.first(), types.get(2)) else {
        return Ok(());
    };
    if !compare(value, default) {
        return Err(absent());
    }
    if is_wider(default, value) {
        let default = type_name(&Some(default.clone()));
        let message = format!("{name} with a default of type {default}, which its value is not of");
        let hint = format!("Cast the value to {default}.");
        return Err(external(SqlError::unsupported(message).with_hint(hint)));
    }
    Ok(())
}

/// `None`: a literal that takes the type it is used as.
fn known_type(e: &Expr, schema: &DFSchema) -> Result<Option<DataType>> {
    if is_unknown(e) {
        return Ok(None);
    }
    Ok(Some(e.get_type(schema)?).filter(|t| !t.is_null()))
}

/// Whether a value of the second type becomes one of the first where both meet, and not the other way.
fn is_wider(a: &DataType, b: &DataType) -> bool {
    use DataType as D;
    match (a, b) {
        (a, b) if b.is_integer() => is_decimal(a) || a.is_floating(),
        (a, b) if is_decimal(b) => a.is_floating(),
        (D::Timestamp(..), D::Date32) => true,
        (D::Timestamp(_, zone), D::Timestamp(_, None)) => zone.is_some(),
        _ => false,
    }
}

fn is_decimal(t: &DataType) -> bool {
    matches!(t, DataType::Decimal128(..) | DataType::Decimal256(..))
}

#[cfg(test)]
mod tests {
    use datafusion::logical_expr::{col, lit};

    use super::*;

    #[test]
    fn what_datafusion_would_count_otherwise() {
        let null = Expr::Literal(ScalarValue::Int32(None), None);
        assert!(own_distance(&[col("x"), null.clone()]));
        assert!(own_distance(&[col("x"), col("n")]));
        assert!(!own_distance(&[col("x"), lit(1i32), null.clone()]));
        assert!(own_number(&[col("x"), lit(0i64)]));
        assert!(own_number(&[col("x"), lit(-1i32)]));
        assert!(own_number(&[col("x"), null]));
        assert!(own_number(&[col("x"), col("n")]));
        assert!(!own_number(&[col("x"), lit(2i32)]));
    }
}
