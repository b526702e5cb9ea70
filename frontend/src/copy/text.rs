//! COPY as it is written: where its parts stand in a string of statements, and what its options say.
//!
//! The grammar is PostgreSQL 15's (`CopyStmt`), of which the parser of statements knows a part: from it the option
//! list and WHERE are hidden.

use std::ops::Range;

use millrace_common::{SqlError, SqlState};
use millrace_planner::ParsedStatement;
use sqlparser::ast::Expr;
use sqlparser::tokenizer::{Token, TokenWithSpan};

use crate::word_reader::{Places, is_word, text_of, tokens};

/// The parts of a COPY that the parser of statements does not know; ranges are of bytes.
#[derive(Debug)]
pub struct CopyText {
    /// The word BINARY after COPY.
    pub binary: Option<Range<usize>>,
    /// The word STDIN.
    pub stdin: Option<Range<usize>>,
    /// What follows the target.
    pub tail: Range<usize>,
}

impl CopyText {
    /// Looks at the tokens of a statement; `None`: it is no COPY of ours.
    pub fn find(places: &Places<'_>, tokens: &[TokenWithSpan]) -> Option<CopyText> {
        let target = target_of(tokens)?;
        let end = places.range(tokens.last()?).end;
        let after = tokens.get(target + 1).map_or(end, |t| places.range(t).start);
        let word = |i: usize, word: &str| {
            tokens.get(i).filter(|t| is_word(Some(*t), word)).map(|t| places.range(t))
        };
        Some(CopyText { binary: word(1, "BINARY"), stdin: word(target, "STDIN"), tail: after..end })
    }
}

/// Which of a COPY's tokens is its target.
fn target_of(tokens: &[TokenWithSpan]) -> Option<usize> {
    let is = |i: usize, word: &str| is_word(tokens.get(i), word);
    if !is(0, "COPY") || (tokens.get(1)?.token == Token::LParen && is(2, "SUBSCRIBE")) {
        return None;
    }
    // The direction stands outside all parentheses.
    let mut depth = 0usize;
    let mut direction = None;
    for (i, token) in tokens.iter().enumerate() {
        match token.token {
            Token::LParen => depth += 1,
            Token::RParen => depth = depth.saturating_sub(1),
            _ if depth == 0 && (is(i, "FROM") || is(i, "TO")) => {
                direction = Some(i);
                break;
            }
            _ => {}
        }
    }
    let target = direction? + 1;
    let target = if is(target, "PROGRAM") { target + 1 } else { target };
    let file = text_of(&tokens.get(target)?.token).is_some();
    (file || is(target, "STDIN") || is(target, "STDOUT")).then_some(target)
}

/// The value of an option.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Arg {
    None,
    /// A word, a string or a number.
    Text(String),
    Star,
    List(Vec<String>),
}

/// An option, and where it stands in the string of statements.
#[derive(Debug)]
pub struct Given {
    pub name: String,
    pub arg: Arg,
    pub position: u32,
}

/// What follows a COPY's target.
pub struct Tail {
    pub given: Vec<Given>,
    /// WHERE.
    pub condition: Option<Expr>,
}

impl Tail {
    /// Reads the tail of a statement that is a COPY.
    pub fn read(parsed: &ParsedStatement, to: bool) -> Result<Tail, SqlError> {
        let sql = parsed.text.as_str();
        let tokens = tokens(sql).unwrap_or_default();
        let Some(target) = target_of(&tokens) else {
            return Err(SqlError::unsupported("COPY inside another statement"));
        };
        let binary = is_word(tokens.get(1), "BINARY");
        let places = Places::new(sql);
        let mut words = Words { places, tokens, at: 1, offset: parsed.offset };
        let mut given = Vec::new();
        if binary {
            given.push(words.given("format", Arg::Text("binary".to_owned())));
        }
        words.at = target + 1;
        words.options(&mut given)?;
        let condition = words.condition(to)?;
        Ok(Tail { given, condition })
    }
}

/// A reader of tokens.
struct Words<'a> {
    places: Places<'a>,
    tokens: Vec<TokenWithSpan>,
    at: usize,
    /// Characters of the string of statements before this one.
    offset: usize,
}

impl Words<'_> {
    fn next(&self) -> Option<&Token> {
        self.tokens.get(self.at).map(|t| &t.token)
    }

    fn take(&mut self, token: &Token) -> bool {
        let found = self.next() == Some(token);
        self.at += usize::from(found);
        found
    }

    fn word(&mut self, word: &str) -> bool {
        let found = is_word(self.tokens.get(self.at), word);
        self.at += usize::from(found);
        found
    }

    /// Where the next token begins: its byte in the statement, and its character in the whole string, from 1.
    fn place(&self) -> (usize, u32) {
        let next = self.tokens.get(self.at);
        let byte = next.map_or(self.places.sql.len(), |t| self.places.range(t).start);
        let before = self.offset + self.places.characters(byte);
        (byte, u32::try_from(before).unwrap_or(u32::MAX).saturating_add(1))
    }

    fn given(&self, name: &str, arg: Arg) -> Given {
        Given { name: name.to_owned(), arg, position: self.place().1 }
    }

    fn unexpected(&self) -> SqlError {
        let (_, position) = self.place();
        let message = match self.tokens.get(self.at) {
            Some(t) => {
                let near = &self.places.sql[self.places.range(t)];
                format!("syntax error at or near \"{near}\"")
            }
            None => "syntax error at end of input".to_owned(),
        };
        SqlError::new(SqlState::SYNTAX_ERROR, message).with_position(position)
    }

    fn expect(&mut self, token: &Token) -> Result<(), SqlError> {
        if self.take(token) { Ok(()) } else { Err(self.unexpected()) }
    }

    /// A name, folded.
    fn name(&mut self) -> Result<String, SqlError> {
        let name = match self.next() {
            Some(Token::Word(w)) if w.quote_style.is_some() => w.value.clone(),
            Some(Token::Word(w)) => w.value.to_lowercase(),
            _ => return Err(self.unexpected()),
        };
        self.at += 1;
        Ok(name)
    }

    fn names(&mut self) -> Result<Vec<String>, SqlError> {
        let mut names = vec![self.name()?];
        while self.take(&Token::Comma) {
            names.push(self.name()?);
        }
        Ok(names)
    }

    /// A string literal, after AS or not.
    fn string(&mut self) -> Result<String, SqlError> {
        let _ = self.word("AS");
        let Some(text) = self.next().and_then(text_of).map(str::to_owned) else {
            return Err(self.unexpected());
        };
        self.at += 1;
        Ok(text)
    }

    fn options(&mut self, given: &mut Vec<Given>) -> Result<(), SqlError> {
        let mut delimiters = self.given("delimiter", Arg::None);
        if self.word("DELIMITERS") || (self.word("USING") && self.word("DELIMITERS")) {
            delimiters.arg = Arg::Text(self.string()?);
            given.push(delimiters);
        }
        let _ = self.word("WITH");
        if !self.take(&Token::LParen) {
            while self.next().is_some() && !is_word(self.tokens.get(self.at), "WHERE") {
                let option = self.legacy()?;
                given.push(option);
            }
            return Ok(());
        }
        loop {
            let option = self.generic()?;
            given.push(option);
            if self.take(&Token::RParen) {
                return Ok(());
            }
            self.expect(&Token::Comma)?;
        }
    }

    /// `name [value]`, between parentheses.
    fn generic(&mut self) -> Result<Given, SqlError> {
        let mut given = self.given("", Arg::None);
        given.name = self.name()?;
        given.arg = match self.next() {
            None => return Err(self.unexpected()),
            Some(Token::Comma | Token::RParen) => Arg::None,
            Some(Token::Mul) => {
                self.at += 1;
                Arg::Star
            }
            Some(Token::LParen) => {
                self.at += 1;
                let names = self.names()?;
                self.expect(&Token::RParen)?;
                Arg::List(names)
            }
            Some(_) => Arg::Text(self.value()?),
        };
        Ok(given)
    }

    /// A string, a number or a word.
    fn value(&mut self) -> Result<String, SqlError> {
        let sign = if self.take(&Token::Minus) { "-" } else { "" };
        let value = match self.next() {
            Some(Token::Number(number, _)) => format!("{sign}{number}"),
            Some(token) if sign.is_empty() => match text_of(token) {
                Some(text) => text.to_owned(),
                None => return self.name(),
            },
            _ => return Err(self.unexpected()),
        };
        self.at += 1;
        Ok(value)
    }

    /// An option as it was written before there were parentheses.
    fn legacy(&mut self) -> Result<Given, SqlError> {
        let mut given = self.given("", Arg::None);
        let (name, arg) = if self.word("BINARY") {
            ("format", Arg::Text("binary".to_owned()))
        } else if self.word("CSV") {
            ("format", Arg::Text("csv".to_owned()))
        } else if self.word("FREEZE") {
            ("freeze", Arg::None)
        } else if self.word("HEADER") {
            ("header", Arg::None)
        } else if self.word("DELIMITER") {
            ("delimiter", Arg::Text(self.string()?))
        } else if self.word("NULL") {
            ("null", Arg::Text(self.string()?))
        } else if self.word("QUOTE") {
            ("quote", Arg::Text(self.string()?))
        } else if self.word("ESCAPE") {
            ("escape", Arg::Text(self.string()?))
        } else if self.word("ENCODING") {
            ("encoding", Arg::Text(self.string()?))
        } else if self.word("FORCE") {
            self.forced()?
        } else {
            return Err(self.unexpected());
        };
        given.name = name.to_owned();
        given.arg = arg;
        Ok(given)
    }

    /// After FORCE.
    fn forced(&mut self) -> Result<(&'static str, Arg), SqlError> {
        if self.word("QUOTE") {
            if self.take(&Token::Mul) {
                return Ok(("force_quote", Arg::Star));
            }
            return Ok(("force_quote", Arg::List(self.names()?)));
        }
        let name = if self.word("NOT") { "force_not_null" } else { "force_null" };
        if !self.word("NULL") {
            return Err(self.unexpected());
        }
        Ok((name, Arg::List(self.names()?)))
    }

    /// WHERE and what is after it, which is the rest.
    fn condition(&mut self, to: bool) -> Result<Option<Expr>, SqlError> {
        let (_, position) = self.place();
        if self.next().is_none() {
            return Ok(None);
        }
        if !self.word("WHERE") {
            return Err(self.unexpected());
        }
        if to {
            let message = "WHERE clause not allowed with COPY TO";
            return Err(SqlError::new(SqlState::SYNTAX_ERROR, message).with_position(position));
        }
        if self.next().is_none() {
            return Err(self.unexpected());
        }
        let (start, first) = self.place();
        let shifted = |mut e: SqlError| {
            e.position = e.position.map(|p| p.saturating_add(first - 1));
            e
        };
        let expr = &self.places.sql[start..];
        millrace_planner::parser::parse_expr(expr).map(Some).map_err(shifted)
    }
}
