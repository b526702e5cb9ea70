//! The words of any text at all: what begins and is not closed goes to the end.

use std::ops::Range;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A word or a number.
    Plain,
    /// A name in double quotes.
    Quoted,
    /// A string, with its quotes.
    Text,
    /// One character of another kind.
    Sign,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Word {
    pub kind: Kind,
    pub range: Range<usize>,
}

/// Its words, without white space and comments.
pub fn words(text: &str) -> Vec<Word> {
    let bytes = text.as_bytes();
    let mut words: Vec<Word> = Vec::new();
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        let rest = &bytes[at..];
        let (kind, length) = match byte {
            b if b.is_ascii_whitespace() => (None, 1),
            b'-' if rest.starts_with(b"--") => (None, line(rest)),
            b'/' if rest.starts_with(b"/*") => (None, comment(rest)),
            b'\'' => (Some(Kind::Text), quoted(rest, b'\'', escapes(bytes, at))),
            b'"' => (Some(Kind::Quoted), quoted(rest, b'"', false)),
            b'$' => match dollar_quoted(rest) {
                Some(length) => (Some(Kind::Text), length),
                None => (Some(Kind::Sign), 1),
            },
            b if is_part(b) => {
                (Some(Kind::Plain), rest.iter().take_while(|b| is_part(**b)).count())
            }
            _ => (Some(Kind::Sign), 1),
        };
        if let Some(kind) = kind {
            words.push(Word { kind, range: at..at + length });
        }
        at += length;
    }
    words
}

/// Bytes of characters that are not ASCII belong to words: so no word begins or ends within one.
fn is_part(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || !byte.is_ascii()
}

fn line(rest: &[u8]) -> usize {
    rest.iter().position(|b| *b == b'\n').unwrap_or(rest.len())
}

/// Comments are nested.
fn comment(rest: &[u8]) -> usize {
    let (mut at, mut depth) = (0, 0_usize);
    while at < rest.len() {
        match &rest[at..] {
            [b'/', b'*', ..] => {
                depth += 1;
                at += 2;
            }
            [b'*', b'/', ..] => {
                depth -= 1;
                at += 2;
                if depth == 0 {
                    return at;
                }
            }
            _ => at += 1,
        }
    }
    rest.len()
}

/// Whether backslashes escape in the string that begins here: `E'…'`.
fn escapes(bytes: &[u8], at: usize) -> bool {
    let before = |n: usize| at.checked_sub(n).and_then(|i| bytes.get(i));
    matches!(before(1), Some(b'e' | b'E')) && !before(2).is_some_and(|b| is_part(*b))
}

/// A quote is doubled within.
fn quoted(rest: &[u8], quote: u8, escapes: bool) -> usize {
    let mut at = 1;
    while at < rest.len() {
        match &rest[at..] {
            [b'\\', _, ..] if escapes => at += 2,
            [first, second, ..] if *first == quote && *second == quote => at += 2,
            [first, ..] if *first == quote => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// `$tag$…$tag$`; `None`: it is something else, a parameter say.
fn dollar_quoted(rest: &[u8]) -> Option<usize> {
    let name = rest[1..].iter().take_while(|b| is_part(**b)).count();
    let begins_well = !rest.get(1).is_some_and(u8::is_ascii_digit);
    if !begins_well || rest.get(1 + name) != Some(&b'$') {
        return None;
    }
    let tag = &rest[..name + 2];
    let body = &rest[tag.len()..];
    let end = body.windows(tag.len()).position(|window| window == tag);
    Some(end.map_or(rest.len(), |end| tag.len() + end + tag.len()))
}
