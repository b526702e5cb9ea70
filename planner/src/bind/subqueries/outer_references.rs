//! Whose columns subqueries read: those of the nearest query around them that has them.
//!
//! A subquery's own columns of outer queries are known to DataFusion; those that only subqueries within it
//! read are not.

use std::sync::Arc;

use datafusion::common::tree_node::{Transformed, TreeNode, TreeNodeRecursion};
use datafusion::common::{Column, DFSchema, Result};
use datafusion::logical_expr::expr::{Exists, InSubquery, SetComparison};
use datafusion::logical_expr::{Expr, LogicalPlan, Subquery};
use millrace_functions::error::{correlated, external};
use millrace_functions::tree::Walk;

use super::lateral::is_subquery;

/// The subquery that an expression is.
pub fn subquery_of(e: &Expr) -> Option<&Subquery> {
    match e {
        Expr::ScalarSubquery(subquery) => Some(subquery),
        Expr::Exists(x) => Some(&x.subquery),
        Expr::InSubquery(x) => Some(&x.subquery),
        Expr::SetComparison(x) => Some(&x.subquery),
        _ => None,
    }
}

fn each_subquery(node: &LogicalPlan, see: &mut dyn FnMut(&Subquery) -> Result<()>) -> Result<()> {
    node.apply_expressions(|e| {
        e.walk(|e| {
            if let Some(subquery) = subquery_of(e) {
                see(subquery)?;
            }
            Ok(TreeNodeRecursion::Continue)
        })
    })?;
    Ok(())
}

/// Whether a node's subqueries find a column in its inputs.
fn is_of(node: &LogicalPlan, column: &Column) -> bool {
    node.inputs().iter().any(|input| input.schema().has_column(column))
}

/// Whether subqueries within a subquery read columns of the query around it.
pub fn reads_across(subquery: &LogicalPlan, around: &DFSchema) -> Result<bool> {
    let mut found = false;
    subquery.walk(|node| {
        each_subquery(node, &mut |inner| {
            let read = outer_columns(&inner.subquery)?;
            found |= read.iter().any(|c| around.has_column(c) && !is_of(node, c));
            Ok(())
        })?;
        Ok(if found { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
    })?;
    Ok(found)
}

/// An error for subqueries of a node within which others read its columns.
pub fn refuse_across(node: &LogicalPlan) -> Result<()> {
    each_subquery(node, &mut |subquery| {
        for input in node.inputs() {
            if reads_across(&subquery.subquery, input.schema())? {
                return Err(external(correlated()));
            }
        }
        Ok(())
    })
}

/// The columns of queries around a plan that it reads, also by way of subqueries.
pub fn outer_columns(plan: &LogicalPlan) -> Result<Vec<Column>> {
    let mut columns: Vec<Column> = Vec::new();
    plan.walk(|node| {
        node.apply_expressions(|e| {
            e.walk(|e| {
                if let Expr::OuterReferenceColumn(_, c) = e {
                    columns.push(c.clone());
                }
                Ok(TreeNodeRecursion::Continue)
            })
        })?;
        each_subquery(node, &mut |inner| {
            let read = outer_columns(&inner.subquery)?;
            columns.extend(read.into_iter().filter(|c| !is_of(node, c)));
            Ok(())
        })?;
        Ok(TreeNodeRecursion::Continue)
    })?;
    Ok(columns)
}

/// A plan that reads columns of the queries around it by other names.
pub fn renamed(plan: LogicalPlan, names: &[(Column, Column)]) -> Result<LogicalPlan> {
    let without = |theirs: &dyn Fn(&Column) -> bool| -> Vec<(Column, Column)> {
        names.iter().filter(|(c, _)| !theirs(c)).cloned().collect()
    };
    let inner = without(&|c| is_of(&plan, c));
    // What stands on the right of a lateral join looks to its left first.
    let lateral = match &plan {
        LogicalPlan::Join(join) if is_subquery(&join.right) => {
            Some(without(&|c| join.left.schema().has_column(c)))
        }
        _ => None,
    };
    let plan = plan.map_expressions(|e| e.rewrite_up(|e| renamed_expr(e, names, &inner)))?.data;
    let mut inputs = 0;
    let plan = plan.map_children(|input| {
        inputs += 1;
        let names = match &lateral {
            Some(right) if inputs == 2 => right.as_slice(),
            _ => names,
        };
        renamed(input, names).map(Transformed::yes)
    })?;
    Ok(plan.data)
}

/// `inner`: what subqueries read by other names.
fn renamed_expr(
    e: Expr,
    names: &[(Column, Column)],
    inner: &[(Column, Column)],
) -> Result<Transformed<Expr>> {
    let within = |subquery: Subquery| -> Result<Subquery> {
        let plan = renamed(subquery.subquery.as_ref().clone(), inner)?;
        let outer_ref_columns = plan.all_out_ref_exprs();
        Ok(Subquery { subquery: Arc::new(plan), outer_ref_columns, ..subquery })
    };
    Ok(match e {
        Expr::OuterReferenceColumn(field, column) => {
            match names.iter().find(|(from, _)| *from == column) {
                Some((_, to)) => Transformed::yes(Expr::OuterReferenceColumn(field, to.clone())),
                None => Transformed::no(Expr::OuterReferenceColumn(field, column)),
            }
        }
        Expr::ScalarSubquery(subquery) => Transformed::yes(Expr::ScalarSubquery(within(subquery)?)),
        Expr::Exists(Exists { subquery, negated }) => {
            Transformed::yes(Expr::Exists(Exists { subquery: within(subquery)?, negated }))
        }
        Expr::InSubquery(InSubquery { expr, subquery, negated }) => {
            let subquery = within(subquery)?;
            Transformed::yes(Expr::InSubquery(InSubquery { expr, subquery, negated }))
        }
        Expr::SetComparison(SetComparison { expr, subquery, op, quantifier }) => {
            let subquery = within(subquery)?;
            Transformed::yes(Expr::SetComparison(SetComparison { expr, subquery, op, quantifier }))
        }
        other => Transformed::no(other),
    })
}
