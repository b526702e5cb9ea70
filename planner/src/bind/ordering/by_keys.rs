//! What the rewrites of orders share: each puts keys in the place of what a plan orders by.

use datafusion::common::tree_node::Transformed;
use datafusion::common::{DFSchema, Result};
use datafusion::logical_expr::expr_rewriter::NamePreserver;
use datafusion::logical_expr::{
    Aggregate, Distinct, DistinctOn, Expr, LogicalPlan, Sort, SortExpr, Window,
};

/// What an expression over a schema is ordered by.
pub type Key = fn(&Expr, &DFSchema) -> Result<Expr>;

/// How an expression over a schema is changed.
pub type Change = fn(Expr, &DFSchema) -> Result<Expr>;

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

/// Changes the calls of a window node.
pub fn change_windows(window: Window, change: Change) -> Result<Transformed<LogicalPlan>> {
    let Window { input, window_expr, schema } = window;
    let window_expr = keeping_names(window_expr, input.schema(), change)?;
    Ok(Transformed::yes(LogicalPlan::Window(Window { input, window_expr, schema })))
}

/// Changes the calls of an aggregate node.
pub fn change_aggregates(aggregate: Aggregate, change: Change) -> Result<Transformed<LogicalPlan>> {
    let Aggregate { input, group_expr, aggr_expr, schema, .. } = aggregate;
    let aggr_expr = keeping_names(aggr_expr, input.schema(), change)?;
    let aggregate = Aggregate::try_new_with_schema(input, group_expr, aggr_expr, schema)?;
    Ok(Transformed::yes(LogicalPlan::Aggregate(aggregate)))
}

/// Changes expressions that are columns of a node below their aliases. They keep their names.
pub fn keeping_names(exprs: Vec<Expr>, schema: &DFSchema, change: Change) -> Result<Vec<Expr>> {
    let names = NamePreserver::new_for_projection();
    let changed = exprs.into_iter().map(|e| {
        let name = names.save(&e);
        Ok(name.restore(below_aliases(e, schema, change)?))
    });
    changed.collect()
}

fn below_aliases(e: Expr, schema: &DFSchema, change: Change) -> Result<Expr> {
    match e {
        Expr::Alias(mut alias) => {
            *alias.expr = below_aliases(*alias.expr, schema, change)?;
            Ok(Expr::Alias(alias))
        }
        e => change(e, schema),
    }
}
