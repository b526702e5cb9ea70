//! UNION of types that PostgreSQL does not match. DataFusion would turn both into text.

use datafusion::arrow::datatypes::DataType;
use datafusion::common::ScalarValue;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::logical_expr::{Expr, LogicalPlan};
use millrace_common::{SqlError, SqlState};

use super::operators::{compare, type_name};
use crate::error::sql_error_from_datafusion;

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
