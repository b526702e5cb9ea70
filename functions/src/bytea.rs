//! Functions of the bits of a `bytea`, of escapes and of the parts of names; `overlay`.

use millrace_common::types::Element;
use millrace_common::{SqlError, SqlState, SqlType as T};

use super::call::{Args, Def, Out, over};

fn invalid(message: impl Into<String>) -> SqlError {
    SqlError::new(SqlState::INVALID_PARAMETER_VALUE, message)
}

/// The byte and the bit of a bit's number, which counts from each byte's lowest bit.
fn bit_place(a: &Args) -> Result<(usize, u32), SqlError> {
    let (n, bits) = (a.big(1), a.bytes(0).len() as i64 * 8);
    match (0..bits).contains(&n) {
        true => Ok(((n / 8) as usize, (n % 8) as u32)),
        false => Err(SqlError::new(
            SqlState("2202E"),
            format!("index {n} out of valid range, 0..{}", bits - 1),
        )),
    }
}

fn get_bit(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let (byte, bit) = bit_place(a)?;
    out.int(i32::from(a.bytes(0)[byte] >> bit & 1))
}

fn set_bit(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let (byte, bit) = bit_place(a)?;
    let mut bytes = a.bytes(0).to_vec();
    match a.int(2) {
        0 => bytes[byte] &= !(1u8 << bit),
        1 => bytes[byte] |= 1u8 << bit,
        _ => return Err(invalid("new bit must be 0 or 1")),
    }
    out.bytes(&bytes)
}

fn bad_escape() -> SqlError {
    SqlError::new(SqlState::SYNTAX_ERROR, "invalid Unicode escape")
        .with_hint("Unicode escapes must be \\XXXX, \\+XXXXXX, \\uXXXX, or \\UXXXXXXXX.")
}

/// The digits of an escape after its backslash, and how long it is.
fn escape_digits(rest: &str) -> Option<(&str, usize)> {
    let (skip, digits) = match rest.as_bytes().first()? {
        b'+' => (1, 6),
        b'u' => (1, 4),
        b'U' => (1, 8),
        _ => (0, 4),
    };
    let text = rest.get(skip..skip + digits)?;
    text.bytes().all(|b| b.is_ascii_hexdigit()).then_some((text, skip + digits))
}

/// `unistr`: text with escapes of code points, also as pairs of surrogates.
fn unistr(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let bad_pair = || SqlError::new(SqlState::SYNTAX_ERROR, "invalid Unicode surrogate pair");
    let mut rest = a.text(0);
    let mut text = String::with_capacity(rest.len());
    let mut high: Option<u32> = None;
    while let Some(c) = rest.chars().next() {
        let after = &rest[c.len_utf8()..];
        if c != '\\' || after.starts_with('\\') {
            if high.is_some() {
                return Err(bad_pair());
            }
            text.push(c);
            rest = if c == '\\' { &after[1..] } else { after };
            continue;
        }
        let (digits, length) = escape_digits(after).ok_or_else(bad_escape)?;
        let code = u32::from_str_radix(digits, 16).map_err(|_| bad_escape())?;
        let code = match (high.take(), code) {
            (None, 0xd800..=0xdbff) => {
                high = Some(code);
                None
            }
            (None, 0xdc00..=0xdfff) => return Err(bad_pair()),
            (None, code) => Some(code),
            (Some(high), 0xdc00..=0xdfff) => {
                Some(0x1_0000 + ((high - 0xd800) << 10) + (code - 0xdc00))
            }
            (Some(_), _) => return Err(bad_pair()),
        };
        if let Some(code) = code {
            let char = char::from_u32(code).filter(|c| *c != '\0');
            text.push(char.ok_or_else(|| {
                let message = format!("invalid Unicode code point: {code:04X}");
                SqlError::new(SqlState::SYNTAX_ERROR, message)
            })?);
        }
        rest = &after[length..];
    }
    match high {
        None => out.text(&text),
        Some(_) => Err(bad_pair()),
    }
}

fn is_space(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\r' | '\u{b}' | '\u{c}')
}

/// The identifier that a name begins with, as it is meant, and the rest; `None`: there is none.
fn first_ident<'a>(
    text: &'a str,
    refused: &dyn Fn(&str) -> SqlError,
) -> Result<Option<(String, &'a str)>, SqlError> {
    let Some(quoted) = text.strip_prefix('"') else {
        let letter = |c: char| c == '_' || !c.is_ascii() || c.is_ascii_alphabetic();
        let inside = |c: char| letter(c) || c == '$' || c.is_ascii_digit();
        if !text.starts_with(letter) {
            return Ok(None);
        }
        let end = text.find(|c: char| !inside(c)).unwrap_or(text.len());
        return Ok(Some((text[..end].to_ascii_lowercase(), &text[end..])));
    };
    let (mut ident, mut rest) = (String::new(), quoted);
    loop {
        let Some(at) = rest.find('"') else {
            return Err(refused("String has unclosed double quotes."));
        };
        ident.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        match rest.strip_prefix('"') {
            Some(more) => {
                ident.push('"');
                rest = more;
            }
            None if ident.is_empty() => {
                return Err(refused("Quoted identifier must not be empty."));
            }
            None => return Ok(Some((ident, rest))),
        }
    }
}

/// `parse_ident`: the parts of a qualified name. Not strictly: whatever follows the name is let be.
fn parse_ident(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let (text, strict) = (a.text(0), a.len() < 2 || a.boolean(1));
    let bad = || invalid(format!("string is not a valid identifier: \"{text}\""));
    let refused = |detail: &str| bad().with_detail(detail);
    let mut rest = text.trim_start_matches(is_space);
    let mut parts: Vec<String> = Vec::new();
    loop {
        let Some((part, after)) = first_ident(rest, &refused)? else {
            return Err(match (rest.starts_with('.'), parts.is_empty()) {
                (true, _) => refused("No valid identifier before \".\"."),
                (false, false) => refused("No valid identifier after \".\"."),
                (false, true) => bad(),
            });
        };
        parts.push(part);
        rest = after.trim_start_matches(is_space);
        match rest.strip_prefix('.') {
            Some(more) => rest = more.trim_start_matches(is_space),
            None if strict && !rest.is_empty() => return Err(bad()),
            None => return out.texts(parts.iter().map(|p| Some(p.as_str()))),
        }
    }
}

/// Where `overlay` cuts: so many elements before, and from which on after.
fn cuts(a: &Args, placed: usize) -> Result<(usize, usize), SqlError> {
    let from = usize::try_from(a.int(2))
        .ok()
        .filter(|n| *n > 0)
        .ok_or_else(|| SqlError::new(SqlState("22011"), "negative substring length not allowed"))?;
    let count = if a.len() > 3 { i64::from(a.int(3)) } else { placed as i64 };
    let after = (from as i64).saturating_add(count) - 1;
    Ok((from - 1, usize::try_from(after).unwrap_or(0)))
}

fn overlay(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let (text, placed) = (a.text(0), a.text(1));
    let (before, after) = cuts(a, placed.chars().count())?;
    let at = |n: usize| text.char_indices().nth(n).map_or(text.len(), |(i, _)| i);
    out.text(&[&text[..at(before)], placed, &text[at(after)..]].concat())
}

fn overlay_bytes(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let (bytes, placed) = (a.bytes(0), a.bytes(1));
    let (before, after) = cuts(a, placed.len())?;
    let (before, after) = (before.min(bytes.len()), after.min(bytes.len()));
    out.bytes(&[&bytes[..before], placed, &bytes[after..]].concat())
}

pub fn defs() -> Vec<Def> {
    const NAMES: T = T::Array(Element::Text);
    vec![
        Def::new("get_bit", &[over(&[T::Bytea, T::BigInt], T::Int, get_bit)]),
        Def::new("set_bit", &[over(&[T::Bytea, T::BigInt, T::Int], T::Bytea, set_bit)]),
        Def::new(
            "bit_count",
            &[over(&[T::Bytea], T::BigInt, |a, out| {
                out.big(a.bytes(0).iter().map(|b| i64::from(b.count_ones())).sum())
            })],
        ),
        Def::new(
            "overlay",
            &[
                over(&[T::Text, T::Text, T::Int], T::Text, overlay),
                over(&[T::Text, T::Text, T::Int, T::Int], T::Text, overlay),
                over(&[T::Bytea, T::Bytea, T::Int], T::Bytea, overlay_bytes),
                over(&[T::Bytea, T::Bytea, T::Int, T::Int], T::Bytea, overlay_bytes),
            ],
        ),
        // There is no encoding but UTF8, of which PostgreSQL refuses it too.
        Def::absent("to_ascii"),
        Def::new("unistr", &[over(&[T::Text], T::Text, unistr)]),
        Def::new(
            "parse_ident",
            &[
                over(&[T::Text], NAMES, parse_ident),
                over(&[T::Text, T::Boolean], NAMES, parse_ident),
            ],
        ),
    ]
}

#[cfg(test)]
mod tests {
    use crate::testing::check;

    #[test]
    fn bits_count_from_each_byte_s_lowest() {
        check(&[
            ("get_bit('\\x1234567890'::bytea, 30)", "1"),
            ("get_bit('\\x01'::bytea, 0)", "1"),
            ("get_bit('\\x80'::bytea, 7)", "1"),
            ("get_bit('\\x80'::bytea, 8)", "error 2202E"),
            ("get_bit('\\x80'::bytea, -1)", "error 2202E"),
            ("set_bit('\\x1234567890'::bytea, 30, 0)", "\\x1234563890"),
            ("set_bit('\\x00'::bytea, 3, 1)", "\\x08"),
            ("set_bit('\\x00'::bytea, 3, 2)", "error 22023"),
            ("set_bit('\\x00'::bytea, 8, 1)", "error 2202E"),
            ("bit_count('\\x1234567890'::bytea)", "15"),
            ("bit_count('\\x'::bytea)", "0"),
            ("bit_count(NULL::bytea)", "NULL"),
        ]);
    }

    #[test]
    fn overlays() {
        check(&[
            ("overlay('Txxxxas'::text, 'hom'::text, 2, 4)", "Thomas"),
            ("overlay('größe'::text, 'o', 3)", "große"),
            ("overlay('abc'::text, 'XYZ', 2)", "aXYZ"),
            ("overlay('abc'::text, 'X', 3, 0)", "abXc"),
            ("overlay('abc'::text, 'X', 0)", "error 22011"),
            ("overlay('abc'::text, 'X', 10)", "abcX"),
            ("overlay('abc'::text, 'X', 2, -1)", "aXabc"),
            ("overlay('\\x1234567890'::bytea, '\\x0203'::bytea, 2, 3)", "\\x12020390"),
            ("overlay('\\x12'::bytea, '\\x02'::bytea, 0)", "error 22011"),
        ]);
    }

    #[test]
    fn escapes_of_code_points() {
        check(&[
            ("unistr('d\\0061t\\+000061')", "data"),
            ("unistr('\\u0061\\U00000062')", "ab"),
            ("unistr('\\D83E\\DD80')", "🦀"),
            ("unistr('a\\\\b')", "a\\b"),
            ("unistr('\\D83E')", "error 42601"),
            ("unistr('\\00')", "error 42601"),
            ("unistr('ö')", "ö"),
        ]);
    }

    #[test]
    fn parts_of_names() {
        check(&[
            ("parse_ident('\"SomeSchema\".someTable')", "{SomeSchema,sometable}"),
            ("parse_ident('a.\"b\"\"c\".D')", "{a,\"b\\\"c\",d}"),
            ("parse_ident('a.b.')", "error 22023"),
            ("parse_ident('1a')", "error 22023"),
            ("parse_ident('foo boo[]')", "error 22023"),
            ("parse_ident('foo[]', false)", "{foo}"),
            ("parse_ident('')", "error 22023"),
            ("parse_ident('\"\"')", "error 22023"),
            ("to_ascii('a'::text)", "error 0A000"),
        ]);
    }
}
