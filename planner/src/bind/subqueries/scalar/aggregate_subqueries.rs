//! What is settled about correlated subqueries before they are taken apart.
//!
//! - An aggregate without GROUP BY has a row over no rows too, which a join with the rows by their values does
//!   not have. So
//!   EXISTS of one is true, and IN or a comparison with one is a comparison with its value.
//! - What a number is compared with gets its type here, as a column by a name of its own: the cast that the
//!   planner would
//!   put there is called as the column is that it reads.
//! - A query within which subqueries are nested too deep is refused: each level makes DataFusion look at those
//!   within it
//!   once more, which is twice as often for every level. So is one whose plan becomes too large.

use std::sync::Arc;

use datafusion::common::tree_node::{Transformed, TreeNodeRecursion};
use datafusion::common::{DataFusionError, Result};
use datafusion::logical_expr::expr::{InSubquery, SetComparison};
use datafusion::logical_expr::expr_rewriter::NamePreserver;
use datafusion::logical_expr::type_coercion::binary::comparison_coercion;
use datafusion::logical_expr::{
    Aggregate, EmptyRelation, Expr, ExprSchemable, FetchType, Limit, LogicalPlan,
    LogicalPlanBuilder, Operator, SkipType, Subquery, binary_expr, cast, lit,
};
use millrace_common::{SqlError, SqlState};
use millrace_functions::error::{correlated, external};
use millrace_functions::tree::{Walk, WalkPlan};

use crate::bind::relations::provider::columns_of;
use crate::bind::subqueries::lateral::reads_outer;
use crate::bind::subqueries::outer_references::subquery_of;

/// How deep correlated subqueries may be nested.
const MAX_LEVELS: usize = 8;
/// How many operators a plan may have in which subqueries are taken apart: what they read of the query
/// around them is there once more for each of them.
const MAX_OPERATORS: usize = 10_000;

/// Settles that in all queries of a plan.
pub fn rewrite(plan: LogicalPlan) -> Result<LogicalPlan> {
    if levels(&plan)? > MAX_LEVELS {
        return Err(too_complex(format!(
            "Correlated subqueries can be nested {MAX_LEVELS} deep. Write some of them as joins."
        )));
    }
    plan.rewrite_up_with_subqueries(settled).map(|t| t.data)
}

fn too_complex(hint: String) -> DataFusionError {
    let e = SqlError::new(SqlState::STATEMENT_TOO_COMPLEX, "statement too complex");
    external(e.with_hint(hint))
}

/// An error for a plan that has become too large.
pub fn check_size(plan: &LogicalPlan) -> Result<()> {
    let mut operators = 0;
    plan.walk_with_subqueries(|_| {
        operators += 1;
        let enough = operators > MAX_OPERATORS;
        Ok(if enough { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
    })?;
    if operators <= MAX_OPERATORS {
        return Ok(());
    }
    Err(too_complex(format!(
        "Its correlated subqueries need more than {MAX_OPERATORS} operators. Write some of them as joins."
    )))
}

/// How many correlated subqueries there are within each other.
fn levels(plan: &LogicalPlan) -> Result<usize> {
    let mut most = 0;
    plan.walk(|node| {
        node.apply_expressions(|e| {
            e.walk(|e| {
                if let Some(subquery) = subquery_of(e) {
                    let own = usize::from(!subquery.outer_ref_columns.is_empty());
                    most = most.max(own + levels(&subquery.subquery)?);
                }
                Ok(TreeNodeRecursion::Continue)
            })
        })
    })?;
    Ok(most)
}

fn settled(node: LogicalPlan) -> Result<Transformed<LogicalPlan>> {
    if !node.expressions().iter().any(has_subquery) {
        return Ok(Transformed::no(node));
    }
    let names = NamePreserver::new(&node);
    let inputs: Vec<LogicalPlan> = node.inputs().into_iter().cloned().collect();
    node.map_expressions(|e| {
        let name = names.save(&e);
        let new = e.rewrite_up(|e| {
            let typed = in_its_type(e, &inputs)?;
            let new = of_one_row(&typed.data)?;
            Ok(new.map_or(typed, Transformed::yes))
        })?;
        Ok(match new.transformed {
            true => new.update_data(|e| name.restore(e)),
            false => new,
        })
    })
}

fn has_subquery(e: &Expr) -> bool {
    e.any(|e| Ok(subquery_of(e).is_some())).unwrap_or(true)
}

/// What a predicate is if its correlated subquery always has one row, or never any.
fn of_one_row(e: &Expr) -> Result<Option<Expr>> {
    let Some(subquery) = subquery_of(e).filter(|s| !s.outer_ref_columns.is_empty()) else {
        return Ok(None);
    };
    let Some(some) = has_row(&subquery.subquery)? else { return Ok(None) };
    let value = || Expr::ScalarSubquery(subquery.clone());
    Ok(match e {
        Expr::Exists(x) => Some(lit(some != x.negated)),
        Expr::InSubquery(InSubquery { expr, negated, .. }) if some => {
            let op = if *negated { Operator::NotEq } else { Operator::Eq };
            Some(binary_expr(expr.as_ref().clone(), op, value()))
        }
        Expr::SetComparison(SetComparison { expr, op, .. }) if some => {
            Some(binary_expr(expr.as_ref().clone(), *op, value()))
        }
        _ => None,
    })
}

/// Whether a plan has one row, or none, whatever its tables hold. `None`: that depends on them.
fn has_row(plan: &LogicalPlan) -> Result<Option<bool>> {
    Ok(match plan {
        LogicalPlan::Projection(p) => has_row(&p.input)?,
        LogicalPlan::SubqueryAlias(a) => has_row(&a.input)?,
        LogicalPlan::Subquery(s) => has_row(&s.subquery)?,
        LogicalPlan::Sort(s) if s.fetch.is_none() => has_row(&s.input)?,
        LogicalPlan::EmptyRelation(EmptyRelation { produce_one_row, .. }) => Some(*produce_one_row),
        LogicalPlan::Aggregate(Aggregate { group_expr, .. }) if group_expr.is_empty() => Some(true),
        LogicalPlan::Limit(limit) => limited(limit)?,
        _ => None,
    })
}

fn limited(limit: &Limit) -> Result<Option<bool>> {
    Ok(match (limit.get_skip_type(), limit.get_fetch_type()) {
        (Ok(_), Ok(FetchType::Literal(Some(0)))) => Some(false),
        (Ok(SkipType::Literal(0)), Ok(FetchType::Literal(_))) => has_row(&limit.input)?,
        // The one that there is is left out.
        (Ok(SkipType::Literal(1..)), Ok(_)) => has_row(&limit.input)?.map(|_| false),
        _ => None,
    })
}

/// Whether a subquery has a group over no rows, which reads the query around it: whether such a group stays,
/// as by HAVING, has to be asked for every row of that query.
pub fn has_group(subquery: &Subquery) -> Result<bool> {
    if subquery.outer_ref_columns.is_empty() {
        return Ok(false);
    }
    let mut found = false;
    subquery.subquery.walk(|node| {
        if let LogicalPlan::Aggregate(a) = node
            && a.group_expr.is_empty()
        {
            found |= reads_outer(node)?;
        }
        Ok(if found { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
    })?;
    Ok(found)
}

/// An error for such subqueries where they are not taken apart.
pub fn refuse_groups(node: &LogicalPlan) -> Result<()> {
    node.apply_expressions(|e| {
        e.walk(|e| {
            if let Expr::Exists(_) | Expr::InSubquery(_) | Expr::SetComparison(_) = e
                && let Some(subquery) = subquery_of(e)
                && has_group(subquery)?
            {
                return Err(external(correlated()));
            }
            Ok(TreeNodeRecursion::Continue)
        })
    })?;
    Ok(())
}

/// A predicate whose subquery has numbers of the type that they are compared in.
fn in_its_type(e: Expr, inputs: &[LogicalPlan]) -> Result<Transformed<Expr>> {
    Ok(match e {
        Expr::InSubquery(mut x) => {
            let typed = typed(&x.expr, &x.subquery, inputs)?;
            let changed = typed.is_some();
            x.subquery = typed.unwrap_or(x.subquery);
            Transformed::new(Expr::InSubquery(x), changed, TreeNodeRecursion::Continue)
        }
        Expr::SetComparison(mut x) => {
            let typed = typed(&x.expr, &x.subquery, inputs)?;
            let changed = typed.is_some();
            x.subquery = typed.unwrap_or(x.subquery);
            Transformed::new(Expr::SetComparison(x), changed, TreeNodeRecursion::Continue)
        }
        other => Transformed::no(other),
    })
}

/// `None`: its values have that type, or are no numbers.
fn typed(value: &Expr, subquery: &Subquery, inputs: &[LogicalPlan]) -> Result<Option<Subquery>> {
    let columns = columns_of(&subquery.subquery);
    let [column] = columns.as_slice() else { return Ok(None) };
    let theirs = column.get_type(subquery.subquery.schema())?;
    // An expression over both sides of a join has no one input; its type is left to the planner.
    let ours = inputs.iter().find_map(|input| value.get_type(input.schema()).ok());
    let Some(ours) = ours.filter(|t| t.is_numeric() && theirs.is_numeric()) else {
        return Ok(None);
    };
    let Some(wanted) = comparison_coercion(&ours, &theirs).filter(|t| *t != theirs) else {
        return Ok(None);
    };
    let plan = LogicalPlanBuilder::from(subquery.subquery.as_ref().clone())
        .project([cast(column.clone(), wanted).alias("#value")])?
        .build()?;
    Ok(Some(Subquery { subquery: Arc::new(plan), ..subquery.clone() }))
}
