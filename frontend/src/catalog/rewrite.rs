//! What clients write beyond our SQL, in words that the planner knows.
//!
//! `OPERATOR(pg_catalog.~)`, casts to `regclass` and its like, array literals, `= ANY (array)`,
//! `ARRAY(SELECT …)`. PostgreSQL's output names are fixed before anything changes. Sub-selects over
//! system tables, which DataFusion cannot decorrelate, are in [`super::subquery`].

use std::ops::ControlFlow;

use millrace_common::SqlError;
use millrace_meta::advisory::{Mode, Scope};
pub(super) use millrace_planner::bind::desugar::plain_call as call;
use millrace_planner::bind::names::{column_name, hidden_name, makes_rows};
use sqlparser::ast::*;

use super::{expanded, subquery, tableoid};
use crate::advisory::takes;
use crate::encoding;
use crate::query::catalog_view::fold;
use crate::session::Session;
use millrace_planner::parser::walk;

/// The query as our planner takes it.
pub fn for_clients(query: &Query, session: &Session) -> Result<Query, SqlError> {
    let mut query = query.clone();
    let catalog = session.cluster().catalog();
    let path = session.search_path();
    let is_user = |name: &str| path.iter().any(|s| catalog.get(s, name).is_some());
    let tables = tableoid::Tables { catalog: &catalog, search_path: &path };
    let (names, scopes, defined) = (Vec::new(), Vec::new(), tableoid::Defined::default());
    let mut rewrite = Rewrite { is_user: &is_user, tables, names, scopes, defined, joins: 0 };
    match walk::visit_mut(&mut query, &mut rewrite) {
        ControlFlow::Continue(()) => {
            expanded::beside_wildcard(&mut query);
            Ok(query)
        }
        ControlFlow::Break(e) => Err(*e),
    }
}

/// `SELECT pg_sleep(seconds)`: how long. A session waits without a thread, so that it can be canceled.
pub fn sleeps(query: &Query) -> Option<std::time::Duration> {
    let [(name, args)] = bare_calls(query)?.try_into().ok()?;
    let [seconds] = args.as_slice() else { return None };
    let seconds = constant_text(seconds).filter(|_| name == "pg_sleep")??;
    let seconds = seconds.trim().parse::<f64>().ok()?.clamp(0.0, 1e9);
    std::time::Duration::try_from_secs_f64(seconds).ok()
}

/// `SELECT set_config(name, value, is_local), …`: the settings.
pub fn sets(query: &Query) -> Option<Vec<(String, String, bool)>> {
    let one = |(name, args): (String, Vec<&Expr>)| {
        let [setting, value, local] = args.as_slice() else { return None };
        let local = match local {
            Expr::Value(v) => matches!(v.value, Value::Boolean(true)),
            other => matches!(constant_text(other)??.as_str(), "t" | "true"),
        };
        let (setting, value) = (constant_text(setting)??, constant_text(value)?);
        (name == "set_config").then_some((setting, value.unwrap_or_default(), local))
    };
    bare_calls(query)?.into_iter().map(one).collect()
}

/// A call of a function that takes a lock, and what it is called in the result.
pub struct LockCall<'a> {
    pub function: String,
    pub column: String,
    pub args: Vec<&'a Expr>,
    pub mode: Mode,
    pub scope: Scope,
    pub waits: bool,
}

/// `SELECT pg_advisory_lock(key), …` by itself: a session waits without a thread.
pub fn lock_calls(query: &Query) -> Option<Vec<LockCall<'_>>> {
    let SetExpr::Select(select) = query.body.as_ref() else { return None };
    let mut found = Vec::new();
    for (item, (name, args)) in select.projection.iter().zip(bare_calls(query)?) {
        let (mode, scope, waits) = takes(&name)?;
        if !matches!(args.len(), 1 | 2) {
            return None;
        }
        let column = match item {
            SelectItem::ExprWithAlias { alias, .. } => fold(alias),
            _ => name.clone(),
        };
        found.push(LockCall { function: name, column, args, mode, scope, waits });
    }
    (!found.is_empty()).then_some(found)
}

/// The calls of a query that is a SELECT list of nothing else.
fn bare_calls(query: &Query) -> Option<Vec<(String, Vec<&Expr>)>> {
    let SetExpr::Select(select) = query.body.as_ref() else { return None };
    if !select.from.is_empty() || select.selection.is_some() || query.limit_clause.is_some() {
        return None;
    }
    let call = |item| match item {
        &SelectItem::UnnamedExpr(Expr::Function(ref f))
        | &SelectItem::ExprWithAlias { expr: Expr::Function(ref f), .. } => {
            let FunctionArguments::List(list) = &f.args else { return None };
            let args = list.args.iter().map(|a| match a {
                FunctionArg::Unnamed(FunctionArgExpr::Expr(e)) => Some(e),
                _ => None,
            });
            Some((function_name(f), args.collect::<Option<Vec<_>>>()?))
        }
        _ => None,
    };
    select.projection.iter().map(call).collect()
}

/// The text of a literal under any casts; `Some(None)`: NULL.
fn constant_text(e: &Expr) -> Option<Option<String>> {
    match e {
        Expr::Cast { expr, .. } | Expr::Nested(expr) => constant_text(expr),
        Expr::TypedString(t) => constant_text(&Expr::Value(t.value.clone())),
        Expr::Value(v) => match &v.value {
            Value::SingleQuotedString(s) | Value::EscapedStringLiteral(s) | Value::Number(s, _) => {
                Some(Some(s.clone()))
            }
            Value::Boolean(b) => Some(Some(b.to_string())),
            Value::Null => Some(None),
            _ => None,
        },
        _ => None,
    }
}

pub(super) struct Rewrite<'a> {
    /// Whether an unqualified name is a user's relation (which hides a system table).
    pub is_user: &'a dyn Fn(&str) -> bool,
    tables: tableoid::Tables<'a>,
    /// Output names of the SELECTs under way.
    names: Vec<Vec<(Expr, String)>>,
    /// Their tables.
    scopes: Vec<tableoid::Scope>,
    defined: tableoid::Defined,
    /// Joins made of sub-selects so far.
    pub joins: usize,
}

type Flow = ControlFlow<Box<SqlError>>;

impl VisitorMut for Rewrite<'_> {
    type Break = Box<SqlError>;

    fn pre_visit_query(&mut self, query: &mut Query) -> Flow {
        self.defined.enter(query);
        ControlFlow::Continue(())
    }

    fn post_visit_query(&mut self, _: &mut Query) -> Flow {
        self.defined.leave();
        ControlFlow::Continue(())
    }

    fn pre_visit_select(&mut self, select: &mut Select) -> Flow {
        let name = |item: &SelectItem| match item {
            SelectItem::UnnamedExpr(e) => (e.clone(), item_name(e)),
            _ => (null(), String::new()),
        };
        self.names.push(select.projection.iter().map(name).collect());
        self.scopes.push(self.tables.scope(select, &self.defined));
        ControlFlow::Continue(())
    }

    fn post_visit_select(&mut self, select: &mut Select) -> Flow {
        subquery::select(select, self);
        let names = self.names.pop().unwrap_or_default();
        self.scopes.pop();
        let rows = makes_rows(&select.projection);
        for (item, (before, name)) in select.projection.iter_mut().zip(names) {
            if let SelectItem::UnnamedExpr(e) | SelectItem::ExprWithAlias { expr: e, .. } = item {
                show_registered(e);
            }
            if let SelectItem::UnnamedExpr(e) = item
                && *e != before
                && !matches!(e, Expr::Subquery(_))
            {
                // Beside rows that are made of the same column its name would stand for both.
                let alias = match before {
                    Expr::CompoundFieldAccess { .. } if rows => hidden_name(&name),
                    _ => Ident::with_quote('"', name),
                };
                *item = SelectItem::ExprWithAlias { expr: take(e), alias };
            }
        }
        ControlFlow::Continue(())
    }

    fn pre_visit_table_factor(&mut self, table: &mut TableFactor) -> Flow {
        expanded::keywords(table);
        expanded::subscripts_of_vector(table);
        ControlFlow::Continue(())
    }

    fn pre_visit_expr(&mut self, expr: &mut Expr) -> Flow {
        // Before the subquery becomes a NULL: everything holds for all of no rows, and nothing for one of them.
        let quantified = match &*expr {
            Expr::AllOp { right, .. } => Some((right, true)),
            Expr::AnyOp { right, .. } => Some((right, false)),
            _ => None,
        };
        if let Some((right, holds)) = quantified
            && matches!(right.as_ref(), Expr::Subquery(query) if subquery::is_empty(query))
        {
            *expr = boolean(holds);
        }
        ControlFlow::Continue(())
    }

    fn post_visit_expr(&mut self, expr: &mut Expr) -> Flow {
        if let Some(new) = self.expression(expr) {
            *expr = new;
        }
        ControlFlow::Continue(())
    }
}

pub(super) fn null() -> Expr {
    Expr::value(Value::Null)
}

pub(super) fn take(e: &mut Expr) -> Expr {
    std::mem::replace(e, null())
}

pub(super) fn boolean(b: bool) -> Expr {
    Expr::value(Value::Boolean(b))
}

/// The unqualified name of a function.
pub(super) fn function_name(f: &Function) -> String {
    f.name.0.last().and_then(|p| p.as_ident()).map(fold).unwrap_or_default()
}

/// The last part of a type's name, and whether it is an array's.
fn type_name(t: &DataType) -> (String, bool) {
    match t {
        DataType::Custom(name, _) => {
            let name = name.0.last().and_then(|p| p.as_ident()).map(fold).unwrap_or_default();
            match name.strip_suffix("[]") {
                Some(item) => (item.to_owned(), true),
                None => (name, false),
            }
        }
        DataType::Regclass => ("regclass".to_owned(), false),
        DataType::Array(ArrayElemTypeDef::SquareBracket(item, _)) => (type_name(item).0, true),
        DataType::Array(_) => (String::new(), true),
        other => (other.to_string().to_lowercase(), false),
    }
}

const REGISTERED: [&str; 8] = [
    "regclass",
    "regtype",
    "regnamespace",
    "regrole",
    "regproc",
    "regprocedure",
    "regoper",
    "regoperator",
];

/// PostgreSQL's name of an expression; casts to types that only catalogs know are named after them.
fn item_name(e: &Expr) -> String {
    if let Expr::Cast { expr, data_type, .. } = e {
        let (name, array) = type_name(data_type);
        let inner = item_name(expr);
        let weak = inner == "?column?" || matches!(**expr, Expr::Cast { .. }) && !is_named(expr);
        if array
            || REGISTERED.contains(&name.as_str())
            || matches!(name.as_str(), "oid" | "name" | "char")
        {
            return if weak { name } else { inner };
        }
    }
    column_name(e)
}

/// Whether a chain of casts begins at something that has a name.
fn is_named(e: &Expr) -> bool {
    match e {
        Expr::Cast { expr, .. } | Expr::Nested(expr) => is_named(expr),
        e => column_name(e) != "?column?",
    }
}

fn string_of(e: &Expr) -> Option<&str> {
    match e {
        Expr::Value(v) => match &v.value {
            Value::SingleQuotedString(s) | Value::EscapedStringLiteral(s) => Some(s),
            _ => None,
        },
        Expr::Cast { expr, data_type: DataType::Text, .. } | Expr::Nested(expr) => string_of(expr),
        _ => None,
    }
}

fn called(e: &Expr) -> Option<String> {
    match e {
        Expr::Function(f) => Some(function_name(f)).filter(|n| n.starts_with('#')),
        Expr::Nested(e) => called(e),
        _ => None,
    }
}

fn first_argument(e: &mut Expr) -> Option<Expr> {
    match e {
        Expr::Nested(e) => first_argument(e),
        Expr::Function(Function { args: FunctionArguments::List(list), .. }) => {
            match list.args.first_mut() {
                Some(FunctionArg::Unnamed(FunctionArgExpr::Expr(e))) => Some(take(e)),
                _ => None,
            }
        }
        _ => None,
    }
}

/// `to_regclass` and its like, which give what a cast does: the type.
fn registering(e: &Expr) -> Option<&'static str> {
    match e {
        Expr::Function(f) => {
            let name = function_name(f);
            let kind = name.strip_prefix("to_")?;
            REGISTERED.into_iter().find(|known| *known == kind)
        }
        Expr::Nested(e) => registering(e),
        _ => None,
    }
}

/// `'t'::regclass` in a SELECT list is shown as a name.
fn show_registered(e: &mut Expr) {
    if let Some(kind) = registering(e) {
        *e = call(&format!("#{kind}_out"), [take(e)]);
        return;
    }
    if let Some(name) = called(e)
        && let Some(kind) = name.strip_suffix("_in")
    {
        let inner = take(e);
        *e = call(&format!("{kind}_out"), [inner]);
    }
}

impl Rewrite<'_> {
    fn expression(&mut self, expr: &mut Expr) -> Option<Expr> {
        if let Some(oid) = tableoid::value(expr, &self.scopes) {
            return Some(oid);
        }
        match expr {
            Expr::BinaryOp { left, op: BinaryOperator::StringConcat, right } => {
                without_empty_array(left, right)
            }
            Expr::BinaryOp { left, op, right } => {
                if let BinaryOperator::PGCustomBinaryOperator(parts) = op {
                    *op = operator(parts.last()?)?;
                }
                compared(left, right);
                compared(right, left);
                None
            }
            Expr::Cast { expr: inner, data_type, .. }
                if tableoid::is_procedure(inner, &self.scopes) =>
            {
                match type_name(data_type).0.as_str() {
                    "text" | "name" | "varchar" => Some(call("#regproc_out", [take(inner)])),
                    "oid" | "int8" | "bigint" => Some(call("#oid", [take(inner)])),
                    _ => cast(inner, data_type),
                }
            }
            Expr::Cast { expr: inner, data_type, .. } => cast(inner, data_type),
            Expr::InList { expr, list, .. } => {
                if let Some(first) = list.first() {
                    let mut first = first.clone();
                    compared(expr, &mut first);
                }
                None
            }
            Expr::AnyOp { left, compare_op: BinaryOperator::Eq, right, .. } => any(left, right),
            Expr::AllOp { left, compare_op: BinaryOperator::NotEq, right } => {
                let any = any(left, right)?;
                Some(Expr::UnaryOp {
                    op: UnaryOperator::Not,
                    expr: Box::new(Expr::Nested(Box::new(any))),
                })
            }
            Expr::Function(f) if function_name(f) == "array" => match &mut f.args {
                FunctionArguments::Subquery(query) => subquery::array(query, self),
                _ => None,
            },
            Expr::Function(f) => {
                expanded::rows_of_array(f).or_else(|| expanded::places_in_vector(f))
            }
            Expr::Identifier(i) if i.quote_style.is_none() => session_value(&i.value),
            Expr::Subquery(query) if subquery::is_empty(query) => Some(null()),
            Expr::Exists { subquery: query, negated } if subquery::is_empty(query) => {
                Some(boolean(*negated))
            }
            Expr::InSubquery { subquery: query, negated, .. } if subquery::is_empty(query) => {
                Some(boolean(*negated))
            }
            Expr::CompoundFieldAccess { root, access_chain } => {
                vector_element(root, access_chain).or_else(|| expanded::field(root, access_chain))
            }
            _ => None,
        }
    }
}

/// `array || …`: nothing is appended to an array.
fn without_empty_array(left: &mut Expr, right: &mut Expr) -> Option<Expr> {
    let empty = |e: &Expr| called(e).is_some_and(|n| n == "#no_texts");
    match (empty(left), empty(right)) {
        (_, true) => Some(take(left)),
        (true, _) => Some(take(right)),
        _ => None,
    }
}

/// The words that are a value of the session without parentheses.
fn session_value(word: &str) -> Option<Expr> {
    match word.to_ascii_lowercase().as_str() {
        "current_schema" => Some(call("current_schema", [])),
        "current_role" => Some(call("current_user", [])),
        _ => None,
    }
}

/// `oid::regclass = 'name'::regclass`: what would be shown by name is compared by number.
fn compared(shown: &mut Expr, number: &mut Expr) {
    let is = |e: &Expr, end: &str| called(e).is_some_and(|name| name.ends_with(end));
    if is(shown, "_out")
        && is(number, "_in")
        && let Some(oid) = first_argument(shown)
    {
        *shown = oid;
    }
}

/// `OPERATOR(pg_catalog.…)`.
fn operator(symbol: &str) -> Option<BinaryOperator> {
    use BinaryOperator as B;
    Some(match symbol {
        "~" => B::PGRegexMatch,
        "~*" => B::PGRegexIMatch,
        "!~" => B::PGRegexNotMatch,
        "!~*" => B::PGRegexNotIMatch,
        "~~" => B::PGLikeMatch,
        "~~*" => B::PGILikeMatch,
        "!~~" => B::PGNotLikeMatch,
        "!~~*" => B::PGNotILikeMatch,
        "=" => B::Eq,
        "<>" | "!=" => B::NotEq,
        "<" => B::Lt,
        "<=" => B::LtEq,
        ">" => B::Gt,
        ">=" => B::GtEq,
        "+" => B::Plus,
        "-" => B::Minus,
        "*" => B::Multiply,
        "/" => B::Divide,
        "||" => B::StringConcat,
        _ => return None,
    })
}

fn cast(inner: &mut Expr, t: &DataType) -> Option<Expr> {
    let (name, array) = type_name(t);
    if array {
        // Arrays of the types that columns have are the planner's.
        if !matches!(name.as_str(), "" | "name" | "oid" | "char" | "regtype" | "regclass") {
            return None;
        }
        return match string_of(inner) {
            Some(text) => array_of_text(text, &name, t),
            None => Some(take(inner)),
        };
    }
    if let Some(kind) = registering(inner)
        && matches!(name.as_str(), "text" | "name" | "varchar")
    {
        return Some(call(&format!("#{kind}_out"), [take(inner)]));
    }
    let column = matches!(inner, Expr::Identifier(_) | Expr::CompoundIdentifier(_));
    if column && name == "text" && subquery::is_vector(inner) {
        return Some(call("#vector_text", [take(inner)]));
    }
    let registered = REGISTERED.contains(&name.as_str());
    if let Some(done) = called(inner).filter(|d| d.ends_with("_in") || d.ends_with("_out")) {
        let wanted = format!("#{name}");
        return match name.as_str() {
            // The number behind the name.
            "oid" | "int8" | "int4" | "bigint" | "integer" | "int" if done.ends_with("_out") => {
                first_argument(inner)
            }
            "oid" | "int8" | "bigint" => Some(call("#oid", [take(inner)])),
            "text" | "name" | "varchar" if done.ends_with("_in") => {
                let kind = done.trim_end_matches("_in").to_owned();
                Some(call(&format!("{kind}_out"), [take(inner)]))
            }
            "text" | "name" | "varchar" => Some(take(inner)),
            _ if registered && done.starts_with(&wanted) => Some(take(inner)),
            _ => None,
        };
    }
    if registered {
        let text = matches!(inner, Expr::Cast { data_type: DataType::Text, .. })
            || string_of(inner).is_some()
            || matches!(inner, Expr::Value(v) if matches!(v.value, Value::Placeholder(_)));
        let suffix = if text { "in" } else { "out" };
        return Some(call(&format!("#{name}_{suffix}"), [take(inner)]));
    }
    None
}

/// `'{…}'::name[]`, where `t` is the type of that `name` with its brackets.
fn array_of_text(text: &str, name: &str, t: &DataType) -> Option<Expr> {
    let items = encoding::array::array_items(text)?;
    if items.is_empty() {
        return Some(call("#no_texts", []));
    }
    let DataType::Array(ArrayElemTypeDef::SquareBracket(item, _)) = t else { return None };
    let plain = matches!(name, "name" | "oid" | "char");
    let item = if plain { DataType::Text } else { item.as_ref().clone() };
    let element = |value: Option<String>| Expr::Cast {
        kind: CastKind::DoubleColon,
        expr: Box::new(Expr::value(value.map_or(Value::Null, Value::SingleQuotedString))),
        data_type: item.clone(),
        array: false,
        format: None,
    };
    Some(Expr::Array(Array { elem: items.into_iter().map(element).collect(), named: true }))
}

/// `left = ANY (right)`: a list stays a list; functions and catalog columns go through ours.
fn any(left: &mut Expr, right: &mut Expr) -> Option<Expr> {
    let mut array = &mut *right;
    while let Expr::Nested(inner) = array {
        array = inner;
    }
    match array {
        Expr::Array(items) => {
            let list = std::mem::take(&mut items.elem);
            if list.is_empty() {
                return Some(boolean(false));
            }
            Some(Expr::InList { expr: Box::new(take(left)), list, negated: false })
        }
        Expr::Value(v) => {
            let Value::SingleQuotedString(text) = &v.value else { return None };
            let items = encoding::array::array_items(text)?;
            if items.is_empty() {
                return Some(boolean(false));
            }
            let value =
                |i: Option<String>| Expr::value(i.map_or(Value::Null, Value::SingleQuotedString));
            let list = items.into_iter().map(value).collect();
            Some(Expr::InList { expr: Box::new(take(left)), list, negated: false })
        }
        Expr::Function(f) if function_name(f) == "#no_texts" => Some(boolean(false)),
        // What the planner makes of its own functions compares by type and knows NULL elements.
        Expr::Function(f) if is_planners(f) => None,
        Expr::Function(_) => Some(call("#any_eq", [take(left), take(right)])),
        Expr::Identifier(_) | Expr::CompoundIdentifier(_) if subquery::is_catalog_array(array) => {
            Some(call("#any_eq", [take(left), take(right)]))
        }
        _ => None,
    }
}

/// Whether a call that returns an array is not one of the catalog's functions: `ARRAY(SELECT …)`,
/// `array_agg` and others.
fn is_planners(f: &Function) -> bool {
    let (name, known) = (function_name(f), millrace_functions::functions());
    matches!(f.args, FunctionArguments::Subquery(_))
        || known.aggregate(&name).is_some()
        || known.scalar(&name).is_some()
}

/// Elements of an `int2vector` count from 0.
fn vector_element(root: &mut Expr, access: &mut [AccessExpr]) -> Option<Expr> {
    // `i.indkey[0]` is read as the field `indkey` of `i`, of which an element is taken.
    let [fields @ .., AccessExpr::Subscript(subscript)] = access else { return None };
    let mut vector = match (&*root, fields.is_empty()) {
        (_, true) => root.clone(),
        (Expr::Identifier(table), false) => {
            let mut parts = vec![table.clone()];
            for field in fields {
                let AccessExpr::Dot(Expr::Identifier(field)) = field else { return None };
                parts.push(field.clone());
            }
            Expr::CompoundIdentifier(parts)
        }
        _ => return None,
    };
    if !subquery::is_vector(&vector) {
        return None;
    }
    match subscript {
        Subscript::Index { index } => Some(call("#vector_get", [take(&mut vector), take(index)])),
        Subscript::Slice { lower_bound: Some(from), upper_bound: Some(to), stride: None } => {
            Some(call("#vector_slice", [take(&mut vector), take(from), take(to)]))
        }
        Subscript::Slice { .. } => None,
    }
}
