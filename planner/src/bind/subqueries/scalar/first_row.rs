//! `(SELECT y FROM w WHERE w.k = v.k ORDER BY z LIMIT 1)`: a left join with the rows of `w` that have number one among
//! those of their key, which a view maintains as it does any top-n.

use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::common::{JoinType, Result, ScalarValue};
use datafusion::logical_expr::expr::WindowFunction;
use datafusion::logical_expr::utils::{conjunction, split_conjunction};
use datafusion::logical_expr::{
    BinaryExpr, Expr, ExprFunctionExt, Limit, LogicalPlan, LogicalPlanBuilder, Operator, SortExpr,
    ident, lit,
};
use millrace_common::SqlError;
use millrace_functions::error::external;
use millrace_functions::functions;
use millrace_functions::tree::{Walk, WalkPlan};

use crate::bind::relations::provider::columns_of;
use crate::bind::subqueries::lateral::refers_outside;

/// Whether a subquery takes the first row, so that there are never more.
pub fn is_limited(plan: &LogicalPlan) -> bool {
    match plan {
        LogicalPlan::Projection(p) => is_limited(&p.input),
        LogicalPlan::SubqueryAlias(a) => is_limited(&a.input),
        LogicalPlan::Limit(limit) => limit.fetch.as_deref().is_some_and(is_one),
        _ => false,
    }
}

fn is_one(e: &Expr) -> bool {
    matches!(e, Expr::Literal(ScalarValue::Int64(Some(1)), _))
}

/// `left` with the subquery's value as the column `name`. `None`: it does more than take the first row by equalities.
pub fn join(left: &LogicalPlan, subquery: &LogicalPlan, name: &str) -> Result<Option<LogicalPlan>> {
    let mut keys = Keys::default();
    let Some(rows) = keys.pull(subquery)? else { return Ok(None) };
    if keys.outer.is_empty() || !keys.limited {
        return Ok(None);
    }
    let width = columns_of(&rows).len() - keys.outer.len();
    let value = columns_of(&rows).into_iter().take(width).map(|c| c.alias(name));
    let key = |i: usize| format!("{name}.{i}");
    let named = (0..keys.outer.len()).map(|i| ident(key_name(i)).alias(key(i)));
    let right =
        LogicalPlanBuilder::from(rows).project(value.chain(named).collect::<Vec<_>>())?.build()?;
    let on = keys.outer.iter().enumerate().map(|(i, outer)| ident(key(i)).eq(outer.clone()));
    let outputs = columns_of(left).into_iter().chain([ident(name)]);
    LogicalPlanBuilder::from(left.clone())
        .join_on(right, JoinType::Left, on.collect::<Vec<_>>())?
        .project(outputs.collect::<Vec<_>>())?
        .build()
        .map(Some)
}

fn key_name(i: usize) -> String {
    format!("#key{i}")
}

/// What the subquery's rows are compared with, and the columns that are: the last of the plan's.
#[derive(Default)]
struct Keys {
    outer: Vec<Expr>,
    limited: bool,
}

impl Keys {
    /// The plan without its comparisons with the outer query, and with their columns.
    fn pull(&mut self, plan: &LogicalPlan) -> Result<Option<LogicalPlan>> {
        let keys = |n: usize| (0..n).map(|i| ident(key_name(i)));
        Ok(match plan {
            LogicalPlan::Filter(f) => {
                let Some(input) = self.compared(&f.input, &f.predicate)? else { return Ok(None) };
                Some(input)
            }
            LogicalPlan::Projection(p) => {
                if refers_outside(&p.expr)? {
                    return Ok(None);
                }
                let Some(input) = self.pull(&p.input)? else { return Ok(None) };
                let all = p.expr.iter().cloned().chain(keys(self.outer.len()));
                let all: Vec<Expr> = all.collect();
                Some(LogicalPlanBuilder::from(input).project(all)?.build()?)
            }
            LogicalPlan::Limit(limit) => self.first(limit)?,
            _ => None,
        })
    }

    fn compared(&mut self, input: &LogicalPlan, predicate: &Expr) -> Result<Option<LogicalPlan>> {
        let mut own = Vec::new();
        let mut inner = Vec::new();
        for part in split_conjunction(predicate) {
            let Some((column, outer)) = equality(part)? else {
                if refers_outside(std::slice::from_ref(part))? {
                    return Ok(None);
                }
                own.push(part.clone());
                continue;
            };
            inner.push(column.alias(key_name(inner.len())));
            self.outer.push(outer);
        }
        let mut below = false;
        input.walk_with_subqueries(|node| {
            below |= !node.all_out_ref_exprs().is_empty();
            Ok(if below { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
        })?;
        if below {
            return Ok(None);
        }
        let columns = columns_of(input);
        let mut plan = LogicalPlanBuilder::from(input.clone());
        if let Some(own) = conjunction(own) {
            plan = plan.filter(own)?;
        }
        plan.project(columns.into_iter().chain(inner).collect::<Vec<_>>())?.build().map(Some)
    }

    /// Row number one by the order below the limit, of every key.
    fn first(&mut self, limit: &Limit) -> Result<Option<LogicalPlan>> {
        let none = |e: &Expr| matches!(e, Expr::Literal(ScalarValue::Int64(Some(0)), _));
        if self.limited
            || !limit.fetch.as_deref().is_some_and(is_one)
            || limit.skip.as_deref().is_some_and(|skip| !none(skip))
        {
            return Ok(None);
        }
        self.limited = true;
        // The order may stand below a projection that leaves columns of it out.
        let (outputs, below) = match limit.input.as_ref() {
            LogicalPlan::Projection(p) if matches!(p.input.as_ref(), LogicalPlan::Sort(_)) => {
                (Some(&p.expr), p.input.as_ref())
            }
            other => (None, other),
        };
        let (order, below): (Vec<SortExpr>, &LogicalPlan) = match below {
            LogicalPlan::Sort(s) => (s.expr.clone(), &s.input),
            other => (Vec::new(), other),
        };
        let sorted: Vec<Expr> = order.iter().map(|s| s.expr.clone()).collect();
        if refers_outside(&sorted)? || refers_outside(outputs.map_or(&[], Vec::as_slice))? {
            return Ok(None);
        }
        let Some(rows) = self.pull(below)? else { return Ok(None) };
        let keys: Vec<Expr> = (0..self.outer.len()).map(|i| ident(key_name(i))).collect();
        let Some(udf) = functions().window("row_number") else {
            return Err(external(SqlError::internal("row_number is not registered")));
        };
        let number = Expr::from(WindowFunction::new(udf, vec![])).partition_by(keys.clone());
        let number = match order.is_empty() {
            true => number.build()?,
            false => number.order_by(order).build()?,
        };
        let columns = columns_of(&rows);
        let outputs = match outputs {
            Some(exprs) => exprs.iter().cloned().chain(keys).collect(),
            None => columns,
        };
        LogicalPlanBuilder::from(rows)
            .window([number.alias("#number")])?
            .filter(ident("#number").lt_eq(lit(1u64)))?
            .project(outputs)?
            .build()
            .map(Some)
    }
}

/// `column of the subquery = value of the outer query`, either way around.
fn equality(e: &Expr) -> Result<Option<(Expr, Expr)>> {
    let Expr::BinaryExpr(BinaryExpr { left, op: Operator::Eq, right }) = e else { return Ok(None) };
    let outside = |e: &Expr| refers_outside(std::slice::from_ref(e));
    let (inner, outer) = match (outside(left)?, outside(right)?) {
        (false, true) => (left, right),
        (true, false) => (right, left),
        _ => return Ok(None),
    };
    Ok(resolved(outer)?.map(|outer| (inner.as_ref().clone(), outer)))
}

/// A value of the outer query as it is there; `None` if it reads the subquery's rows too.
fn resolved(e: &Expr) -> Result<Option<Expr>> {
    use datafusion::common::tree_node::Transformed;
    let mut own = false;
    let outer = e.clone().rewrite_up(|e| match e {
        Expr::OuterReferenceColumn(_, c) => Ok(Transformed::yes(Expr::Column(c))),
        Expr::Column(_) | Expr::ScalarSubquery(_) => {
            own = true;
            Ok(Transformed::no(e))
        }
        e => Ok(Transformed::no(e)),
    });
    // What was turned into a column is not looked at again.
    let outer = outer?.data;
    Ok((!own).then_some(outer))
}
