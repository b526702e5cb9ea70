//! JSON documents: PostgreSQL's `jsonb`, kept as its canonical text.
//!
//! The canonical text is what PostgreSQL prints: keys without repetition, ordered by length and then by bytes, `", "` and
//! `": "` between parts, strings with the fewest escapes, numbers with the digits they came with. Documents are read
//! in place where a part of one is wanted ([`Doc`]), and as a tree ([`Json`]) where one is made.

mod order;

use std::cmp::Ordering;
use std::fmt::Write;

use crate::error::{SqlError, SqlState};

/// Documents may nest this deep: bounds the stack.
const MAX_DEPTH: usize = 512;

#[derive(Clone, Debug)]
pub enum Json {
    Null,
    Bool(bool),
    /// The digits as printed.
    Number(String),
    String(String),
    Array(Vec<Json>),
    /// In canonical order.
    Object(Vec<(String, Json)>),
}

fn invalid(detail: impl Into<String>) -> SqlError {
    SqlError::new(SqlState::INVALID_TEXT_REPRESENTATION, "invalid input syntax for type json")
        .with_detail(detail)
}

/// Keys are ordered by length, then bytes.
fn key_order(a: &str, b: &str) -> Ordering {
    a.len().cmp(&b.len()).then_with(|| a.as_bytes().cmp(b.as_bytes()))
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
}

/// Apart from [`Parser::value`], whose part of the stack each level of a document takes.
fn too_deep() -> SqlError {
    SqlError::new(SqlState::STATEMENT_TOO_COMPLEX, "stack depth limit exceeded")
        .with_detail(format!("A document may nest {MAX_DEPTH} levels."))
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn unexpected(&self) -> SqlError {
        match self.text[self.at..].chars().next() {
            None => invalid("The input string ended unexpectedly."),
            Some(c) if c.is_alphanumeric() => {
                let rest = &self.text[self.at..];
                let end = rest.find(|c: char| !c.is_alphanumeric()).unwrap_or(rest.len());
                invalid(format!("Token \"{}\" is invalid.", &rest[..end]))
            }
            Some(c) => invalid(format!("Token \"{c}\" is invalid.")),
        }
    }

    fn expect(&mut self, byte: u8) -> Result<(), SqlError> {
        self.space();
        match self.peek() == Some(byte) {
            true => {
                self.at += 1;
                Ok(())
            }
            false => Err(self.unexpected()),
        }
    }

    fn word(&mut self, word: &str, value: Json) -> Result<Json, SqlError> {
        let rest = &self.text[self.at..];
        let end = rest.find(|c: char| !c.is_alphanumeric()).unwrap_or(rest.len());
        match &rest[..end] == word {
            true => {
                self.at += word.len();
                Ok(value)
            }
            false => Err(self.unexpected()),
        }
    }

    fn value(&mut self, depth: usize) -> Result<Json, SqlError> {
        if depth > MAX_DEPTH {
            return Err(too_deep());
        }
        self.space();
        match self.peek() {
            Some(b'{') => self.object(depth),
            Some(b'[') => self.array(depth),
            Some(b'"') => Ok(Json::String(self.string()?)),
            Some(b't') => self.word("true", Json::Bool(true)),
            Some(b'f') => self.word("false", Json::Bool(false)),
            Some(b'n') => self.word("null", Json::Null),
            Some(b'-' | b'0'..=b'9') => self.number(),
            _ => Err(self.unexpected()),
        }
    }

    /// Passes the opening of an object or an array, and its end where nothing is in it; then true.
    fn opens_nothing(&mut self, end: u8) -> bool {
        self.at += 1;
        self.space();
        let empty = self.peek() == Some(end);
        self.at += usize::from(empty);
        empty
    }

    /// Passes the comma before another part; false: passed the end.
    fn another(&mut self, end: u8) -> Result<bool, SqlError> {
        self.space();
        match self.peek() {
            Some(c) if c == b',' || c == end => {
                self.at += 1;
                Ok(c == b',')
            }
            _ => Err(self.unexpected()),
        }
    }

    fn object(&mut self, depth: usize) -> Result<Json, SqlError> {
        let mut entries = Vec::new();
        let mut more = !self.opens_nothing(b'}');
        while more {
            self.space();
            if self.peek() != Some(b'"') {
                return Err(self.unexpected());
            }
            let key = self.string()?;
            self.expect(b':')?;
            entries.push((key, self.value(depth + 1)?));
            more = self.another(b'}')?;
        }
        Ok(Json::object(entries))
    }

    fn array(&mut self, depth: usize) -> Result<Json, SqlError> {
        let mut items = Vec::new();
        let mut more = !self.opens_nothing(b']');
        while more {
            items.push(self.value(depth + 1)?);
            more = self.another(b']')?;
        }
        Ok(Json::Array(items))
    }

    fn hex4(&mut self) -> Result<u32, SqlError> {
        let digits = self.text.get(self.at..self.at + 4);
        let digits = digits.filter(|d| d.bytes().all(|b| b.is_ascii_hexdigit()));
        let code = digits.and_then(|d| u32::from_str_radix(d, 16).ok());
        self.at += 4;
        code.ok_or_else(|| invalid("\"\\u\" must be followed by four hexadecimal digits."))
    }

    fn string(&mut self) -> Result<String, SqlError> {
        self.at += 1;
        let mut out = String::new();
        loop {
            let rest = &self.text[self.at..];
            let stop = rest.find(|c: char| c == '"' || c == '\\' || c < ' ');
            let stop = stop.ok_or_else(|| invalid("The input string ended unexpectedly."))?;
            out.push_str(&rest[..stop]);
            self.at += stop + 1;
            match rest.as_bytes()[stop] {
                b'"' => return Ok(out),
                b'\\' => {}
                b => {
                    return Err(invalid(format!(
                        "Character with value 0x{b:02x} must be escaped."
                    )));
                }
            }
            let escape = self.peek();
            self.at += 1;
            match escape {
                Some(c @ (b'"' | b'\\' | b'/')) => out.push(c as char),
                Some(b'b') => out.push('\u{8}'),
                Some(b'f') => out.push('\u{c}'),
                Some(b'n') => out.push('\n'),
                Some(b'r') => out.push('\r'),
                Some(b't') => out.push('\t'),
                Some(b'u') => out.push(self.unicode()?),
                _ => return Err(invalid("Escape sequence is invalid.")),
            }
        }
    }

    fn unicode(&mut self) -> Result<char, SqlError> {
        let pair = || invalid("Unicode high surrogate must be followed by a low one.");
        let code = match self.hex4()? {
            0 => {
                return Err(SqlError::new(
                    SqlState("22P05"),
                    "unsupported Unicode escape sequence",
                )
                .with_detail("\\u0000 cannot be converted to text."));
            }
            high @ 0xd800..=0xdbff => {
                if !self.text[self.at..].starts_with("\\u") {
                    return Err(pair());
                }
                self.at += 2;
                match self.hex4()? {
                    low @ 0xdc00..=0xdfff => 0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00),
                    _ => return Err(pair()),
                }
            }
            code => code,
        };
        char::from_u32(code).ok_or_else(pair)
    }

    fn number(&mut self) -> Result<Json, SqlError> {
        let start = self.at;
        let digits = |p: &mut Parser<'_>| {
            let from = p.at;
            while p.peek().is_some_and(|b| b.is_ascii_digit()) {
                p.at += 1;
            }
            p.at - from
        };
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        let zero = self.peek() == Some(b'0');
        let whole = digits(self);
        let mut good = whole > 0 && !(zero && whole > 1);
        if self.peek() == Some(b'.') {
            self.at += 1;
            good &= digits(self) > 0;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            good &= digits(self) > 0;
        }
        let text = &self.text[start..self.at];
        if !good || self.peek().is_some_and(|b| b.is_ascii_alphanumeric()) {
            return Err(invalid(format!("Token \"{text}\" is invalid.")));
        }
        if !text.contains(['e', 'E']) {
            let zero = text.starts_with('-') && !text.bytes().any(|b| (b'1'..=b'9').contains(&b));
            return Ok(Json::Number(text[usize::from(zero)..].to_owned()));
        }
        plain_digits(text).map(Json::Number)
    }
}

/// Says whether to go on.
pub type Ask<'a> = dyn FnMut() -> Result<(), SqlError> + 'a;

fn any_covers(items: &[Json], wanted: &Json, ask: &mut Ask<'_>) -> Result<bool, SqlError> {
    for item in items {
        if item.covers(wanted, ask)? {
            return Ok(true);
        }
    }
    Ok(false)
}

impl Json {
    pub fn parse(text: &str) -> Result<Json, SqlError> {
        let mut p = Parser { text, at: 0 };
        let value = p.value(0)?;
        p.space();
        match p.at == text.len() {
            true => Ok(value),
            false => Err(p.unexpected()),
        }
    }

    /// An object of entries in any order; of equal keys the last one stays.
    pub fn object(mut entries: Vec<(String, Json)>) -> Json {
        entries.sort_by(|a, b| key_order(&a.0, &b.0));
        let mut kept: Vec<(String, Json)> = Vec::with_capacity(entries.len());
        for entry in entries {
            match kept.last_mut() {
                Some(last) if last.0 == entry.0 => *last = entry,
                _ => kept.push(entry),
            }
        }
        Json::Object(kept)
    }

    pub fn print(&self) -> String {
        let mut out = String::new();
        self.push(&mut out);
        out
    }

    pub fn push(&self, out: &mut String) {
        match self {
            Json::Null => out.push_str("null"),
            Json::Bool(b) => out.push_str(if *b { "true" } else { "false" }),
            Json::Number(n) => out.push_str(n),
            Json::String(s) => push_string(out, s),
            Json::Array(items) => {
                out.push('[');
                for (i, item) in items.iter().enumerate() {
                    if i > 0 {
                        out.push_str(", ");
                    }
                    item.push(out);
                }
                out.push(']');
            }
            Json::Object(entries) => {
                out.push('{');
                for (i, (key, value)) in entries.iter().enumerate() {
                    if i > 0 {
                        out.push_str(", ");
                    }
                    push_string(out, key);
                    out.push_str(": ");
                    value.push(out);
                }
                out.push('}');
            }
        }
    }

    pub fn pretty(&self, out: &mut String, depth: usize) {
        let line = |out: &mut String, depth: usize| {
            out.push('\n');
            out.push_str(&"    ".repeat(depth));
        };
        match self {
            Json::Array(items) if !items.is_empty() => {
                out.push('[');
                for (i, item) in items.iter().enumerate() {
                    if i > 0 {
                        out.push(',');
                    }
                    line(out, depth + 1);
                    item.pretty(out, depth + 1);
                }
                line(out, depth);
                out.push(']');
            }
            Json::Object(entries) if !entries.is_empty() => {
                out.push('{');
                for (i, (key, value)) in entries.iter().enumerate() {
                    if i > 0 {
                        out.push(',');
                    }
                    line(out, depth + 1);
                    push_string(out, key);
                    out.push_str(": ");
                    value.pretty(out, depth + 1);
                }
                line(out, depth);
                out.push('}');
            }
            Json::Array(_) => {
                out.push('[');
                line(out, depth);
                out.push(']');
            }
            Json::Object(_) => {
                out.push('{');
                line(out, depth);
                out.push('}');
            }
            other => other.push(out),
        }
    }

    /// Whether `self @> other`.
    /// `ask` says before each comparison of two items whether to go on: there may be as many as the product of both lengths.
    pub fn contains(&self, other: &Json, ask: &mut Ask<'_>) -> Result<bool, SqlError> {
        match (self, other) {
            (Json::Object(a), Json::Object(b)) => {
                for (key, wanted) in b {
                    let Some(have) = find(a, key) else { return Ok(false) };
                    if !have.covers(wanted, ask)? {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
            (Json::Array(a), Json::Array(b)) => {
                for wanted in b {
                    if !any_covers(a, wanted, ask)? {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
            // An array may contain a scalar.
            (Json::Array(a), scalar) if scalar.is_scalar() => any_covers(a, scalar, ask),
            (a, b) => Ok(a.is_scalar() && a.equals(b)),
        }
    }

    /// Whether an item stands for one that is looked for within it.
    fn covers(&self, wanted: &Json, ask: &mut Ask<'_>) -> Result<bool, SqlError> {
        ask()?;
        match (self, wanted) {
            (Json::Object(_), Json::Object(_)) | (Json::Array(_), Json::Array(_)) => {
                self.contains(wanted, ask)
            }
            _ => Ok(self.equals(wanted)),
        }
    }

    fn is_scalar(&self) -> bool {
        !matches!(self, Json::Array(_) | Json::Object(_))
    }

    fn equals(&self, other: &Json) -> bool {
        match (self, other) {
            (Json::String(a), Json::String(b)) => a == b,
            (Json::Bool(a), Json::Bool(b)) => a == b,
            (Json::Number(a), Json::Number(b)) if a == b => true,
            _ if std::mem::discriminant(self) != std::mem::discriminant(other) => false,
            _ => self.compare(other).is_eq(),
        }
    }

    pub fn strip_nulls(self) -> Json {
        match self {
            Json::Array(items) => Json::Array(items.into_iter().map(Json::strip_nulls).collect()),
            Json::Object(entries) => Json::Object(
                entries
                    .into_iter()
                    .filter(|(_, v)| !matches!(v, Json::Null))
                    .map(|(k, v)| (k, v.strip_nulls()))
                    .collect(),
            ),
            other => other,
        }
    }

    /// `a || b`.
    pub fn concat(self, other: Json) -> Json {
        match (self, other) {
            (Json::Object(mut a), Json::Object(b)) => {
                a.extend(b);
                Json::object(a)
            }
            (a, b) => {
                let items = |j: Json| match j {
                    Json::Array(items) => items,
                    other => vec![other],
                };
                let mut all = items(a);
                all.extend(items(b));
                Json::Array(all)
            }
        }
    }

    /// Replaces, inserts or (`None`) deletes what a path leads to.
    pub fn put(&mut self, path: &[&str], value: Option<&Json>, how: Put) -> Result<(), SqlError> {
        let Some((step, rest)) = path.split_first() else { return Ok(()) };
        match self {
            Json::Object(entries) => {
                let at = entries.iter().position(|e| e.0 == *step);
                match (at, rest.is_empty()) {
                    (Some(at), true) => match (value, how) {
                        (None, _) => drop(entries.remove(at)),
                        (Some(_), Put::Insert { .. }) => {
                            return Err(SqlError::new(
                                SqlState::INVALID_PARAMETER_VALUE,
                                "cannot replace existing key",
                            )
                            .with_hint("Try using the function jsonb_set to replace key value."));
                        }
                        (Some(v), _) => entries[at].1 = v.clone(),
                    },
                    (Some(at), false) => entries[at].1.put(rest, value, how)?,
                    (None, true) => {
                        if let (Some(v), true) = (value, how.creates()) {
                            entries.push(((*step).to_owned(), v.clone()));
                            entries.sort_by(|a, b| key_order(&a.0, &b.0));
                        }
                    }
                    (None, false) => {}
                }
            }
            Json::Array(items) => {
                let index: i64 = step.parse().map_err(|_| {
                    SqlError::new(
                        SqlState::INVALID_TEXT_REPRESENTATION,
                        format!("path element is not an integer: \"{step}\""),
                    )
                })?;
                let len = items.len() as i64;
                let at = if index < 0 { index + len } else { index };
                let inside = (0..len).contains(&at);
                match (inside, rest.is_empty()) {
                    (true, true) => match (value, how) {
                        (None, _) => drop(items.remove(at as usize)),
                        (Some(v), Put::Insert { after }) => {
                            items.insert(at as usize + usize::from(after), v.clone());
                        }
                        (Some(v), _) => items[at as usize] = v.clone(),
                    },
                    (true, false) => items[at as usize].put(rest, value, how)?,
                    (false, true) => {
                        if let (Some(v), true) = (value, how.creates()) {
                            let to = if at < 0 { 0 } else { items.len() };
                            items.insert(to, v.clone());
                        }
                    }
                    _ => {}
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// What `put` does where nothing is, or something.
#[derive(Clone, Copy)]
pub enum Put {
    Replace { create: bool },
    Insert { after: bool },
}

impl Put {
    fn creates(self) -> bool {
        !matches!(self, Put::Replace { create: false })
    }
}

/// Digits after the point, or before it, that an exponent may ask for.
const MAX_DIGITS: i64 = 1000;

/// A number with an exponent, written without.
fn plain_digits(text: &str) -> Result<String, SqlError> {
    let overflow =
        || SqlError::new(SqlState::NUMERIC_VALUE_OUT_OF_RANGE, "value overflows numeric format");
    let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let exponent: i64 = exponent.parse().map_err(|_| overflow())?;
    let (sign, mantissa) = match mantissa.strip_prefix('-') {
        Some(rest) => ("-", rest),
        None => ("", mantissa),
    };
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let mut digits = format!("{whole}{fraction}");
    let point = whole.len() as i64 + exponent;
    if !(-MAX_DIGITS..=MAX_DIGITS).contains(&point) {
        return Err(overflow());
    }
    let scale = (fraction.len() as i64 - exponent).max(0) as usize;
    if point > digits.len() as i64 {
        digits.push_str(&"0".repeat((point - digits.len() as i64) as usize));
    }
    if digits.len() <= scale {
        digits = format!("{}{digits}", "0".repeat(scale + 1 - digits.len()));
    }
    let (whole, fraction) = digits.split_at(digits.len() - scale);
    let whole = match whole.trim_start_matches('0') {
        "" => "0",
        whole => whole,
    };
    let zero = !digits.bytes().any(|b| b != b'0');
    let sign = if zero { "" } else { sign };
    Ok(match fraction.is_empty() {
        true => format!("{sign}{whole}"),
        false => format!("{sign}{whole}.{fraction}"),
    })
}

fn find<'a>(entries: &'a [(String, Json)], key: &str) -> Option<&'a Json> {
    entries.binary_search_by(|e| key_order(&e.0, key)).ok().map(|i| &entries[i].1)
}

pub fn push_string(out: &mut String, s: &str) {
    out.push('"');
    for c in s.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c < ' ' => drop(write!(out, "\\u{:04x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push('"');
}

/// The canonical form of a text.
pub fn canonical(text: &str) -> Result<String, SqlError> {
    Ok(Json::parse(text)?.print())
}

/// A document, or a part of one, in its canonical text.
#[derive(Clone, Copy, Debug)]
pub struct Doc<'a>(pub &'a str);

impl<'a> Doc<'a> {
    pub fn kind(self) -> &'static str {
        match self.0.as_bytes().first() {
            Some(b'{') => "object",
            Some(b'[') => "array",
            Some(b'"') => "string",
            Some(b't' | b'f') => "boolean",
            Some(b'n') => "null",
            _ => "number",
        }
    }

    pub fn is_null(self) -> bool {
        self.kind() == "null"
    }

    /// The end of the value that begins at `at`.
    fn end(self, mut at: usize) -> usize {
        let bytes = self.0.as_bytes();
        let (mut depth, mut in_string) = (0usize, false);
        while let Some(&b) = bytes.get(at) {
            match (b, in_string) {
                (b'\\', true) => at += 1,
                (b'"', _) => {
                    in_string = !in_string;
                    if !in_string && depth == 0 {
                        return at + 1;
                    }
                }
                (b'{' | b'[', false) => depth += 1,
                (b'}' | b']', false) if depth == 0 => return at,
                (b'}' | b']', false) => {
                    depth -= 1;
                    if depth == 0 {
                        return at + 1;
                    }
                }
                (b',' | b':', false) if depth == 0 => return at,
                _ => {}
            }
            at += 1;
        }
        at.min(bytes.len())
    }

    /// The elements of an array; of anything else, none.
    pub fn items(self) -> impl Iterator<Item = Doc<'a>> {
        let mut at = if self.kind() == "array" { 1 } else { self.0.len() };
        std::iter::from_fn(move || {
            if at >= self.0.len() || self.0.as_bytes()[at] == b']' {
                return None;
            }
            let end = self.end(at);
            let item = Doc(&self.0[at..end]);
            at = if self.0[end..].starts_with(", ") { end + 2 } else { end };
            Some(item)
        })
    }

    /// The entries of an object, keys as written; of anything else, none.
    pub fn entries(self) -> impl Iterator<Item = (Doc<'a>, Doc<'a>)> {
        let mut at = if self.kind() == "object" { 1 } else { self.0.len() };
        std::iter::from_fn(move || {
            if at >= self.0.len() || self.0.as_bytes()[at] == b'}' {
                return None;
            }
            let key_end = self.end(at);
            let value = key_end + 2;
            let end = self.end(value);
            let entry = (Doc(&self.0[at..key_end]), Doc(&self.0[value..end]));
            at = if self.0[end..].starts_with(", ") { end + 2 } else { end };
            Some(entry)
        })
    }

    pub fn field(self, key: &str) -> Option<Doc<'a>> {
        self.entries().find(|(k, _)| k.is_string(key)).map(|(_, v)| v)
    }

    pub fn item(self, index: i64) -> Option<Doc<'a>> {
        match index {
            0.. => self.items().nth(index as usize),
            _ => {
                let from = self.items().count() as i64 + index;
                usize::try_from(from).ok().and_then(|i| self.items().nth(i))
            }
        }
    }

    /// One step of a path.
    pub fn step(self, step: &str) -> Option<Doc<'a>> {
        match self.kind() {
            "object" => self.field(step),
            "array" => self.item(step.parse().ok()?),
            _ => None,
        }
    }

    /// Whether this is the string `s`.
    pub fn is_string(self, s: &str) -> bool {
        let inner = self.0.strip_prefix('"').and_then(|r| r.strip_suffix('"'));
        match inner {
            Some(raw) if !raw.contains('\\') => raw == s,
            Some(_) => self.text().as_deref() == Some(s),
            None => false,
        }
    }

    /// As `->>` gives it: strings without quotes, null as `None`.
    pub fn text(self) -> Option<std::borrow::Cow<'a, str>> {
        match self.kind() {
            "null" => None,
            "string" => {
                let raw = &self.0[1..self.0.len() - 1];
                if !raw.contains('\\') {
                    return Some(raw.into());
                }
                let mut p = Parser { text: self.0, at: 0 };
                p.string().ok().map(Into::into)
            }
            _ => Some(self.0.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_print_as_in_postgres() {
        let cases = [
            (r#" {"bb":1,"a":2, "a" : 3} "#, r#"{"a": 3, "bb": 1}"#),
            (r#"[1, 2.50,"x",null,true,[],{}]"#, r#"[1, 2.50, "x", null, true, [], {}]"#),
            (r#"1e2"#, "100"),
            (r#"1.5e-3"#, "0.0015"),
            (r#""a\u00e9\n\/\u0001""#, "\"a\u{e9}\\n/\\u0001\""),
            ("-0", "0"),
        ];
        for (text, printed) in cases {
            assert_eq!(canonical(text).unwrap(), printed);
        }
        for bad in ["", "{", "{a:1}", "[1,]", "01", "1.", "nul", "\"a", "1 2", "\"\\u12\""] {
            assert!(canonical(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn parts_are_found_in_place() {
        let text = canonical(r#"{"a":{"b":[1,{"c":"x, y"}]},"k\"":null,"z":"]"}"#).unwrap();
        let doc = Doc(&text);
        assert_eq!(
            doc.field("a").unwrap().field("b").unwrap().item(-1).unwrap().0,
            r#"{"c": "x, y"}"#
        );
        assert_eq!(doc.field("k\"").unwrap().text(), None);
        assert_eq!(doc.field("z").unwrap().text().unwrap(), "]");
        assert!(doc.field("y").is_none());
        assert_eq!(doc.entries().count(), 3);
    }
}
