//! Rows as lines of JSON or CSV.
//!
//! JSON follows PostgreSQL's `row_to_json`: numbers and booleans bare (NaN and infinities as strings),
//! timestamps with a `T`, jsonb as it is, arrays as arrays, everything else as the string that PostgreSQL prints. FORMAT DEBEZIUM
//! has jsonb as a string, as Debezium does. CSV follows its `COPY … (FORMAT csv)`.

use bytes::{BufMut, BytesMut};
use millrace_common::encoding::array::array_items;
use millrace_common::{Epoch, SqlError, SqlType};

use super::{Change, Definition, Rows, SinkType};
use crate::decode::json::Strings;
use crate::options::invalid;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encode {
    Json,
    Csv { delimiter: u8, header: bool },
}

/// Writes a sink's changes as lines.
#[derive(Debug)]
pub struct LineWriter {
    definition: Definition,
    encode: Encode,
    /// `"name":` of every column.
    names: Vec<String>,
}

impl LineWriter {
    pub fn new(definition: Definition, encode: Encode) -> Result<LineWriter, SqlError> {
        if matches!(encode, Encode::Csv { .. }) && definition.kind != SinkType::AppendOnly {
            return Err(SqlError::unsupported("ENCODE CSV of anything but FORMAT PLAIN")
                .with_hint("Use ENCODE JSON."));
        }
        if definition.kind == SinkType::Upsert && definition.key.is_empty() {
            return Err(invalid("an upsert sink needs a key"));
        }
        let mut names = Vec::new();
        for column in &definition.columns {
            let mut name = BytesMut::new();
            put_json_string(&column.name, &mut name);
            let mut name = String::from_utf8_lossy(&name).into_owned();
            name.push(':');
            names.push(name);
        }
        Ok(LineWriter { definition, encode, names })
    }

    /// Positions of the key's columns.
    pub fn key(&self) -> &[usize] {
        &self.definition.key
    }

    /// The line that begins a file, if any.
    pub fn header(&self, out: &mut BytesMut) {
        let Encode::Csv { delimiter, header: true } = self.encode else { return };
        for (i, column) in self.definition.columns.iter().enumerate() {
            if i > 0 {
                out.put_u8(delimiter);
            }
            put_csv(&column.name, delimiter, out);
        }
        out.put_u8(b'\n');
    }

    /// The lines of one change; nothing for one that the format leaves out.
    pub fn line(
        &self,
        rows: &Rows<'_>,
        change: Change,
        epoch: Epoch,
        text: &mut BytesMut,
        out: &mut BytesMut,
    ) -> Result<(), SqlError> {
        match (self.definition.kind, change) {
            (SinkType::AppendOnly, Change::Delete(_)) => {}
            (SinkType::AppendOnly, Change::Insert(row) | Change::Update { new: row, .. }) => {
                self.row(rows, row, text, out)?;
                out.put_u8(b'\n');
            }
            (SinkType::Upsert, change) => {
                let (row, value) = match change {
                    Change::Insert(row) | Change::Update { new: row, .. } => (row, true),
                    Change::Delete(row) => (row, false),
                };
                out.put_slice(b"{\"key\":");
                self.object(rows, row, &self.definition.key, text, out)?;
                out.put_slice(b",\"value\":");
                if value {
                    self.row(rows, row, text, out)?;
                } else {
                    out.put_slice(b"null");
                }
                out.put_slice(b"}\n");
            }
            (SinkType::Changelog, change) => {
                let (old, new, op) = match change {
                    Change::Insert(row) => (None, Some(row), "c"),
                    Change::Delete(row) => (Some(row), None, "d"),
                    Change::Update { old, new } => (Some(old), Some(new), "u"),
                };
                for (name, row) in [("{\"before\":", old), (",\"after\":", new)] {
                    out.put_slice(name.as_bytes());
                    match row {
                        Some(row) => self.row(rows, row, text, out)?,
                        None => out.put_slice(b"null"),
                    }
                }
                let end = format!(
                    ",\"op\":\"{op}\",\"ts_ms\":{},\"epoch\":{}}}\n",
                    epoch.millis(),
                    epoch.0
                );
                out.put_slice(end.as_bytes());
            }
        }
        Ok(())
    }

    /// Key and value of the message that tells one change; `None` for one that the format leaves out. A
    /// message without a value deletes its key.
    #[cfg(feature = "kafka")]
    pub fn message(
        &self,
        rows: &Rows<'_>,
        change: Change,
        epoch: Epoch,
        text: &mut BytesMut,
    ) -> Result<Option<(Option<BytesMut>, Option<BytesMut>)>, SqlError> {
        let (Change::Insert(row) | Change::Delete(row) | Change::Update { new: row, .. }) = change;
        let deleted = matches!(change, Change::Delete(_));
        if deleted && self.definition.kind == SinkType::AppendOnly {
            return Ok(None);
        }
        let mut key = None;
        if !self.definition.key.is_empty() {
            let out = key.insert(BytesMut::new());
            self.object(rows, row, &self.definition.key, text, out)?;
        }
        let mut value = BytesMut::new();
        match self.definition.kind {
            SinkType::Upsert if deleted => return Ok(Some((key, None))),
            SinkType::Upsert => self.row(rows, row, text, &mut value)?,
            _ => {
                self.line(rows, change, epoch, text, &mut value)?;
                // A message needs no line feed.
                value.truncate(value.len().saturating_sub(1));
            }
        }
        Ok(Some((key, Some(value))))
    }

    fn row(
        &self,
        rows: &Rows<'_>,
        row: usize,
        text: &mut BytesMut,
        out: &mut BytesMut,
    ) -> Result<(), SqlError> {
        match self.encode {
            Encode::Json => {
                let all: Vec<usize> = (0..self.names.len()).collect();
                self.object(rows, row, &all, text, out)
            }
            Encode::Csv { delimiter, .. } => {
                for column in 0..self.names.len() {
                    if column > 0 {
                        out.put_u8(delimiter);
                    }
                    if let Some(value) = rows.text(row, column, text)? {
                        put_csv(value, delimiter, out);
                    }
                }
                Ok(())
            }
        }
    }

    fn object(
        &self,
        rows: &Rows<'_>,
        row: usize,
        columns: &[usize],
        text: &mut BytesMut,
        out: &mut BytesMut,
    ) -> Result<(), SqlError> {
        let strings = match self.definition.kind {
            SinkType::Changelog => Strings::Documents,
            SinkType::AppendOnly | SinkType::Upsert => Strings::Values,
        };
        out.put_u8(b'{');
        for (i, &column) in columns.iter().enumerate() {
            if i > 0 {
                out.put_u8(b',');
            }
            out.put_slice(self.names[column].as_bytes());
            match rows.text(row, column, text)? {
                None => out.put_slice(b"null"),
                Some(value) => {
                    put_json(value, self.definition.columns[column].sql_type, strings, out)
                }
            }
        }
        out.put_u8(b'}');
        Ok(())
    }
}

/// A value from its text.
fn put_json(text: &str, sql_type: SqlType, strings: Strings, out: &mut BytesMut) {
    match sql_type {
        SqlType::Boolean => out.put_slice(if text == "t" { b"true" } else { b"false" }),
        SqlType::SmallInt
        | SqlType::Int
        | SqlType::BigInt
        | SqlType::Real
        | SqlType::Double
        | SqlType::Numeric(_) => {
            let plain = text.bytes().all(|b| b.is_ascii_digit() || b"+-.e".contains(&b));
            if plain {
                out.put_slice(text.as_bytes());
            } else {
                put_json_string(text, out);
            }
        }
        SqlType::Timestamp | SqlType::Timestamptz => {
            let mut iso = text.replacen(' ', "T", 1);
            // PostgreSQL's text has the hours of a whole offset only.
            if sql_type == SqlType::Timestamptz && iso.ends_with("+00") {
                iso.push_str(":00");
            }
            put_json_string(&iso, out);
        }
        SqlType::Jsonb => match strings {
            Strings::Values => out.put_slice(text.as_bytes()),
            Strings::Documents => put_json_string(text, out),
        },
        SqlType::Array(element) => match array_items(text) {
            Some(items) => put_json_array(&items, element.scalar(), strings, out),
            None => put_json_string(text, out),
        },
        _ => put_json_string(text, out),
    }
}

fn put_json_array(
    items: &[Option<String>],
    element: SqlType,
    strings: Strings,
    out: &mut BytesMut,
) {
    out.put_u8(b'[');
    for (i, item) in items.iter().enumerate() {
        if i > 0 {
            out.put_u8(b',');
        }
        match item {
            Some(item) => put_json(item, element, strings, out),
            None => out.put_slice(b"null"),
        }
    }
    out.put_u8(b']');
}

fn put_json_string(text: &str, out: &mut BytesMut) {
    out.put_u8(b'"');
    let bytes = text.as_bytes();
    let mut plain = 0;
    for (i, &b) in bytes.iter().enumerate() {
        let escaped: Option<&[u8]> = match b {
            b'"' => Some(b"\\\""),
            b'\\' => Some(b"\\\\"),
            b'\n' => Some(b"\\n"),
            b'\r' => Some(b"\\r"),
            b'\t' => Some(b"\\t"),
            8 => Some(b"\\b"),
            12 => Some(b"\\f"),
            b if b < 32 => None,
            _ => continue,
        };
        out.put_slice(&bytes[plain..i]);
        match escaped {
            Some(escaped) => out.put_slice(escaped),
            None => out.put_slice(format!("\\u{b:04x}").as_bytes()),
        }
        plain = i + 1;
    }
    out.put_slice(&bytes[plain..]);
    out.put_u8(b'"');
}

/// Quoted where it must be; an empty string is quoted, because nothing at all is NULL.
fn put_csv(text: &str, delimiter: u8, out: &mut BytesMut) {
    let special = |b: u8| b == delimiter || matches!(b, b'"' | b'\n' | b'\r');
    if !text.is_empty() && text != "\\." && !text.bytes().any(special) {
        return out.put_slice(text.as_bytes());
    }
    out.put_u8(b'"');
    for b in text.bytes() {
        if b == b'"' {
            out.put_u8(b'"');
        }
        out.put_u8(b);
    }
    out.put_u8(b'"');
}

#[cfg(test)]
mod tests {
    use millrace_common::json::canonical;
    use millrace_common::types::Element;

    use super::*;
    use crate::decode::json::Object;

    fn json(text: &str, t: SqlType) -> String {
        json_with(text, t, Strings::Values)
    }

    fn json_with(text: &str, t: SqlType, strings: Strings) -> String {
        let mut out = BytesMut::new();
        put_json(text, t, strings, &mut out);
        String::from_utf8(out.to_vec()).unwrap()
    }

    /// As `SELECT to_json(value)` of PostgreSQL 15 prints them.
    #[test]
    fn values_are_those_of_to_json() {
        assert_eq!(json("t", SqlType::Boolean), "true");
        assert_eq!(json("-12.50", SqlType::Numeric(None)), "-12.50");
        assert_eq!(json("1e+100", SqlType::Double), "1e+100");
        assert_eq!(json("NaN", SqlType::Double), "\"NaN\"");
        assert_eq!(json("-Infinity", SqlType::Real), "\"-Infinity\"");
        assert_eq!(json("2024-02-03 04:05:06.7", SqlType::Timestamp), "\"2024-02-03T04:05:06.7\"");
        assert_eq!(
            json("2024-02-03 04:05:06+00", SqlType::Timestamptz),
            "\"2024-02-03T04:05:06+00:00\""
        );
        assert_eq!(json("{\"x\": [1, 2.50]}", SqlType::Jsonb), "{\"x\": [1, 2.50]}");
        let texts = SqlType::Array(Element::Text);
        assert_eq!(json("{a,\"b \\\"c\",NULL}", texts), "[\"a\",\"b \\\"c\",null]");
        assert_eq!(json("{t,f}", SqlType::Array(Element::Boolean)), "[true,false]");
        assert_eq!(json("{}", SqlType::Array(Element::Int)), "[]");
        assert_eq!(json("a\"b\\c\n\u{1}é", SqlType::Text), "\"a\\\"b\\\\c\\n\\u0001é\"");
    }

    #[test]
    fn sources_read_the_jsonb_that_sinks_of_their_format_write() {
        let read = |json: &str, t, strings| {
            let mut object = Object::default();
            object.parse(format!("{{\"j\":{json}}}").as_bytes()).unwrap();
            object.field("j", t, strings).unwrap().map(|text| text.into_owned())
        };
        let documents = [
            "5",
            "true",
            r#""5""#,
            r#""true""#,
            r#""hello""#,
            r#""a\"b\\c\n\u0001é""#,
            r#"{"a": "5", "b": [1, "x", null]}"#,
            r#"["5", 2.50]"#,
        ];
        let array = SqlType::Array(Element::Jsonb);
        let items = r#"{"\"5\"",5,"\"a b\"","{\"a\": \"5\"}",NULL}"#;
        for strings in [Strings::Values, Strings::Documents] {
            for document in documents {
                let written = json_with(document, SqlType::Jsonb, strings);
                let back = read(&written, SqlType::Jsonb, strings).unwrap();
                assert_eq!(canonical(&back).unwrap(), document, "{strings:?} {written}");
            }
            let written = json_with(items, array, strings);
            let back = read(&written, array, strings).unwrap();
            assert_eq!(array_items(&back), array_items(items), "{strings:?} {written}");
        }
        let debezium = |text, t| json_with(text, t, Strings::Documents);
        assert_eq!(debezium("{\"a\": 1}", SqlType::Jsonb), r#""{\"a\": 1}""#);
        assert_eq!(debezium("{5,NULL}", array), r#"["5",null]"#);
        // Only as a string a JSON null differs from NULL.
        let null = debezium("null", SqlType::Jsonb);
        assert_eq!(read(&null, SqlType::Jsonb, Strings::Documents).unwrap(), "null");
    }

    #[test]
    fn csv_quotes_what_it_must() {
        let csv = |text: &str| {
            let mut out = BytesMut::new();
            put_csv(text, b',', &mut out);
            String::from_utf8(out.to_vec()).unwrap()
        };
        assert_eq!(csv("plain"), "plain");
        assert_eq!(csv(""), "\"\"");
        assert_eq!(csv("a,\"b\"\n"), "\"a,\"\"b\"\"\n\"");
    }
}
