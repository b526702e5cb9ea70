//! Calls of functions that are operators, constants of the statement, or other functions.

use millrace_common::{SqlError, SqlState, SqlType};
use sqlparser::ast::*;

use super::Desugar;
use super::ops::{
    Op, call, cast, null, ours, resolved, resolved_name, string, take, unwrap_number,
};
use crate::bind::names::fold;
use crate::functions::text::timestamptz_text;

impl Desugar<'_> {
    /// Functions that are operators, or constants of the statement.
    pub(super) fn function(&self, f: &mut Function) -> Result<Option<Expr>, SqlError> {
        let parts: Vec<String> = f.name.0.iter().filter_map(|p| p.as_ident()).map(fold).collect();
        let name = match parts.as_slice() {
            [name] => name.as_str(),
            [schema, name] if schema == "pg_catalog" => {
                f.name = ObjectName::from(vec![Ident::with_quote('"', name.clone())]);
                name.as_str()
            }
            _ => {
                let name = f.name.to_string();
                return Err(SqlError::new(
                    SqlState::UNDEFINED_FUNCTION,
                    format!("function {name} does not exist"),
                ));
            }
        };
        if f.over.is_some() {
            unwrap_window(f);
        }
        if matches!(name, "array_agg" | "string_agg" | "jsonb_agg" | "json_agg") {
            order_distinct(f);
        }
        let now = || cast(string(timestamptz_text(self.session.now_us)), SqlType::Timestamptz);
        let fixed = !self.session.for_view;
        Ok(match name {
            "mod" => arguments(f).and_then(<[Expr; 2]>::try_from_vec).map(|[a, b]| {
                let (a, b) =
                    (Box::new(Expr::Nested(Box::new(a))), Box::new(Expr::Nested(Box::new(b))));
                Expr::BinaryOp { left: a, op: BinaryOperator::Modulo, right: b }
            }),
            "nullif" => {
                if let [a, b] = arguments_mut(f).as_mut_slice() {
                    **b = ours(Op::Element, a.clone(), Box::new(take(b)));
                }
                None
            }
            "version" => Some(string(VERSION)),
            "date" => arguments(f)
                .and_then(<[Expr; 1]>::try_from_vec)
                .map(|[moment]| cast(moment, SqlType::Date)),
            "now" | "current_timestamp" | "transaction_timestamp" | "statement_timestamp"
                if fixed =>
            {
                Some(now())
            }
            "localtimestamp" if fixed => Some(cast(now(), SqlType::Timestamp)),
            "current_date" if fixed => Some(cast(now(), SqlType::Date)),
            "localtime" | "current_time" if fixed => {
                Some(cast(cast(now(), SqlType::Timestamp), SqlType::Time))
            }
            "transaction_timestamp"
            | "statement_timestamp"
            | "current_timestamp"
            | "localtimestamp" => Some(call("now", [])),
            "current_user" | "session_user" | "user" | "current_role" if fixed => {
                Some(string(self.session.user.clone()))
            }
            "current_database" | "current_catalog" if fixed => {
                Some(string(self.session.database.clone()))
            }
            "string_agg" => Some(cast(Expr::Function(f.clone()), SqlType::Text)),
            "jsonb_agg" | "json_agg" if f.over.is_none() => {
                // An array of documents is one document.
                if let [argument] = arguments_mut(f).as_mut_slice() {
                    let document = call("to_jsonb", [take(argument)]);
                    **argument = document;
                }
                let array = Function {
                    name: ObjectName::from(vec![Ident::with_quote('"', "array_agg")]),
                    ..f.clone()
                };
                Some(call("to_jsonb", [Expr::Function(array)]))
            }
            "jsonb_object_agg" | "json_object_agg" => {
                if let [key, value] = arguments_mut(f).as_mut_slice() {
                    **key = cast(take(key), SqlType::Text);
                    **value = call("to_jsonb", [take(value)]);
                }
                f.name = ObjectName::from(vec![Ident::with_quote('"', "jsonb_object_agg")]);
                None
            }
            "approx_count_distinct" | "approx_distinct" => {
                // Exact, which is as near as it gets, and the same in a view as in a query.
                f.name = ObjectName::from(vec![Ident::with_quote('"', "count")]);
                if let FunctionArguments::List(list) = &mut f.args {
                    list.duplicate_treatment = Some(DuplicateTreatment::Distinct);
                }
                None
            }
            "make_interval" => positional(f, &INTERVAL_PARTS)?.map(|args| call(name, args)),
            "age" => match arguments(f) {
                // The age of one time is counted from today's midnight.
                Some(args) if args.len() == 1 && fixed => {
                    let today = cast(cast(now(), SqlType::Date), SqlType::Timestamp);
                    Some(call(name, [today].into_iter().chain(args)))
                }
                args => args.map(|args| call(name, args)),
            },
            _ => match (resolved_name(name), is_plain(f)) {
                (Some(name), true) => arguments(f).map(|args| resolved(name, args)),
                _ => None,
            },
        })
    }
}

const INTERVAL_PARTS: [&str; 7] = ["years", "months", "weeks", "days", "hours", "mins", "secs"];

/// Arguments by position or by name, zero where one is left out.
fn positional(f: &mut Function, names: &[&str]) -> Result<Option<Vec<Expr>>, SqlError> {
    let FunctionArguments::List(list) = &mut f.args else { return Ok(None) };
    let named = list.args.iter().any(|a| !matches!(a, FunctionArg::Unnamed(_)));
    if !named {
        return Ok(arguments(f));
    }
    let zero = || ours(Op::Number, string("0"), null());
    let mut out: Vec<Expr> = names.iter().map(|_| zero()).collect();
    for (i, arg) in list.args.iter().enumerate() {
        let (at, e) = match arg {
            FunctionArg::Unnamed(FunctionArgExpr::Expr(e)) => (Some(i), e),
            FunctionArg::Named { name, arg: FunctionArgExpr::Expr(e), .. }
            | FunctionArg::ExprNamed {
                name: Expr::Identifier(name),
                arg: FunctionArgExpr::Expr(e),
                ..
            } => (names.iter().position(|n| *n == fold(name)), e),
            _ => return Ok(None),
        };
        match at.and_then(|at| out.get_mut(at)) {
            Some(slot) => *slot = e.clone(),
            None => return Err(crate::error::undefined_function(&f.to_string())),
        }
    }
    Ok(Some(out))
}

/// A call without any clause of aggregates or windows.
fn is_plain(f: &Function) -> bool {
    let FunctionArguments::List(list) = &f.args else { return false };
    f.over.is_none()
        && f.filter.is_none()
        && f.within_group.is_empty()
        && f.null_treatment.is_none()
        && list.duplicate_treatment.is_none()
        && list.clauses.is_empty()
}

/// The unnamed arguments of a plain call, in place.
fn arguments_mut(f: &mut Function) -> Vec<&mut Expr> {
    let FunctionArguments::List(list) = &mut f.args else { return Vec::new() };
    let unnamed = list.args.iter_mut().filter_map(|a| match a {
        FunctionArg::Unnamed(FunctionArgExpr::Expr(e)) => Some(e),
        _ => None,
    });
    unnamed.collect()
}

/// What clients that look at the version expect, and whose it is.
const VERSION: &str = concat!(
    "PostgreSQL 15.8 (Millrace ",
    env!("CARGO_PKG_VERSION"),
    "), compiled by rustc, 64-bit"
);

/// Window frames and the plain arguments of window functions want plain numbers.
fn unwrap_window(f: &mut Function) {
    if let FunctionArguments::List(list) = &mut f.args {
        for arg in list.args.iter_mut().skip(1) {
            if let FunctionArg::Unnamed(FunctionArgExpr::Expr(e)) = arg {
                unwrap_number(e);
            }
        }
    }
    let Some(WindowType::WindowSpec(spec)) = &mut f.over else { return };
    let Some(frame) = &mut spec.window_frame else { return };
    for bound in [Some(&mut frame.start_bound), frame.end_bound.as_mut()].into_iter().flatten() {
        if let WindowFrameBound::Preceding(Some(e)) | WindowFrameBound::Following(Some(e)) = bound {
            unwrap_number(e);
        }
    }
}

/// Distinct values are collected in their order where no other is asked for.
fn order_distinct(f: &mut Function) {
    let FunctionArguments::List(list) = &mut f.args else { return };
    let ordered = |c: &FunctionArgumentClause| matches!(c, FunctionArgumentClause::OrderBy(_));
    if list.duplicate_treatment != Some(DuplicateTreatment::Distinct)
        || list.clauses.iter().any(ordered)
        || f.over.is_some()
    {
        return;
    }
    if let Some(FunctionArg::Unnamed(FunctionArgExpr::Expr(value))) = list.args.first() {
        let options = OrderByOptions { asc: None, nulls_first: None };
        let by = OrderByExpr { expr: value.clone(), options, with_fill: None };
        list.clauses.push(FunctionArgumentClause::OrderBy(vec![by]));
    }
}

/// The unnamed arguments of a plain call.
fn arguments(f: &Function) -> Option<Vec<Expr>> {
    let FunctionArguments::List(list) = &f.args else { return None };
    if f.over.is_some() || list.duplicate_treatment.is_some() {
        return None;
    }
    unnamed_arguments(f)
}

/// The arguments of a call, if none has a name.
pub(super) fn unnamed_arguments(f: &Function) -> Option<Vec<Expr>> {
    let FunctionArguments::List(list) = &f.args else { return None };
    list.args
        .iter()
        .map(|a| match a {
            FunctionArg::Unnamed(FunctionArgExpr::Expr(e)) => Some(e.clone()),
            _ => None,
        })
        .collect()
}

trait TryFromVec: Sized {
    fn try_from_vec(v: Vec<Expr>) -> Option<Self>;
}

impl<const N: usize> TryFromVec for [Expr; N] {
    fn try_from_vec(v: Vec<Expr>) -> Option<Self> {
        v.try_into().ok()
    }
}
