//! Where in the text stands what an error is about.
//!
//! Planning works on rewritten trees, so positions are found afterwards: the message names a name, a
//! literal or an operator, and the statement as it was parsed says where that stands. What cannot be
//! told apart (two casts to one type) gets no position rather than a wrong one.

use std::ops::ControlFlow;

use millrace_common::{SqlError, SqlState};
use millrace_functions::parse::base_name;
use sqlparser::ast::{
    AssignmentTarget, Expr, Ident, ObjectName, Query, Select, SetExpr, Spanned,
    Statement as SqlStatement, Visit, Visitor,
};
use sqlparser::keywords::Keyword;
use sqlparser::tokenizer::{Location, Token};

use super::error_spans;
use super::misplaced_calls;
use super::operator_spans::Place;
use crate::ast::{ParsedStatement, Statement};
use crate::bind::expressions::stored_expressions;
use crate::bind::names::fold;
use crate::bind::ordering::order;
use crate::parser::walk;
use crate::parser::{folded, position_of, tokens_of};

/// Adds the position of what the error is about, counted in the string the statement came in.
pub fn in_statement(e: SqlError, parsed: &ParsedStatement) -> SqlError {
    // Of a name that USING says and a side has not, what other places say is not meant.
    if e.position.is_some()
        || parsed.source.is_empty()
        || e.message.contains(" specified in USING clause ")
        || e.message.starts_with("common column name ")
    {
        return e;
    }
    // What has ended for no fault of its text.
    if matches!(e.state, SqlState::QUERY_CANCELED | SqlState::OUT_OF_MEMORY) {
        return e;
    }
    let at = match &parsed.statement {
        Statement::Sql(sql) if folded::has_any(sql.as_ref()) => {
            let mut parsed = parsed.clone();
            return match folded::written_out(&mut parsed) {
                Ok(()) => in_statement(e, &parsed),
                Err(_) => e,
            };
        }
        Statement::Sql(sql) => as_written(&e, sql).or_else(|| in_tree(&e, sql)),
        Statement::CreateView(view) => {
            as_written(&e, &SqlStatement::Query(view.query.query.clone()))
        }
        Statement::CreateTable(def) | Statement::CreateSource(def) => {
            stored_expressions::place(&e.message, def)
        }
        _ => None,
    };
    let position = match at.and_then(|at| position_of(&parsed.source, at)) {
        Some(position) => Some(position),
        None => in_tokens(&e, parsed),
    };
    match position {
        Some(position) => e.with_position(position),
        None => e,
    }
}

/// Errors that the tree alone tells.
fn as_written(e: &SqlError, sql: &SqlStatement) -> Option<Location> {
    match e.state {
        SqlState::GROUPING_ERROR | SqlState::SYNTAX_ERROR | SqlState("42P20") => {
            misplaced_calls::place(&e.message, sql).or_else(|| error_spans::place(e, sql))
        }
        SqlState("42P10") if e.message.starts_with("for SELECT DISTINCT") => {
            order::unlisted_in(sql)
        }
        SqlState::DATATYPE_MISMATCH | SqlState::FEATURE_NOT_SUPPORTED | SqlState("42P10") => {
            error_spans::place(e, sql)
        }
        _ => None,
    }
}

fn in_tree(e: &SqlError, sql: &SqlStatement) -> Option<Location> {
    match e.state {
        SqlState::UNDEFINED_COLUMN
        | SqlState::UNDEFINED_TABLE
        | SqlState::UNDEFINED_FUNCTION
        | SqlState::AMBIGUOUS_COLUMN
        | SqlState::GROUPING_ERROR => find(sql, &subject(&e.message)?),
        SqlState::DATATYPE_MISMATCH => mismatch(&e.message, sql),
        _ => None,
    }
}

/// The expression whose type is wrong: a condition, or the value assigned to a column.
fn mismatch(message: &str, sql: &SqlStatement) -> Option<Location> {
    if message.starts_with("argument of WHERE ") {
        let clause: Option<&Expr> = match sql {
            SqlStatement::Update(u) => u.selection.as_ref(),
            SqlStatement::Delete(d) => d.selection.as_ref(),
            SqlStatement::Query(q) => only_select(q).and_then(|s| s.selection.as_ref()),
            _ => None,
        };
        return clause.map(|c| c.span().start);
    }
    if message.starts_with("argument of HAVING ") {
        let SqlStatement::Query(q) = sql else { return None };
        return only_select(q)?.having.as_ref().map(|c| c.span().start);
    }
    let column = message.strip_prefix("column \"")?.split('"').next()?;
    match sql {
        SqlStatement::Update(u) => u.assignments.iter().find_map(|a| match &a.target {
            AssignmentTarget::ColumnName(name) if last(name).as_deref() == Some(column) => {
                Some(a.value.span().start)
            }
            _ => None,
        }),
        SqlStatement::Insert(i) => {
            let at = i.columns.iter().position(|c| last(c).as_deref() == Some(column))?;
            match i.source.as_ref()?.body.as_ref() {
                SetExpr::Values(v) if v.rows.len() == 1 => {
                    Some(v.rows.first()?.content.get(at)?.span().start)
                }
                SetExpr::Select(s) => Some(s.projection.get(at)?.span().start),
                _ => None,
            }
        }
        _ => None,
    }
}

fn last(name: &ObjectName) -> Option<String> {
    name.0.last().and_then(|p| p.as_ident()).map(fold)
}

/// The SELECT of a query that is one and has no other inside that could be meant.
fn only_select(query: &Query) -> Option<&Select> {
    match query.body.as_ref() {
        SetExpr::Select(s) if query.with.is_none() => Some(s),
        SetExpr::Query(q) => only_select(q),
        _ => None,
    }
}

/// Looks for the literal, operator, parameter or name among the statement's tokens.
fn in_tokens(e: &SqlError, parsed: &ParsedStatement) -> Option<u32> {
    let quoted = || e.message.split('"').nth(1);
    let is_sql = matches!(&parsed.statement, Statement::Sql(_));
    let wanted = match e.state {
        SqlState::INVALID_TEXT_REPRESENTATION
        | SqlState::INVALID_DATETIME_FORMAT
        | SqlState::DATETIME_FIELD_OVERFLOW
        | SqlState::NUMERIC_VALUE_OUT_OF_RANGE => {
            // The value is the rest of the message, quotes inside it included.
            let value = e.message.split_once('"').and_then(|(_, r)| r.rsplit_once('"'))?.0;
            return token_at(parsed, |tokens| {
                tokens.iter().position(|t| string_of(t) == Some(value))
            });
        }
        SqlState::UNDEFINED_PARAMETER => {
            let name = e.message.split_whitespace().find(|w| w.starts_with('$'))?;
            return token_at(parsed, |tokens| {
                tokens.iter().position(|t| matches!(t, Token::Placeholder(p) if p == name))
            });
        }
        SqlState::UNDEFINED_FUNCTION if e.message.starts_with("operator does not exist: ") => {
            let operator = e.message.split_whitespace().rev().nth(1)?;
            if let Some(after) = e.after {
                return operator_after(&parsed.source, operator, after);
            }
            return token_at(parsed, |tokens| {
                let mut found = (0..tokens.len()).filter(|&i| tokens[i].to_string() == operator);
                found.next().filter(|_| found.next().is_none())
            });
        }
        SqlState::CANNOT_COERCE => return token_at(parsed, |tokens| cast(tokens, &e.message)),
        SqlState::UNDEFINED_TABLE if e.message.starts_with("relation ") || is_sql => {
            subject(&e.message)?
        }
        SqlState::UNDEFINED_COLUMN
        | SqlState::UNDEFINED_FUNCTION
        | SqlState::AMBIGUOUS_COLUMN
        | SqlState::GROUPING_ERROR => subject(&e.message)?,
        SqlState::UNDEFINED_OBJECT if e.message.starts_with("type ") => quoted()?.to_owned(),
        SqlState::DUPLICATE_COLUMN if is_sql => {
            let name = quoted()?.to_owned();
            // The second one is one too many.
            return token_at(parsed, |tokens| {
                (0..tokens.len()).filter(|&i| is_name(&tokens[i], &name)).nth(1)
            });
        }
        _ => return None,
    };
    token_at(parsed, |tokens| {
        let mut at = tokens.iter().position(|t| is_name(t, &wanted))?;
        while at >= 2 && tokens[at - 1] == Token::Period && matches!(tokens[at - 2], Token::Word(_))
        {
            at -= 2;
        }
        Some(at)
    })
}

/// The position of the token that `pick` chooses by its index among all that are not white space.
fn token_at(parsed: &ParsedStatement, pick: impl FnOnce(&[Token]) -> Option<usize>) -> Option<u32> {
    let (tokens, places): (Vec<Token>, Vec<Location>) = tokens_of(&parsed.text)
        .into_iter()
        .filter(|t| !matches!(t.token, Token::Whitespace(_)))
        .map(|t| (t.token, t.span.start))
        .unzip();
    let at = pick(&tokens)?;
    let within = position_of(&parsed.text, *places.get(at)?)?;
    Some(within + u32::try_from(parsed.offset).ok()?)
}

/// Keywords in a cast of an operand.
const TYPES: [&str; 22] = [
    "date",
    "time",
    "timestamp",
    "interval",
    "int",
    "integer",
    "bigint",
    "smallint",
    "numeric",
    "varchar",
    "char",
    "boolean",
    "uuid",
    "text",
    "bytea",
    "jsonb",
    "json",
    "real",
    "double",
    "precision",
    "float",
    "character",
];

/// The first such operator that stands after a place.
fn operator_after(source: &str, operator: &str, after: Place) -> Option<u32> {
    let same = |t: &Token| match t {
        Token::Neq => matches!(operator, "<>" | "!="),
        t => t.to_string() == operator,
    };
    // What may stand between an operand's last part and the operator; anything else is another operator's.
    let between = |t: &Token| match t {
        Token::Word(w) => {
            w.keyword == Keyword::NoKeyword || TYPES.iter().any(|t| w.value.eq_ignore_ascii_case(t))
        }
        Token::RParen | Token::RBracket | Token::LBracket | Token::DoubleColon | Token::LParen => {
            true
        }
        Token::Number(_, _) | Token::Comma => true,
        _ => false,
    };
    let tokens = tokens_of(source);
    let rest = tokens
        .iter()
        .filter(|t| !matches!(t.token, Token::Whitespace(_)))
        .skip_while(|t| (t.span.start.line, t.span.start.column) < after);
    let found = rest.take_while(|t| between(&t.token) || same(&t.token)).find(|t| same(&t.token));
    position_of(source, found?.span.start)
}

/// The cast that a message means: the only one to its type that can have come from the other.
fn cast(tokens: &[Token], message: &str) -> Option<usize> {
    let (from, to) = message.strip_prefix("cannot cast type ")?.split_once(" to ")?;
    let is_to = |at: usize| {
        let mut text = String::new();
        let end = (at..tokens.len()).find(|&i| tokens[i] == Token::DoubleColon);
        (at..end.unwrap_or(tokens.len()).min(at + 4)).any(|i| {
            text.push_str(&format!(" {}", tokens[i]));
            let parsed = crate::parser::parse_expr(&format!("NULL::{text}"));
            let Ok(Expr::Cast { data_type, .. }) = parsed else { return false };
            crate::bind::expressions::types::sql_type(&data_type).is_ok_and(|t| base_name(t) == to)
        })
    };
    // What is cast is no literal of unknown type, and a number is of a number's type.
    let fits = |operand: Option<&Token>| match operand {
        Some(Token::SingleQuotedString(_)) => false,
        Some(Token::Number(_, _)) => matches!(from, "integer" | "bigint" | "numeric"),
        _ => true,
    };
    let colons = (1..tokens.len())
        .filter(|&i| tokens[i] == Token::DoubleColon && fits(tokens.get(i - 1)) && is_to(i + 1));
    let calls = (0..tokens.len()).filter(|&i| {
        let call = is_name(&tokens[i], "cast") && tokens.get(i + 1) == Some(&Token::LParen);
        let mut depth = 0;
        let keyword = (i + 1..tokens.len()).find(|&k| {
            match tokens[k] {
                Token::LParen => depth += 1,
                Token::RParen => depth -= 1,
                _ => {}
            }
            depth == 1 && is_name(&tokens[k], "as")
        });
        call && fits(tokens.get(i + 2)) && keyword.is_some_and(|k| is_to(k + 1))
    });
    let mut found = colons.chain(calls);
    found.next().filter(|_| found.next().is_none())
}

fn string_of(token: &Token) -> Option<&str> {
    match token {
        Token::SingleQuotedString(s)
        | Token::EscapedStringLiteral(s)
        | Token::NationalStringLiteral(s) => Some(s),
        Token::Number(n, _) => Some(n),
        _ => None,
    }
}

fn is_name(token: &Token, name: &str) -> bool {
    match token {
        Token::Word(w) if w.quote_style.is_some() => w.value == name,
        Token::Word(w) => w.value.to_lowercase() == name,
        _ => false,
    }
}

/// The last part of the name that the message is about: quoted, or the second word.
fn subject(message: &str) -> Option<String> {
    let name = match message.split('"').nth(1) {
        Some(quoted) => quoted,
        None => message.split_whitespace().nth(1)?.split('(').next()?,
    };
    name.rsplit('.').next().map(str::to_owned)
}

/// Whether a query names an identifier anywhere.
pub fn names_identifier<T: Visit>(node: &T, name: &str) -> bool {
    find(node, name).is_some()
}

fn find<T: Visit>(node: &T, name: &str) -> Option<Location> {
    match walk::visit(node, &mut Finder { name }) {
        ControlFlow::Break(at) => Some(at),
        ControlFlow::Continue(()) => None,
    }
}

struct Finder<'a> {
    name: &'a str,
}

impl Finder<'_> {
    /// The start of a dotted name whose last part is the one looked for.
    fn check(&self, parts: &[Ident]) -> ControlFlow<Location> {
        match (parts.first(), parts.last()) {
            (Some(first), Some(last)) if fold(last) == self.name => {
                ControlFlow::Break(first.span.start)
            }
            _ => ControlFlow::Continue(()),
        }
    }

    fn check_name(&self, name: &ObjectName) -> ControlFlow<Location> {
        let parts: Vec<Ident> = name.0.iter().filter_map(|p| p.as_ident()).cloned().collect();
        self.check(&parts)
    }
}

impl Visitor for Finder<'_> {
    type Break = Location;

    fn pre_visit_relation(&mut self, relation: &ObjectName) -> ControlFlow<Location> {
        self.check_name(relation)
    }

    fn pre_visit_expr(&mut self, expr: &Expr) -> ControlFlow<Location> {
        match expr {
            Expr::Identifier(i) => self.check(std::slice::from_ref(i)),
            Expr::CompoundIdentifier(parts) => self.check(parts),
            Expr::Function(f) => self.check_name(&f.name),
            _ => ControlFlow::Continue(()),
        }
    }
}
