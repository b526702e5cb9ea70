//! Calls: their arguments, the clauses within and behind them, and windows.

use sqlparser::ast::*;

use super::{Checked, NOWHERE, queries, start, syntax};

/// Which clauses a function may have depends on what it is: see [`crate::bind`].
pub fn call(f: &Function) -> Checked {
    let Function {
        name,
        // `{fn f()}` is f().
        uses_odbc_syntax: _,
        parameters,
        args,
        filter: _,
        null_treatment: _,
        over,
        within_group,
    } = f;
    let at = name.span().end;
    match parameters {
        FunctionArguments::None => {}
        FunctionArguments::Subquery(_) | FunctionArguments::List(_) => syntax(true, "(", at)?,
    }
    match args {
        FunctionArguments::None => {}
        FunctionArguments::Subquery(_) => {}
        FunctionArguments::List(list) => arguments(list)?,
    }
    match over {
        None | Some(WindowType::NamedWindow(_)) => {}
        Some(WindowType::WindowSpec(spec)) => window(spec)?,
    }
    queries::order(within_group)
}

fn arguments(list: &FunctionArgumentList) -> Checked {
    let FunctionArgumentList { duplicate_treatment: _, args, clauses } = list;
    for arg in args {
        let value = match arg {
            FunctionArg::Named { name: _, arg, operator: _ } => arg,
            FunctionArg::ExprNamed { name: _, arg, operator: _ } => arg,
            FunctionArg::Unnamed(arg) => arg,
        };
        match value {
            FunctionArgExpr::Expr(_)
            | FunctionArgExpr::QualifiedWildcard(_)
            | FunctionArgExpr::Wildcard => {}
            FunctionArgExpr::WildcardWithOptions(options) => queries::wildcard(options)?,
        }
    }
    for clause in clauses {
        match clause {
            FunctionArgumentClause::IgnoreOrRespectNulls(_) => {}
            FunctionArgumentClause::OrderBy(exprs) => queries::order(exprs)?,
            FunctionArgumentClause::Limit(e) => syntax(true, "LIMIT", start([e]))?,
            FunctionArgumentClause::OnOverflow(_) => syntax(true, "ON", NOWHERE)?,
            FunctionArgumentClause::Having(HavingBound(_, e)) => {
                syntax(true, "HAVING", start([e]))?
            }
            FunctionArgumentClause::Separator(_) => syntax(true, "SEPARATOR", NOWHERE)?,
            FunctionArgumentClause::JsonNullClause(_) => syntax(true, "NULL", NOWHERE)?,
            FunctionArgumentClause::JsonReturningClause(_) => syntax(true, "RETURNING", NOWHERE)?,
        }
    }
    Ok(())
}

pub fn window(spec: &WindowSpec) -> Checked {
    let WindowSpec { window_name: _, partition_by: _, order_by, window_frame } = spec;
    if let Some(frame) = window_frame {
        let WindowFrame { units: _, start_bound: _, end_bound: _ } = frame;
    }
    queries::order(order_by)
}
