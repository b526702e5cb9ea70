//! SQL text to statements.
//!
//! sqlparser does the work; around it stands a small parser of the statements that it does not
//! know (or whose shape here is our own), which peeks at the first words and otherwise falls
//! through. A string may hold many statements; each keeps its own source text, because the catalog
//! stores definitions as the user wrote them. Errors have PostgreSQL's words and positions:
//! characters from the start of the whole string, counted from 1.

mod asof;
mod assignments;
mod clauses;
mod depth;
mod dialect;
pub mod folded;
pub mod joins;
mod statements;
mod streams;
mod table;
mod tokens;
mod users;
pub mod walk;
mod with;

pub use with::{changes_rows, take_in, with_changes_rows};

use std::sync::Arc;

use millrace_common::{SqlError, SqlState};
use sqlparser::keywords::Keyword;
use sqlparser::parser::{Parser, ParserError};
use sqlparser::tokenizer::{Location, Token, TokenWithSpan, Tokenizer};

use crate::ast::{CreateView, ExplainTarget, ParsedStatement, QueryText, Statement};
pub(crate) use asof::ASOF_LEFT;
use dialect::MillraceDialect;
pub(crate) use dialect::VARIADIC;
use folded::Folded;
use millrace_functions::interrupt;

pub(crate) type Result<T, E = ParserError> = std::result::Result<T, E>;

/// How deep expressions and subqueries may nest: bounds the stack of every later pass too.
const MAX_DEPTH: usize = 60;

/// Parses a string of statements. Long lists of literals in it may stay text ([`folded`]).
pub fn parse(sql: &str) -> Result<Vec<ParsedStatement>, SqlError> {
    if let Some(folded) = Folded::of(sql) {
        let parsed = parse_text(sql, Some(&folded));
        if parsed.is_ok() {
            return parsed;
        }
        // What is wrong is told by the text as it is written.
        interrupt::check()?;
    }
    parse_text(sql, None)
}

fn parse_text(sql: &str, folded: Option<&Folded<'_>>) -> Result<Vec<ParsedStatement>, SqlError> {
    let source = Source::new(sql);
    let whole: Arc<str> = Arc::from(sql);
    let mut dialect = MillraceDialect::default();
    let mut tokens = match folded {
        Some(folded) => {
            let mut tokens = tokenize(&dialect, &Source::new(&folded.visible))?;
            folded.restore(&mut tokens);
            tokens
        }
        None => tokenize(&dialect, &source)?,
    };
    interrupt::check()?;
    depth::check(&tokens, &source)?;
    tokens::join_strings(&mut tokens, &source)?;
    tokens::free_words(&mut tokens);
    tokens::blank_noise(&mut tokens);
    tokens::plain_windows(&mut tokens);
    tokens::spell_out_tables(&mut tokens);
    tokens::bare_rows(&mut tokens);
    dialect.table_versions = tokens.iter().any(|t| is_word(&t.token, "SYSTEM_TIME"));
    let missing = tokens::missing_relation(&tokens);
    let emits = tokens::take_emit_clauses(&mut tokens);
    asof::wrap_left(&mut tokens);
    tokens::take_frame_exclusions(&mut tokens);
    tokens::enclose_offsets(&mut tokens);
    tokens::cast_intervals(&mut tokens);
    dialect.allow(tokens.len());
    let inner =
        Parser::new(&dialect).with_recursion_limit(MAX_DEPTH).with_tokens_with_locations(tokens);
    let mut parser = SqlParser { inner, source: &source, dialect: &dialect };
    let mut statements = Vec::new();
    loop {
        while parser.inner.consume_token(&Token::SemiColon) {}
        if parser.inner.peek_token_ref().token == Token::EOF {
            return match missing {
                Some(at) => Err(parser.error(located("", at))),
                None => Ok(statements),
            };
        }
        let mut parsed = parser.one_statement(&emits, &whole).map_err(|e| parser.error(e))?;
        clauses::check(&parsed.statement).map_err(|refused| refused.placed(&source))?;
        spread_assignments(&mut parsed.statement, &source)?;
        statements.push(parsed);
    }
}

/// Makes assignments of one column each of those of several.
fn spread_assignments(statement: &mut Statement, source: &Source<'_>) -> Result<(), SqlError> {
    let sql = match statement {
        Statement::Sql(sql) => sql.as_mut(),
        Statement::Explain(explain) => match &mut explain.target {
            ExplainTarget::Statement(inner) => {
                return spread_assignments(inner, source);
            }
            ExplainTarget::Job(_) => return Ok(()),
        },
        _ => return Ok(()),
    };
    assignments::spread(sql).map_err(|wrong| {
        let before = &source.sql[..source.byte(wrong.at)];
        let opened = before.trim_end().strip_suffix('(').filter(|_| wrong.enclosed);
        wrong.error.with_position(opened.unwrap_or(before).chars().count() as u32 + 1)
    })
}

/// The materialized view that a statement creates, or would create.
fn materialized_view(statement: &mut Statement) -> Option<&mut CreateView> {
    match statement {
        Statement::CreateView(v) if v.materialized => Some(v.as_mut()),
        Statement::Explain(explain) => match &mut explain.target {
            ExplainTarget::Statement(inner) => materialized_view(inner),
            ExplainTarget::Job(_) => None,
        },
        _ => None,
    }
}

/// Parses one query, for definitions that the catalog stores as text.
pub fn parse_query(sql: &str) -> Result<Box<sqlparser::ast::Query>, SqlError> {
    let mut statements = parse(sql)?;
    match (statements.pop().map(|s| s.statement), statements.is_empty()) {
        (Some(Statement::Sql(s)), true) => match *s {
            sqlparser::ast::Statement::Query(q) => Ok(q),
            _ => Err(SqlError::internal("stored definition is not a query")),
        },
        _ => Err(SqlError::internal("stored definition is not one query")),
    }
}

/// Parses one scalar expression, for defaults and watermarks that the catalog stores as text.
pub fn parse_expr(sql: &str) -> Result<sqlparser::ast::Expr, SqlError> {
    let source = Source::new(sql);
    let dialect = MillraceDialect::default();
    let tokens = tokenize(&dialect, &source)?;
    depth::check(&tokens, &source)?;
    dialect.allow(tokens.len());
    let inner =
        Parser::new(&dialect).with_recursion_limit(MAX_DEPTH).with_tokens_with_locations(tokens);
    let mut parser = SqlParser { inner, source: &source, dialect: &dialect };
    parser
        .inner
        .parse_expr()
        .and_then(|e| parser.inner.expect_token(&Token::EOF).map(|_| e))
        .map_err(|e| parser.error(e))
}

/// The text, and where its lines begin.
pub(crate) struct Source<'a> {
    sql: &'a str,
    /// Characters before each line.
    lines: Vec<usize>,
    /// Byte offset of every so many characters, so that a place far along is not counted to. Empty where each character is a
    /// byte.
    marks: Vec<usize>,
    /// Characters of the whole text.
    length: usize,
}

/// Characters from one mark to the next.
const STRIDE: usize = 64;

impl<'a> Source<'a> {
    pub(crate) fn new(sql: &'a str) -> Source<'a> {
        let ascii = sql.is_ascii();
        let (mut lines, mut marks, mut length) = (vec![0], Vec::new(), 0usize);
        for (byte, c) in sql.char_indices() {
            if !ascii && length.is_multiple_of(STRIDE) {
                marks.push(byte);
            }
            length += 1;
            if c == '\n' {
                lines.push(length);
            }
        }
        Source { sql, lines, marks, length }
    }

    /// Byte offset of a location.
    fn byte(&self, at: Location) -> usize {
        let characters = self.chars_before(at);
        if self.marks.is_empty() {
            return characters;
        }
        let Some(&mark) = self.marks.get(characters / STRIDE) else { return self.sql.len() };
        let found = self.sql[mark..].char_indices().nth(characters % STRIDE);
        found.map_or(self.sql.len(), |(i, _)| mark + i)
    }

    /// Characters before a location (line and column count characters from 1).
    fn chars_before(&self, at: Location) -> usize {
        let line = (at.line as usize).checked_sub(1).and_then(|line| self.lines.get(line));
        let skip = (at.column as usize).saturating_sub(1);
        line.map_or(self.length, |start| start.saturating_add(skip).min(self.length))
    }

    fn slice(&self, from: Location, to: Location) -> &'a str {
        let (a, b) = (self.byte(from), self.byte(to));
        self.sql[a..b.max(a)].trim()
    }
}

/// 1-based character position in `sql` of a parser location, if it is one.
pub fn position_of(sql: &str, at: Location) -> Option<u32> {
    (at.line > 0).then(|| Source::new(sql).chars_before(at) as u32 + 1)
}

/// The tokens of a text that has been parsed before; up to the first error otherwise.
pub(crate) fn tokens_of(sql: &str) -> Vec<TokenWithSpan> {
    let mut tokens = Vec::new();
    let _ = Tokenizer::new(&MillraceDialect::default(), sql)
        .tokenize_with_location_into_buf(&mut tokens);
    tokens
}

fn tokenize(
    dialect: &MillraceDialect,
    source: &Source<'_>,
) -> Result<Vec<TokenWithSpan>, SqlError> {
    // As many as there may be, at once: then it is known before they are made whether there is memory for them.
    let mut tokens = Vec::with_capacity(folded::words_at_most(source.sql));
    interrupt::check()?;
    let read = Tokenizer::new(dialect, source.sql).tokenize_with_location_into_buf(&mut tokens);
    read.map(|()| tokens::part_signs(tokens)).map_err(|e| {
        let message = match e.message.as_str() {
            m if m.contains("string literal") => "unterminated quoted string",
            m if m.contains("comment") => "unterminated /* comment",
            m if m.contains("Expected close delimiter") => "unterminated quoted identifier",
            m => m,
        };
        let start = source.byte(e.location);
        let rest: String = source.sql[start..].chars().take(64).collect();
        SqlError::new(SqlState::SYNTAX_ERROR, format!("{message} at or near \"{rest}\""))
            .with_position(source.chars_before(e.location) as u32 + 1)
    })
}

fn is_word(token: &Token, word: &str) -> bool {
    matches!(token, Token::Word(w) if w.quote_style.is_none() && w.value.eq_ignore_ascii_case(word))
}

pub(crate) struct SqlParser<'a> {
    pub(crate) inner: Parser<'a>,
    source: &'a Source<'a>,
    dialect: &'a MillraceDialect,
}

impl SqlParser<'_> {
    fn one_statement(&mut self, emits: &[Location], whole: &Arc<str>) -> Result<ParsedStatement> {
        let start = self.inner.peek_token_ref().span.start;
        let mut statement = self.statement()?;
        let next = self.inner.peek_token_ref();
        if !matches!(next.token, Token::SemiColon | Token::EOF) {
            return self.inner.expected_ref("end of statement", next);
        }
        let end = self.inner.get_current_token().span.end;
        let upto = if next.token == Token::EOF { end } else { next.span.start };
        if let Some(&at) =
            emits.iter().find(|&&e| start < e && (e < upto || next.token == Token::EOF))
        {
            match materialized_view(&mut statement) {
                Some(v) => {
                    v.emit_on_window_close = true;
                    v.query.text = self.source.slice(self.query_start(&v.query), at).to_owned();
                }
                None => return Err(located("Expected: end of statement, found: EMIT", at)),
            }
        }
        Ok(ParsedStatement {
            statement,
            text: self.source.slice(start, upto.max(end)).to_owned(),
            offset: self.source.chars_before(start),
            source: Arc::clone(whole),
        })
    }

    fn query_start(&self, q: &QueryText) -> Location {
        use sqlparser::ast::Spanned;
        q.query.span().start
    }

    /// Parses a query and keeps its text.
    pub(crate) fn query_text(&mut self) -> Result<QueryText> {
        let start = self.inner.peek_token_ref().span.start;
        let query = self.inner.parse_query()?;
        let end = self.inner.get_current_token().span.end;
        Ok(QueryText { query, text: self.source.slice(start, end).to_owned() })
    }

    /// Parses an expression and keeps its text.
    pub(crate) fn expr_text(&mut self) -> Result<(sqlparser::ast::Expr, String)> {
        let start = self.inner.peek_token_ref().span.start;
        let expr = self.inner.parse_expr()?;
        let end = self.inner.get_current_token().span.end;
        Ok((expr, self.source.slice(start, end).to_owned()))
    }

    /// Whether the next words are these (keywords of sqlparser or not).
    pub(crate) fn peek_words(&self, words: &[&str]) -> bool {
        words.iter().enumerate().all(|(i, w)| is_word(&self.inner.peek_nth_token_ref(i).token, w))
    }

    /// Consumes these words if they are next.
    pub(crate) fn take_words(&mut self, words: &[&str]) -> bool {
        let found = self.peek_words(words);
        if found {
            words.iter().for_each(|_| self.inner.advance_token());
        }
        found
    }

    pub(crate) fn expect_words(&mut self, words: &[&str]) -> Result<()> {
        for word in words {
            if !self.take_words(&[word]) {
                return self.inner.expected_ref(word, self.inner.peek_token_ref());
            }
        }
        Ok(())
    }

    pub(crate) fn if_not_exists(&mut self) -> bool {
        self.inner.parse_keywords(&[Keyword::IF, Keyword::NOT, Keyword::EXISTS])
    }

    pub(crate) fn if_exists(&mut self) -> bool {
        self.inner.parse_keywords(&[Keyword::IF, Keyword::EXISTS])
    }

    /// PostgreSQL's form of a parser error.
    fn error(&self, e: ParserError) -> SqlError {
        if let Some(ended) = self.dialect.ended() {
            return ended;
        }
        if self.dialect.is_spent() {
            let message = "statement is too complex: it can be read in too many ways";
            return SqlError::new(SqlState::STATEMENT_TOO_COMPLEX, message).with_hint(
                "Look for a mistake within nested calls, or make it several statements.",
            );
        }
        let text = match e {
            ParserError::RecursionLimitExceeded => {
                return SqlError::new(
                    SqlState::STATEMENT_TOO_COMPLEX,
                    "stack depth limit exceeded",
                )
                .with_hint(format!("Expressions and subqueries may nest {MAX_DEPTH} levels."));
            }
            ParserError::TokenizerError(m) | ParserError::ParserError(m) => m,
        };
        let (body, at) = split_location(&text);
        let at = at.unwrap_or_else(|| self.inner.get_current_token().span.start);
        let at_end = at.line == 0 || self.source.byte(at) >= self.source.sql.trim_end().len();
        let error = if at_end {
            SqlError::new(SqlState::SYNTAX_ERROR, "syntax error at end of input")
                .with_position(self.source.length as u32 + 1)
        } else {
            let near = self.token_text(at);
            SqlError::new(SqlState::SYNTAX_ERROR, format!("syntax error at or near \"{near}\""))
                .with_position(self.source.chars_before(at) as u32 + 1)
        };
        match body.strip_prefix("Expected: ").and_then(|b| b.split_once(", found:")) {
            Some((expected, _)) => error.with_hint(format!("Expected {}.", expected.trim())),
            None if body.is_empty() => error,
            None => error.with_detail(format!("{}.", body.trim_end_matches('.'))),
        }
    }

    /// The source text of the token that starts at a location.
    fn token_text(&self, at: Location) -> String {
        let start = self.source.byte(at);
        let dialect = MillraceDialect::default();
        let rest = &self.source.sql[start..];
        let mut tokens = Vec::new();
        // An error in later text leaves the tokens before it in the buffer.
        let _ = Tokenizer::new(&dialect, rest).tokenize_with_location_into_buf(&mut tokens);
        match tokens.first() {
            Some(t) => Source::new(rest).slice(t.span.start, t.span.end).to_owned(),
            None => rest.chars().take(1).collect(),
        }
    }
}

/// A parser error at a place, in the form that sqlparser gives its own.
pub(crate) fn located(message: &str, at: Location) -> ParserError {
    ParserError::ParserError(format!("{message}{at}"))
}

/// Splits `… at Line: 1, Column: 8`.
fn split_location(text: &str) -> (&str, Option<Location>) {
    let Some((body, place)) = text.rsplit_once(" at Line: ") else { return (text, None) };
    let location = place.split_once(", Column: ").and_then(|(line, column)| {
        Some(Location { line: line.trim().parse().ok()?, column: column.trim().parse().ok()? })
    });
    (body, location)
}

#[cfg(test)]
mod tests;
