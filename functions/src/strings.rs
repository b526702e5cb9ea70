//! PostgreSQL's functions of text and bytes.

use std::fmt::Write;

use millrace_common::{SqlError, SqlState, SqlType as T};

use super::call::{Args, Def, Out, Overload, over};

fn invalid(message: impl Into<String>) -> SqlError {
    SqlError::new(SqlState::INVALID_PARAMETER_VALUE, message)
}

/// `substring` by positions from 1: the part of [from, from + count) that exists.
fn window(from: i32, count: Option<i32>) -> Result<(usize, usize), SqlError> {
    let from = i64::from(from);
    let end = match count {
        Some(n) if n < 0 => {
            return Err(SqlError::new(SqlState("22011"), "negative substring length not allowed"));
        }
        Some(n) => from + i64::from(n),
        None => i64::MAX,
    };
    let start = from.max(1);
    Ok(((start - 1) as usize, (end - start).max(0) as usize))
}

fn characters(s: &str, skip: usize, take: usize) -> &str {
    let start = s.char_indices().nth(skip).map_or(s.len(), |(i, _)| i);
    let rest = &s[start..];
    let end = rest.char_indices().nth(take).map_or(rest.len(), |(i, _)| i);
    &rest[..end]
}

fn substring(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let count = (a.len() > 2).then(|| a.int(2));
    let (skip, take) = window(a.int(1), count)?;
    out.text(characters(a.text(0), skip, take))
}

fn substring_bytes(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let count = (a.len() > 2).then(|| a.int(2));
    let (skip, take) = window(a.int(1), count)?;
    let bytes = a.bytes(0);
    let rest = &bytes[skip.min(bytes.len())..];
    out.bytes(&rest[..take.min(rest.len())])
}

fn split_part(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let (text, delimiter, n) = (a.text(0), a.text(1), a.int(2));
    if n == 0 {
        return Err(invalid("field position must not be zero"));
    }
    if delimiter.is_empty() {
        return out.text(if n == 1 || n == -1 { text } else { "" });
    }
    let field = match n > 0 {
        true => text.split(delimiter).nth(n as usize - 1),
        false => text.rsplit(delimiter).nth(n.unsigned_abs() as usize - 1),
    };
    out.text(field.unwrap_or(""))
}

/// Characters that words consist of, for `initcap`.
fn initcap(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let mut result = String::with_capacity(a.text(0).len());
    let mut inside = false;
    for c in a.text(0).chars() {
        match inside {
            true => result.extend(c.to_lowercase()),
            false => result.extend(c.to_uppercase()),
        }
        inside = c.is_alphanumeric();
    }
    out.text(&result)
}

fn chr(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let too_large = |n: i32| {
        SqlError::new(SqlState("54000"), format!("requested character too large for encoding: {n}"))
    };
    match a.int(0) {
        0 => Err(SqlError::new(SqlState("54000"), "null character not permitted")),
        n if n < 0 => Err(SqlError::new(SqlState("54000"), "character number must be positive")),
        n => {
            let c = char::from_u32(n as u32).ok_or_else(|| too_large(n))?;
            out.text(c.encode_utf8(&mut [0; 4]))
        }
    }
}

const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

fn encode(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let bytes = a.bytes(0);
    let mut text = String::with_capacity(bytes.len() * 2);
    match a.text(1).to_ascii_lowercase().as_str() {
        "hex" => bytes.iter().for_each(|b| {
            let _ = write!(text, "{b:02x}");
        }),
        "base64" => {
            for (i, group) in bytes.chunks(3).enumerate() {
                // Lines of 76 characters, as MIME has them.
                if i > 0 && i % 19 == 0 {
                    text.push('\n');
                }
                let word = group
                    .iter()
                    .enumerate()
                    .fold(0u32, |w, (i, b)| w | u32::from(*b) << (16 - 8 * i));
                for k in 0..4 {
                    match k <= group.len() {
                        true => text.push(BASE64[(word >> (18 - 6 * k)) as usize & 63] as char),
                        false => text.push('='),
                    }
                }
            }
        }
        "escape" => {
            for &b in bytes {
                match b {
                    0 | 128.. => drop(write!(text, "\\{b:03o}")),
                    b'\\' => text.push_str("\\\\"),
                    b => text.push(b as char),
                }
            }
        }
        _ => return Err(invalid(format!("unrecognized encoding: \"{}\"", a.text(1)))),
    }
    out.text(&text)
}

fn decode(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let text = a.text(0);
    let mut bytes = Vec::with_capacity(text.len());
    match a.text(1).to_ascii_lowercase().as_str() {
        "hex" => {
            let mut high = None;
            for c in text.chars().filter(|c| !c.is_ascii_whitespace()) {
                let digit = c.to_digit(16);
                let digit = digit
                    .ok_or_else(|| invalid(format!("invalid hexadecimal digit: \"{c}\"")))?
                    as u8;
                match high.take() {
                    None => high = Some(digit),
                    Some(h) => bytes.push(h << 4 | digit),
                }
            }
            if high.is_some() {
                return Err(invalid("invalid hexadecimal data: odd number of digits"));
            }
        }
        "base64" => {
            let (mut word, mut bits) = (0u32, 0);
            for c in text.bytes().filter(|c| !c.is_ascii_whitespace() && *c != b'=') {
                let digit = BASE64.iter().position(|b| *b == c).ok_or_else(|| {
                    let c = c as char;
                    invalid(format!("invalid symbol \"{c}\" found while decoding base64 sequence"))
                })?;
                word = word << 6 | digit as u32;
                bits += 6;
                if bits >= 8 {
                    bits -= 8;
                    bytes.push((word >> bits) as u8);
                }
            }
        }
        "escape" => bytes = super::parse::bytea_escape(text)?,
        _ => return Err(invalid(format!("unrecognized encoding: \"{}\"", a.text(1)))),
    }
    out.bytes(&bytes)
}

/// Words that `quote_ident` quotes: PostgreSQL's reserved ones and those that may not be column names.
const RESERVED: &str = " all analyse analyze and any array as asc asymmetric authorization between bigint binary bit \
 boolean both case cast char character check coalesce collate collation column concurrently constraint create cross \
 current_catalog current_date current_role current_schema current_time current_timestamp current_user dec decimal default \
 deferrable desc distinct do else end except exists extract false fetch float for foreign freeze from full grant greatest \
 group grouping having ilike in initially inner inout int integer intersect interval into is isnull join lateral leading \
 least left like limit localtime localtimestamp national natural nchar none normalize not notnull null nullif numeric \
 offset on only or order out outer overlaps overlay placing position precision primary real references returning right row \
 select session_user setof similar smallint some substring symmetric table tablesample then time timestamp to trailing \
 treat trim true union unique user using values varchar variadic verbose when where window with xmlattributes ";

pub fn push_ident(out: &mut String, name: &str) {
    let plain = name.bytes().next().is_some_and(|b| b.is_ascii_lowercase() || b == b'_')
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
        && !RESERVED.contains(&format!(" {name} "));
    match plain {
        true => out.push_str(name),
        false => drop(write!(out, "\"{}\"", name.replace('"', "\"\""))),
    }
}

pub fn push_literal(out: &mut String, text: &str) {
    if text.contains('\\') {
        out.push_str(" E");
    }
    push_quoted(out, '\'', text);
}

/// The text in quotes; quotes and backslashes in it are there twice.
fn push_quoted(out: &mut String, quote: char, text: &str) {
    out.push(quote);
    for c in text.chars() {
        if c == quote || c == '\\' {
            out.push(c);
        }
        out.push(c);
    }
    out.push(quote);
}

/// `format`: `%s`, `%I`, `%L`, with positions, widths and the flag `-`.
fn format(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let Some(pattern) = a.text_or_null(0) else {
        out.null();
        return Ok(());
    };
    let unterminated = || {
        invalid("unterminated format() type specifier").with_hint("For a single \"%\" use \"%%\".")
    };
    let mut result = String::with_capacity(pattern.len());
    let mut chars = pattern.chars().peekable();
    let mut next = 1usize;
    while let Some(c) = chars.next() {
        if c != '%' {
            result.push(c);
            continue;
        }
        if chars.peek() == Some(&'%') {
            chars.next();
            result.push('%');
            continue;
        }
        let Specifier { position, width, left } = read_specifier(a, &mut chars, &mut next)?;
        super::size_limits::check_bytes(width.saturating_add(result.len() as i64))?;
        let kind = chars.next().ok_or_else(unterminated)?;
        if !matches!(kind, 's' | 'I' | 'L') {
            return Err(invalid(format!("unrecognized format() type specifier \"{kind}\""))
                .with_hint("For a single \"%\" use \"%%\"."));
        }
        let index = position.unwrap_or(next);
        next = index + 1;
        if index >= a.len() {
            return Err(too_few_arguments());
        }
        let start = result.len();
        push_formatted(&mut result, kind, a.text_or_null(index))?;
        let wide = result[start..].chars().count() as i64;
        let pad = " ".repeat((width - wide).max(0) as usize);
        match left {
            true => result.push_str(&pad),
            false => result.insert_str(start, &pad),
        }
    }
    out.text(&result)
}

/// What stands between the `%` and the letter of a specifier of `format`.
struct Specifier {
    /// Of the argument, where it is given.
    position: Option<usize>,
    width: i64,
    left: bool,
}

type Characters<'a> = std::iter::Peekable<std::str::Chars<'a>>;

/// `next`: the argument that is next without a position; the width may be that one.
fn read_specifier(
    a: &Args,
    chars: &mut Characters<'_>,
    next: &mut usize,
) -> Result<Specifier, SqlError> {
    let (mut position, mut width, mut left) = (None, None, false);
    let n = read_number(chars);
    match (n, chars.peek()) {
        (Some(n), Some('$')) => {
            chars.next();
            if n == 0 {
                return Err(invalid(
                    "format specifies argument 0, but arguments are numbered from 1",
                ));
            }
            position = Some(n);
        }
        (n, _) => width = n.map(|n| n as i64),
    }
    if width.is_none() {
        while chars.peek() == Some(&'-') {
            left = true;
            chars.next();
        }
        if chars.peek() == Some(&'*') {
            chars.next();
            if *next >= a.len() {
                return Err(too_few_arguments());
            }
            let text = a.text_or_null(*next).unwrap_or("0");
            *next += 1;
            width = Some(super::parse::integer(text, T::Int)?);
        } else {
            width = read_number(chars).map(|n| n as i64);
        }
    }
    if let Some(w) = width.filter(|w| *w < 0) {
        left = true;
        width = Some(-w);
    }
    if width.is_some_and(|w| w > 100_000_000) {
        return Err(invalid("number is out of range"));
    }
    Ok(Specifier { position, width: width.unwrap_or(0), left })
}

fn read_number(chars: &mut Characters<'_>) -> Option<usize> {
    let mut n = None;
    while let Some(d) = chars.peek().and_then(|c| c.to_digit(10)) {
        n = Some(n.unwrap_or(0usize).saturating_mul(10).saturating_add(d as usize));
        chars.next();
    }
    n
}

fn too_few_arguments() -> SqlError {
    invalid("too few arguments for format()")
}

fn push_formatted(out: &mut String, kind: char, value: Option<&str>) -> Result<(), SqlError> {
    match (kind, value) {
        ('s', v) => out.push_str(v.unwrap_or("")),
        ('I', Some(v)) => push_ident(out, v),
        ('I', None) => {
            let message = "null values cannot be formatted as an SQL identifier";
            return Err(SqlError::new(SqlState("22004"), message));
        }
        (_, Some(v)) => push_literal(out, v),
        (_, None) => out.push_str("NULL"),
    }
    Ok(())
}

fn concat(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let mut text = String::new();
    for i in 0..a.len() {
        let part = a.text_or_null(i).unwrap_or("");
        super::size_limits::check_bytes(text.len().saturating_add(part.len()) as i64)?;
        text.push_str(part);
    }
    out.text(&text)
}

fn concat_ws(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let Some(separator) = a.text_or_null(0) else {
        out.null();
        return Ok(());
    };
    let mut text = String::new();
    let mut first = true;
    for part in (1..a.len()).filter_map(|i| a.text_or_null(i)) {
        if !first {
            text.push_str(separator);
        }
        first = false;
        super::size_limits::check_bytes(text.len().saturating_add(part.len()) as i64)?;
        text.push_str(part);
    }
    out.text(&text)
}

/// A row as PostgreSQL shows it: `(1,"a b",)`.
fn row_text(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let special = |c: char| matches!(c, '"' | '\\' | '(' | ')' | ',') || c.is_ascii_whitespace();
    let mut text = String::from("(");
    for i in 0..a.len() {
        if i > 0 {
            text.push(',');
        }
        let Some(value) = a.text_or_null(i) else { continue };
        if !value.is_empty() && !value.contains(special) {
            text.push_str(value);
            continue;
        }
        push_quoted(&mut text, '"', value);
    }
    text.push(')');
    out.text(&text)
}

fn position_bytes(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let (bytes, part) = (a.bytes(0), a.bytes(1));
    let at = match part.is_empty() {
        true => 1,
        false => bytes.windows(part.len()).position(|w| w == part).map_or(0, |i| i + 1),
    };
    out.int(at as i32)
}

fn trim_bytes(a: &Args, out: &mut Out, left: bool, right: bool) -> Result<(), SqlError> {
    let (mut bytes, set) = (a.bytes(0), a.bytes(1));
    while let (true, Some((first, rest))) = (left, bytes.split_first())
        && set.contains(first)
    {
        bytes = rest;
    }
    while let (true, Some((last, rest))) = (right, bytes.split_last())
        && set.contains(last)
    {
        bytes = rest;
    }
    out.bytes(bytes)
}

fn trim_text(a: &Args, out: &mut Out, left: bool, right: bool) -> Result<(), SqlError> {
    let set = if a.len() > 1 { a.text(1) } else { " " };
    let mut text = a.text(0);
    if left {
        text = text.trim_start_matches(|c| set.contains(c));
    }
    if right {
        text = text.trim_end_matches(|c| set.contains(c));
    }
    out.text(text)
}

macro_rules! trim {
    ($name:literal, $left:literal, $right:literal) => {
        Def::new(
            $name,
            &[
                over(&[T::Text], T::Text, |a, out| trim_text(a, out, $left, $right)),
                over(&[T::Text, T::Text], T::Text, |a, out| trim_text(a, out, $left, $right)),
                over(&[T::Bytea, T::Bytea], T::Bytea, |a, out| trim_bytes(a, out, $left, $right)),
            ],
        )
    };
}

fn byte_index(a: &Args) -> Result<usize, SqlError> {
    let (n, len) = (a.int(1), a.bytes(0).len());
    match usize::try_from(n) {
        Ok(i) if i < len => Ok(i),
        _ => Err(SqlError::new(
            SqlState("2202E"),
            format!("index {n} out of valid range, 0..{}", len as i64 - 1),
        )),
    }
}

fn utf8(encoding: &str) -> Result<(), SqlError> {
    let folded: String = encoding.to_ascii_lowercase().chars().filter(|c| *c != '-').collect();
    match folded.as_str() {
        "utf8" | "unicode" => Ok(()),
        _ => Err(SqlError::unsupported(format!("the encoding {encoding}"))),
    }
}

const LENGTH: [Overload; 2] = [
    over(&[T::Text], T::Int, |a, out| out.int(a.text(0).chars().count() as i32)),
    over(&[T::Bytea], T::Int, |a, out| out.int(a.bytes(0).len() as i32)),
];

const SUBSTRING: [Overload; 4] = [
    over(&[T::Text, T::Int], T::Text, substring),
    over(&[T::Text, T::Int, T::Int], T::Text, substring),
    over(&[T::Bytea, T::Int], T::Bytea, substring_bytes),
    over(&[T::Bytea, T::Int, T::Int], T::Bytea, substring_bytes),
];

fn quoting() -> Vec<Def> {
    let quote = |a: &Args, out: &mut Out| {
        let mut text = String::new();
        push_literal(&mut text, a.text(0));
        out.text(text.trim_start_matches(' '))
    };
    vec![
        Def::new(
            "quote_ident",
            &[over(&[T::Text], T::Text, |a, out| {
                let mut text = String::new();
                push_ident(&mut text, a.text(0));
                out.text(&text)
            })],
        ),
        Def::new("quote_literal", &[over(&[T::Text], T::Text, quote)]).any(),
        Def::new(
            "quote_nullable",
            &[over(&[T::Text], T::Text, |a, out| match a.text_or_null(0) {
                None => out.text("NULL"),
                Some(t) => {
                    let mut text = String::new();
                    push_literal(&mut text, t);
                    out.text(text.trim_start_matches(' '))
                }
            })],
        )
        .takes_nulls()
        .any(),
    ]
}

/// The text of a row, of its columns.
pub const ROW_TEXT: &str = "row_text";

pub fn defs() -> Vec<Def> {
    [quoting(), lengths(), parts_and_forms(), compositions(), positions(), bytes(), null_counts()]
        .into_iter()
        .flatten()
        .collect()
}

/// How long a text or bytes are.
fn lengths() -> Vec<Def> {
    vec![
        Def::new("length", &LENGTH),
        Def::new("char_length", &LENGTH[..1]),
        Def::new("character_length", &LENGTH[..1]),
        Def::new(
            "octet_length",
            &[
                over(&[T::Text], T::Int, |a, out| out.int(a.text(0).len() as i32)),
                over(&[T::Bytea], T::Int, |a, out| out.int(a.bytes(0).len() as i32)),
            ],
        ),
        Def::new(
            "bit_length",
            &[
                over(&[T::Text], T::Int, |a, out| out.int(a.text(0).len() as i32 * 8)),
                over(&[T::Bytea], T::Int, |a, out| out.int(a.bytes(0).len() as i32 * 8)),
            ],
        ),
    ]
}

/// Parts of a text, and the text in another case or encoding.
fn parts_and_forms() -> Vec<Def> {
    vec![
        Def::new("substr", &SUBSTRING),
        Def::new(
            "substring",
            &[
                SUBSTRING[0],
                SUBSTRING[1],
                SUBSTRING[2],
                SUBSTRING[3],
                over(&[T::Text, T::Text], T::Text, super::patterns::substring),
                over(&[T::Text, T::Text, T::Text], T::Text, super::patterns::substring_similar),
            ],
        ),
        Def::new(
            "starts_with",
            &[over(&[T::Text, T::Text], T::Boolean, |a, out| {
                out.boolean(a.text(0).starts_with(a.text(1)))
            })],
        ),
        Def::new("split_part", &[over(&[T::Text, T::Text, T::Int], T::Text, split_part)]),
        Def::new("initcap", &[over(&[T::Text], T::Text, initcap)]),
        Def::new(
            "upper",
            &[over(&[T::Text], T::Text, |a, out| out.text(&a.text(0).to_uppercase()))],
        ),
        Def::new(
            "lower",
            &[over(&[T::Text], T::Text, |a, out| out.text(&a.text(0).to_lowercase()))],
        ),
        Def::new("chr", &[over(&[T::Int], T::Text, chr)]),
        Def::new("encode", &[over(&[T::Bytea, T::Text], T::Text, encode)]),
        Def::new("decode", &[over(&[T::Text, T::Text], T::Bytea, decode)]),
    ]
}

/// Texts put together of values.
fn compositions() -> Vec<Def> {
    let variadic = |args, eval| Overload { args, variadic: true, returns: T::Text, eval };
    vec![
        Def::new("format", &[variadic(&[T::Text], format)]).takes_nulls().any(),
        Def::new(ROW_TEXT, &[variadic(&[T::Text], row_text)]).takes_nulls().any(),
        Def::new("concat", &[variadic(&[T::Text], concat)]).takes_nulls().any(),
        Def::new("concat_ws", &[variadic(&[T::Text, T::Text], concat_ws)]).takes_nulls().any(),
    ]
}

/// Where a part is in a text, and what is trimmed off its ends.
fn positions() -> Vec<Def> {
    vec![
        Def::new(
            "strpos",
            &[over(&[T::Text, T::Text], T::Int, |a, out| {
                let (text, part) = (a.text(0), a.text(1));
                let at = text.find(part).map_or(0, |i| text[..i].chars().count() + 1);
                out.int(at as i32)
            })],
        ),
        Def::new(
            "position",
            &[
                over(&[T::Text, T::Text], T::Int, |a, out| {
                    let (text, part) = (a.text(0), a.text(1));
                    let at = text.find(part).map_or(0, |i| text[..i].chars().count() + 1);
                    out.int(at as i32)
                }),
                over(&[T::Bytea, T::Bytea], T::Int, position_bytes),
            ],
        ),
        trim!("btrim", true, true),
        trim!("ltrim", true, false),
        trim!("rtrim", false, true),
    ]
}

/// Bytes, singly and as texts.
fn bytes() -> Vec<Def> {
    vec![
        Def::new(
            "bytea_concat",
            &[over(&[T::Bytea, T::Bytea], T::Bytea, |a, out| {
                out.bytes(&[a.bytes(0), a.bytes(1)].concat())
            })],
        ),
        Def::new(
            "get_byte",
            &[over(&[T::Bytea, T::Int], T::Int, |a, out| {
                out.int(i32::from(a.bytes(0)[byte_index(a)?]))
            })],
        ),
        Def::new(
            "set_byte",
            &[over(&[T::Bytea, T::Int, T::Int], T::Bytea, |a, out| {
                let mut bytes = a.bytes(0).to_vec();
                bytes[byte_index(a)?] = a.int(2) as u8;
                out.bytes(&bytes)
            })],
        ),
        Def::new(
            "convert_to",
            &[over(&[T::Text, T::Text], T::Bytea, |a, out| {
                utf8(a.text(1))?;
                out.bytes(a.text(0).as_bytes())
            })],
        ),
        Def::new(
            "convert_from",
            &[over(&[T::Bytea, T::Text], T::Text, |a, out| {
                utf8(a.text(1))?;
                let text = std::str::from_utf8(a.bytes(0)).map_err(|_| {
                    SqlError::new(SqlState("22021"), "invalid byte sequence for encoding \"UTF8\"")
                })?;
                out.text(text)
            })],
        ),
    ]
}

/// How many arguments are NULL, or are not.
fn null_counts() -> Vec<Def> {
    vec![
        Def::new(
            "num_nulls",
            &[variadic_any(|a, out| {
                out.int((0..a.len()).filter(|&i| a.is_null(i)).count() as i32)
            })],
        )
        .takes_nulls()
        .any(),
        Def::new(
            "num_nonnulls",
            &[variadic_any(|a, out| {
                out.int((0..a.len()).filter(|&i| !a.is_null(i)).count() as i32)
            })],
        )
        .takes_nulls()
        .any(),
    ]
}

/// Any number of arguments, looked at for NULL only.
fn variadic_any(eval: super::call::Eval) -> Overload {
    Overload { args: &[T::Text], variadic: true, returns: T::Int, eval }
}

#[cfg(test)]
mod tests;
