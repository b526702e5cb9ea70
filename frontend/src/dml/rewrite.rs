//! AST building blocks for statements that are evaluated as queries.

use std::borrow::Cow;
use std::sync::OnceLock;

use millrace_common::collections::HashMap;
use millrace_common::{SqlError, SqlState, SqlType};
use millrace_planner::parser::folded::Cell;
use parking_lot::Mutex;
use sqlparser::ast::{
    CastKind, Expr, Ident, ObjectName, ObjectNamePart, Query, Select, SelectItem, SetExpr,
    TableAlias, TableFactor, TableWithJoins, UnaryOperator, Value,
};
use sqlparser::dialect::PostgreSqlDialect;
use sqlparser::parser::Parser;

/// Text of ours, parsed.
fn parser(sql: &str) -> Result<Parser<'static>, SqlError> {
    static DIALECT: PostgreSqlDialect = PostgreSqlDialect {};
    Parser::new(&DIALECT).try_with_sql(sql).map_err(|e| syntax(&e))
}

fn syntax(e: &sqlparser::parser::ParserError) -> SqlError {
    SqlError::new(SqlState::SYNTAX_ERROR, e.to_string())
}

pub fn parse_expr(sql: &str) -> Result<Expr, SqlError> {
    parser(sql)?.parse_expr().map_err(|e| syntax(&e))
}

pub fn parse_query(sql: &str) -> Result<Query, SqlError> {
    parser(sql)?.parse_query().map(|q| *q).map_err(|e| syntax(&e))
}

/// `SELECT 1`, to be filled in.
pub fn empty_query() -> Result<Query, SqlError> {
    static EMPTY: OnceLock<Result<Query, SqlError>> = OnceLock::new();
    EMPTY.get_or_init(|| parse_query("SELECT 1")).clone()
}

pub fn select_of(query: &mut Query) -> Result<&mut Select, SqlError> {
    match query.body.as_mut() {
        SetExpr::Select(select) => Ok(select),
        _ => Err(SqlError::internal("a template query is no SELECT")),
    }
}

fn quoted(name: &str) -> Ident {
    Ident::with_quote('"', name)
}

pub fn column(table: &str, name: &str) -> Expr {
    Expr::CompoundIdentifier(vec![quoted(table), quoted(name)])
}

pub fn item(expr: Expr, alias: &str) -> SelectItem {
    SelectItem::ExprWithAlias { expr, alias: quoted(alias) }
}

pub fn table_ref(schema: Option<&str>, name: &str) -> TableWithJoins {
    let parts =
        schema.into_iter().chain([name]).map(|p| ObjectNamePart::Identifier(quoted(p))).collect();
    TableWithJoins {
        relation: TableFactor::Table {
            name: ObjectName(parts),
            alias: None,
            args: None,
            with_hints: vec![],
            version: None,
            with_ordinality: false,
            partitions: vec![],
            json_path: None,
            sample: None,
            index_hints: vec![],
        },
        joins: vec![],
    }
}

/// `"name" AS "alias"`.
pub fn aliased(name: &str, alias: &str) -> TableWithJoins {
    let mut table = table_ref(None, name);
    if let TableFactor::Table { alias: called, .. } = &mut table.relation {
        let name = quoted(alias);
        *called = Some(TableAlias { explicit: true, name, columns: Vec::new(), at: None });
    }
    table
}

pub fn quote_literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

pub fn quote_ident(name: &str) -> String {
    let plain = !name.is_empty()
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
        && !name.starts_with(|c: char| c.is_ascii_digit());
    if plain { name.to_owned() } else { format!("\"{}\"", name.replace('"', "\"\"")) }
}

/// `'text'::type`, for a parameter or a literal of unknown type.
pub fn typed_literal(text: Option<&str>, type_name: &str) -> Result<Expr, SqlError> {
    let mut cast = null_of(type_name)?;
    if let (Some(text), Expr::Cast { expr, .. }) = (text, &mut cast)
        && let Expr::Value(v) = expr.as_mut()
    {
        v.value = Value::SingleQuotedString(text.to_owned());
    }
    Ok(cast)
}

/// Types whose casts are kept. There are fewer, digits and lengths aside.
const KEPT_CASTS: usize = 256;

/// `CAST(NULL AS type)`, parsed once for each type: statements with parameters have one for every value.
fn null_of(type_name: &str) -> Result<Expr, SqlError> {
    static CASTS: OnceLock<Mutex<HashMap<String, Expr>>> = OnceLock::new();
    let casts = CASTS.get_or_init(Mutex::default);
    if let Some(known) = casts.lock().get(type_name) {
        return Ok(known.clone());
    }
    let cast = parse_expr(&format!("CAST(NULL AS {type_name})"))?;
    let mut casts = casts.lock();
    if casts.len() < KEPT_CASTS {
        casts.insert(type_name.to_owned(), cast.clone());
    }
    Ok(cast)
}

/// An expression out of its place.
pub fn taken(e: &mut Expr) -> Expr {
    std::mem::replace(e, Expr::value(Value::Null))
}

/// A literal whose type PostgreSQL would not know yet takes the column's type.
pub fn type_unknown(expr: Expr, to: SqlType) -> Result<Expr, SqlError> {
    match unknown(&expr) {
        Some(text) => typed_literal(text, &base_name(to)),
        None => Ok(expr),
    }
}

/// The text of a literal of unknown type; `Some(None)`: NULL.
fn unknown(expr: &Expr) -> Option<Option<&str>> {
    match expr {
        Expr::Nested(inner) => unknown(inner),
        Expr::Value(v) => match &v.value {
            Value::SingleQuotedString(s)
            | Value::EscapedStringLiteral(s)
            | Value::UnicodeStringLiteral(s) => Some(Some(s)),
            Value::DollarQuotedString(s) => Some(Some(&s.value)),
            Value::Null => Some(None),
            _ => None,
        },
        _ => None,
    }
}

/// The type's name without its length: lengths are checked at assignment, never cut by a cast.
fn base_name(t: SqlType) -> String {
    match t {
        SqlType::Varchar(_) | SqlType::Char(_) => "text".to_owned(),
        other => other.to_string(),
    }
}

/// Whether an expression is the keyword DEFAULT.
pub fn is_default(expr: &Expr) -> bool {
    matches!(expr, Expr::Identifier(i) if i.quote_style.is_none() && i.value.eq_ignore_ascii_case("default"))
}

/// A literal whose text a column's type reads.
pub enum Literal<'a> {
    Null,
    Text(Cow<'a, str>),
    /// With its sign.
    Number(Cow<'a, str>),
}

impl Literal<'_> {
    /// `None`: NULL.
    pub fn text(&self) -> Option<&str> {
        match self {
            Literal::Null => None,
            Literal::Text(text) | Literal::Number(text) => Some(text),
        }
    }
}

/// The literal that an expression is, if reading its text as a value of `to` gives what assigning it would.
pub fn literal(expr: &Expr, to: SqlType) -> Option<Literal<'_>> {
    match expr {
        Expr::Value(v) => match &v.value {
            Value::Null => Some(Literal::Null),
            Value::SingleQuotedString(s) => Some(Literal::Text(Cow::Borrowed(s))),
            Value::Boolean(b) if to == SqlType::Boolean => {
                Some(Literal::Text(Cow::Borrowed(if *b { "true" } else { "false" })))
            }
            Value::Number(n, _) if reads(n, to) => Some(Literal::Number(Cow::Borrowed(n))),
            _ => None,
        },
        Expr::UnaryOp { op: UnaryOperator::Minus, expr } => {
            let n = number(expr).filter(|n| reads(n, to))?;
            // Negative zero is zero where it is a number, not in the text of a float.
            (!is_zero(n)).then(|| Literal::Number(Cow::Owned(format!("-{n}"))))
        }
        _ => None,
    }
}

/// The literal that a cast to a type is of, which is what a parameter's value has become: the cast reads its text as the
/// type does. Of an instant the text must say its zone.
pub fn cast_literal(expr: &Expr, to: SqlType) -> Option<Literal<'_>> {
    let Expr::Cast { kind: CastKind::Cast, expr, data_type, array: false, format: None } = expr
    else {
        return None;
    };
    let Expr::Value(v) = expr.as_ref() else { return None };
    let literal = match &v.value {
        Value::Null => Literal::Null,
        Value::SingleQuotedString(text) if to == SqlType::Timestamptz && !text.ends_with("+00") => {
            return None;
        }
        Value::SingleQuotedString(text) => Literal::Text(Cow::Borrowed(text)),
        _ => return None,
    };
    let plain = !matches!(to, SqlType::Array(_) | SqlType::Interval);
    (plain && data_type.to_string().eq_ignore_ascii_case(&base_name(to))).then_some(literal)
}

/// [`literal`] for a value of a row that is kept as text.
pub fn cell_literal(cell: Cell<'_>, to: SqlType) -> Option<Literal<'_>> {
    match cell {
        Cell::Null => Some(Literal::Null),
        Cell::Text(text) => Some(Literal::Text(text)),
        Cell::Boolean(b) => (to == SqlType::Boolean)
            .then_some(Literal::Text(Cow::Borrowed(if b { "true" } else { "false" }))),
        Cell::Number(signed) => {
            let n = signed.strip_prefix('-').unwrap_or(signed);
            let zero = n.len() < signed.len() && is_zero(n);
            (!zero && reads(n, to)).then_some(Literal::Number(Cow::Borrowed(signed)))
        }
    }
}

fn is_zero(n: &str) -> bool {
    n.bytes().all(|b| matches!(b, b'0' | b'.'))
}

fn number(expr: &Expr) -> Option<&str> {
    match expr {
        Expr::Value(v) => match &v.value {
            Value::Number(n, _) => Some(n),
            _ => None,
        },
        _ => None,
    }
}

/// Whether a type reads a number's text as the number.
fn reads(n: &str, to: SqlType) -> bool {
    match to {
        SqlType::SmallInt | SqlType::Int | SqlType::BigInt => n.bytes().all(|b| b.is_ascii_digit()),
        SqlType::Real | SqlType::Double | SqlType::Numeric(_) => !n.contains('_'),
        _ => false,
    }
}

/// Whether an expression is a literal, of whatever type: its value does not depend on the session.
pub fn is_literal(expr: &Expr) -> bool {
    match expr {
        Expr::Value(v) => matches!(
            v.value,
            Value::SingleQuotedString(_) | Value::Number(_, _) | Value::Boolean(_) | Value::Null
        ),
        Expr::UnaryOp { op: UnaryOperator::Minus, expr } => number(expr).is_some(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_typed_literal_is_what_its_text_would_be_parsed_to() {
        for text in ["5", "", "it's", "a\\b", "\"x\"", "ä\n$1"] {
            for name in ["bigint", "text", "timestamp with time zone", "numeric(10,2)", "integer[]"]
            {
                let parsed =
                    parse_expr(&format!("CAST({} AS {name})", quote_literal(text))).unwrap();
                // Twice: parsed, and kept.
                for _ in 0..2 {
                    assert_eq!(typed_literal(Some(text), name).unwrap(), parsed);
                }
            }
        }
        assert_eq!(typed_literal(None, "date").unwrap(), parse_expr("CAST(NULL AS date)").unwrap());
        assert!(typed_literal(None, "no type (").is_err());
    }

    #[test]
    fn only_casts_to_the_columns_own_type_are_literals() {
        let text = |cast: &str, to| {
            let cast = parse_expr(cast).unwrap();
            cast_literal(&cast, to).map(|literal| literal.text().map(str::to_owned))
        };
        let some = |text: &str| Some(Some(text.to_owned()));
        assert_eq!(text("CAST('5' AS bigint)", SqlType::BigInt), some("5"));
        assert_eq!(text("CAST(NULL AS bigint)", SqlType::BigInt), Some(None));
        assert_eq!(text("CAST('a' AS text)", SqlType::Varchar(Some(3))), some("a"));
        assert_eq!(text("CAST('1.5' AS double precision)", SqlType::Double), some("1.5"));
        let instant = "CAST('2024-01-01 00:00:00+00' AS timestamp with time zone)";
        assert_eq!(text(instant, SqlType::Timestamptz), some("2024-01-01 00:00:00+00"));
        for (cast, to) in [
            ("CAST('5' AS integer)", SqlType::BigInt),
            ("CAST('1.005' AS numeric)", SqlType::Numeric(Some((10, 2)))),
            ("CAST('abcd' AS varchar(3))", SqlType::Varchar(Some(3))),
            ("CAST('2024-01-01 00:00' AS timestamp with time zone)", SqlType::Timestamptz),
            ("CAST(5 AS bigint)", SqlType::BigInt),
            ("CAST('5' || '6' AS bigint)", SqlType::BigInt),
            ("TRY_CAST('5' AS bigint)", SqlType::BigInt),
        ] {
            assert_eq!(text(cast, to), None, "{cast}");
        }
    }
}
