//! Regular expressions and patterns: PostgreSQL's functions and operators over the `regex` crate.
//!
//! PostgreSQL's advanced regular expressions are translated: `.` and classes match newlines, `\m`, `\M`, `\y` and
//! `\Y` are word boundaries. Back references and look-around have no equivalent in linear time: 0A000.

use std::sync::Arc;

use millrace_common::encoding::array::put_item;
use millrace_common::types::Element;
use millrace_common::{SqlError, SqlState, SqlType as T};
use regex::{Regex, RegexBuilder};

use super::call::{Args, Def, Eval, Out, Overload, over};
use super::size_limits::check_bytes;
use crate::interrupt;

fn invalid(message: impl Into<String>) -> SqlError {
    SqlError::new(SqlState::INVALID_PARAMETER_VALUE, message)
}

/// Options of a regular expression: `g` is for replacing.
#[derive(Clone, Copy, Default)]
struct Flags {
    global: bool,
    insensitive: bool,
    lines: bool,
    expanded: bool,
    literal: bool,
}

fn flags(text: &str) -> Result<Flags, SqlError> {
    let mut f = Flags::default();
    for c in text.chars() {
        match c {
            'g' => f.global = true,
            'i' => f.insensitive = true,
            'c' => f.insensitive = false,
            'n' | 'm' => f.lines = true,
            's' => f.lines = false,
            'x' => f.expanded = true,
            't' | 'e' | 'b' => {}
            'q' => f.literal = true,
            c => return Err(invalid(format!("invalid regular expression option: \"{c}\""))),
        }
    }
    Ok(f)
}

fn compile(pattern: &str, flags: Flags) -> Result<Regex, SqlError> {
    let bad = |e: &dyn std::fmt::Display| {
        SqlError::new(SqlState("2201B"), format!("invalid regular expression: {e}"))
    };
    let (pattern, insensitive) = match pattern.strip_prefix("(?i)") {
        Some(rest) => (rest, true),
        None => (pattern, flags.insensitive),
    };
    let translated = match flags.literal {
        true => regex::escape(pattern),
        false => translate(pattern)?,
    };
    RegexBuilder::new(&translated)
        .case_insensitive(insensitive)
        .dot_matches_new_line(!flags.lines)
        .multi_line(flags.lines)
        .ignore_whitespace(flags.expanded)
        .build()
        .map_err(|e| match e {
            regex::Error::Syntax(text) => bad(&text.lines().last().unwrap_or("").trim()),
            e => bad(&e),
        })
}

/// PostgreSQL's escapes in the crate's syntax.
fn translate(pattern: &str) -> Result<String, SqlError> {
    let unsupported = |what: &str| SqlError::unsupported(format!("{what} in a regular expression"));
    if pattern.contains("(?=") || pattern.contains("(?!") || pattern.contains("(?<") {
        return Err(unsupported("look-around"));
    }
    let mut out = String::with_capacity(pattern.len());
    let mut chars = pattern.chars().peekable();
    let mut in_class = false;
    while let Some(c) = chars.next() {
        match (c, in_class) {
            ('\\', _) => match chars.next() {
                Some('y') => out.push_str(r"\b"),
                Some('Y') => out.push_str(r"\B"),
                Some('m') => out.push_str(r"\b{start}"),
                Some('M') => out.push_str(r"\b{end}"),
                Some('Z') => out.push_str(r"\z"),
                Some(d @ '1'..='9') if !in_class => {
                    return Err(unsupported(&format!("the back reference \\{d}")));
                }
                Some(other) if other.is_alphanumeric() || other.is_ascii_punctuation() => {
                    out.push('\\');
                    out.push(other);
                }
                Some(other) => out.push(other),
                None => {
                    let message = "invalid regular expression: invalid escape \\ sequence";
                    return Err(SqlError::new(SqlState("2201B"), message));
                }
            },
            ('[', false) => {
                in_class = true;
                out.push('[');
                if chars.peek() == Some(&'^') {
                    out.push('^');
                    chars.next();
                }
                if chars.peek() == Some(&']') {
                    out.push_str("\\]");
                    chars.next();
                }
            }
            ('[', true) => match chars.peek() {
                // [:alpha:] and its like.
                Some(':') => {
                    out.push('[');
                    for c in chars.by_ref() {
                        out.push(c);
                        if c == ']' {
                            break;
                        }
                    }
                }
                _ => out.push_str("\\["),
            },
            (']', true) => {
                in_class = false;
                out.push(']');
            }
            ('&' | '~', true) => {
                out.push('\\');
                out.push(c);
            }
            (c, _) => out.push(c),
        }
    }
    Ok(out)
}

fn regex(a: &Args, pattern: usize, options: &str) -> Result<(Arc<Regex>, Flags), SqlError> {
    let flags = flags(options)?;
    let pattern = a.text(pattern);
    let key = format!("{options}\u{1f}{pattern}");
    let regex = a.regex(&key, || compile(pattern, flags))?;
    Ok((regex, flags))
}

/// The same, for a function that has no use for the option `g`.
fn plain_regex(a: &Args, options: &str, function: &str) -> Result<Arc<Regex>, SqlError> {
    let (regex, flags) = regex(a, 1, options)?;
    if !flags.global {
        return Ok(regex);
    }
    let e = invalid(format!("{function}() does not support the \"global\" option"));
    Err(match function {
        "regexp_match" => e.with_hint("Use the regexp_matches function instead."),
        _ => e,
    })
}

fn matches(a: &Args, out: &mut Out, options: &str, wanted: bool) -> Result<(), SqlError> {
    let regex = plain_regex(a, options, "regexp_like")?;
    out.boolean(regex.is_match(a.text(0)) == wanted)
}

/// `\1`, `\&` and `\\` of a replacement.
fn push_replacement(out: &mut String, template: &str, found: &regex::Captures<'_>) {
    let mut chars = template.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('&') => out.push_str(&found[0]),
            Some(d @ '1'..='9') => {
                let group = found.get(d as usize - '0' as usize);
                out.push_str(group.map_or("", |m| m.as_str()));
            }
            Some('\\') | None => out.push('\\'),
            Some(other) => out.extend(['\\', other]),
        }
    }
}

/// Replaces the `nth` match from a byte on, or all of them (0).
fn replace(
    text: &str,
    from: usize,
    regex: &Regex,
    template: &str,
    nth: usize,
) -> Result<String, SqlError> {
    let mut result = String::with_capacity(text.len());
    let mut last = 0;
    for (i, found) in regex.captures_iter(&text[from..]).enumerate() {
        let Some(whole) = found.get(0) else { continue };
        searched(whole.len())?;
        if nth > 0 && i + 1 != nth {
            continue;
        }
        result.push_str(&text[last..from + whole.start()]);
        push_replacement(&mut result, template, &found);
        searched(template.len())?;
        check_bytes(result.len() as i64)?;
        last = from + whole.end();
        if nth > 0 {
            break;
        }
    }
    result.push_str(&text[last..]);
    Ok(result)
}

/// Of a match, besides its letters.
const MATCH_BYTES: usize = 64;

/// Of a part of a text, besides its letters.
const PART_BYTES: usize = size_of::<&str>();

/// After each match: a text may have millions of them.
fn searched(bytes: usize) -> Result<(), SqlError> {
    interrupt::step(MATCH_BYTES + bytes)
}

/// The byte where the `start`-th character is, for functions with a start position.
fn start_at(text: &str, start: i32) -> Result<usize, SqlError> {
    if start < 1 {
        return Err(invalid(format!("invalid value for parameter \"start\": {start}")));
    }
    Ok(text.char_indices().nth(start as usize - 1).map_or(text.len(), |(i, _)| i))
}

fn positive(name: &str, n: i32) -> Result<usize, SqlError> {
    match n {
        1.. => Ok(n as usize),
        n => Err(invalid(format!("invalid value for parameter \"{name}\": {n}"))),
    }
}

fn regexp_replace(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let options = if a.len() > 3 { a.text(3) } else { "" };
    let (regex, flags) = regex(a, 1, options)?;
    out.text(&replace(a.text(0), 0, &regex, a.text(2), usize::from(!flags.global))?)
}

fn regexp_replace_nth(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let options = if a.len() > 5 { a.text(5) } else { "" };
    let (regex, flags) = regex(a, 1, options)?;
    let from = start_at(a.text(0), a.int(3))?;
    let nth = match a.len() {
        4 => usize::from(!flags.global),
        _ => match a.int(4) {
            n @ 0.. => n as usize,
            n => return Err(invalid(format!("invalid value for parameter \"n\": {n}"))),
        },
    };
    out.text(&replace(a.text(0), from, &regex, a.text(2), nth)?)
}

fn regexp_count(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let options = if a.len() > 3 { a.text(3) } else { "" };
    let regex = plain_regex(a, options, "regexp_count")?;
    let from = start_at(a.text(0), if a.len() > 2 { a.int(2) } else { 1 })?;
    let mut count = 0;
    for found in regex.find_iter(&a.text(0)[from..]) {
        searched(found.len())?;
        count += 1;
    }
    out.int(count)
}

/// The `nth` match from a start, as a range of bytes; of a group, if asked for.
fn nth_match(
    a: &Args,
    options: usize,
    group: usize,
    function: &str,
) -> Result<Option<std::ops::Range<usize>>, SqlError> {
    let text = a.text(0);
    let given = if a.len() > options { a.text(options) } else { "" };
    let regex = plain_regex(a, given, function)?;
    let from = start_at(text, if a.len() > 2 { a.int(2) } else { 1 })?;
    let nth = positive("n", if a.len() > 3 { a.int(3) } else { 1 })?;
    let group = if a.len() > group { a.int(group).max(0) as usize } else { 0 };
    let mut all = regex.captures_iter(&text[from..]);
    for _ in 1..nth {
        if all.next().is_none() {
            break;
        }
        searched(0)?;
    }
    let found = all.next();
    Ok(found.and_then(|f| f.get(group)).map(|m| from + m.start()..from + m.end()))
}

fn regexp_substr(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    match nth_match(a, 4, 5, "regexp_substr")? {
        Some(range) => out.text(&a.text(0)[range]),
        None => {
            out.null();
            Ok(())
        }
    }
}

fn regexp_instr(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let end = a.len() > 4 && a.int(4) == 1;
    let found = nth_match(a, 5, 6, "regexp_instr")?.map(|r| if end { r.end } else { r.start });
    out.int(found.map_or(0, |at| a.text(0)[..at].chars().count() as i32 + 1))
}

fn split(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let options = if a.len() > 2 { a.text(2) } else { "" };
    let regex = plain_regex(a, options, "regexp_split_to_array")?;
    let text = a.text(0);
    let (mut parts, mut last) = (Vec::new(), 0);
    for found in regex.find_iter(text) {
        searched(found.start() - last)?;
        check_bytes((parts.len() * PART_BYTES) as i64)?;
        // An empty match at either end splits nothing.
        if found.is_empty() && (found.start() == 0 || found.end() == text.len()) {
            continue;
        }
        parts.push(&text[last..found.start()]);
        last = found.end();
    }
    parts.push(&text[last..]);
    out.texts(parts.into_iter().map(Some))
}

/// The groups of the first match, or the whole of it; NULL without a match.
fn groups(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let regex = plain_regex(a, if a.len() > 2 { a.text(2) } else { "" }, "regexp_match")?;
    let Some(found) = regex.captures(a.text(0)) else {
        out.null();
        return Ok(());
    };
    let from = usize::from(found.len() > 1);
    out.texts((from..found.len()).map(|i| found.get(i).map(|m| m.as_str())))
}

/// `regexp_matches`: what [`groups`] gives of the first match, or of each (`g`), as texts of arrays.
fn all_groups(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let (regex, flags) = regex(a, 1, if a.len() > 2 { a.text(2) } else { "" })?;
    let most = if flags.global { usize::MAX } else { 1 };
    let mut rows = Vec::new();
    let mut bytes = 0;
    for found in regex.captures_iter(a.text(0)).take(most) {
        searched(found.len())?;
        let mut row = String::from("{");
        for group in usize::from(found.len() > 1)..found.len() {
            if row.len() > 1 {
                row.push(',');
            }
            match found.get(group) {
                Some(text) => put_item(text.as_str(), &mut row),
                None => row.push_str("NULL"),
            }
        }
        row.push('}');
        bytes += row.capacity() + size_of::<String>();
        check_bytes(bytes as i64)?;
        rows.push(row);
    }
    out.texts(rows.iter().map(|row| Some(row.as_str())))
}

/// `substring(text from pattern)`: the first group, or the whole match.
pub fn substring(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let (regex, _) = regex(a, 1, "")?;
    let found =
        regex.captures(a.text(0)).and_then(|f| if f.len() > 1 { f.get(1) } else { f.get(0) });
    match found {
        Some(m) => out.text(m.as_str()),
        None => {
            out.null();
            Ok(())
        }
    }
}

/// The regular expression of a SIMILAR TO pattern, anchored at both ends.
fn similar(pattern: &str, escape: Option<char>) -> String {
    let mut out = String::from("^(?:");
    let mut chars = pattern.chars();
    let (mut in_class, mut parts) = (false, 0);
    while let Some(c) = chars.next() {
        if Some(c) == escape {
            match chars.next() {
                Some('"') if !in_class => {
                    // Parts of `substring … similar`: the middle one is the result.
                    out.push_str(match parts {
                        0 => "){1,1}?(",
                        1 => "){1,1}(?:",
                        _ => "\"",
                    });
                    parts += 1;
                }
                // Letters may be escapes of regular expressions, as `\d` is.
                Some(c) => out.extend(['\\', c]),
                None => {}
            }
            continue;
        }
        match (c, in_class) {
            ('[', false) => {
                in_class = true;
                out.push('[');
            }
            (']', true) => {
                in_class = false;
                out.push(']');
            }
            // A backslash that escapes nothing here must not do so there.
            ('\\', _) => out.push_str("\\\\"),
            (c, true) => out.push(c),
            ('%', _) => out.push_str(".*"),
            ('_', _) => out.push('.'),
            ('(', _) => out.push_str("(?:"),
            ('.' | '^' | '$', _) => {
                out.push('\\');
                out.push(c);
            }
            (c, _) => out.push(c),
        }
    }
    out.push_str(")$");
    out
}

fn escape_of(a: &Args, i: usize) -> Result<Option<char>, SqlError> {
    if a.len() <= i {
        return Ok(Some('\\'));
    }
    let mut chars = a.text(i).chars();
    match (chars.next(), chars.next()) {
        (c, None) => Ok(c),
        _ => Err(SqlError::new(SqlState("22025"), "invalid escape string")
            .with_hint("Escape string must be empty or one character.")),
    }
}

/// By what a pattern with an escape character is kept.
fn key_of(pattern: &str, escape: Option<char>) -> String {
    format!("{}\u{1f}{pattern}", escape.map_or(String::new(), String::from))
}

fn similar_regex(a: &Args, escape: Option<char>) -> Result<Arc<Regex>, SqlError> {
    let pattern = a.text(1);
    let key = key_of(pattern, escape);
    a.regex(&key, || compile(&similar(pattern, escape), Flags::default()))
}

fn similar_to(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let escape = escape_of(a, 2)?;
    let regex = similar_regex(a, escape)?;
    out.boolean(regex.is_match(a.text(0)))
}

pub fn substring_similar(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let escape = escape_of(a, 2)?;
    let regex = similar_regex(a, escape)?;
    let found = regex.captures(a.text(0));
    match found.as_ref().and_then(|f| if f.len() > 1 { f.get(1) } else { f.get(0) }) {
        Some(m) => out.text(m.as_str()),
        None => {
            out.null();
            Ok(())
        }
    }
}

/// LIKE with an escape character of one's own.
fn like(a: &Args, out: &mut Out, insensitive: bool) -> Result<(), SqlError> {
    let escape = escape_of(a, 2)?;
    let pattern = a.text(1);
    let regex = a.regex(&key_of(pattern, escape), || {
        let mut text = String::from("^");
        let mut chars = pattern.chars();
        while let Some(c) = chars.next() {
            match c {
                c if Some(c) == escape => match chars.next() {
                    Some(c) => text.push_str(&regex::escape(&c.to_string())),
                    None => {
                        let message = "LIKE pattern must not end with escape character";
                        return Err(SqlError::new(SqlState("22025"), message));
                    }
                },
                '%' => text.push_str(".*"),
                '_' => text.push('.'),
                c => text.push_str(&regex::escape(&c.to_string())),
            }
        }
        text.push('$');
        RegexBuilder::new(&text)
            .case_insensitive(insensitive)
            .dot_matches_new_line(true)
            .build()
            .map_err(|e| SqlError::new(SqlState("2201B"), e.to_string()))
    })?;
    out.boolean(regex.is_match(a.text(0)))
}

/// A text and an array of patterns.
const LISTED: &[T] = &[T::Text, T::Array(Element::Text)];

/// LIKE ANY and LIKE ALL of an array: NULL where only a NULL pattern could decide.
fn like_each(a: &Args, out: &mut Out, each: bool, any_case: bool) -> Result<(), SqlError> {
    let mut unknown = false;
    let text = if any_case { a.text(0).to_lowercase() } else { a.text(0).to_owned() };
    for pattern in a.texts(1) {
        let matched = match pattern {
            None => {
                unknown = true;
                continue;
            }
            Some(pattern) if any_case => matches_like(&text, &pattern.to_lowercase())?,
            Some(pattern) => matches_like(&text, pattern)?,
        };
        if matched != each {
            return out.boolean(matched);
        }
    }
    match unknown {
        true => {
            out.null();
            Ok(())
        }
        false => out.boolean(each),
    }
}

/// LIKE with the backslash as its escape: time in proportion to the product of the lengths at most.
fn matches_like(text: &str, pattern: &str) -> Result<bool, SqlError> {
    enum Part {
        Any,
        One,
        Char(char),
    }
    let mut parts = Vec::with_capacity(pattern.len());
    let mut chars = pattern.chars();
    while let Some(c) = chars.next() {
        parts.push(match c {
            '%' => Part::Any,
            '_' => Part::One,
            '\\' => match chars.next() {
                Some(c) => Part::Char(c),
                None => {
                    let message = "LIKE pattern must not end with escape character";
                    return Err(SqlError::new(SqlState("22025"), message));
                }
            },
            c => Part::Char(c),
        });
    }
    let text: Vec<char> = text.chars().collect();
    let (mut t, mut p) = (0, 0);
    // Where the last % stands, and how much of the text it has taken.
    let mut last: Option<(usize, usize)> = None;
    while t < text.len() {
        interrupt::step(1)?;
        match parts.get(p) {
            Some(Part::Any) => {
                last = Some((p, t));
                p += 1;
            }
            Some(Part::One) => (t, p) = (t + 1, p + 1),
            Some(Part::Char(c)) if *c == text[t] => (t, p) = (t + 1, p + 1),
            _ => match last {
                Some((at, taken)) => {
                    last = Some((at, taken + 1));
                    (t, p) = (taken + 1, at + 1);
                }
                None => return Ok(false),
            },
        }
    }
    Ok(parts[p..].iter().all(|part| matches!(part, Part::Any)))
}

const TEXTS: [&[T]; 7] = [
    &[],
    &[T::Text],
    &[T::Text, T::Text],
    &[T::Text, T::Text, T::Text],
    &[T::Text, T::Text, T::Text, T::Text],
    &[T::Text, T::Text, T::Int],
    &[T::Text, T::Text, T::Int, T::Text],
];

/// The same of the first arguments, from `least` of them to all.
fn shortened(args: &'static [T], least: usize, returns: T, eval: Eval) -> Vec<Overload> {
    (least..=args.len()).map(|n| over(&args[..n], returns, eval)).collect()
}

fn regexp_replace_def() -> Def {
    let mut all =
        vec![over(TEXTS[3], T::Text, regexp_replace), over(TEXTS[4], T::Text, regexp_replace)];
    let args = &[T::Text, T::Text, T::Text, T::Int, T::Int, T::Text];
    all.extend(shortened(args, 4, T::Text, regexp_replace_nth));
    Def::new("regexp_replace", &all)
}

fn regexp_substr_def() -> Def {
    let args = &[T::Text, T::Text, T::Int, T::Int, T::Text, T::Int];
    Def::new("regexp_substr", &shortened(args, 2, T::Text, regexp_substr))
}

fn regexp_instr_def() -> Def {
    let args = &[T::Text, T::Text, T::Int, T::Int, T::Int, T::Text, T::Int];
    Def::new("regexp_instr", &shortened(args, 2, T::Int, regexp_instr))
}

pub fn defs() -> Vec<Def> {
    vec![
        regexp_replace_def(),
        regexp_substr_def(),
        Def::new(
            "regexp_split_to_array",
            &[
                over(TEXTS[2], T::Array(Element::Text), split),
                over(TEXTS[3], T::Array(Element::Text), split),
            ],
        ),
        Def::new(
            "regexp_match",
            &[
                over(TEXTS[2], T::Array(Element::Text), groups),
                over(TEXTS[3], T::Array(Element::Text), groups),
            ],
        ),
        Def::new(
            "regexp_matches_list",
            &[
                over(TEXTS[2], T::Array(Element::Text), all_groups),
                over(TEXTS[3], T::Array(Element::Text), all_groups),
            ],
        ),
        Def::absent("regexp_matches"),
        regexp_instr_def(),
        Def::new(
            "regexp_count",
            &[
                over(TEXTS[2], T::Int, regexp_count),
                over(TEXTS[5], T::Int, regexp_count),
                over(TEXTS[6], T::Int, regexp_count),
            ],
        ),
        Def::new(
            "regexp_like",
            &[
                over(TEXTS[2], T::Boolean, |a, out| matches(a, out, "", true)),
                over(TEXTS[3], T::Boolean, |a, out| matches(a, out, a.text(2), true)),
            ],
        ),
        Def::new("regex_match", &[over(TEXTS[2], T::Boolean, |a, out| matches(a, out, "", true))]),
        Def::new(
            "regex_imatch",
            &[over(TEXTS[2], T::Boolean, |a, out| matches(a, out, "i", true))],
        ),
        Def::new(
            "similar_to",
            &[over(TEXTS[2], T::Boolean, similar_to), over(TEXTS[3], T::Boolean, similar_to)],
        ),
        Def::new("like_escape", &[over(TEXTS[3], T::Boolean, |a, out| like(a, out, false))]),
        Def::new("ilike_escape", &[over(TEXTS[3], T::Boolean, |a, out| like(a, out, true))]),
        Def::new("like_any", &[over(LISTED, T::Boolean, |a, out| like_each(a, out, false, false))]),
        Def::new("like_all", &[over(LISTED, T::Boolean, |a, out| like_each(a, out, true, false))]),
        Def::new("ilike_any", &[over(LISTED, T::Boolean, |a, out| like_each(a, out, false, true))]),
        Def::new("ilike_all", &[over(LISTED, T::Boolean, |a, out| like_each(a, out, true, true))]),
    ]
}

#[cfg(test)]
mod tests;
