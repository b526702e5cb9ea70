//! The directions of FETCH and MOVE that the parser of statements does not know: backward, absolute and relative.

use std::ops::Range;

use sqlparser::ast::{FetchDirection, Value, ValueWithSpan};
use sqlparser::tokenizer::{Token, TokenWithSpan};

use crate::word_reader::is_word;

/// Which of a statement's tokens say its direction, and what they say. `None`: no FETCH or MOVE, or one whose
/// direction the parser knows.
pub fn find(tokens: &[TokenWithSpan]) -> Option<(Range<usize>, FetchDirection)> {
    if !is_word(tokens.first(), "FETCH") && !is_word(tokens.first(), "MOVE") {
        return None;
    }
    let is = |word: &str| is_word(tokens.get(1), word);
    let number = |at: usize| signed(tokens.get(at..)?);
    let has_sign =
        |at: usize| matches!(tokens.get(at).map(|t| &t.token), Some(Token::Minus | Token::Plus));
    let (direction, end) = if has_sign(1) {
        let (limit, words) = number(1)?;
        (FetchDirection::Count { limit }, 1 + words)
    } else if is("FORWARD") && has_sign(2) {
        let (limit, words) = number(2)?;
        (FetchDirection::Forward { limit: Some(limit) }, 2 + words)
    } else if is("PRIOR") {
        (FetchDirection::Prior, 2)
    } else if is("FIRST") {
        (FetchDirection::First, 2)
    } else if is("LAST") {
        (FetchDirection::Last, 2)
    } else if is("ABSOLUTE") {
        let (limit, words) = number(2)?;
        (FetchDirection::Absolute { limit }, 2 + words)
    } else if is("RELATIVE") {
        let (limit, words) = number(2)?;
        (FetchDirection::Relative { limit }, 2 + words)
    } else if is("BACKWARD") && is_word(tokens.get(2), "ALL") {
        (FetchDirection::BackwardAll, 3)
    } else if is("BACKWARD") {
        let (limit, words) = number(2).map_or((None, 0), |(limit, words)| (Some(limit), words));
        (FetchDirection::Backward { limit }, 2 + words)
    } else {
        return None;
    };
    // Where nothing follows, the word is the cursor's name.
    let follows = matches!(tokens.get(end).map(|t| &t.token), Some(Token::Word(_)))
        && !tokens.iter().any(|t| is_word(Some(t), "WITH"));
    follows.then_some((1..end, direction))
}

/// A number with or without a sign, and how many tokens it is.
fn signed(tokens: &[TokenWithSpan]) -> Option<(ValueWithSpan, usize)> {
    let (sign, words) = match &tokens.first()?.token {
        Token::Minus => ("-", 1),
        Token::Plus => ("", 1),
        _ => ("", 0),
    };
    let Token::Number(number, _) = &tokens.get(words)?.token else { return None };
    let value = Value::Number(format!("{sign}{number}"), false);
    Some((value.with_empty_span(), words + 1))
}
