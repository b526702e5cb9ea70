//! What the rewrites of orders share: each puts keys in the place of what a plan orders by.

use datafusion::common::tree_node::Transformed;
use datafusion::common::{DFSchema, Result};
use datafusion::logical_expr::expr_rewriter::NamePreserver;
use datafusion::logical_expr::{Distinct, DistinctOn, Expr, LogicalPlan, Sort, SortExpr};

/// What an expression over a schema is ordered by.
pub type Key = fn(&Expr, &DFSchema) -> Result<Expr>;

/// A sort or a DISTINCT ON by keys; any other node stays.
pub fn sort_by_keys(node: LogicalPlan, key: Key) -> Result<Transformed<LogicalPlan>> {
    Ok(match node {
        LogicalPlan::Sort(Sort { expr, input, fetch }) => {
            let expr = sorted(expr, input.schema(), key)?;
            Transformed::yes(LogicalPlan::Sort(Sort { expr, input, fetch }))
        }
        LogicalPlan::Distinct(Distinct::On(on)) => {
            let DistinctOn { on_expr, select_expr, sort_expr, input, .. } = on;
            let on_expr = all(&on_expr, input.schema(), key)?;
            let sort_expr = sort_expr.map(|s| sorted(s, input.schema(), key)).transpose()?;
            let on = DistinctOn::try_new(on_expr, select_expr, sort_expr, input)?;
            Transformed::yes(LogicalPlan::Distinct(Distinct::On(on)))
        }
        other => Transformed::no(other),
    })
}

/// The keys of an order, in its directions.
pub fn sorted(by: Vec<SortExpr>, schema: &DFSchema, key: Key) -> Result<Vec<SortExpr>> {
    by.into_iter().map(|s| Ok(SortExpr { expr: key(&s.expr, schema)?, ..s })).collect()
}

/// The keys of expressions.
pub fn all(exprs: &[Expr], schema: &DFSchema, key: Key) -> Result<Vec<Expr>> {
    exprs.iter().map(|e| key(e, schema)).collect()
}

/// Changes expressions that are columns of a node, which keep their names.
pub fn keeping_names(
    exprs: Vec<Expr>,
    schema: &DFSchema,
    change: fn(Expr, &DFSchema) -> Result<Expr>,
) -> Result<Vec<Expr>> {
    let names = NamePreserver::new_for_projection();
    let changed = exprs.into_iter().map(|e| {
        let name = names.save(&e);
        Ok(name.restore(change(e, schema)?))
    });
    changed.collect()
}
