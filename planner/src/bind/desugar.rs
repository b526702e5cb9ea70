//! A rewrite of the AST before planning, so that PostgreSQL's rules for literals, casts and
//! operators can be applied where types are known.
//!
//! `SqlToRel` has one hook that sees the types of an expression's parts: binary operators. So
//! everything that needs types becomes one, with a custom operator ([`Op`]) that
//! [`super::operators`] resolves: casts, numbers, parameters, unary minus, elements of IN lists. BETWEEN,
//! simple CASE, EXTRACT and their like are spelled out as comparisons and functions. Numbers that are not
//! values (LIMIT, ORDER BY 1, window frames) keep their form.

use std::ops::ControlFlow;

use millrace_common::{SqlError, SqlState, SqlType};
use millrace_rpc::catalog::ColumnType;
use sqlparser::ast::*;

use super::SessionInfo;
use super::names::{fold, name_items};
use super::predicates::{opposite, spell_out_filter, spell_out_predicates};
use super::table_functions::reads_columns;
use super::types::sql_type;
use crate::functions::text::timestamptz_text;
use crate::functions::window_fn::WITH_TIES;

/// Our operators, as they travel in `BinaryOperator::Custom`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Op {
    /// A number's text (left operand).
    Number,
    /// A cast of the left operand.
    Cast(SqlType),
    /// Unary minus of the left operand.
    Negate,
    Distinct,
    NotDistinct,
    /// The right operand, as an element of a list that is compared with the left one.
    Element,
    /// A parameter (right operand) whose type is looked up or remembered.
    Parameter,
    /// The left operand's list of arguments and one more.
    Argument,
    /// A call of the named function or construct with the left operand's list of arguments.
    Call(&'static str),
}

/// Constructs that are resolved as calls: their results need a common type.
const CONSTRUCTS: [&str; 16] = [
    ANY,
    VALUES,
    SERIES,
    "case",
    "coalesce",
    "greatest",
    "least",
    "pg_typeof",
    "array_length",
    "array_upper",
    "array_lower",
    "cardinality",
    "array_ndims",
    "array_position",
    "array_remove",
    "array_replace",
];

/// The construct by which the elements of a column of VALUES get a common type: one of them and the others.
pub const VALUES: &str = "#values";

/// `op ANY (array)`.
pub const ANY: &str = "#any";

/// `generate_series` as an array of its arguments' type.
pub const SERIES: &str = "#series";

/// Functions that return sets of rows, and the ones of arrays that they are in a SELECT list.
const SETS: [(&str, &str); 5] = [
    ("generate_series", SERIES),
    ("jsonb_array_elements", "jsonb_array_elements_list"),
    ("jsonb_array_elements_text", "jsonb_array_elements_text_list"),
    ("jsonb_object_keys", "jsonb_object_keys_list"),
    ("regexp_split_to_table", "regexp_split_to_array"),
];

/// The name of a call that [`super::operators`] resolves by types.
fn resolved_name(name: &str) -> Option<&'static str> {
    let name = match name {
        "pow" => "power",
        "json_build_object" => "jsonb_build_object",
        "json_build_array" => "jsonb_build_array",
        "json_typeof" => "jsonb_typeof",
        "json_array_length" => "jsonb_array_length",
        "json_extract_path" => "jsonb_extract_path",
        "json_extract_path_text" => "jsonb_extract_path_text",
        "json_strip_nulls" => "jsonb_strip_nulls",
        "to_json" | "array_to_json" => "to_jsonb",
        name => name,
    };
    CONSTRUCTS
        .iter()
        .find(|c| **c == name)
        .copied()
        .or_else(|| crate::functions::call::defs().get_key_value(name).map(|(k, _)| *k))
}

impl Op {
    fn encode(self) -> BinaryOperator {
        BinaryOperator::Custom(match self {
            Op::Number => "#number".into(),
            Op::Cast(t) => {
                let t = ColumnType::from(t);
                format!("#cast:{}:{}", t.oid, t.typmod)
            }
            Op::Negate => "#negate".into(),
            Op::Distinct => "#distinct".into(),
            Op::NotDistinct => "#notdistinct".into(),
            Op::Element => "#element".into(),
            Op::Parameter => "#parameter".into(),
            Op::Argument => "#argument".into(),
            Op::Call(name) => format!("#call:{name}"),
        })
    }

    pub fn decode(op: &BinaryOperator) -> Option<Op> {
        let BinaryOperator::Custom(text) = op else { return None };
        Some(match text.as_str() {
            "#number" => Op::Number,
            "#negate" => Op::Negate,
            "#distinct" => Op::Distinct,
            "#notdistinct" => Op::NotDistinct,
            "#element" => Op::Element,
            "#parameter" => Op::Parameter,
            "#argument" => Op::Argument,
            _ if text.starts_with("#call:") => Op::Call(resolved_name(&text[6..])?),
            _ => {
                let (oid, typmod) = text.strip_prefix("#cast:")?.split_once(':')?;
                let t = ColumnType { oid: oid.parse().ok()?, typmod: typmod.parse().ok()? };
                Op::Cast(t.to_sql().ok()?)
            }
        })
    }
}

/// Rewrites a query in place.
pub fn desugar_query(query: &mut Query, session: &SessionInfo) -> Result<(), SqlError> {
    run(query, session)
}

/// Rewrites a scalar expression in place.
pub fn desugar_expr(expr: &mut Expr, session: &SessionInfo) -> Result<(), SqlError> {
    run(expr, session)
}

fn run<T: VisitMut>(node: &mut T, session: &SessionInfo) -> Result<(), SqlError> {
    match node.visit(&mut Desugar { session }) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(e) => Err(*e),
    }
}

struct Desugar<'a> {
    session: &'a SessionInfo,
}

type Flow = ControlFlow<Box<SqlError>>;

impl VisitorMut for Desugar<'_> {
    type Break = Box<SqlError>;

    fn pre_visit_select(&mut self, select: &mut Select) -> Flow {
        if let Err(e) = super::table_functions::spell_out(select) {
            return ControlFlow::Break(Box::new(e));
        }
        if let Err(e) = super::using::spell_out_select(select) {
            return ControlFlow::Break(Box::new(e));
        }
        name_items(&mut select.projection);
        select.projection.iter_mut().for_each(spread_series);
        if let Err(e) = spell_out_predicates(&mut select.projection) {
            return ControlFlow::Break(Box::new(e));
        }
        for filter in [&mut select.selection, &mut select.having].into_iter().flatten() {
            if let Err(e) = spell_out_filter(filter) {
                return ControlFlow::Break(Box::new(e));
            }
        }
        for from in &mut select.from {
            if let Err(e) = super::asof::mark(from) {
                return ControlFlow::Break(Box::new(e));
            }
        }
        if let Err(e) = super::windows::write_out(select) {
            return ControlFlow::Break(Box::new(e));
        }
        match refuse_select(select) {
            Some(e) => ControlFlow::Break(Box::new(e)),
            None => ControlFlow::Continue(()),
        }
    }

    fn pre_visit_query(&mut self, query: &mut Query) -> Flow {
        if let Err(e) = super::windows::write_out_order(query) {
            return ControlFlow::Break(Box::new(e));
        }
        if let Err(e) = super::using::spell_out_query(query) {
            return ControlFlow::Break(Box::new(e));
        }
        if let Err(e) = super::values::unify(&mut query.body) {
            return ControlFlow::Break(Box::new(e));
        }
        match refuse_query(query) {
            Some(e) => ControlFlow::Break(Box::new(e)),
            None => ControlFlow::Continue(()),
        }
    }

    fn post_visit_select(&mut self, select: &mut Select) -> Flow {
        if let GroupByExpr::Expressions(exprs, _) = &mut select.group_by {
            exprs.iter_mut().for_each(unwrap_number);
        }
        ControlFlow::Continue(())
    }

    fn post_visit_query(&mut self, query: &mut Query) -> Flow {
        if let Err(e) = fetch_to_limit(query) {
            return ControlFlow::Break(Box::new(e));
        }
        if let Some(OrderBy { kind: OrderByKind::Expressions(exprs), .. }) = &mut query.order_by {
            exprs.iter_mut().for_each(|o| unwrap_number(&mut o.expr));
        }
        if let Some(LimitClause::LimitOffset { limit, offset, .. }) = &mut query.limit_clause {
            limit.iter_mut().for_each(unwrap_limit);
            offset.iter_mut().for_each(|o| unwrap_limit(&mut o.value));
        }
        ControlFlow::Continue(())
    }

    fn pre_visit_expr(&mut self, expr: &mut Expr) -> Flow {
        // Before its operands are rewritten, which loses their places.
        if let Expr::BinaryOp { left, op, .. } = expr {
            super::places::note(op, left);
        }
        if let Expr::Function(f) = expr {
            super::filters::guard(f);
            if let Err(e) = super::windows::plain_bounds(f) {
                return ControlFlow::Break(Box::new(e));
            }
        }
        ControlFlow::Continue(())
    }

    fn post_visit_expr(&mut self, expr: &mut Expr) -> Flow {
        match self.rewrite(expr) {
            Ok(()) => ControlFlow::Continue(()),
            Err(e) => ControlFlow::Break(Box::new(e)),
        }
    }
}

/// `generate_series` in a SELECT list is a set of rows.
fn spread_series(item: &mut SelectItem) {
    if let SelectItem::UnnamedExpr(e) | SelectItem::ExprWithAlias { expr: e, .. } = item
        && let Expr::Function(f) = e
        && let Some((_, list)) = SETS.iter().find(|s| f.name.to_string().eq_ignore_ascii_case(s.0))
    {
        f.name = ObjectName::from(vec![Ident::with_quote('"', *list)]);
        let list = take(e);
        *e = call("unnest", [list]);
    }
}

/// Clauses that would otherwise be ignored or computed wrongly.
fn refuse_select(select: &Select) -> Option<SqlError> {
    if select.into.is_some() {
        return Some(SqlError::unsupported("SELECT INTO").with_hint("Use CREATE TABLE … AS."));
    }
    (select.top.is_some() || !select.lateral_views.is_empty() || select.prewhere.is_some())
        .then(|| SqlError::unsupported("this SELECT clause"))
}

fn refuse_query(query: &Query) -> Option<SqlError> {
    if !query.locks.is_empty() {
        return Some(SqlError::unsupported("a row lock (FOR UPDATE, FOR SHARE)").with_hint(
            "Leave it out: statements that write check that what they read has not changed.",
        ));
    }
    None
}

/// FETCH FIRST n ROWS ONLY is the standard's LIMIT n.
fn fetch_to_limit(query: &mut Query) -> Result<(), SqlError> {
    let Some(fetch) = query.fetch.take() else { return Ok(()) };
    if fetch.percent {
        return Err(SqlError::unsupported("FETCH FIRST … PERCENT"));
    }
    let one = || Expr::value(Value::Number("1".into(), false));
    let mut quantity = fetch.quantity.unwrap_or_else(one);
    if fetch.with_ties {
        unwrap_limit(&mut quantity);
        quantity = call(WITH_TIES, [quantity]);
    }
    match &mut query.limit_clause {
        None => {
            let limit = Some(quantity);
            query.limit_clause =
                Some(LimitClause::LimitOffset { limit, offset: None, limit_by: Vec::new() });
        }
        Some(LimitClause::LimitOffset { limit: limit @ None, .. }) => *limit = Some(quantity),
        Some(_) => {
            return Err(SqlError::new(
                SqlState::SYNTAX_ERROR,
                "multiple LIMIT clauses not allowed",
            ));
        }
    }
    Ok(())
}

fn null() -> Box<Expr> {
    Box::new(Expr::value(Value::Null))
}

pub(super) fn string(text: impl Into<String>) -> Expr {
    Expr::value(Value::SingleQuotedString(text.into()))
}

fn ours(op: Op, left: Expr, right: Box<Expr>) -> Expr {
    Expr::BinaryOp { left: Box::new(left), op: op.encode(), right }
}

fn binary(left: Expr, op: BinaryOperator, right: Expr) -> Expr {
    Expr::BinaryOp { left: Box::new(left), op, right: Box::new(right) }
}

fn cast(e: Expr, t: SqlType) -> Expr {
    ours(Op::Cast(t), e, null())
}

fn digits_of(n: u64) -> Expr {
    ours(Op::Number, string(n.min(6).to_string()), null())
}

/// A cast to a type as written: a precision of seconds rounds.
fn cast_to(e: Expr, t: &DataType) -> Result<Expr, SqlError> {
    let value = cast(e, sql_type(t)?);
    Ok(match t {
        DataType::Timestamp(Some(n), _)
        | DataType::Time(Some(n), _)
        | DataType::Interval { precision: Some(n), .. }
            if *n < 6 =>
        {
            call("round_seconds", [value, digits_of(*n)])
        }
        _ => value,
    })
}

/// A call of a function, by a name that needs no folding.
pub(super) fn call(name: &str, args: impl IntoIterator<Item = Expr>) -> Expr {
    if let Some(name) = resolved_name(name) {
        return resolved(name, args);
    }
    let args = args.into_iter().map(|a| FunctionArg::Unnamed(FunctionArgExpr::Expr(a))).collect();
    Expr::Function(Function {
        name: ObjectName::from(vec![Ident::with_quote('"', name)]),
        uses_odbc_syntax: false,
        parameters: FunctionArguments::None,
        args: FunctionArguments::List(FunctionArgumentList {
            duplicate_treatment: None,
            args,
            clauses: Vec::new(),
        }),
        filter: None,
        null_treatment: None,
        over: None,
        within_group: Vec::new(),
    })
}

/// A call that is resolved by the types of its arguments.
pub(super) fn resolved(name: &'static str, args: impl IntoIterator<Item = Expr>) -> Expr {
    let list = args
        .into_iter()
        .fold(Expr::value(Value::Null), |list, arg| ours(Op::Argument, list, Box::new(arg)));
    ours(Op::Call(name), list, null())
}

pub(super) fn take(e: &mut Expr) -> Expr {
    std::mem::replace(e, Expr::value(Value::Null))
}

/// The text of a number that was rewritten.
fn number_text(e: &Expr) -> Option<&str> {
    match e {
        Expr::BinaryOp { left, op, .. } if Op::decode(op) == Some(Op::Number) => match &**left {
            Expr::Value(v) => match &v.value {
                Value::SingleQuotedString(s) => Some(s),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    }
}

/// Gives a number back its plain form.
fn unwrap_number(e: &mut Expr) {
    if let Some(text) = number_text(e) {
        *e = Expr::value(Value::Number(text.to_owned(), false));
    }
}

fn unwrap_limit(e: &mut Expr) {
    unwrap_number(e);
    if let Expr::BinaryOp { op, right, .. } = e
        && Op::decode(op) == Some(Op::Parameter)
    {
        // LIMIT counts in bigint.
        *e = ours(Op::Cast(SqlType::BigInt), take(right), null());
    }
}

impl Desugar<'_> {
    fn rewrite(&self, expr: &mut Expr) -> Result<(), SqlError> {
        let new = match expr {
            Expr::Value(v) => match &v.value {
                Value::Number(n, _) => ours(Op::Number, string(n.replace('_', "")), null()),
                Value::Placeholder(_) => {
                    let p = take(expr);
                    ours(Op::Parameter, Expr::value(Value::Null), Box::new(p))
                }
                Value::EscapedStringLiteral(s) | Value::UnicodeStringLiteral(s) => {
                    string(s.clone())
                }
                Value::DollarQuotedString(s) => string(s.value.clone()),
                _ => return Ok(()),
            },
            Expr::UnaryOp { op: UnaryOperator::Minus, expr: e } => match number_text(e) {
                Some(text) if !text.starts_with('-') => {
                    ours(Op::Number, string(format!("-{text}")), null())
                }
                _ => ours(Op::Negate, take(e), null()),
            },
            Expr::UnaryOp { op: UnaryOperator::Plus, expr: e } => take(e),
            Expr::Cast {
                kind: CastKind::Cast | CastKind::DoubleColon, expr: e, data_type, ..
            } => cast_to(take(e), data_type)?,
            Expr::TypedString(t) => {
                let text = t.value.clone().into_string().unwrap_or_default();
                cast_to(string(text), &t.data_type)?
            }
            Expr::Interval(i) => {
                let value = cast(string(interval_text(i)?), SqlType::Interval);
                match i.fractional_seconds_precision.or(i.leading_precision) {
                    Some(digits) => call("round_seconds", [value, digits_of(digits)]),
                    None => value,
                }
            }
            Expr::UnaryOp { op: UnaryOperator::PGSquareRoot, expr: e } => call("sqrt", [take(e)]),
            Expr::UnaryOp { op: UnaryOperator::PGCubeRoot, expr: e } => call("cbrt", [take(e)]),
            Expr::UnaryOp { op: UnaryOperator::PGAbs, expr: e } => call("abs", [take(e)]),
            Expr::SimilarTo { negated, expr: e, pattern, escape_char } => {
                let args = [take(e), take(pattern)].into_iter();
                let escape = escape_char.take().map(Expr::Value);
                negate_if(*negated, call("similar_to", args.chain(escape)))
            }
            Expr::Array(array) if array.elem.iter().any(|e| matches!(e, Expr::Array(_))) => {
                return Err(SqlError::unsupported("an array of more than one dimension"));
            }
            // An array as such is planned without sight of outer queries.
            Expr::Array(array) if array.elem.iter().any(reads_columns) => {
                call("make_array", std::mem::take(&mut array.elem))
            }
            Expr::AnyOp { left, compare_op, right, .. }
                if !matches!(&**right, Expr::Subquery(_)) && opposite(compare_op).is_some() =>
            {
                resolved(ANY, [take(left), take(right), string(compare_op.to_string())])
            }
            // Not all of them: the opposite holds for one.
            Expr::AllOp { left, compare_op, right }
                if !matches!(&**right, Expr::Subquery(_))
                    && let Some(op) = opposite(compare_op) =>
            {
                negate_if(true, resolved(ANY, [take(left), take(right), string(op.to_string())]))
            }
            Expr::Like { negated, any, expr: e, pattern, escape_char: None }
                if let Some((each, patterns)) = quantified(*any, pattern) =>
            {
                quantified_like(take(e), each, patterns, *negated, false)?
            }
            Expr::ILike { negated, any, expr: e, pattern, escape_char: None }
                if let Some((each, patterns)) = quantified(*any, pattern) =>
            {
                quantified_like(take(e), each, patterns, *negated, true)?
            }
            Expr::AnyOp { left, compare_op, right, .. }
                if let Some((not, any_case)) = like_operator(compare_op) =>
            {
                quantified_like(take(left), false, take(right), not, any_case)?
            }
            Expr::AllOp { left, compare_op, right }
                if let Some((not, any_case)) = like_operator(compare_op) =>
            {
                quantified_like(take(left), true, take(right), not, any_case)?
            }
            Expr::Like { negated, any: false, expr: e, pattern, escape_char: Some(c) } => {
                let args = [take(e), take(pattern), Expr::Value(c.clone())];
                negate_if(*negated, call("like_escape", args))
            }
            Expr::ILike { negated, any: false, expr: e, pattern, escape_char: Some(c) } => {
                let args = [take(e), take(pattern), Expr::Value(c.clone())];
                negate_if(*negated, call("ilike_escape", args))
            }
            Expr::Trim { expr: e, trim_where, trim_what, trim_characters: None } => {
                let name = match trim_where {
                    Some(TrimWhereField::Leading) => "ltrim",
                    Some(TrimWhereField::Trailing) => "rtrim",
                    _ => "btrim",
                };
                let what = trim_what.as_mut().map(|w| take(w));
                call(name, [take(e)].into_iter().chain(what))
            }
            Expr::InSubquery { expr: e, subquery, .. } => {
                let width = match subquery.body.as_ref() {
                    SetExpr::Select(s) => s.projection.len(),
                    _ => 1,
                };
                if row_items(e).is_some() {
                    return Err(SqlError::unsupported("a row IN a subquery outside of WHERE")
                        .with_hint("In WHERE it may stand alone or under AND and OR."));
                }
                if width > 1 {
                    let message = "subquery has too many columns";
                    return Err(SqlError::new(SqlState::SYNTAX_ERROR, message));
                }
                return Ok(());
            }
            Expr::Between { expr: e, negated, low, high } => {
                let e = take(e);
                let lower = binary(e.clone(), BinaryOperator::GtEq, take(low));
                let upper = binary(e, BinaryOperator::LtEq, take(high));
                negate_if(*negated, binary(lower, BinaryOperator::And, upper))
            }
            // A row is not NULL if none of its fields is.
            Expr::IsNull(e) | Expr::IsNotNull(e) if let Some(row) = row_items(e) => {
                let negated = matches!(expr, Expr::IsNotNull(_));
                let one = |field| match negated {
                    true => Expr::IsNotNull(Box::new(field)),
                    false => Expr::IsNull(Box::new(field)),
                };
                let all = row.into_iter().map(one);
                all.reduce(|a, b| binary(a, BinaryOperator::And, b)).unwrap_or_else(no)
            }
            Expr::IsDistinctFrom(a, b) | Expr::IsNotDistinctFrom(a, b)
                if row_items(a).is_some() && row_items(b).is_some() =>
            {
                let (x, y) = (row_items(a).unwrap_or_default(), row_items(b).unwrap_or_default());
                check_widths(&x, &y)?;
                let differ = x.into_iter().zip(y).map(|(x, y)| ours(Op::Distinct, x, Box::new(y)));
                let any = differ.reduce(|x, y| binary(x, BinaryOperator::Or, y)).unwrap_or_else(no);
                negate_if(matches!(expr, Expr::IsNotDistinctFrom(_, _)), any)
            }
            Expr::IsDistinctFrom(a, b) => ours(Op::Distinct, take(a), Box::new(take(b))),
            Expr::IsNotDistinctFrom(a, b) => ours(Op::NotDistinct, take(a), Box::new(take(b))),
            Expr::InList { expr: e, list, negated } if row_items(e).is_some() => {
                let row = row_items(e).unwrap_or_default();
                let mut any: Option<Expr> = None;
                for item in list.iter() {
                    let other = row_items(item).unwrap_or_else(|| vec![item.clone()]);
                    let equal = compare_rows(&row, &BinaryOperator::Eq, &other)?;
                    any = match (any, equal) {
                        (Some(a), Some(b)) => Some(binary(a, BinaryOperator::Or, b)),
                        (a, b) => a.or(b),
                    };
                }
                negate_if(*negated, any.unwrap_or_else(no))
            }
            Expr::InList { expr: e, list, .. } => {
                let left = e.as_ref().clone();
                for item in list.iter_mut() {
                    *item = ours(Op::Element, left.clone(), Box::new(take(item)));
                }
                return Ok(());
            }
            Expr::BinaryOp { left, op, right } => match (row_items(left), row_items(right)) {
                (Some(a), Some(b)) => match compare_rows(&a, &super::places::split(op).0, &b)? {
                    Some(new) => new,
                    None => return Ok(()),
                },
                _ => return Ok(()),
            },
            Expr::Case { operand, conditions, else_result, .. } => {
                let operand = operand.take();
                let mut parts = Vec::with_capacity(conditions.len() * 2 + 1);
                for when in conditions.iter_mut() {
                    let value = take(&mut when.condition);
                    parts.push(match &operand {
                        Some(o) => binary(o.as_ref().clone(), BinaryOperator::Eq, value),
                        None => value,
                    });
                    parts.push(take(&mut when.result));
                }
                parts.extend(else_result.take().map(|e| *e));
                resolved("case", parts)
            }
            Expr::UnaryOp { op: UnaryOperator::BitwiseNot, expr: e } => {
                let ones = ours(Op::Number, string("-1"), null());
                Expr::Nested(Box::new(binary(take(e), BinaryOperator::PGBitwiseXor, ones)))
            }
            Expr::Extract { field, expr: e, .. } => {
                let field = field.to_string().trim_matches('\'').to_lowercase();
                call("extract", [string(field), take(e)])
            }
            Expr::Position { expr: e, r#in } => call("position", [take(r#in), take(e)]),
            Expr::Substring { expr: e, substring_from, substring_for, .. } => {
                let from = substring_from.as_mut().map(|f| take(f));
                let from = from.unwrap_or_else(|| ours(Op::Number, string("1"), null()));
                let length = substring_for.as_mut().map(|f| take(f));
                call("substring", [take(e), from].into_iter().chain(length))
            }
            Expr::Overlay { expr: e, overlay_what, overlay_from, overlay_for } => {
                let length = overlay_for.as_mut().map(|f| take(f));
                let args = [take(e), take(overlay_what), take(overlay_from)];
                call("overlay", args.into_iter().chain(length))
            }
            Expr::Floor {
                expr: e,
                field: CeilFloorKind::DateTimeField(DateTimeField::NoDateTime),
            } => call("floor", [take(e)]),
            Expr::Ceil {
                expr: e,
                field: CeilFloorKind::DateTimeField(DateTimeField::NoDateTime),
            } => call("ceil", [take(e)]),
            Expr::AtTimeZone { timestamp, time_zone } => {
                call("timezone", [take(time_zone), take(timestamp)])
            }
            Expr::Collate { expr: e, .. } => take(e),
            Expr::Function(f) => match self.function(f)? {
                Some(new) => new,
                None => return Ok(()),
            },
            _ => return Ok(()),
        };
        *expr = new;
        Ok(())
    }

    /// Functions that are operators, or constants of the statement.
    fn function(&self, f: &mut Function) -> Result<Option<Expr>, SqlError> {
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
            _ => match (resolved_name(name), plain_call(f)) {
                (Some(name), true) => arguments(f).map(|args| resolved(name, args)),
                _ => None,
            },
        })
    }
}

/// What LIKE ANY or LIKE ALL compares with, and whether it is ALL. The parser takes ALL and SOME for calls.
fn quantified(any: bool, pattern: &Expr) -> Option<(bool, Expr)> {
    if any {
        return Some((false, pattern.clone()));
    }
    let Expr::Function(f) = pattern else { return None };
    let each = match f.name.to_string().to_ascii_lowercase().as_str() {
        "all" => true,
        "some" => false,
        _ => return None,
    };
    match &f.args {
        FunctionArguments::Subquery(q) => Some((each, Expr::Subquery(q.clone()))),
        FunctionArguments::List(list) => match list.args.as_slice() {
            [FunctionArg::Unnamed(FunctionArgExpr::Expr(e))] => Some((each, e.clone())),
            _ => None,
        },
        FunctionArguments::None => None,
    }
}

/// Whether LIKE's operator negates, and whether it ignores case.
fn like_operator(op: &BinaryOperator) -> Option<(bool, bool)> {
    Some(match op {
        BinaryOperator::PGLikeMatch => (false, false),
        BinaryOperator::PGILikeMatch => (false, true),
        BinaryOperator::PGNotLikeMatch => (true, false),
        BinaryOperator::PGNotILikeMatch => (true, true),
        _ => return None,
    })
}

/// `e [NOT] [I]LIKE ANY | ALL (patterns)`: of an array that is spelled out, pattern by pattern.
fn quantified_like(
    e: Expr,
    each: bool,
    patterns: Expr,
    negated: bool,
    any_case: bool,
) -> Result<Expr, SqlError> {
    let patterns = match patterns {
        Expr::Nested(inner) => *inner,
        other => other,
    };
    match patterns {
        Expr::Array(array) => {
            let parts = array.elem.into_iter().map(|p| {
                let (expr, pattern) = (Box::new(e.clone()), Box::new(p));
                match any_case {
                    true => Expr::ILike { negated, any: false, expr, pattern, escape_char: None },
                    false => Expr::Like { negated, any: false, expr, pattern, escape_char: None },
                }
            });
            let with = if each { BinaryOperator::And } else { BinaryOperator::Or };
            let all = parts.reduce(|a, b| binary(a, with.clone(), b));
            let none = Expr::value(Value::Boolean(each));
            Ok(Expr::Nested(Box::new(all.unwrap_or(none))))
        }
        Expr::Subquery(_) => Err(SqlError::unsupported("LIKE ANY or ALL of a subquery")
            .with_hint("Use EXISTS with a condition, or an array.")),
        patterns => {
            // Not like any of them: like all of them, negated.
            let name = match (each != negated, any_case) {
                (false, false) => "like_any",
                (false, true) => "ilike_any",
                (true, false) => "like_all",
                (true, true) => "ilike_all",
            };
            Ok(negate_if(negated, call(name, [e, patterns])))
        }
    }
}

fn no() -> Expr {
    Expr::value(Value::Boolean(false))
}

/// The columns of a row value.
pub(super) fn row_items(e: &Expr) -> Option<Vec<Expr>> {
    match e {
        Expr::Tuple(items) if !items.is_empty() => Some(items.clone()),
        Expr::Nested(inner) => row_items(inner),
        Expr::Function(f) if f.name.to_string().eq_ignore_ascii_case("row") => {
            let FunctionArguments::List(list) = &f.args else { return None };
            list.args
                .iter()
                .map(|a| match a {
                    FunctionArg::Unnamed(FunctionArgExpr::Expr(e)) => Some(e.clone()),
                    _ => None,
                })
                .collect()
        }
        _ => None,
    }
}

fn check_widths(a: &[Expr], b: &[Expr]) -> Result<(), SqlError> {
    match a.len() == b.len() {
        true => Ok(()),
        false => Err(SqlError::new(
            SqlState::SYNTAX_ERROR,
            "unequal number of entries in row expressions",
        )),
    }
}

/// A comparison of row values, column by column from the left.
fn compare_rows(a: &[Expr], op: &BinaryOperator, b: &[Expr]) -> Result<Option<Expr>, SqlError> {
    use BinaryOperator as B;
    if *op == B::Overlaps {
        let (Ok(a), Ok(b)) = (<[Expr; 2]>::try_from(a.to_vec()), <[Expr; 2]>::try_from(b.to_vec()))
        else {
            let message = "wrong number of parameters on one side of OVERLAPS expression";
            return Err(SqlError::new(SqlState::SYNTAX_ERROR, message));
        };
        return Ok(Some(call("overlaps", a.into_iter().chain(b))));
    }
    let strict = match op {
        B::Eq | B::NotEq => op.clone(),
        B::Lt | B::LtEq => B::Lt,
        B::Gt | B::GtEq => B::Gt,
        _ => return Ok(None),
    };
    check_widths(a, b)?;
    let pairs: Vec<(Expr, Expr)> = a.iter().cloned().zip(b.iter().cloned()).collect();
    let all = |op: B, with: B| {
        let parts = pairs.iter().map(|(a, b)| binary(a.clone(), op.clone(), b.clone()));
        parts.reduce(|x, y| binary(x, with.clone(), y))
    };
    let new = match op {
        B::Eq => all(B::Eq, B::And),
        B::NotEq => all(B::NotEq, B::Or),
        _ => {
            // a1 < b1 OR (a1 = b1 AND (a2 < b2 OR …)); the last column decides about equality.
            let mut rest: Option<Expr> = None;
            for (a, b) in pairs.iter().rev() {
                rest = Some(match rest {
                    None => binary(a.clone(), op.clone(), b.clone()),
                    Some(rest) => {
                        let equal = binary(a.clone(), B::Eq, b.clone());
                        let less = binary(a.clone(), strict.clone(), b.clone());
                        let rest = binary(equal, B::And, Expr::Nested(Box::new(rest)));
                        binary(less, B::Or, Expr::Nested(Box::new(rest)))
                    }
                });
            }
            rest
        }
    };
    Ok(new.map(|e| Expr::Nested(Box::new(e))))
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
fn plain_call(f: &Function) -> bool {
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

fn negate_if(negated: bool, e: Expr) -> Expr {
    let nested = Expr::Nested(Box::new(e));
    match negated {
        true => Expr::UnaryOp { op: UnaryOperator::Not, expr: Box::new(nested) },
        false => nested,
    }
}

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

/// The unnamed arguments of a plain call.
fn arguments(f: &mut Function) -> Option<Vec<Expr>> {
    let FunctionArguments::List(list) = &mut f.args else { return None };
    if f.over.is_some() || list.duplicate_treatment.is_some() {
        return None;
    }
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

/// The text of an interval literal, its unit after the number.
pub(super) fn interval_text(i: &Interval) -> Result<String, SqlError> {
    let text = match i.value.as_ref() {
        Expr::Value(v) => match &v.value {
            Value::SingleQuotedString(s) => s.clone(),
            Value::Number(n, _) => n.clone(),
            _ => return Err(SqlError::unsupported("an interval of an expression")),
        },
        e => match number_text(e) {
            Some(n) => n.to_owned(),
            None => return Err(SqlError::unsupported("an interval of an expression")),
        },
    };
    Ok(match (&i.leading_field, text.trim().parse::<f64>()) {
        (Some(unit), Ok(_)) => format!("{text} {}", unit.to_string().to_lowercase()),
        _ => text,
    })
}
