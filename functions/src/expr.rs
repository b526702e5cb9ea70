//! Compiled expressions, and the few things that are done with them.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, FieldRef, Schema};
use datafusion::common::tree_node::{Transformed, TransformedResult};
use datafusion::common::{Result, ScalarValue};
use datafusion::error::DataFusionError;
use datafusion::physical_expr::expressions::{CastExpr, Column, Literal, TryCastExpr};
use datafusion::physical_expr::{PhysicalExpr, ScalarFunctionExpr};

use crate::tree::Walk;

/// A compiled scalar expression over a node's input columns.
pub type ExprRef = Arc<dyn PhysicalExpr>;

pub fn column(schema: &Schema, index: usize) -> ExprRef {
    Arc::new(Column::new(schema.field(index).name(), index))
}

/// The position, if the expression is a plain column.
pub fn as_column(e: &ExprRef) -> Option<usize> {
    e.downcast_ref::<Column>().map(Column::index)
}

pub fn as_literal(e: &ExprRef) -> Option<&ScalarValue> {
    e.downcast_ref::<Literal>().map(Literal::value)
}

/// A column of a schema that is still to be made.
pub fn placeholder(index: usize) -> ExprRef {
    Arc::new(Column::new("", index))
}

pub fn literal(value: ScalarValue) -> ExprRef {
    Arc::new(Literal::new(value))
}

pub fn cast(e: ExprRef, to: DataType) -> ExprRef {
    Arc::new(CastExpr::new(e, to, None))
}

/// What a cast casts, and to what: DataFusion's casts and those by our functions.
pub fn as_cast(e: &ExprRef) -> Option<(&ExprRef, &DataType)> {
    if let Some(c) = e.downcast_ref::<CastExpr>() {
        return Some((c.expr(), c.cast_type()));
    }
    if let Some(c) = e.downcast_ref::<TryCastExpr>() {
        return Some((c.expr(), c.cast_type()));
    }
    let call = e.downcast_ref::<ScalarFunctionExpr>()?;
    let cast = call.fun().name().starts_with("cast_to_");
    call.args().first().filter(|_| cast).map(|arg| (arg, call.return_type()))
}

/// The expression below casts from integer to integer.
pub fn below_integer_casts(e: &ExprRef, schema: &Schema) -> ExprRef {
    let Some((inner, to)) = as_cast(e) else { return Arc::clone(e) };
    match inner.data_type(schema) {
        Ok(from) if from.is_integer() && to.is_integer() => below_integer_casts(inner, schema),
        _ => Arc::clone(e),
    }
}

/// A rank that was cast to DataFusion's type of it and back is the rank itself.
pub fn without_rank_casts(e: ExprRef, schema: &Schema) -> ExprRef {
    if as_cast(&e).is_none_or(|(_, to)| to != &DataType::Int64) {
        return e;
    }
    let below = below_integer_casts(&e, schema);
    let wide = as_column(&below).is_some_and(|c| schema.field(c).data_type() == &DataType::Int64);
    let unsigned = as_cast(&e)
        .and_then(|(inner, _)| as_cast(inner))
        .is_some_and(|(inner, to)| to == &DataType::UInt64 && as_column(inner).is_some());
    if wide && unsigned { below } else { e }
}

/// The field of a projected expression.
pub fn output_field(e: &ExprRef, input: &Schema, name: &str) -> Result<FieldRef> {
    if let Some(c) = as_column(e) {
        return Ok(Arc::new(input.field(c).clone().with_name(name)));
    }
    let nullable = as_literal(e).is_none_or(ScalarValue::is_null);
    Ok(Arc::new(Field::new(name, e.data_type(input)?, nullable)))
}

/// Positions of the columns an expression reads, ascending, each once.
pub fn columns_of(e: &ExprRef) -> Vec<usize> {
    let mut columns: Vec<usize> =
        datafusion::physical_expr::utils::collect_columns(e).iter().map(Column::index).collect();
    columns.sort_unstable();
    columns.dedup();
    columns
}

/// Replaces every column by what `f` gives for its position.
pub fn replace_columns(e: &ExprRef, f: impl Fn(usize) -> Option<ExprRef>) -> Result<ExprRef> {
    Arc::clone(e)
        .rewrite_up(|e| match as_column(&e) {
            None => Ok(Transformed::no(e)),
            Some(c) => match f(c) {
                Some(new) => Ok(Transformed::yes(new)),
                None => Err(DataFusionError::Internal(format!("column {c} has been pruned"))),
            },
        })
        .data()
}

/// Moves columns to new positions; names come from the new schema.
pub fn remap(e: &ExprRef, map: &[Option<usize>], schema: &Schema) -> Result<ExprRef> {
    replace_columns(e, |c| map.get(c).copied().flatten().map(|new| column(schema, new)))
}
