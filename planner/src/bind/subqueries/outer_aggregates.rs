//! An aggregate in a subquery whose arguments are all of a query around: in PostgreSQL it is an aggregate of that
//! query, over its rows. This is not done here.

use datafusion::common::Result;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::logical_expr::expr::AggregateFunction;
use datafusion::logical_expr::{Aggregate, Expr, LogicalPlan};
use millrace_common::SqlError;
use millrace_functions::error::{external, sql_error_from_datafusion};
use millrace_functions::tree::{Walk, WalkPlan};
use sqlparser::ast;
use sqlparser::tokenizer::Location;

use super::array_query::GATHERED;
use crate::bind::expressions::clause_expressions::any_own;
use crate::bind::names::{column_name, fold};
use crate::bind::rewrites::plan::PlanRewrite;
use crate::bind::spans::misplaced_calls::{Called, is_aggregate, start};

/// Refuses aggregates of columns of outer queries.
pub const REFUSE_OUTER_AGGREGATES: PlanRewrite =
    PlanRewrite::new("refuse outer aggregates", |plan, _| {
        refuse(&plan)?;
        Ok(plan)
    });

/// Refuses such aggregates.
fn refuse(plan: &LogicalPlan) -> std::result::Result<(), SqlError> {
    let mut gathered: Option<*const LogicalPlan> = None;
    let checked = plan.walk_with_subqueries(|node| {
        match node {
            LogicalPlan::Projection(p) => {
                if let [Expr::Alias(alias)] = p.expr.as_slice()
                    && alias.name == GATHERED
                {
                    gathered = Some(std::ptr::from_ref(p.input.as_ref()));
                }
            }
            LogicalPlan::Aggregate(a) if gathered != Some(std::ptr::from_ref(node)) => check(a)?,
            _ => {}
        }
        Ok(TreeNodeRecursion::Continue)
    });
    checked.map(|_| ()).map_err(sql_error_from_datafusion)
}

fn check(aggregate: &Aggregate) -> Result<()> {
    for e in &aggregate.aggr_expr {
        let call = match e {
            Expr::Alias(alias) => alias.expr.as_ref(),
            e => e,
        };
        if let Expr::AggregateFunction(f) = call
            && is_of_outer(f)?
        {
            return Err(external(refused(f.func.name())));
        }
    }
    Ok(())
}

fn refused(name: &str) -> SqlError {
    let what = format!("the aggregate {name} of columns of the query around a subquery");
    SqlError::unsupported(what).with_hint(
        "It is an aggregate of that query: compute it there, and read it in the subquery.",
    )
}

/// The error for such an aggregate in a condition of a subquery, which has no aggregates of its own: all
/// names in the call are those of columns of tables that are not the subquery's.
pub fn written(condition: &ast::Expr, tables: &[Called<'_>]) -> Option<(SqlError, Location)> {
    let mut found = None;
    any_own(condition, |e| {
        if let ast::Expr::Function(f) = e
            && is_aggregate(f)
            && names_others(f, tables)
        {
            found = Some((refused(&column_name(e)), start(f)));
        }
        found.is_some()
    });
    found
}

fn names_others(f: &ast::Function, tables: &[Called<'_>]) -> bool {
    let (mut others, mut own) = (false, false);
    any_own(&f.args, |e| {
        match e {
            ast::Expr::CompoundIdentifier(parts) => match parts.as_slice() {
                [.., table, _] if !tables.iter().any(|(name, _)| *name == fold(table)) => {
                    others = true;
                }
                _ => own = true,
            },
            ast::Expr::Identifier(_) => own = true,
            _ => {}
        }
        own
    });
    others && !own
}

/// Whether a call reads columns of queries around it and none of its own.
fn is_of_outer(f: &AggregateFunction) -> Result<bool> {
    let params = &f.params;
    let order = params.order_by.iter().map(|by| &by.expr);
    let (mut outer, mut own) = (false, false);
    for e in params.args.iter().chain(params.filter.as_deref()).chain(order) {
        e.walk(|e| {
            match e {
                Expr::OuterReferenceColumn(..) => outer = true,
                // A subquery of an argument may read either.
                Expr::Column(_)
                | Expr::ScalarSubquery(_)
                | Expr::Exists(_)
                | Expr::InSubquery(_)
                | Expr::SetComparison(_) => own = true,
                _ => {}
            }
            Ok(TreeNodeRecursion::Continue)
        })?;
    }
    Ok(outer && !own)
}

#[cfg(test)]
mod tests {
    use millrace_common::SqlState;

    use crate::bind::rewrites::testing::bound;

    #[test]
    fn an_aggregate_of_an_outer_query_is_refused() {
        let e = bound("SELECT (SELECT sum(t.a) FROM k) FROM t").unwrap_err();
        assert_eq!(e.state, SqlState::FEATURE_NOT_SUPPORTED);
    }
}
