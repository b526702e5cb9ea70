//! How long chains of operators may be.
//!
//! `1 + 1 + 1 …`, `a AND b AND c …` and `q UNION r UNION s …` are as deep as they are long, and every later
//! pass goes down to the first of them on the stack, and looks at all that is below at every step. The
//! parser itself does not, so chains are counted in the text's words before it runs. What is nested by
//! parentheses the parser bounds.

use millrace_common::{SqlError, SqlState};
use sqlparser::tokenizer::{Token, TokenWithSpan};

use super::Source;

/// Operators of one expression, without AND and OR.
const OPERATORS: usize = 128;
/// AND and OR.
const CONDITIONS: usize = 1_024;
/// Queries of a UNION and its like, or of a WITH; joins of a FROM.
const QUERIES: usize = 256;

/// Words that begin an expression or a list of them.
const BOUNDARIES: [&str; 19] = [
    "SELECT",
    "FROM",
    "WHERE",
    "HAVING",
    "GROUP",
    "ORDER",
    "ON",
    "USING",
    "WHEN",
    "THEN",
    "ELSE",
    "END",
    "VALUES",
    "SET",
    "RETURNING",
    "LIMIT",
    "OFFSET",
    "FILTER",
    "QUALIFY",
];
const SET_OPERATIONS: [&str; 3] = ["UNION", "INTERSECT", "EXCEPT"];
const WORD_OPERATORS: [&str; 9] =
    ["IS", "NOT", "LIKE", "ILIKE", "SIMILAR", "BETWEEN", "IN", "COLLATE", "AT"];

#[derive(Default, Clone, Copy)]
struct Counts {
    operators: usize,
    conditions: usize,
    queries: usize,
    joins: usize,
}

/// Refuses a text with longer chains: 54001, at the word that is one too many.
pub fn check(tokens: &[TokenWithSpan], source: &Source<'_>) -> Result<(), SqlError> {
    let mut outer: Vec<Counts> = Vec::new();
    let mut here = Counts::default();
    // WITH … AS (…): each may read the one before.
    let mut after_as = false;
    for token in tokens.iter().filter(|t| !matches!(t.token, Token::Whitespace(_))) {
        here.queries += usize::from(after_as && token.token == Token::LParen);
        after_as = matches!(&token.token, Token::Word(w) if w.value.eq_ignore_ascii_case("AS"));
        match &token.token {
            Token::LParen => outer.push(std::mem::take(&mut here)),
            Token::RParen => here = outer.pop().unwrap_or_default(),
            Token::SemiColon => here = Counts::default(),
            Token::Comma => (here.operators, here.conditions) = (0, 0),
            Token::Word(word) if word.quote_style.is_none() => here.word(&word.value),
            Token::Word(_)
            | Token::Number(_, _)
            | Token::SingleQuotedString(_)
            | Token::Period
            | Token::RBracket
            | Token::EOF => {}
            _ => here.operators += 1,
        }
        if let Some((what, most)) = here.excess() {
            let error =
                SqlError::new(SqlState::STATEMENT_TOO_COMPLEX, "stack depth limit exceeded")
                    .with_hint(format!("A chain may have {most} {what}; parentheses part it."));
            return Err(error.with_position(source.chars_before(token.span.start) as u32 + 1));
        }
    }
    Ok(())
}

impl Counts {
    fn word(&mut self, word: &str) {
        let is = |other: &str| word.eq_ignore_ascii_case(other);
        if ["AND", "OR"].iter().copied().any(is) {
            self.operators = 0;
            self.conditions += 1;
        } else if SET_OPERATIONS.iter().copied().any(is) {
            *self = Counts { queries: self.queries + 1, ..Counts::default() };
        } else if is("JOIN") {
            self.joins += 1;
        } else if BOUNDARIES.iter().copied().any(is) {
            (self.operators, self.conditions) = (0, 0);
        } else if WORD_OPERATORS.iter().copied().any(is) {
            self.operators += 1;
        }
    }

    fn excess(&self) -> Option<(&'static str, usize)> {
        [
            (self.operators, "operators", OPERATORS),
            (self.conditions, "conditions", CONDITIONS),
            (self.queries, "queries", QUERIES),
            (self.joins, "joins", QUERIES),
        ]
        .into_iter()
        .find_map(|(count, what, most)| (count > most).then_some((what, most)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parser::parse;

    #[test]
    fn long_chains_are_refused_and_long_lists_are_not() {
        let refused = |sql: &str| {
            let error = parse(sql).expect_err("too long a chain");
            assert_eq!(error.state, SqlState::STATEMENT_TOO_COMPLEX, "{}", error.message);
            assert!(error.position.is_some());
        };
        refused(&format!("SELECT 1{}", " + 1".repeat(2_000)));
        refused(&format!("SELECT 1{}", "::int".repeat(5_000)));
        refused(&format!("SELECT 1{}", " IS NULL".repeat(5_000)));
        refused(&format!("SELECT {} true", "NOT ".repeat(5_000)));
        refused(&format!("SELECT 1 WHERE true{}", " AND true".repeat(20_000)));
        refused(&format!("SELECT (SELECT 1 WHERE 1 = 1{})", " OR 1 = 2".repeat(20_000)));
        refused(&format!("SELECT 1{}", " UNION ALL SELECT 1".repeat(5_000)));
        refused(&format!("SELECT 1 FROM a{}", " JOIN b ON true".repeat(5_000)));
        refused(&format!("WITH a AS (SELECT 1){} SELECT 1", ", b AS (SELECT 2)".repeat(1_000)));
        let accepted = |sql: &str| assert!(parse(sql).is_ok(), "{}", &sql[..40]);
        accepted(&format!("SELECT 1{}", " + 1".repeat(100)));
        accepted(&format!("SELECT 1{}", ", 1 + 1".repeat(5_000)));
        accepted(&format!("INSERT INTO t VALUES (-1){}", ", (-1)".repeat(20_000)));
        accepted(&format!("SELECT 1 WHERE a = 1{}", " OR a = 1 AND b = 2".repeat(400)));
        accepted(&"SELECT 1 + 1;".repeat(1_000));
    }

    /// An argument is read once, not once more to see whether it is named, at every level.
    #[test]
    fn nested_calls_are_parsed_in_time() {
        let nested = |f: &str, n: usize| format!("SELECT {}1{}", f.repeat(n), ")".repeat(n));
        assert!(parse(&nested("abs(", 50)).is_ok());
        assert!(parse(&nested("coalesce(a => ", 20)).is_ok());
    }
}
