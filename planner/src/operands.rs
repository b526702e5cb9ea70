//! Plans whose sorts, aggregates and windows compute nothing: what they sort, group, add up and filter by is a column of a
//! projection below them.
//!
//! Where failing expressions are NULL (`SET expression_errors = 'null'`) projections see to it. The other nodes would have
//! to as well, each in its own way, and in the order of their keys.

use std::sync::Arc;

use datafusion::common::Result;
use datafusion::common::tree_node::Transformed;
use datafusion::logical_expr::expr::{AggregateFunction, GroupingSet, WindowFunction};
use datafusion::logical_expr::{
    Aggregate, Expr, LogicalPlan, Projection, Sort, SortExpr, Window, ident,
};
use millrace_common::SqlError;
use millrace_functions::error::sql_error_from_datafusion;
use millrace_functions::tree::WalkPlan;

use crate::bind::provider::columns_of;

/// Puts a projection below every such node.
pub fn project(plan: LogicalPlan) -> std::result::Result<LogicalPlan, SqlError> {
    let projected = plan.rewrite_up_with_subqueries(|node| {
        Ok(match node {
            LogicalPlan::Sort(sort) => sorted(sort)?,
            LogicalPlan::Aggregate(aggregate) => grouped(aggregate)?,
            LogicalPlan::Window(window) => windowed(window)?,
            other => Transformed::no(other),
        })
    });
    projected.map(|t| t.data).map_err(sql_error_from_datafusion)
}

/// Expressions that become columns.
#[derive(Default)]
struct Operands(Vec<Expr>);

impl Operands {
    fn one(&mut self, e: Expr) -> Expr {
        match e {
            Expr::Alias(mut alias) => {
                *alias.expr = self.one(*alias.expr);
                Expr::Alias(alias)
            }
            Expr::Column(_) | Expr::Literal(..) => e,
            // Aggregates read some of their arguments before there are rows.
            e if !e.any_column_refs() && !e.is_volatile() => e,
            e => {
                let place = self.0.iter().position(|known| *known == e && !e.is_volatile());
                let place = place.unwrap_or_else(|| {
                    self.0.push(e);
                    self.0.len() - 1
                });
                ident(name(place))
            }
        }
    }

    fn all(&mut self, exprs: Vec<Expr>) -> Vec<Expr> {
        exprs.into_iter().map(|e| self.one(e)).collect()
    }

    fn order(&mut self, by: Vec<SortExpr>) -> Vec<SortExpr> {
        by.into_iter().map(|by| SortExpr { expr: self.one(by.expr), ..by }).collect()
    }

    /// The input with the expressions as further columns; `None`: there are none.
    fn below(self, input: &Arc<LogicalPlan>) -> Result<Option<Arc<LogicalPlan>>> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let named = self.0.into_iter().enumerate().map(|(i, e)| e.alias(name(i)));
        let exprs = columns_of(input).into_iter().chain(named).collect();
        let projection = Projection::try_new(exprs, Arc::clone(input))?;
        Ok(Some(Arc::new(LogicalPlan::Projection(projection))))
    }
}

fn name(place: usize) -> String {
    format!("#operand{place}")
}

/// A node over more columns, without those.
fn narrowed(node: LogicalPlan, before: &LogicalPlan) -> Result<Transformed<LogicalPlan>> {
    let projection = Projection::try_new(columns_of(before), Arc::new(node))?;
    Ok(Transformed::yes(LogicalPlan::Projection(projection)))
}

fn sorted(sort: Sort) -> Result<Transformed<LogicalPlan>> {
    let mut operands = Operands::default();
    let expr = operands.order(sort.expr.clone());
    let fetch = sort.fetch;
    match operands.below(&sort.input)? {
        Some(input) => {
            let lifted = LogicalPlan::Sort(Sort { expr, input, fetch });
            narrowed(lifted, &LogicalPlan::Sort(sort))
        }
        None => Ok(Transformed::no(LogicalPlan::Sort(sort))),
    }
}

fn grouped(aggregate: Aggregate) -> Result<Transformed<LogicalPlan>> {
    let mut operands = Operands::default();
    let by = aggregate.group_expr.clone().into_iter().map(|e| group(e, &mut operands)).collect();
    let calls = aggregate.aggr_expr.clone().into_iter();
    let calls = calls.map(|e| named(e, |e| call(e, &mut operands))).collect();
    match operands.below(&aggregate.input)? {
        Some(input) => Ok(Transformed::yes(LogicalPlan::Aggregate(
            Aggregate::try_new_with_schema(input, by, calls, aggregate.schema)?,
        ))),
        None => Ok(Transformed::no(LogicalPlan::Aggregate(aggregate))),
    }
}

/// An expression that is computed otherwise, by the name that it had.
fn named(e: Expr, compute: impl FnOnce(Expr) -> Expr) -> Expr {
    let (relation, name) = e.qualified_name();
    let computed = compute(e.clone());
    match computed == e {
        true => e,
        false => computed.unalias().alias_qualified(relation, name),
    }
}

fn group(e: Expr, operands: &mut Operands) -> Expr {
    let mut one = |e: Expr| named(e, |e| operands.one(e));
    let mut set = |set: Vec<Expr>| set.into_iter().map(&mut one).collect::<Vec<_>>();
    match e {
        Expr::GroupingSet(GroupingSet::Rollup(all)) => {
            Expr::GroupingSet(GroupingSet::Rollup(set(all)))
        }
        Expr::GroupingSet(GroupingSet::Cube(all)) => Expr::GroupingSet(GroupingSet::Cube(set(all))),
        Expr::GroupingSet(GroupingSet::GroupingSets(sets)) => {
            Expr::GroupingSet(GroupingSet::GroupingSets(sets.into_iter().map(set).collect()))
        }
        e => one(e),
    }
}

fn call(e: Expr, operands: &mut Operands) -> Expr {
    match e {
        Expr::Alias(mut alias) => {
            *alias.expr = call(*alias.expr, operands);
            Expr::Alias(alias)
        }
        Expr::AggregateFunction(AggregateFunction { func, mut params }) => {
            params.args = operands.all(params.args);
            params.order_by = operands.order(params.order_by);
            params.filter = params.filter.map(|e| Box::new(operands.one(*e)));
            Expr::AggregateFunction(AggregateFunction { func, params })
        }
        other => other,
    }
}

fn windowed(window: Window) -> Result<Transformed<LogicalPlan>> {
    let mut operands = Operands::default();
    let calls = window.window_expr.clone().into_iter();
    let calls = calls.map(|e| named(e, |e| over(e, &mut operands))).collect();
    match operands.below(&window.input)? {
        Some(input) => {
            let lifted = LogicalPlan::Window(Window::try_new(calls, input)?);
            narrowed(lifted, &LogicalPlan::Window(window))
        }
        None => Ok(Transformed::no(LogicalPlan::Window(window))),
    }
}

fn over(e: Expr, operands: &mut Operands) -> Expr {
    match e {
        Expr::Alias(mut alias) => {
            *alias.expr = over(*alias.expr, operands);
            Expr::Alias(alias)
        }
        Expr::WindowFunction(mut call) => {
            let WindowFunction { params, .. } = call.as_mut();
            params.args = operands.all(std::mem::take(&mut params.args));
            params.partition_by = operands.all(std::mem::take(&mut params.partition_by));
            params.order_by = operands.order(std::mem::take(&mut params.order_by));
            params.filter = params.filter.take().map(|e| Box::new(operands.one(*e)));
            Expr::WindowFunction(call)
        }
        other => other,
    }
}
