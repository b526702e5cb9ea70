//! The words of a text, for what is read beside the parser of statements.

use std::ops::Range;

use sqlparser::dialect::PostgreSqlDialect;
use sqlparser::tokenizer::{Location, Token, TokenWithSpan, Tokenizer};

/// The tokens of a text, without white space and comments; `None`: it has no tokens, which the parser says better.
pub fn tokens(sql: &str) -> Option<Vec<TokenWithSpan>> {
    let mut tokens = Tokenizer::new(&PostgreSqlDialect {}, sql).tokenize_with_location().ok()?;
    tokens.retain(|t| !matches!(t.token, Token::Whitespace(_) | Token::EOF));
    Some(tokens)
}

/// Whether a token is this word, without quotes.
pub fn is_word(token: Option<&TokenWithSpan>, word: &str) -> bool {
    let Some(Token::Word(w)) = token.map(|t| &t.token) else { return false };
    w.quote_style.is_none() && w.value.eq_ignore_ascii_case(word)
}

/// The value of a string literal.
pub fn text_of(token: &Token) -> Option<&str> {
    match token {
        Token::SingleQuotedString(s)
        | Token::EscapedStringLiteral(s)
        | Token::UnicodeStringLiteral(s) => Some(s),
        Token::DollarQuotedString(s) => Some(&s.value),
        _ => None,
    }
}

/// Byte offsets of lines and columns, which count characters from 1.
pub struct Places<'a> {
    pub sql: &'a str,
    lines: Vec<usize>,
    /// Each character is a byte: then a place far along a line need not be counted to.
    ascii: bool,
}

impl<'a> Places<'a> {
    pub fn new(sql: &'a str) -> Places<'a> {
        let after = sql.bytes().enumerate().filter(|(_, b)| *b == b'\n').map(|(i, _)| i + 1);
        let lines = std::iter::once(0).chain(after).collect();
        Places { sql, lines, ascii: sql.is_ascii() }
    }

    pub fn byte(&self, at: Location) -> usize {
        let line = usize::try_from(at.line).ok().and_then(|l| l.checked_sub(1));
        let Some(&start) = line.and_then(|l| self.lines.get(l)) else { return self.sql.len() };
        let skip = usize::try_from(at.column).unwrap_or(usize::MAX).saturating_sub(1);
        if self.ascii {
            return start.saturating_add(skip).min(self.sql.len());
        }
        let rest = &self.sql[start..];
        rest.char_indices().nth(skip).map_or(self.sql.len(), |(i, _)| start + i)
    }

    /// The bytes of a token.
    pub fn range(&self, token: &TokenWithSpan) -> Range<usize> {
        let start = self.byte(token.span.start);
        start..self.byte(token.span.end).max(start)
    }

    /// Characters before a byte.
    pub fn characters(&self, byte: usize) -> usize {
        if self.ascii {
            return byte;
        }
        self.sql[..byte].chars().count()
    }
}
