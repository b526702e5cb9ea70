//! JSON objects into columns, one pass over the bytes: what is a number stays its digits, so that a
//! numeric loses nothing; what is nested stays its text.

use std::borrow::Cow;

use millrace_common::encoding::array::put_item;
use millrace_common::json::push_string;
use millrace_common::types::Element;
use millrace_common::{SqlError, SqlState, SqlType};

/// Nesting deeper than this is refused: it bounds the stack.
const MAX_DEPTH: usize = 128;

/// What a JSON string is where a column is jsonb. Sinks write what sources of the same format read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strings {
    /// A JSON string, as for PostgreSQL's jsonb_populate_record.
    Values,
    /// The text of a document: so Debezium sends columns of type json.
    Documents,
}

impl Strings {
    /// By the word after FORMAT.
    pub fn of(format: &str) -> Strings {
        if format == "DEBEZIUM" { Strings::Documents } else { Strings::Values }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Null,
    /// true, false, numbers: their text.
    Plain,
    /// Already unescaped.
    String,
    Nested,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    key: (usize, usize),
    value: (usize, usize),
    kind: Kind,
}

/// The members of one object. Reused from object to object.
#[derive(Debug, Default)]
pub struct Object {
    /// Keys and values, unescaped.
    text: String,
    entries: Vec<Entry>,
}

impl Object {
    /// Reads an object, or says where it is broken (characters from 1).
    pub fn parse(&mut self, bytes: &[u8]) -> Result<(), SqlError> {
        let text = super::text(bytes)?;
        self.text.clear();
        self.entries.clear();
        let mut p = Parser { text, at: 0 };
        p.space();
        if p.peek() != Some(b'{') {
            return Err(p.expected("an object"));
        }
        p.at += 1;
        p.space();
        if p.peek() == Some(b'}') {
            p.at += 1;
        } else {
            self.members(&mut p)?;
        }
        p.space();
        if p.at < text.len() {
            return Err(p.expected("the end of the line"));
        }
        Ok(())
    }

    fn members(&mut self, p: &mut Parser<'_>) -> Result<(), SqlError> {
        loop {
            p.space();
            let key = self.keep(&p.string()?);
            p.space();
            p.byte(b':')?;
            p.space();
            let (value, kind) = p.value(0)?;
            let value = self.keep(&value);
            self.entries.push(Entry { key, value, kind });
            p.space();
            match p.peek() {
                Some(b',') => p.at += 1,
                Some(b'}') => {
                    p.at += 1;
                    return Ok(());
                }
                _ => return Err(p.expected("\",\" or \"}\"")),
            }
        }
    }

    fn keep(&mut self, text: &str) -> (usize, usize) {
        let start = self.text.len();
        self.text.push_str(text);
        (start, self.text.len())
    }

    fn entry(&self, name: &str) -> Option<&Entry> {
        // The last of several members of one name counts, as in jsonb.
        self.entries.iter().rev().find(|e| &self.text[e.key.0..e.key.1] == name)
    }

    /// A member's text for a column of a type; a missing one is null.
    pub fn field(
        &self,
        name: &str,
        t: SqlType,
        strings: Strings,
    ) -> Result<Option<Cow<'_, str>>, SqlError> {
        let Some(entry) = self.entry(name) else { return Ok(None) };
        let text = &self.text[entry.value.0..entry.value.1];
        match entry.kind {
            Kind::Null => Ok(None),
            Kind::String if t == SqlType::Jsonb && strings == Strings::Values => {
                Ok(Some(Cow::Owned(quoted(text))))
            }
            Kind::Nested if matches!(t, SqlType::Array(_)) && text.starts_with('[') => {
                let quotes = t == SqlType::Array(Element::Jsonb) && strings == Strings::Values;
                Ok(Some(Cow::Owned(array_literal(text, quotes)?)))
            }
            Kind::Nested if !takes_nested(t) => Err(SqlError::new(
                SqlState::INVALID_TEXT_REPRESENTATION,
                format!("an object or array where {t} is expected"),
            )),
            _ => Ok(Some(Cow::Borrowed(text))),
        }
    }

    /// A member's own JSON text when it is an object; `None`: it is null or missing.
    pub fn nested(&self, name: &str) -> Option<&str> {
        let entry = self.entry(name).filter(|e| e.kind == Kind::Nested)?;
        Some(&self.text[entry.value.0..entry.value.1])
    }
}

/// A text as a JSON string.
fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    push_string(&mut out, text);
    out
}

/// A JSON array as PostgreSQL writes it: `[1, null, "a b"]` is `{1,NULL,"a b"}`. `quotes`: strings stay
/// JSON strings.
fn array_literal(text: &str, quotes: bool) -> Result<String, SqlError> {
    let mut p = Parser { text, at: 1 };
    let mut out = String::from("{");
    p.space();
    while p.peek() != Some(b']') {
        if out.len() > 1 {
            p.byte(b',')?;
            p.space();
            out.push(',');
        }
        let (value, kind) = p.value(0)?;
        match kind {
            Kind::Null => out.push_str("NULL"),
            Kind::Plain => out.push_str(&value),
            Kind::String if quotes => put_item(&quoted(&value), &mut out),
            // An element that is an array of its own is told as an object would be: the element's type decides.
            Kind::String | Kind::Nested => put_item(&value, &mut out),
        }
        p.space();
    }
    out.push('}');
    Ok(out)
}

/// Whether a column of this type takes JSON text as it is.
fn takes_nested(t: SqlType) -> bool {
    let scalar = matches!(
        t,
        SqlType::Boolean
            | SqlType::SmallInt
            | SqlType::Int
            | SqlType::BigInt
            | SqlType::Real
            | SqlType::Double
            | SqlType::Numeric(_)
            | SqlType::Bytea
            | SqlType::Date
            | SqlType::Time
            | SqlType::Timestamp
            | SqlType::Timestamptz
            | SqlType::Interval
    );
    !scalar
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\r' | b'\n')) {
            self.at += 1;
        }
    }

    fn expected(&self, what: &str) -> SqlError {
        let at = self.text[..self.at].chars().count() + 1;
        let found = match self.text[self.at..].chars().next() {
            None => "the end".to_owned(),
            Some(c) => format!("\"{c}\""),
        };
        SqlError::new(
            SqlState::INVALID_TEXT_REPRESENTATION,
            format!("invalid JSON: expected {what}, found {found} at character {at}"),
        )
    }

    fn byte(&mut self, byte: u8) -> Result<(), SqlError> {
        if self.peek() != Some(byte) {
            return Err(self.expected(&format!("\"{}\"", char::from(byte))));
        }
        self.at += 1;
        Ok(())
    }

    fn value(&mut self, depth: usize) -> Result<(Cow<'a, str>, Kind), SqlError> {
        let start = self.at;
        let slice = |p: &Parser<'a>| Cow::Borrowed(&p.text[start..p.at]);
        match self.peek() {
            Some(b'"') => Ok((self.string()?, Kind::String)),
            Some(b'{' | b'[') => {
                self.nested(depth)?;
                Ok((slice(self), Kind::Nested))
            }
            Some(b't' | b'f' | b'n') => {
                let word = ["true", "false", "null"]
                    .into_iter()
                    .find(|w| self.text[start..].starts_with(w))
                    .ok_or_else(|| self.expected("a value"))?;
                self.at += word.len();
                let kind = if word == "null" { Kind::Null } else { Kind::Plain };
                Ok((Cow::Borrowed(word), kind))
            }
            Some(b'-' | b'0'..=b'9') => {
                self.number()?;
                Ok((slice(self), Kind::Plain))
            }
            _ => Err(self.expected("a value")),
        }
    }

    fn nested(&mut self, depth: usize) -> Result<(), SqlError> {
        if depth >= MAX_DEPTH {
            return Err(self.expected("less nesting"));
        }
        let object = self.peek() == Some(b'{');
        let close = if object { b'}' } else { b']' };
        self.at += 1;
        self.space();
        if self.peek() == Some(close) {
            self.at += 1;
            return Ok(());
        }
        loop {
            self.space();
            if object {
                self.string()?;
                self.space();
                self.byte(b':')?;
                self.space();
            }
            self.value(depth + 1)?;
            self.space();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b) if b == close => {
                    self.at += 1;
                    return Ok(());
                }
                _ => return Err(self.expected(&format!("\",\" or \"{}\"", char::from(close)))),
            }
        }
    }

    fn digits(&mut self) -> Result<(), SqlError> {
        let start = self.at;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        if self.at == start { Err(self.expected("a digit")) } else { Ok(()) }
    }

    fn number(&mut self) -> Result<(), SqlError> {
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        match self.peek() {
            Some(b'0') => self.at += 1,
            _ => self.digits()?,
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits()?;
        }
        Ok(())
    }

    fn string(&mut self) -> Result<Cow<'a, str>, SqlError> {
        if self.peek() != Some(b'"') {
            return Err(self.expected("a string"));
        }
        self.at += 1;
        let bytes = self.text.as_bytes();
        let mut piece = self.at;
        let mut owned: Option<String> = None;
        loop {
            let Some(&byte) = bytes.get(self.at) else { return Err(self.expected("\"\\\"\"")) };
            match byte {
                b'"' => {
                    let rest = &self.text[piece..self.at];
                    self.at += 1;
                    return Ok(match owned {
                        None => Cow::Borrowed(rest),
                        Some(text) => Cow::Owned(text + rest),
                    });
                }
                b'\\' => {
                    let text = owned.get_or_insert_default();
                    text.push_str(&self.text[piece..self.at]);
                    self.at += 1;
                    let c = self.escape()?;
                    owned.get_or_insert_default().push(c);
                    piece = self.at;
                }
                0..=0x1f => return Err(self.expected("no control character")),
                _ => self.at += 1,
            }
        }
    }

    /// What stands after a backslash.
    fn escape(&mut self) -> Result<char, SqlError> {
        let Some(byte) = self.peek() else { return Err(self.expected("an escape")) };
        let c = match byte {
            b'"' => '"',
            b'\\' => '\\',
            b'/' => '/',
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                self.at += 1;
                return self.unicode();
            }
            _ => return Err(self.expected("an escape")),
        };
        self.at += 1;
        Ok(c)
    }

    fn hex4(&mut self) -> Result<u32, SqlError> {
        let digits = self.text.as_bytes().get(self.at..self.at + 4);
        let code = digits
            .filter(|d| d.iter().all(u8::is_ascii_hexdigit))
            .and_then(|d| std::str::from_utf8(d).ok())
            .and_then(|d| u32::from_str_radix(d, 16).ok())
            .ok_or_else(|| self.expected("four hexadecimal digits"))?;
        self.at += 4;
        Ok(code)
    }

    fn unicode(&mut self) -> Result<char, SqlError> {
        let first = self.hex4()?;
        let code = if (0xd800..0xdc00).contains(&first) && self.text[self.at..].starts_with("\\u") {
            self.at += 2;
            let second = self.hex4()?;
            if !(0xdc00..0xe000).contains(&second) {
                return Err(self.expected("a low surrogate"));
            }
            0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00)
        } else {
            first
        };
        // A text cannot hold a zero character, as in PostgreSQL.
        char::from_u32(code).filter(|c| *c != '\0').ok_or_else(|| self.expected("a character"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(json: &str, name: &str, t: SqlType) -> Result<Option<String>, SqlError> {
        field_with(json, name, t, Strings::Values)
    }

    fn field_with(
        json: &str,
        name: &str,
        t: SqlType,
        strings: Strings,
    ) -> Result<Option<String>, SqlError> {
        let mut object = Object::default();
        object.parse(json.as_bytes())?;
        object.field(name, t, strings).map(|f| f.map(Cow::into_owned))
    }

    #[test]
    fn members_come_as_their_text() {
        let json = r#" {"a": 12345678901234567890.5e-3, "b":"x\"\u00e9\ud83d\ude00\n", "c":null, "d":[1,{"k":"]"}], "a" :true} "#;
        let get = |name| field(json, name, SqlType::Text).unwrap();
        assert_eq!(get("b").unwrap(), "x\"é😀\n");
        assert_eq!(get("c"), None);
        assert_eq!(get("missing"), None);
        assert_eq!(get("d").unwrap(), r#"[1,{"k":"]"}]"#);
        assert_eq!(get("a").unwrap(), "true");
        assert!(field(json, "d", SqlType::Int).is_err());
        let arrays = r#"{"n":[1, null ,-2.5], "t":["a b", "NULL", "q\"\\"], "e":[ ], "x":{"k":1}}"#;
        let array = |name, t| field(arrays, name, SqlType::Array(t));
        assert_eq!(array("n", Element::Double).unwrap().unwrap(), "{1,NULL,-2.5}");
        assert_eq!(array("t", Element::Text).unwrap().unwrap(), r#"{"a b","NULL","q\"\\"}"#);
        assert_eq!(array("e", Element::Int).unwrap().unwrap(), "{}");
        assert_eq!(array("x", Element::Int).unwrap().unwrap(), r#"{"k":1}"#);
        assert_eq!(field("{}", "x", SqlType::Int).unwrap(), None);
    }

    #[test]
    fn a_string_for_jsonb_is_a_json_string_or_a_document() {
        let json = r#"{"n":"5", "t":"true", "h":"a\"b\u0001", "z":null, "d":{"k":"5"}, "p":5, "l":["5", 5, null, {"k":"5"}, "{1}"]}"#;
        let get = |name, strings| field_with(json, name, SqlType::Jsonb, strings).unwrap();
        let value = |name| get(name, Strings::Values);
        assert_eq!(value("n").unwrap(), r#""5""#);
        assert_eq!(value("t").unwrap(), r#""true""#);
        assert_eq!(value("h").unwrap(), r#""a\"b\u0001""#);
        assert_eq!(value("l").unwrap(), r#"["5", 5, null, {"k":"5"}, "{1}"]"#);
        let document = |name| get(name, Strings::Documents);
        assert_eq!(document("n").unwrap(), "5");
        assert_eq!(document("t").unwrap(), "true");
        assert_eq!(document("h").unwrap(), "a\"b\u{1}");
        for strings in [Strings::Values, Strings::Documents] {
            assert_eq!(get("z", strings), None);
            assert_eq!(get("d", strings).unwrap(), r#"{"k":"5"}"#);
            assert_eq!(get("p", strings).unwrap(), "5");
            // To other types a string is its text.
            let text = field_with(json, "n", SqlType::Text, strings).unwrap();
            assert_eq!(text.unwrap(), "5");
        }
        let list = |t, strings| field_with(json, "l", SqlType::Array(t), strings).unwrap().unwrap();
        assert_eq!(
            list(Element::Jsonb, Strings::Values),
            r#"{"\"5\"",5,NULL,"{\"k\":\"5\"}","\"{1}\""}"#
        );
        for (t, strings) in [(Element::Jsonb, Strings::Documents), (Element::Text, Strings::Values)]
        {
            assert_eq!(list(t, strings), r#"{"5",5,NULL,"{\"k\":\"5\"}","{1}"}"#);
        }
    }

    #[test]
    fn broken_json_is_an_error_with_its_place() {
        for broken in [
            "",
            "[1]",
            "{",
            "{\"a\"}",
            "{\"a\":}",
            "{\"a\":01}",
            "{\"a\":1,}",
            "{\"a\":\"\\x\"}",
            "{\"a\":\"\\ud800\"}",
            "{\"a\":1} x",
            "{\"a\":tru}",
            "{\"a\":\"\t\"}",
            "{\"a\":1.}",
        ] {
            assert!(field(broken, "a", SqlType::Text).is_err(), "{broken}");
        }
        let deep = format!("{{\"a\":{}1{}}}", "[".repeat(500), "]".repeat(500));
        assert!(field(&deep, "a", SqlType::Text).is_err());
        let message =
            field("{\"a\":1 \"b\":2}", "a", SqlType::Int).unwrap_err().into_parts().message;
        assert_eq!(message, "invalid JSON: expected \",\" or \"}\", found \"\"\" at character 8");
    }
}
