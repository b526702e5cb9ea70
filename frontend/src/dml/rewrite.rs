//! AST building blocks for statements that are evaluated as queries.

use millrace_common::{SqlError, SqlState, SqlType};
use sqlparser::ast::{
    Expr, Ident, ObjectName, ObjectNamePart, Query, Select, SelectItem, SetExpr, TableAlias,
    TableFactor, TableWithJoins, Value,
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
    parse_query("SELECT 1")
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
    match text {
        Some(text) => parse_expr(&format!("CAST({} AS {type_name})", quote_literal(text))),
        None => parse_expr(&format!("CAST(NULL AS {type_name})")),
    }
}

/// A literal whose type PostgreSQL would not know yet takes the column's type.
pub fn type_unknown(expr: Expr, to: SqlType) -> Result<Expr, SqlError> {
    match &expr {
        Expr::Value(v) => match &v.value {
            Value::SingleQuotedString(s) | Value::EscapedStringLiteral(s) => {
                typed_literal(Some(s), &base_name(to))
            }
            Value::Null => typed_literal(None, &base_name(to)),
            _ => Ok(expr),
        },
        _ => Ok(expr),
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

/// The text of a plain literal, if `expr` is one: `Some(None)` is NULL.
pub fn literal(expr: &Expr) -> Option<Option<String>> {
    match expr {
        Expr::Value(v) => match &v.value {
            Value::SingleQuotedString(s) => Some(Some(s.clone())),
            Value::Number(n, _) => Some(Some(n.clone())),
            Value::Boolean(b) => Some(Some(b.to_string())),
            Value::Null => Some(None),
            _ => None,
        },
        Expr::UnaryOp { op: sqlparser::ast::UnaryOperator::Minus, expr } => match expr.as_ref() {
            Expr::Value(v) => match &v.value {
                Value::Number(n, _) => Some(Some(format!("-{n}"))),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    }
}

/// Whether reading the literal's text as a value of `to` gives what assigning it would.
pub fn literal_fits(expr: &Expr, to: SqlType) -> bool {
    let inner = match expr {
        Expr::UnaryOp { expr, .. } => expr.as_ref(),
        other => other,
    };
    let Expr::Value(v) = inner else { return false };
    match (&v.value, to) {
        (Value::Null | Value::SingleQuotedString(_), _) => true,
        (Value::Boolean(_), SqlType::Boolean) => true,
        (Value::Number(n, _), SqlType::SmallInt | SqlType::Int | SqlType::BigInt) => {
            n.bytes().all(|b| b.is_ascii_digit())
        }
        (Value::Number(..), SqlType::Real | SqlType::Double | SqlType::Numeric(_)) => true,
        _ => false,
    }
}
