//! Calls of functions that are operators, constants of the statement, or other functions.

use millrace_common::types::Element;
use millrace_common::{SqlError, SqlState, SqlType};
use millrace_functions::text::timestamptz_text;
use sqlparser::ast::*;

use super::literals::digits_of;
use super::ops::{
    Op, SCALAR, call, cast, null, number_text, ours, resolved, resolved_name, string, take,
    unwrap_number,
};
use crate::bind::SessionInfo;
use crate::bind::names::fold;
use crate::parser::VARIADIC;

/// Functions that become operators, casts or constants.
pub(super) const SPELLED: [&str; 10] = [
    "mod",
    "version",
    "date",
    "now",
    "transaction_timestamp",
    "statement_timestamp",
    "current_database",
    "age",
    "timezone",
    "row_to_json",
];

/// Functions that are operators, or constants of the statement.
pub(super) fn rewrite(f: &mut Function, session: &SessionInfo) -> Result<Option<Expr>, SqlError> {
    let name = own_name(f)?;
    let name = name.as_str();
    place_arguments(f, name)?;
    if let Some(call) = variadic(f, name)? {
        return Ok(Some(call));
    }
    if let Some(digits) = seconds_of(f, name)? {
        let moment = rewrite(f, session)?;
        let none = || SqlError::unsupported(format!("{} with a precision", f.name));
        return Ok(Some(call("round_seconds", [moment.ok_or_else(none)?, digits])));
    }
    if f.over.is_some() {
        unwrap_window(f);
    }
    if matches!(name, "array_agg" | "string_agg" | "jsonb_agg" | "json_agg") {
        order_distinct(f);
    }
    if name == "array_agg"
        && let Some(value) = arguments_mut(f).into_iter().next()
    {
        *value = resolved(SCALAR, [take(value)]);
    }
    if let Some(constant) = constant(name, session) {
        return Ok(Some(constant));
    }
    Ok(match name {
        "mod" => arguments(f).and_then(<[Expr; 2]>::try_from_vec).map(|[a, b]| {
            let (a, b) = (Box::new(Expr::Nested(Box::new(a))), Box::new(Expr::Nested(Box::new(b))));
            Expr::BinaryOp { left: a, op: BinaryOperator::Modulo, right: b }
        }),
        "abs" | "ceil" | "ceiling" | "floor" | "sign" => {
            arguments_mut(f).into_iter().for_each(|e| *e = number(take(e)));
            None
        }
        // What the type of the value does not tell any more.
        "pg_typeof"
            if let Some(name) = arguments_mut(f).first().and_then(|e| cast_to_varchar(e)) =>
        {
            Some(cast(string(name), SqlType::Text))
        }
        "date" => arguments(f)
            .and_then(<[Expr; 1]>::try_from_vec)
            .map(|[moment]| cast(moment, SqlType::Date)),
        "jsonb_agg" | "json_agg" if f.over.is_none() => Some(array_of_documents(f)),
        "jsonb_object_agg" | "json_object_agg" => {
            make_object_of_documents(f);
            None
        }
        "approx_count_distinct" | "approx_distinct" => {
            make_count_of_distinct(f);
            None
        }
        "age" => match arguments(f) {
            // The age of one time is counted from today's midnight.
            Some(args) if args.len() == 1 && !session.for_view => {
                let today = cast(cast(now(session), SqlType::Date), SqlType::Timestamp);
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

/// The name of a function, without PostgreSQL's own schema; an error of one in another schema.
fn own_name(f: &mut Function) -> Result<String, SqlError> {
    let parts: Vec<String> = f.name.0.iter().filter_map(|p| p.as_ident()).map(fold).collect();
    match parts.as_slice() {
        [name] => Ok(name.clone()),
        [schema, name] if schema == "pg_catalog" => {
            f.name = ObjectName::from(vec![Ident::with_quote('"', name.clone())]);
            Ok(name.clone())
        }
        _ => {
            let name = f.name.to_string();
            Err(SqlError::new(
                SqlState::UNDEFINED_FUNCTION,
                format!("function {name} does not exist"),
            ))
        }
    }
}

/// What a function says that says the same all through a statement.
fn constant(name: &str, session: &SessionInfo) -> Option<Expr> {
    let fixed = !session.for_view;
    Some(match name {
        "version" => cast(string(VERSION), SqlType::Text),
        "now" | "current_timestamp" | "transaction_timestamp" if fixed => now(session),
        "statement_timestamp" if fixed => {
            let text = timestamptz_text(session.statement_us);
            cast(string(text), SqlType::Timestamptz)
        }
        "localtimestamp" if fixed => cast(now(session), SqlType::Timestamp),
        "current_date" if fixed => cast(now(session), SqlType::Date),
        "localtime" | "current_time" if fixed => {
            cast(cast(now(session), SqlType::Timestamp), SqlType::Time)
        }
        "transaction_timestamp"
        | "statement_timestamp"
        | "current_timestamp"
        | "localtimestamp" => call("now", []),
        "current_user" | "session_user" | "user" | "current_role" if fixed => {
            cast(string(session.user.clone()), SqlType::Text)
        }
        "current_database" | "current_catalog" if fixed => {
            cast(string(session.database.clone()), SqlType::Text)
        }
        _ => return None,
    })
}

fn now(session: &SessionInfo) -> Expr {
    cast(string(timestamptz_text(session.now_us)), SqlType::Timestamptz)
}

/// `jsonb_agg`: an array of documents is one document. Distinct values are in the order of their
/// own type.
fn array_of_documents(f: &mut Function) -> Expr {
    let distinct = is_distinct(f);
    if let [argument] = arguments_mut(f).as_mut_slice() {
        let value = take(argument);
        **argument = match distinct {
            true => resolved(SCALAR, [value]),
            false => call("to_jsonb", [value]),
        };
    }
    let array =
        Function { name: ObjectName::from(vec![Ident::with_quote('"', "array_agg")]), ..f.clone() };
    call("to_jsonb", [Expr::Function(array)])
}

/// `jsonb_object_agg`, of keys that are texts and values that are documents.
fn make_object_of_documents(f: &mut Function) {
    if let [key, value] = arguments_mut(f).as_mut_slice() {
        **key = cast(take(key), SqlType::Text);
        **value = call("to_jsonb", [take(value)]);
    }
    f.name = ObjectName::from(vec![Ident::with_quote('"', "jsonb_object_agg")]);
}

/// Exact, which is as near as it gets, and the same in a view as in a query.
fn make_count_of_distinct(f: &mut Function) {
    f.name = ObjectName::from(vec![Ident::with_quote('"', "count")]);
    if let FunctionArguments::List(list) = &mut f.args {
        list.duplicate_treatment = Some(DuplicateTreatment::Distinct);
    }
}

/// A string constant as the number that a function of all numeric types takes it for.
pub(super) fn number(e: Expr) -> Expr {
    match &e {
        Expr::Value(v) if matches!(v.value, Value::SingleQuotedString(_)) => {
            cast(e, SqlType::Double)
        }
        _ => e,
    }
}

/// Takes the precision of `current_timestamp(n)` away from it; an error where a function has none.
fn seconds_of(f: &mut Function, name: &str) -> Result<Option<Expr>, SqlError> {
    let precise = match name {
        "current_timestamp" | "localtimestamp" | "current_time" | "localtime" => true,
        "now" | "transaction_timestamp" | "statement_timestamp" => false,
        _ => return Ok(None),
    };
    let FunctionArguments::List(list) = &mut f.args else { return Ok(None) };
    let digits = match list.args.as_slice() {
        [] => return Ok(None),
        [only] if precise => argument_value(only).and_then(number_text),
        _ => None,
    };
    match digits.and_then(|text| text.parse().ok()) {
        Some(digits) => {
            list.args.clear();
            Ok(Some(digits_of(digits)))
        }
        None => {
            let shown: Vec<String> = list.args.iter().map(argument_shown).collect();
            let call = format!("{name}({})", shown.join(", "));
            Err(millrace_functions::error::undefined_function(&call))
        }
    }
}

/// The name of `varchar` or its array, if an expression is a cast to it.
fn cast_to_varchar(e: &Expr) -> Option<&'static str> {
    match e {
        Expr::Nested(inner) => cast_to_varchar(inner),
        Expr::BinaryOp { op, .. } => match Op::decode(op)? {
            Op::Cast(SqlType::Varchar(_)) => Some("character varying"),
            Op::Cast(SqlType::Array(Element::Varchar(_))) => Some("character varying[]"),
            _ => None,
        },
        _ => None,
    }
}

/// Functions whose arguments have names; how many there must be; what those that are left out are, where
/// they have places.
static NAMED: [(&str, &[&str], usize, Option<&str>); 8] = [
    ("make_interval", &["years", "months", "weeks", "days", "hours", "mins", "secs"], 0, Some("0")),
    ("make_date", &["year", "month", "day"], 3, None),
    ("make_time", &["hour", "min", "sec"], 3, None),
    ("make_timestamp", &["year", "month", "mday", "hour", "min", "sec"], 6, None),
    ("make_timestamptz", &["year", "month", "mday", "hour", "min", "sec", "timezone"], 6, None),
    ("jsonb_set", &["jsonb_in", "path", "replacement", "create_if_missing"], 3, None),
    ("jsonb_insert", &["jsonb_in", "path", "replacement", "insert_after"], 3, None),
    ("parse_ident", &["str", "strict"], 1, None),
];

/// Gives arguments with names their places.
fn place_arguments(f: &mut Function, name: &str) -> Result<(), SqlError> {
    let FunctionArguments::List(list) = &mut f.args else { return Ok(()) };
    if !list.args.iter().any(|a| argument_name(a).is_some()) {
        return Ok(());
    }
    let shown: Vec<String> = list.args.iter().map(argument_shown).collect();
    let none =
        || millrace_functions::error::undefined_function(&format!("{name}({})", shown.join(", ")));
    let (_, names, required, left_out) = NAMED.iter().find(|n| n.0 == name).ok_or_else(none)?;
    let wrong = |message: String| SqlError::new(SqlState::SYNTAX_ERROR, message);
    let mut placed: Vec<Option<Expr>> = vec![None; names.len()];
    let mut by_name = false;
    for (i, arg) in list.args.iter().enumerate() {
        let at = match argument_name(arg) {
            Some(name) => {
                by_name = true;
                names.iter().position(|n| *n == name)
            }
            None if by_name => {
                return Err(wrong("positional argument cannot follow named argument".to_owned()));
            }
            None => Some(i),
        };
        let (Some(slot), Some(e)) = (at.and_then(|at| placed.get_mut(at)), argument_value(arg))
        else {
            return Err(none());
        };
        if slot.replace(e.clone()).is_some() {
            let name = argument_name(arg).unwrap_or_default();
            return Err(wrong(format!("argument name \"{name}\" used more than once")));
        }
    }
    if left_out.is_none() {
        let last = placed.iter().rposition(Option::is_some).map_or(0, |i| i + 1);
        placed.truncate(last.max(*required));
    }
    let fill = |e: Option<Expr>| match (e, left_out) {
        (Some(e), _) => Ok(e),
        (None, Some(number)) => Ok(ours(Op::Number, string(*number), null())),
        (None, None) => Err(none()),
    };
    let placed = placed.into_iter().map(fill).collect::<Result<Vec<_>, SqlError>>()?;
    list.args =
        placed.into_iter().map(|e| FunctionArg::Unnamed(FunctionArgExpr::Expr(e))).collect();
    Ok(())
}

fn argument_name(arg: &FunctionArg) -> Option<String> {
    use FunctionArgOperator as O;
    match arg {
        FunctionArg::Named { name, operator: O::RightArrow | O::Assignment, .. }
        | FunctionArg::ExprNamed {
            name: Expr::Identifier(name),
            operator: O::RightArrow | O::Assignment,
            ..
        } => Some(fold(name)),
        _ => None,
    }
}

/// An argument as an error shows it: its name and, where its text tells, its type.
fn argument_shown(arg: &FunctionArg) -> String {
    let t = match argument_value(arg).and_then(number_text) {
        None => "unknown",
        Some(n) if n.parse::<i32>().is_ok() => "integer",
        Some(n) if n.parse::<i64>().is_ok() => "bigint",
        Some(_) => "numeric",
    };
    match argument_name(arg) {
        Some(name) => format!("{name} => {t}"),
        None => t.to_owned(),
    }
}

fn argument_value(arg: &FunctionArg) -> Option<&Expr> {
    match arg {
        FunctionArg::Unnamed(FunctionArgExpr::Expr(e))
        | FunctionArg::Named { arg: FunctionArgExpr::Expr(e), .. }
        | FunctionArg::ExprNamed { arg: FunctionArgExpr::Expr(e), .. } => Some(e),
        _ => None,
    }
}

fn function_name(f: &Function) -> Option<String> {
    f.name.0.last().and_then(|p| p.as_ident()).map(fold)
}

/// A call whose last argument is the array of those that may be many; `None`: it has none.
fn variadic(f: &Function, name: &str) -> Result<Option<Expr>, SqlError> {
    let FunctionArguments::List(list) = &f.args else { return Ok(None) };
    let array = match list.args.last().and_then(argument_value) {
        Some(Expr::Function(last)) if function_name(last).is_some_and(|n| n == VARIADIC) => {
            unnamed_arguments(last).and_then(|mut only| only.pop())
        }
        _ => None,
    };
    let Some(array) = array else { return Ok(None) };
    let Some(mut args) = unnamed_arguments(f) else { return Ok(None) };
    args.pop();
    Ok(Some(match (name, args.as_mut_slice()) {
        ("concat", []) => call("array_to_string", [array, string("")]),
        ("concat_ws", [separator]) => call("array_to_string", [array, take(separator)]),
        ("jsonb_build_array" | "json_build_array", []) => call("to_jsonb", [array]),
        ("jsonb_extract_path" | "json_extract_path", [doc]) => {
            call("jsonb_follow", [take(doc), array])
        }
        ("jsonb_extract_path_text" | "json_extract_path_text", [doc]) => {
            call("jsonb_follow_text", [take(doc), array])
        }
        _ => return Err(SqlError::unsupported(format!("VARIADIC in a call of {name}"))),
    }))
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

fn is_distinct(f: &Function) -> bool {
    let FunctionArguments::List(list) = &f.args else { return false };
    list.duplicate_treatment == Some(DuplicateTreatment::Distinct)
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
