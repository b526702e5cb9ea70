//! UNION of types that PostgreSQL does not match. DataFusion would turn both into text.

use std::sync::Arc;

use datafusion::arrow::datatypes::DataType;
use datafusion::common::ScalarValue;
use datafusion::common::tree_node::{Transformed, TreeNodeRecursion};
use datafusion::logical_expr::{Expr, LogicalPlan, LogicalPlanBuilder, Union};
use millrace_common::{SqlError, SqlState, SqlType};

use super::operators::{cast_expr, common_type, compare, type_name};
use crate::error::{external, sql_error_from_datafusion};

/// 42804 where a column of a UNION has types of different kinds.
pub fn check(plan: &LogicalPlan) -> Result<(), SqlError> {
    let mut found = None;
    plan.apply_with_subqueries(|node| {
        if let LogicalPlan::Union(union) = node {
            found = mismatch(union.inputs.iter().map(AsRef::as_ref));
        }
        Ok(if found.is_some() { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
    })
    .map_err(sql_error_from_datafusion)?;
    found.map_or(Ok(()), Err)
}

fn mismatch<'a>(inputs: impl Iterator<Item = &'a LogicalPlan>) -> Option<SqlError> {
    let mut common: Vec<Option<DataType>> = Vec::new();
    for input in inputs {
        let types = known_types(input);
        common.resize(common.len().max(types.len()), None);
        for (so_far, t) in common.iter_mut().zip(types) {
            match (&so_far, t) {
                (Some(a), Some(b)) if !compare(a, &b) => {
                    let (a, b) = (type_name(so_far), type_name(&Some(b)));
                    return Some(SqlError::new(
                        SqlState::DATATYPE_MISMATCH,
                        format!("UNION types {a} and {b} cannot be matched"),
                    ));
                }
                (None, t) => *so_far = t,
                _ => {}
            }
        }
    }
    None
}

/// Column types; `None` for literals of unknown type.
fn known_types(plan: &LogicalPlan) -> Vec<Option<DataType>> {
    let literal = |i: usize| match plan {
        LogicalPlan::Projection(p) => p.expr.get(i).is_some_and(unknown),
        LogicalPlan::Values(v) => v.values.iter().any(|row| row.get(i).is_some_and(unknown)),
        _ => false,
    };
    let fields = plan.schema().fields().iter().enumerate();
    fields
        .map(|(i, f)| Some(f.data_type().clone()).filter(|t| !t.is_null() && !literal(i)))
        .collect()
}

fn unknown(e: &Expr) -> bool {
    match e {
        Expr::Alias(a) => unknown(&a.expr),
        Expr::Literal(v, _) => matches!(v, ScalarValue::Utf8(_) | ScalarValue::Null),
        _ => false,
    }
}

/// Gives the columns of every UNION the types that PostgreSQL resolves: literals of unknown type take the
/// others' type, narrower numbers the widest one's. What stands above sees the new types.
pub fn unify(plan: LogicalPlan) -> Result<LogicalPlan, SqlError> {
    let unified = plan.transform_up_with_subqueries(|node| match node {
        LogicalPlan::Union(union) => {
            let inputs: Vec<LogicalPlan> =
                union.inputs.iter().map(|i| LogicalPlan::clone(i)).collect();
            let types = common_types(&inputs);
            let inputs = inputs
                .into_iter()
                .map(|i| typed(i, &types).map(Arc::new))
                .collect::<datafusion::common::Result<Vec<_>>>()?;
            let union = Union::try_new_with_loose_types(inputs)?;
            Ok(Transformed::yes(LogicalPlan::Union(union)))
        }
        node => Ok(Transformed::no(node)),
    });
    let unified = unified.map_err(sql_error_from_datafusion)?;
    if !unified.transformed {
        return Ok(unified.data);
    }
    let recomputed =
        unified.data.transform_up_with_subqueries(|n| n.recompute_schema().map(Transformed::yes));
    recomputed.map(|t| t.data).map_err(sql_error_from_datafusion)
}

fn common_types(inputs: &[LogicalPlan]) -> Vec<Option<DataType>> {
    let mut common: Vec<Option<DataType>> = Vec::new();
    for input in inputs {
        let types = known_types(input);
        common.resize(common.len().max(types.len()), None);
        for (so_far, t) in common.iter_mut().zip(types) {
            *so_far = match (so_far.take(), t) {
                (Some(a), Some(b)) => Some(common_type(&a, &b).unwrap_or(a)),
                (a, b) => a.or(b),
            };
        }
    }
    common
}

/// The same rows with columns of the given types.
fn typed(
    input: LogicalPlan,
    types: &[Option<DataType>],
) -> datafusion::common::Result<LogicalPlan> {
    let known = known_types(&input);
    let fields: Vec<(Expr, String, DataType)> = input
        .schema()
        .iter()
        .map(|(q, f)| (Expr::Column((q, f).into()), f.name().clone(), f.data_type().clone()))
        .collect();
    let mut changed = false;
    let mut exprs = Vec::with_capacity(fields.len());
    for (i, (column, name, own)) in fields.into_iter().enumerate() {
        let expr = match types.get(i).cloned().flatten() {
            Some(t) if t != own => {
                changed = true;
                let literal = known[i].is_none();
                converted(column, &own, &t, literal)?.alias(name)
            }
            _ => column,
        };
        exprs.push(expr);
    }
    match changed {
        true => LogicalPlanBuilder::from(input).project(exprs)?.build(),
        false => Ok(input),
    }
}

fn converted(
    e: Expr,
    from: &DataType,
    to: &DataType,
    literal: bool,
) -> datafusion::common::Result<Expr> {
    let target = SqlType::from_arrow(to).map_err(external)?;
    let plain = |e| Expr::Cast(datafusion::logical_expr::Cast::new(Box::new(e), to.clone()));
    match (from, target) {
        (DataType::Null, _) => Ok(plain(e)),
        (DataType::Utf8, _) if literal => cast_expr(e, from, target).map_err(external),
        (_, SqlType::Numeric(_)) => Ok(plain(e)),
        _ => cast_expr(e, from, target).map_err(external),
    }
}
