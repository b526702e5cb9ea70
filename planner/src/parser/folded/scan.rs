//! Where in a text long lists of literals are.
//!
//! The text is read by its bytes once, before it is words. What is not certain is no list: then the parser reads it.

use super::{Fold, Kind};

/// Texts of fewer bytes have no list that is worth it.
const SHORT: usize = 2_048;
/// The items of a list, or the rows of an INSERT, from which on they are kept as text.
const LONG: usize = 128;
/// Bytes before VALUES that are looked at.
const HEAD: usize = 8_192;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Literal {
    Null,
    Boolean(bool),
    Integer,
    /// Of another form, which not every type reads.
    Number,
    Text,
}

fn is_word(b: u8) -> bool {
    b.is_ascii_alphanumeric() || b == b'_' || b == b'$' || b >= 0x80
}

fn blanks(text: &[u8], mut at: usize) -> usize {
    while text.get(at).is_some_and(|b| matches!(b, b' ' | b'\t' | b'\n' | b'\r')) {
        at += 1;
    }
    at
}

/// The literal that begins at a place, and where it ends.
pub(super) fn literal(text: &[u8], at: usize) -> Option<(Literal, usize)> {
    let first = *text.get(at)?;
    let (kind, end) = match first {
        b'\'' => {
            let mut end = at + 1;
            loop {
                end += 1 + text.get(end..)?.iter().position(|b| *b == b'\'')?;
                match text.get(end) {
                    Some(b'\'') => end += 1,
                    _ => break (Literal::Text, end),
                }
            }
        }
        b'-' | b'0'..=b'9' => number(text, at)?,
        _ => {
            let length = text[at..].iter().position(|b| !is_word(*b)).unwrap_or(text.len() - at);
            let word = &text[at..at + length];
            let kind = match word {
                w if w.eq_ignore_ascii_case(b"null") => Literal::Null,
                w if w.eq_ignore_ascii_case(b"true") => Literal::Boolean(true),
                w if w.eq_ignore_ascii_case(b"false") => Literal::Boolean(false),
                _ => return None,
            };
            (kind, at + length)
        }
    };
    match text.get(end) {
        Some(b'.') => None,
        Some(b) if is_word(*b) => None,
        _ => Some((kind, end)),
    }
}

/// Digits, of a bigint at most, or digits with a point among them.
fn number(text: &[u8], at: usize) -> Option<(Literal, usize)> {
    let digits = |from: usize| {
        let rest = text.get(from..).unwrap_or_default();
        rest.iter().position(|b| !b.is_ascii_digit()).unwrap_or(rest.len())
    };
    let start = at + usize::from(text[at] == b'-');
    let whole = digits(start);
    if whole == 0 {
        return None;
    }
    let end = start + whole;
    if text.get(end) == Some(&b'.') && digits(end + 1) > 0 {
        return Some((Literal::Number, end + 1 + digits(end + 1)));
    }
    Some((if whole <= 18 { Literal::Integer } else { Literal::Number }, end))
}

/// Where the next literal of a list begins, behind the end of one.
pub(super) fn separator(raw: &str, end: usize) -> usize {
    let between = |b: &u8| matches!(b, b' ' | b'\t' | b'\n' | b'\r' | b',' | b'(' | b')');
    let rest = raw.as_bytes().get(end..).unwrap_or_default();
    end + rest.iter().position(|b| !between(b)).unwrap_or(rest.len())
}

/// The list that begins behind an opening parenthesis, with the place of its closing one.
fn list(text: &[u8], open: usize) -> Option<(Fold, usize)> {
    let start = blanks(text, open + 1);
    let (mut at, mut count, mut kind) = (start, 0, None);
    loop {
        let (literal, end) = literal(text, at)?;
        let this = match literal {
            Literal::Integer => Some(Kind::Integers),
            Literal::Text => Some(Kind::Strings),
            Literal::Null => kind,
            Literal::Boolean(_) | Literal::Number => return None,
        };
        // The first one tells what they are.
        if this.is_none() || kind.is_some_and(|k| Some(k) != this) {
            return None;
        }
        (kind, count) = (this, count + 1);
        let next = blanks(text, end);
        match text.get(next)? {
            b',' => at = blanks(text, next + 1),
            b')' if count >= LONG => {
                return Some((Fold { range: start..end, kind: kind?, count }, next));
            }
            _ => return None,
        }
    }
}

/// The values of one row and the place of its closing parenthesis.
fn row(text: &[u8], open: usize) -> Option<(usize, usize, usize)> {
    let (mut at, mut width) = (blanks(text, open + 1), 0);
    loop {
        let (_, end) = literal(text, at)?;
        width += 1;
        let next = blanks(text, end);
        match text.get(next)? {
            b',' => at = blanks(text, next + 1),
            b')' => return Some((width, end, next)),
            _ => return None,
        }
    }
}

/// The rows that begin at an opening parenthesis, with the place of the last closing one.
fn rows(text: &[u8], open: usize) -> Option<(Fold, usize)> {
    let start = blanks(text, open + 1);
    let (width, mut end, mut close) = row(text, open)?;
    let mut count = 1;
    loop {
        let next = blanks(text, close + 1);
        if text.get(next) != Some(&b',') {
            let ends = match text.get(next) {
                None | Some(b';') => true,
                Some(_) => {
                    let rest = &text[next..];
                    let word = rest.iter().position(|b| !is_word(*b)).unwrap_or(rest.len());
                    let is = |w: &str| rest[..word].eq_ignore_ascii_case(w.as_bytes());
                    is("returning") || is("on")
                }
            };
            let fold = Fold { range: start..end, kind: Kind::Rows(width), count };
            return (ends && count >= LONG).then_some((fold, close));
        }
        let open = blanks(text, next + 1);
        if text.get(open) != Some(&b'(') {
            return None;
        }
        let (same, last, closed) = row(text, open)?;
        if same != width {
            return None;
        }
        (end, close, count) = (last, closed, count + 1);
    }
}

/// Whether a text is `INSERT INTO name (columns)` and nothing else.
fn begins_insert(text: &[u8]) -> bool {
    let plain = |b: &u8| is_word(*b) || matches!(b, b'.' | b'"' | b',' | b'(' | b')');
    if !text.iter().all(|b| plain(b) || b.is_ascii_whitespace()) {
        return false;
    }
    let mut words = text.split(|b| !is_word(*b) && *b != b'"').filter(|w| !w.is_empty());
    let mut next_is = |word: &[u8]| words.next().is_some_and(|w| w.eq_ignore_ascii_case(word));
    let clauses: [&[u8]; 5] = [b"select", b"with", b"from", b"default", b"table"];
    next_is(b"insert")
        && next_is(b"into")
        && text.iter().filter(|b| **b == b'(').count() <= 1
        && !words.any(|w| clauses.iter().any(|c| w.eq_ignore_ascii_case(c)))
}

/// The end of what is quoted or a comment, where one begins.
fn skipped(text: &[u8], at: usize) -> Option<usize> {
    let find = |from: usize, what: &[u8]| {
        let rest = text.get(from..).unwrap_or_default();
        let found = rest.windows(what.len()).position(|w| w == what);
        found.map_or(text.len(), |i| from + i + what.len())
    };
    match (text[at], text.get(at + 1)) {
        (b'\'', _) => {
            let escapes =
                at > 0 && matches!(text[at - 1], b'e' | b'E') && !(at > 1 && is_word(text[at - 2]));
            let mut end = at + 1;
            while let Some(b) = text.get(end) {
                match b {
                    b'\\' if escapes => end += 2,
                    b'\'' => return Some(end + 1),
                    _ => end += 1,
                }
            }
            Some(text.len())
        }
        (b'"', _) => Some(find(at + 1, b"\"")),
        (b'-', Some(b'-')) => Some(find(at + 2, b"\n")),
        (b'/', Some(b'*')) => {
            let (mut depth, mut end) = (1, at + 2);
            while depth > 0 && end < text.len() {
                match (text[end], text.get(end + 1)) {
                    (b'*', Some(b'/')) => (depth, end) = (depth - 1, end + 2),
                    (b'/', Some(b'*')) => (depth, end) = (depth + 1, end + 2),
                    _ => end += 1,
                }
            }
            Some(end)
        }
        (b'$', _) => {
            let tag = text[at + 1..].iter().position(|b| !is_word(*b) || *b == b'$')?;
            let close = at + 1 + tag;
            (text.get(close) == Some(&b'$') && !text[at + 1..].first()?.is_ascii_digit())
                .then(|| find(close + 1, &text[at..=close]))
        }
        _ => None,
    }
}

/// The lists of a text, in their order.
pub(in crate::parser) fn scan(sql: &str) -> Vec<Fold> {
    let (text, mut folds) = (sql.as_bytes(), Vec::new());
    if text.len() < SHORT || text.contains(&0) {
        return folds;
    }
    let (mut at, mut statement) = (0, 0);
    while at < text.len() {
        if let Some(end) = skipped(text, at) {
            at = end;
            continue;
        }
        if text[at] == b';' {
            statement = at + 1;
        }
        if !is_word(text[at]) {
            at += 1;
            continue;
        }
        let length = text[at..].iter().position(|b| !is_word(*b)).unwrap_or(text.len() - at);
        let (word, end) = (&text[at..at + length], at + length);
        let open = blanks(text, end);
        let found = match text.get(open) {
            Some(b'(') if word.eq_ignore_ascii_case(b"in") => list(text, open),
            Some(b'(')
                if word.eq_ignore_ascii_case(b"values")
                    && at - statement <= HEAD
                    && begins_insert(&text[statement..at]) =>
            {
                rows(text, open)
            }
            _ => None,
        };
        at = end;
        if let Some((fold, close)) = found {
            folds.push(fold);
            at = close;
        }
    }
    folds
}

/// How many words a text has at most, with what is between them.
pub(in crate::parser) fn words_at_most(sql: &str) -> usize {
    let text = sql.as_bytes();
    let (mut at, mut words) = (0, 1);
    while at < text.len() {
        at = match skipped(text, at) {
            Some(end) => end,
            // A number may be parted from letters behind it.
            None if is_word(text[at]) => {
                let digit = |b: u8| b.is_ascii_digit();
                let same = |b: &u8| is_word(*b) && digit(*b) == digit(text[at]);
                at + text[at..].iter().take_while(|b| same(b)).count()
            }
            None => at + 1,
        };
        words += 1;
    }
    words
}
