//! UNION of types that PostgreSQL does not match. DataFusion would turn both into text.

use std::sync::Arc;

use datafusion::arrow::datatypes::DataType;
use datafusion::common::tree_node::{Transformed, TreeNodeRecursion};
use datafusion::logical_expr::{Expr, LogicalPlan, LogicalPlanBuilder, Union};
use millrace_common::{SqlError, SqlState, SqlType};
use millrace_functions::error::{external, sql_error_from_datafusion};
use millrace_functions::tree::WalkPlan;
use millrace_functions::types::{common_type, type_name};
use sqlparser::ast::{Query, SetExpr, TableFactor};

use super::set_operations::SetOperation;
use crate::bind::expressions::operators::{cast_expr, compare, is_unknown};
use crate::bind::rewrites::ast::AstRewrite;
use crate::bind::rewrites::plan::PlanRewrite;

/// Whether a query unites others.
pub fn is_set_operation(body: &SetExpr) -> bool {
    match body {
        SetExpr::SetOperation { .. } => true,
        SetExpr::Query(query) => is_set_operation(&query.body),
        _ => false,
    }
}

/// The plan of a query in FROM with the types that PostgreSQL resolves: expressions over its columns are bound by them.
pub fn typed_in_from(plan: LogicalPlan) -> Result<LogicalPlan, SqlError> {
    check(&plan)?;
    unify(plan)
}

/// Gives set operations in WITH the types of their columns before others read them.
pub const TYPE_UNIONS_IN_WITH: AstRewrite = AstRewrite {
    name: "type unions in with",
    query: |query, _| {
        let Some(with) = query.with.as_mut().filter(|with| !with.recursive) else { return Ok(()) };
        let mut united = with.cte_tables.iter_mut().filter(|cte| is_set_operation(&cte.query.body));
        united.try_for_each(|cte| in_from(&mut cte.query))
    },
    ..AstRewrite::NONE
};

/// A set operation as a query in FROM, whose columns have their types where others read them.
fn in_from(query: &mut Query) -> Result<(), SqlError> {
    let mut outer = crate::parser::parse_query("SELECT * FROM (SELECT 1) AS united")?;
    if let SetExpr::Select(select) = outer.body.as_mut() {
        for from in &mut select.from {
            if let TableFactor::Derived { subquery, .. } = &mut from.relation {
                std::mem::swap(subquery.as_mut(), query);
            }
        }
        *query = *outer;
    }
    Ok(())
}

/// Gives the columns of UNIONs the types that PostgreSQL resolves; 42804 where there is none.
pub const UNIFY_UNIONS: PlanRewrite =
    PlanRewrite::new("unify unions", |plan, _| typed_in_from(plan));

/// 42804 where a column of a UNION has types of different kinds.
fn check(plan: &LogicalPlan) -> Result<(), SqlError> {
    let mut found = None;
    plan.walk_with_subqueries(|node| {
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
        .map(|(i, f)| Some(signed(f.data_type())).filter(|t| !t.is_null() && !literal(i)))
        .collect()
}

/// The type that a number has in SQL: DataFusion's `row_number` and its like count without a sign.
fn signed(t: &DataType) -> DataType {
    match t {
        DataType::UInt64 => DataType::Int64,
        t => t.clone(),
    }
}

fn unknown(e: &Expr) -> bool {
    match e {
        Expr::Alias(a) => unknown(&a.expr),
        e => is_unknown(e),
    }
}

/// Gives the columns of every UNION the types that PostgreSQL resolves: literals of unknown type take the
/// others' type, narrower numbers the widest one's. What stands above sees the new types.
pub fn unify(plan: LogicalPlan) -> Result<LogicalPlan, SqlError> {
    let unified = plan.rewrite_up_with_subqueries(|node| match node {
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
        node => match SetOperation::of(&node).map(retyped).transpose()?.flatten() {
            Some(plan) => Ok(Transformed::yes(as_called(plan, &node)?)),
            None => Ok(Transformed::no(node)),
        },
    });
    let unified = unified.map_err(sql_error_from_datafusion)?;
    if !unified.transformed {
        return Ok(unified.data);
    }
    let recomputed =
        unified.data.rewrite_up_with_subqueries(|n| n.recompute_schema().map(Transformed::yes));
    recomputed.map(|t| t.data).map_err(sql_error_from_datafusion)
}

/// An INTERSECT or EXCEPT whose sides have other types than they are compared by.
fn retyped(operation: SetOperation<'_>) -> datafusion::common::Result<Option<LogicalPlan>> {
    let sides = [operation.left.clone(), operation.right.clone()];
    if let Some(e) = mismatch(sides.iter()) {
        return Err(external(e));
    }
    let types = common_types(&sides);
    let own = |side: &LogicalPlan| {
        let fields = side.schema().fields().iter();
        fields.zip(&types).all(|(f, t)| t.as_ref().is_none_or(|t| t == f.data_type()))
    };
    if sides.iter().all(own) {
        return Ok(None);
    }
    let [left, right] = sides;
    let (left, right) = (typed(left, &types)?, typed(right, &types)?);
    let plan = match operation.except {
        true => LogicalPlanBuilder::except(left, right, operation.all)?,
        false => LogicalPlanBuilder::intersect(left, right, operation.all)?,
    };
    Ok(Some(plan))
}

/// A plan whose columns are called as those of another, by which what stands above reads them.
fn as_called(plan: LogicalPlan, other: &LogicalPlan) -> datafusion::common::Result<LogicalPlan> {
    let columns = plan.schema().iter().zip(other.schema().iter());
    let named = columns.map(|(own, (qualifier, field))| {
        Expr::Column(own.into()).alias_qualified(qualifier.cloned(), field.name())
    });
    let named: Vec<Expr> = named.collect();
    LogicalPlanBuilder::from(plan).project(named)?.build()
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
        (DataType::Null | DataType::UInt64, _) => Ok(plain(e)),
        (DataType::Utf8, _) if literal => cast_expr(e, from, target).map_err(external),
        (_, SqlType::Numeric(_)) => Ok(plain(e)),
        _ => cast_expr(e, from, target).map_err(external),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bind::rewrites::testing::{assert_rewritten, bound};

    #[test]
    fn a_set_operation_in_with_is_a_query_in_from() {
        let sql = "WITH w AS (SELECT 1 UNION SELECT 2) SELECT * FROM w";
        let expected =
            "WITH w AS (SELECT * FROM (SELECT 1 UNION SELECT 2) AS united) SELECT * FROM w";
        assert_rewritten(TYPE_UNIONS_IN_WITH, &[(sql, expected)]);
        // A recursive one is known by being one.
        let sql = "WITH RECURSIVE w AS (SELECT 1 UNION SELECT 2) SELECT * FROM w";
        assert_rewritten(TYPE_UNIONS_IN_WITH, &[(sql, sql)]);
    }

    #[test]
    fn branches_have_one_type_or_there_is_an_error() {
        assert_eq!(bound("SELECT NULL UNION SELECT 1").unwrap().types, [SqlType::Int]);
        let e = bound("SELECT 1 UNION SELECT true").unwrap_err();
        assert_eq!(e.state, SqlState::DATATYPE_MISMATCH);
    }
}
