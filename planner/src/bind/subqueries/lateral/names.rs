//! A left side under names of its own, where a lateral join's right side has columns that are called the same.

use std::sync::Arc;

use datafusion::common::tree_node::{Transformed, TreeNodeRecursion};
use datafusion::common::{Column, Result};
use datafusion::logical_expr::{Expr, Join, LogicalPlan, LogicalPlanBuilder};
use millrace_functions::tree::{Walk, WalkPlan};

use crate::bind::relations::provider::columns_of;
use crate::bind::subqueries::outer_references;

/// The start of numbered names that no column of a join's sides has: the given one and, where there are such
/// already, one more apostrophe than they have.
pub fn unused(join: &Join, prefix: &str) -> Result<String> {
    let mut more = 0;
    for side in [&join.left, &join.right] {
        side.walk_with_subqueries(|node| {
            for field in node.schema().fields().iter() {
                let Some(rest) = field.name().strip_prefix(prefix) else { continue };
                let number = rest.trim_start_matches('\'');
                if number.parse::<usize>().is_ok() {
                    more = more.max(rest.len() - number.len() + 1);
                }
            }
            Ok(TreeNodeRecursion::Continue)
        })?;
    }
    Ok(format!("{prefix}{}", "'".repeat(more)))
}

/// What `way` makes of the join and the source of its values with such names, with the names as they were.
pub fn with_own(
    join: &Join,
    source: &LogicalPlan,
    way: impl Fn(&Join, &LogicalPlan) -> Result<Option<LogicalPlan>>,
) -> Result<Option<LogicalPlan>> {
    let prefix = unused(join, "#left")?;
    let columns = join.left.schema().columns().into_iter().enumerate();
    let names: Vec<(Column, Column)> =
        columns.map(|(i, c)| (c, Column::from_name(format!("{prefix}{i}")))).collect();
    let left = under(&join.left, &names)?;
    let width = source.schema().fields().len().min(names.len());
    let source = under(source, &names[..width]).unwrap_or_else(|_| left.clone());
    let right = outer_references::renamed(join.right.as_ref().clone(), &names)?;
    let filter = join.filter.clone().map(|f| renamed(f, &names)).transpose()?;
    let join = Join { left: Arc::new(left), right: Arc::new(right), filter, ..join.clone() };
    let Some(plan) = way(&join, &source)? else { return Ok(None) };
    let theirs = columns_of(&plan).into_iter().skip(names.len());
    let ours = names.iter().map(|(c, new)| {
        Expr::Column(new.clone()).alias_qualified(c.relation.clone(), c.name.clone())
    });
    let outputs: Vec<Expr> = ours.chain(theirs).collect();
    LogicalPlanBuilder::from(plan).project(outputs)?.build().map(Some)
}

/// A plan's columns under other names.
fn under(plan: &LogicalPlan, names: &[(Column, Column)]) -> Result<LogicalPlan> {
    let named = names.iter().map(|(c, new)| Expr::Column(c.clone()).alias(new.name.clone()));
    LogicalPlanBuilder::from(plan.clone()).project(named.collect::<Vec<_>>())?.build()
}

fn renamed(e: Expr, names: &[(Column, Column)]) -> Result<Expr> {
    e.rewrite_up(|e| match e {
        Expr::Column(c) => Ok(match names.iter().find(|(from, _)| *from == c) {
            Some((_, to)) => Transformed::yes(Expr::Column(to.clone())),
            None => Transformed::no(Expr::Column(c)),
        }),
        e => Ok(Transformed::no(e)),
    })
    .map(|t| t.data)
}
