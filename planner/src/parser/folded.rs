//! Long lists of literals, which are kept as text.
//!
//! A literal of five characters is hundreds of bytes as words and expressions, and programs write lists of a hundred
//! thousand. So the rows of a long `INSERT … VALUES` and the items of a long `IN (…)` that are plain literals are one word for
//! the parser: a string that no text can have, with the list's text in it ([`Fold`]). An INSERT reads its rows from it
//! ([`rows`]), and a list becomes a comparison with an array ([`spell_lists`]). Whoever needs the expressions makes them
//! ([`unfold`]), at the places where they are written.

mod scan;

use std::fmt::Display;
use std::ops::ControlFlow;

use millrace_common::{SqlError, SqlState};
use sqlparser::ast::{
    BinaryOperator, CastKind, Expr, Parens, Query, SetExpr, Statement, Value, Values, Visit,
    VisitMut, Visitor, VisitorMut,
};
use sqlparser::parser::Parser;
use sqlparser::tokenizer::{Location, Span, Token, TokenWithSpan, Tokenizer};

use super::MillraceDialect;
use crate::ast::ParsedStatement;
use crate::parser::walk;
pub(super) use scan::words_at_most;
use scan::{Literal, literal, scan, separator};

/// What begins the string of a list: the character is one that no SQL text has.
const MARK: &str = "\0fold ";

/// What a list is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Integers,
    Strings,
    /// Rows of so many values.
    Rows(usize),
}

/// A list of literals in a text, from the first one to the end of the last.
#[derive(Debug)]
pub(super) struct Fold {
    range: std::ops::Range<usize>,
    kind: Kind,
    count: usize,
}

/// A text in which a `0` stands for every list.
pub(super) struct Folded<'a> {
    sql: &'a str,
    pub visible: String,
    folds: Vec<Fold>,
}

impl<'a> Folded<'a> {
    /// `None`: there is none.
    pub fn of(sql: &'a str) -> Option<Folded<'a>> {
        let folds = scan(sql);
        if folds.is_empty() {
            return None;
        }
        let (mut visible, mut at) = (String::new(), 0);
        for fold in &folds {
            visible.push_str(&sql[at..fold.range.start]);
            visible.push('0');
            at = fold.range.end;
        }
        visible.push_str(&sql[at..]);
        Some(Folded { sql, visible, folds })
    }

    /// Puts the lists in the place of what stands for them, and every word where it is in the text.
    pub fn restore(&self, tokens: &mut [TokenWithSpan]) {
        let mut moved = Moved { after: BEGINNING, to: BEGINNING };
        let mut lists = self.folds.iter().peekable();
        // Where the next list stands in what the parser sees.
        let (mut place, mut from) = (BEGINNING, 0);
        let mut next = lists.peek().map(|fold| behind(place, &self.sql[from..fold.range.start]));
        for token in tokens {
            let Span { start, end } = token.span;
            token.span.start = moved.place(start);
            if next == Some(start)
                && let Some(fold) = lists.next()
            {
                let raw = &self.sql[fold.range.clone()];
                token.token = Token::SingleQuotedString(fold.marker(token.span.start, raw));
                let real = behind(token.span.start, raw);
                moved = Moved { after: end, to: real };
                (place, from) = (end, fold.range.end);
                next = lists.peek().map(|fold| behind(place, &self.sql[from..fold.range.start]));
            }
            token.span.end = moved.place(end);
        }
    }
}

/// How places behind a list differ from those that the parser sees.
struct Moved {
    after: Location,
    to: Location,
}

const BEGINNING: Location = Location { line: 1, column: 1 };

impl Moved {
    fn place(&self, at: Location) -> Location {
        if at.line == 0 {
            return at;
        }
        let column = match at.line == self.after.line {
            true => at.column.saturating_sub(self.after.column) + self.to.column,
            false => at.column,
        };
        Location { line: at.line.saturating_sub(self.after.line) + self.to.line, column }
    }
}

/// The place behind a text that begins at one.
fn behind(at: Location, text: &str) -> Location {
    match text.rsplit_once('\n') {
        None => Location { line: at.line, column: at.column + text.chars().count() as u64 },
        Some((before, last)) => Location {
            line: at.line + 1 + before.matches('\n').count() as u64,
            column: 1 + last.chars().count() as u64,
        },
    }
}

impl Fold {
    fn marker(&self, at: Location, raw: &str) -> String {
        let kind = match self.kind {
            Kind::Integers => "integers 1".to_owned(),
            Kind::Strings => "strings 1".to_owned(),
            Kind::Rows(width) => format!("rows {width}"),
        };
        format!("{MARK}{kind} {} {} {} {raw}", self.count, at.line, at.column)
    }
}

/// A list in a statement.
#[derive(Clone, Copy)]
struct List<'a> {
    kind: Kind,
    count: usize,
    at: Location,
    raw: &'a str,
}

fn list_of(e: &Expr) -> Option<List<'_>> {
    let Expr::Value(v) = e else { return None };
    let Value::SingleQuotedString(s) = &v.value else { return None };
    let mut parts = s.strip_prefix(MARK)?.splitn(6, ' ');
    let (kind, width) = (parts.next()?, parts.next()?.parse().ok()?);
    let kind = match kind {
        "integers" => Kind::Integers,
        "strings" => Kind::Strings,
        "rows" => Kind::Rows(width),
        _ => return None,
    };
    let count = parts.next()?.parse().ok()?;
    let at = Location { line: parts.next()?.parse().ok()?, column: parts.next()?.parse().ok()? };
    Some(List { kind, count, at, raw: parts.next()? })
}

/// The rows of an INSERT that are kept as text.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    pub width: usize,
    pub count: usize,
    raw: &'a str,
}

/// A value of such a row.
pub enum Cell<'a> {
    Null,
    Boolean(bool),
    /// Without its quotes; two of them within it are one.
    Text(std::borrow::Cow<'a, str>),
    /// With its sign.
    Number(&'a str),
}

/// What VALUES has instead of rows; `None`: it has its rows.
pub fn rows(values: &Values) -> Option<Rows<'_>> {
    let [row] = values.rows.as_slice() else { return None };
    let [only] = row.content.as_slice() else { return None };
    match list_of(only)? {
        List { kind: Kind::Rows(width), count, raw, .. } => Some(Rows { width, count, raw }),
        _ => None,
    }
}

impl<'a> Rows<'a> {
    /// All values, row by row.
    pub fn cells(&self) -> impl Iterator<Item = Cell<'a>> + use<'a> {
        let (raw, mut at) = (self.raw, 0);
        std::iter::from_fn(move || {
            let (cell, end) = cell_at(raw, at)?;
            at = separator(raw, end);
            Some(cell)
        })
    }
}

fn cell_at(raw: &str, at: usize) -> Option<(Cell<'_>, usize)> {
    let (kind, end) = literal(raw.as_bytes(), at)?;
    let text = &raw[at..end];
    let cell = match kind {
        Literal::Null => Cell::Null,
        Literal::Boolean(b) => Cell::Boolean(b),
        Literal::Integer | Literal::Number => Cell::Number(text),
        Literal::Text => {
            let inner = text.get(1..text.len() - 1)?;
            Cell::Text(match inner.contains('\'') {
                true => inner.replace("''", "'").into(),
                false => inner.into(),
            })
        }
    };
    Some((cell, end))
}

/// Makes comparisons with arrays of the long lists of a query: `x IN (1, 2)` is `x = ANY ('{1,2}'::int[])`. Whether there
/// were any.
pub fn spell_lists(query: &mut Query) -> Result<bool, SqlError> {
    if !has_lists(query) {
        return Ok(false);
    }
    let mut spell = Spell { failed: None };
    let _ = walk::visit_mut(query, &mut spell);
    spell.failed.map_or(Ok(true), Err)
}

fn has_lists<T: Visit>(node: &T) -> bool {
    struct Lists;
    impl Visitor for Lists {
        type Break = ();

        fn pre_visit_expr(&mut self, e: &Expr) -> ControlFlow<()> {
            match e {
                Expr::InList { list, .. } if of_list(list).is_some() => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        }
    }
    walk::visit(node, &mut Lists).is_break()
}

fn of_list(items: &[Expr]) -> Option<List<'_>> {
    match items {
        [only] => list_of(only).filter(|list| !matches!(list.kind, Kind::Rows(_))),
        _ => None,
    }
}

struct Spell {
    failed: Option<SqlError>,
}

impl VisitorMut for Spell {
    type Break = ();

    fn post_visit_expr(&mut self, e: &mut Expr) -> ControlFlow<()> {
        let Expr::InList { expr, list, negated } = e else { return ControlFlow::Continue(()) };
        let Some(found) = of_list(list) else { return ControlFlow::Continue(()) };
        let right = match array(&found) {
            Ok(array) => Box::new(array),
            Err(failed) => {
                self.failed = Some(failed);
                return ControlFlow::Break(());
            }
        };
        let left = std::mem::replace(expr, Box::new(Expr::value(Value::Null)));
        *e = match negated {
            true => Expr::AllOp { left, compare_op: BinaryOperator::NotEq, right },
            false => Expr::AnyOp { left, compare_op: BinaryOperator::Eq, right, is_some: false },
        };
        ControlFlow::Continue(())
    }
}

/// The items as an array. Strings are of the type of what they are compared with, as they are in a list.
fn array(list: &List<'_>) -> Result<Expr, SqlError> {
    let cells = Rows { width: 1, count: list.count, raw: list.raw }.cells();
    let (mut text, mut wide) = (String::with_capacity(list.raw.len() + 2), false);
    for (i, cell) in cells.enumerate() {
        text.push(if i == 0 { '{' } else { ',' });
        match cell {
            Cell::Number(n) => {
                wide |= n.trim_start_matches('-').parse::<i32>().is_err();
                text.push_str(n);
            }
            Cell::Text(t) => {
                text.push('"');
                for c in t.chars() {
                    if matches!(c, '"' | '\\') {
                        text.push('\\');
                    }
                    text.push(c);
                }
                text.push('"');
            }
            Cell::Null | Cell::Boolean(_) => text.push_str("NULL"),
        }
    }
    text.push('}');
    let value = Expr::value(Value::SingleQuotedString(text));
    if list.kind == Kind::Strings {
        return Ok(value);
    }
    let mut cast = super::parse_expr(if wide { "''::bigint[]" } else { "''::int[]" })?;
    if let Expr::Cast { kind: CastKind::DoubleColon, expr, .. } = &mut cast {
        **expr = value;
    }
    Ok(cast)
}

/// Makes expressions of the long lists of a statement or a part of one.
pub fn unfold<T: VisitMut + Visit>(node: &mut T) -> Result<(), SqlError> {
    if !has_lists(node) {
        return Ok(());
    }
    let mut unfold = Unfold { failed: None };
    let _ = walk::visit_mut(node, &mut unfold);
    unfold.failed.map_or(Ok(()), Err)
}

/// A part of a statement as SQL, to be stored or shown.
pub fn to_sql<T: VisitMut + Visit + Clone + Display>(node: &T) -> Result<String, SqlError> {
    if !has_lists(node) {
        return Ok(node.to_string());
    }
    let mut written = node.clone();
    unfold(&mut written)?;
    Ok(written.to_string())
}

/// Whether anything in a statement is kept as text.
pub fn has_any(statement: &Statement) -> bool {
    let of_rows = match statement {
        Statement::Insert(insert) => match insert.source.as_ref().map(|q| q.body.as_ref()) {
            Some(SetExpr::Values(values)) => rows(values).is_some(),
            _ => false,
        },
        _ => false,
    };
    of_rows || has_lists(statement)
}

/// Makes expressions of everything in a statement that is kept as text.
pub fn written_out(parsed: &mut ParsedStatement) -> Result<(), SqlError> {
    let crate::ast::Statement::Sql(sql) = &mut parsed.statement else { return Ok(()) };
    unfold_rows(sql)?;
    unfold(sql.as_mut())
}

/// Makes expressions of the rows of an INSERT. Whether they were kept as text.
pub fn unfold_rows(statement: &mut Statement) -> Result<bool, SqlError> {
    let Statement::Insert(insert) = statement else { return Ok(false) };
    match insert.source.as_mut().map(|q| q.body.as_mut()) {
        Some(SetExpr::Values(values)) => unfold_values(values),
        _ => Ok(false),
    }
}

/// [`unfold_rows`] of VALUES.
pub fn unfold_values(values: &mut Values) -> Result<bool, SqlError> {
    let list = |values: &Values| {
        let only = values.rows.first()?.content.first()?;
        list_of(only).map(|list| (format!("({})", list.raw), list.at))
    };
    if rows(values).is_none() {
        return Ok(false);
    }
    let Some((text, mut at)) = list(values) else { return Ok(false) };
    at.column = at.column.saturating_sub(1);
    values.rows = parsed(&text, at, |parser| {
        parser.parse_comma_separated(|p| {
            p.expect_token(&Token::LParen)?;
            let content = p.parse_comma_separated(Parser::parse_expr)?;
            p.expect_token(&Token::RParen)?;
            Ok(Parens::with_empty_span(content))
        })
    })?;
    Ok(true)
}

struct Unfold {
    failed: Option<SqlError>,
}

impl VisitorMut for Unfold {
    type Break = ();

    fn pre_visit_expr(&mut self, e: &mut Expr) -> ControlFlow<()> {
        let Expr::InList { list, .. } = e else { return ControlFlow::Continue(()) };
        let Some(found) = of_list(list) else { return ControlFlow::Continue(()) };
        match parsed(found.raw, found.at, |p| p.parse_comma_separated(Parser::parse_expr)) {
            Ok(items) => {
                *list = items;
                ControlFlow::Continue(())
            }
            Err(failed) => {
                self.failed = Some(failed);
                ControlFlow::Break(())
            }
        }
    }
}

/// What a text is that stands at a place of another one.
fn parsed<T>(
    text: &str,
    at: Location,
    parse: impl FnOnce(&mut Parser<'_>) -> super::Result<T>,
) -> Result<T, SqlError> {
    let broken = |_| SqlError::new(SqlState::INTERNAL_ERROR, "a list of literals cannot be read");
    let dialect = MillraceDialect::default();
    let moved = Moved { after: BEGINNING, to: at };
    let mut tokens = Vec::new();
    let place = |mut token: TokenWithSpan| {
        token.span =
            Span { start: moved.place(token.span.start), end: moved.place(token.span.end) };
        token
    };
    Tokenizer::new(&dialect, text)
        .tokenize_with_location_into_buf_with_mapper(&mut tokens, place)
        .map_err(|e| broken(e.to_string()))?;
    dialect.allow(tokens.len());
    let mut parser = Parser::new(&dialect).with_tokens_with_locations(tokens);
    parse(&mut parser).map_err(|e| broken(e.to_string()))
}

#[cfg(test)]
mod tests;
