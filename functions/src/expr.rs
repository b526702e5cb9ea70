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

#[cfg(test)]
mod tests {
    use datafusion::common::config::ConfigOptions;
    use millrace_common::SqlType;

    use super::*;

    fn schema() -> Schema {
        let field = |name: &str, t| Field::new(name, t, false);
        Schema::new(vec![
            field("a", DataType::Int16),
            field("b", DataType::Int64),
            field("c", DataType::UInt64),
            field("d", DataType::Utf8),
        ])
    }

    fn ours(e: ExprRef, to: SqlType, schema: &Schema) -> ExprRef {
        let from = e.data_type(schema).unwrap();
        let function = crate::cast::cast_function(&from, to).unwrap();
        let options = Arc::new(ConfigOptions::default());
        Arc::new(ScalarFunctionExpr::try_new(function, vec![e], schema, options).unwrap())
    }

    #[test]
    fn casts_of_both_kinds_are_seen() {
        let schema = schema();
        let a = column(&schema, 0);
        for wide in [
            cast(Arc::clone(&a), DataType::Int64),
            Arc::new(TryCastExpr::new(Arc::clone(&a), DataType::Int64)),
            ours(Arc::clone(&a), SqlType::BigInt, &schema),
        ] {
            let (inner, to) = as_cast(&wide).unwrap();
            assert_eq!((as_column(inner), to), (Some(0), &DataType::Int64));
            assert_eq!(as_column(&wide), None);
            assert_eq!(as_column(&below_integer_casts(&wide, &schema)), Some(0));
        }
        assert!(as_cast(&a).is_none());
        assert!(as_cast(&literal(ScalarValue::from(1i64))).is_none());
    }

    #[test]
    fn only_casts_among_integers_are_looked_below() {
        let schema = schema();
        let twice = cast(cast(column(&schema, 0), DataType::Int32), DataType::Int64);
        assert_eq!(as_column(&below_integer_casts(&twice, &schema)), Some(0));
        let text = cast(column(&schema, 1), DataType::Utf8);
        assert!(Arc::ptr_eq(&text, &below_integer_casts(&text, &schema)));
        let read = cast(column(&schema, 3), DataType::Int64);
        assert!(Arc::ptr_eq(&read, &below_integer_casts(&read, &schema)));
        let over = cast(Arc::clone(&text), DataType::Int64);
        assert!(Arc::ptr_eq(&over, &below_integer_casts(&over, &schema)));
    }

    #[test]
    fn a_rank_that_was_cast_to_and_fro_is_itself() {
        let schema = schema();
        let rank = |c, through| cast(cast(column(&schema, c), through), DataType::Int64);
        let kept = |e: ExprRef| as_column(&without_rank_casts(e, &schema));
        assert_eq!(kept(rank(1, DataType::UInt64)), Some(1));
        // Another width loses digits, another type is no rank.
        assert_eq!(kept(rank(1, DataType::Int32)), None);
        assert_eq!(kept(rank(0, DataType::UInt64)), None);
        assert_eq!(kept(cast(column(&schema, 2), DataType::Int64)), None);
        assert_eq!(kept(column(&schema, 1)), Some(1));
    }

    #[test]
    fn fields_of_projections_know_what_is_null() {
        let schema = schema();
        let field = |e: ExprRef| output_field(&e, &schema, "x").unwrap();
        assert_eq!(*field(column(&schema, 0)), Field::new("x", DataType::Int16, false));
        let one = literal(ScalarValue::from(1i64));
        assert_eq!(*field(one), Field::new("x", DataType::Int64, false));
        let none = literal(ScalarValue::Int64(None));
        assert_eq!(*field(none), Field::new("x", DataType::Int64, true));
        let made = cast(column(&schema, 0), DataType::Int64);
        assert_eq!(*field(made), Field::new("x", DataType::Int64, true));
    }

    #[test]
    fn columns_are_listed_once_and_moved() {
        use datafusion::logical_expr::Operator;
        use datafusion::physical_expr::expressions::BinaryExpr;
        let schema = schema();
        let sum = |l: usize, r: usize| -> ExprRef {
            let (l, r) = (column(&schema, l), column(&schema, r));
            Arc::new(BinaryExpr::new(l, Operator::Plus, r))
        };
        let all: ExprRef = Arc::new(BinaryExpr::new(sum(2, 0), Operator::Plus, sum(2, 1)));
        assert_eq!(columns_of(&all), [0, 1, 2]);
        assert_eq!(columns_of(&literal(ScalarValue::from(1i64))), [0usize; 0]);
        let narrow = Schema::new(vec![schema.field(1).clone(), schema.field(0).clone()]);
        let moved = remap(&sum(0, 1), &[Some(1), Some(0)], &narrow).unwrap();
        assert_eq!(moved.to_string(), "a@1 + b@0");
        assert!(remap(&sum(0, 1), &[Some(0)], &narrow).is_err(), "a column that is not there");
        assert!(remap(&sum(0, 1), &[Some(0), None], &narrow).is_err());
        assert_eq!(as_column(&placeholder(7)), Some(7));
    }
}
