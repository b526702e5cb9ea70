//! What DataFusion's own decorrelation does well.

use datafusion::common::Result;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::logical_expr::utils::split_conjunction;
use datafusion::logical_expr::{
    BinaryExpr, Distinct, Expr, FetchType, LogicalPlan, Operator, SkipType,
};
use millrace_functions::tree::Walk;

use super::{is_subquery, reads_outer};

/// Whether DataFusion takes a subquery apart: columns of the outer query are only compared by `=`, in
/// filters between which and the top there are only projections and one aggregate.
pub fn decorrelates(plan: &LogicalPlan) -> Result<bool> {
    match plan {
        LogicalPlan::Subquery(s) => decorrelates(&s.subquery),
        LogicalPlan::SubqueryAlias(a) if is_subquery(plan) => decorrelates(&a.input),
        LogicalPlan::Projection(p) if !refers_outside(&p.expr)? => decorrelates(&p.input),
        LogicalPlan::Aggregate(a) => {
            let own = [a.group_expr.as_slice(), a.aggr_expr.as_slice()];
            let refers = refers_outside(own[0])? || refers_outside(own[1])?;
            Ok(!refers && a.group_expr.is_empty() && filters_by_equality(&a.input)?)
        }
        plan => filters_by_equality(plan),
    }
}

/// A predicate of a subquery.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Predicate {
    Exists,
    /// IN, ANY and ALL.
    Compared,
}

/// Whether DataFusion makes a semi or anti join of a predicate: columns of the outer query are only read in
/// filters between which and the top there are only projections and DISTINCT, or GROUP BY where they are
/// compared by `=`, and not with subqueries. Below an alias or a join it does not find the columns again
/// that the filters compare.
pub fn joins(plan: &LogicalPlan, kind: Predicate) -> Result<bool> {
    if !reads_outer(plan)? {
        return Ok(true);
    }
    match plan {
        LogicalPlan::Projection(p) if !refers_outside(&p.expr)? => joins(&p.input, kind),
        LogicalPlan::Distinct(Distinct::All(input)) => joins(input, kind),
        LogicalPlan::Filter(f) => Ok(!compares_outside(&f.predicate)? && joins(&f.input, kind)?),
        LogicalPlan::Aggregate(a) if !a.group_expr.is_empty() => {
            let refers = refers_outside(&a.group_expr)? || refers_outside(&a.aggr_expr)?;
            Ok(!refers && filters_by_equality(&a.input)?)
        }
        LogicalPlan::Limit(limit) => {
            let some = matches!(limit.get_fetch_type()?, FetchType::Literal(Some(1..)));
            let first = matches!(limit.get_skip_type()?, SkipType::Literal(0));
            Ok(kind == Predicate::Exists && some && first && joins(&limit.input, kind)?)
        }
        _ => Ok(false),
    }
}

/// Whether an expression compares a value of the outer query with a subquery: that becomes a join, below
/// which DataFusion does not find the value.
fn compares_outside(e: &Expr) -> Result<bool> {
    e.any(|e| match e {
        Expr::InSubquery(x) => refers_outside(std::slice::from_ref(&x.expr)),
        Expr::SetComparison(x) => refers_outside(std::slice::from_ref(&x.expr)),
        _ => Ok(false),
    })
}

fn filters_by_equality(plan: &LogicalPlan) -> Result<bool> {
    match plan {
        LogicalPlan::Projection(p) if !refers_outside(&p.expr)? => filters_by_equality(&p.input),
        LogicalPlan::Filter(f) => {
            let outer = |e: &Expr| matches!(e, Expr::OuterReferenceColumn(_, _));
            let own = |e: &Expr| -> Result<bool> {
                Ok(e.any_column_refs() && !refers_outside(std::slice::from_ref(e))?)
            };
            for part in split_conjunction(&f.predicate) {
                let equality = match part {
                    Expr::BinaryExpr(BinaryExpr { left, op: Operator::Eq, right }) => {
                        (outer(left) && own(right)?) || (outer(right) && own(left)?)
                    }
                    _ => false,
                };
                if !equality && refers_outside(std::slice::from_ref(part))? {
                    return Ok(false);
                }
            }
            filters_by_equality(&f.input)
        }
        plan => Ok(!reads_outer(plan)?),
    }
}

/// Whether expressions read the outer query, also by way of subqueries.
pub fn refers_outside(exprs: &[Expr]) -> Result<bool> {
    let mut refers = false;
    for e in exprs {
        e.walk(|e| {
            refers |= match e {
                Expr::OuterReferenceColumn(_, _) => true,
                Expr::ScalarSubquery(s) => !s.outer_ref_columns.is_empty(),
                Expr::Exists(x) => !x.subquery.outer_ref_columns.is_empty(),
                Expr::InSubquery(x) => !x.subquery.outer_ref_columns.is_empty(),
                _ => false,
            };
            Ok(TreeNodeRecursion::Continue)
        })?;
    }
    Ok(refers)
}
