//! Bytes into rows: CSV records and JSON objects, with errors that say what is wrong.

pub mod csv;
pub mod json;

use std::borrow::Cow;
use std::sync::Arc;

use millrace_common::{SqlError, SqlState, SqlType};
use millrace_rpc::catalog::Relation;

use crate::batch::{BatchBuilder, Facts};
use crate::columns::Columns;
use crate::options;
use csv::CsvFormat;
use json::Strings;

/// ENCODE of a source.
#[derive(Clone, Debug)]
pub enum Encoding {
    Csv(CsvFormat),
    Json(Strings),
    /// The whole value in the one column.
    Bytes,
}

impl Encoding {
    /// From the FORMAT clause. `default`: the encoding when there is none.
    pub fn of(relation: &Relation, encode: &str) -> Result<Encoding, SqlError> {
        Ok(match encode {
            "CSV" => Encoding::Csv(CsvFormat {
                header: options::boolean(relation, "header", false)?,
                delimiter: options::byte(relation, "delimiter", b',')?,
                quote: options::byte(relation, "quote", b'"')?,
                escape: match relation.option("escape") {
                    Some(_) => options::byte(relation, "escape", b'"')?,
                    None => options::byte(relation, "quote", b'"')?,
                },
                null: relation.option("null").unwrap_or_default().to_owned(),
            }),
            "JSON" => Encoding::Json(Strings::of(options::format(relation, ("PLAIN", encode)).0)),
            "BYTES" => Encoding::Bytes,
            other => {
                return Err(SqlError::unsupported(format!("ENCODE {other}"))
                    .with_hint("Use ENCODE CSV, JSON or BYTES."));
            }
        })
    }
}

/// Options of the encodings.
pub const ENCODE_OPTIONS: &[&str] = &["header", "delimiter", "quote", "escape", "null"];

/// Reads rows of one encoding into batches.
pub struct Decoder {
    columns: Arc<Columns>,
    encoding: Encoding,
    /// CSV: which field each column is, by column. From the header, or in order.
    fields: Vec<Option<usize>>,
    /// CSV without a header: fields a record must have.
    exact: Option<usize>,
    record: csv::Record,
    object: json::Object,
}

impl Decoder {
    pub fn new(columns: Arc<Columns>, encoding: Encoding) -> Decoder {
        let mut fields = vec![None; columns.len()];
        columns.values().enumerate().for_each(|(i, c)| fields[c] = Some(i));
        let exact = Some(columns.values().count());
        let (record, object) = Default::default();
        Decoder { columns, encoding, fields, exact, record, object }
    }

    /// Takes the names of the fields from a CSV header.
    pub fn set_header(&mut self, line: &[u8]) -> Result<(), SqlError> {
        let Encoding::Csv(format) = &self.encoding else { return Ok(()) };
        self.record.parse(line, format)?;
        let names: Vec<&str> = (0..self.record.len()).map(|i| self.record.text(i).trim()).collect();
        let mut fields = vec![None; self.columns.len()];
        for column in self.columns.values() {
            let wanted = &self.columns.names[column];
            let exact = names.iter().position(|n| n == wanted);
            let found = exact.or_else(|| names.iter().position(|n| n.eq_ignore_ascii_case(wanted)));
            fields[column] = Some(found.ok_or_else(|| {
                SqlError::new(
                    SqlState::UNDEFINED_COLUMN,
                    format!("the header has no column \"{wanted}\""),
                )
                .with_detail(format!("It has: {}.", names.join(", ")))
            })?);
        }
        self.fields = fields;
        self.exact = Some(names.len());
        Ok(())
    }

    /// Adds one record. An error tells why it was left out.
    pub fn push(
        &mut self,
        bytes: &[u8],
        facts: &Facts<'_>,
        weight: i64,
        out: &mut BatchBuilder,
    ) -> Result<(), SqlError> {
        match &self.encoding {
            Encoding::Csv(format) => {
                self.record.parse(bytes, format)?;
                self.check_width()?;
                let (record, fields) = (&self.record, &self.fields);
                out.push(facts, weight, |column| {
                    Ok(fields[column]
                        .and_then(|f| record.field(f, &format.null))
                        .map(Cow::Borrowed))
                })
            }
            Encoding::Json(strings) => {
                self.object.parse(bytes)?;
                let (object, columns) = (&self.object, &self.columns);
                out.push(facts, weight, |c| {
                    object.field(&columns.names[c], columns.types[c], *strings)
                })
            }
            Encoding::Bytes => {
                let text = bytes_as_text(bytes, &self.columns)?;
                out.push(facts, weight, |_| Ok(Some(Cow::Borrowed(&text))))
            }
        }
    }

    fn check_width(&self) -> Result<(), SqlError> {
        let (Some(exact), found) = (self.exact, self.record.len()) else { return Ok(()) };
        let message = match found.cmp(&exact) {
            std::cmp::Ordering::Equal => return Ok(()),
            std::cmp::Ordering::Less => {
                let missing = self.columns.values().find(|&c| self.fields[c] >= Some(found));
                match missing {
                    Some(c) => format!("missing data for column \"{}\"", self.columns.names[c]),
                    None => format!("the record has {found} fields instead of {exact}"),
                }
            }
            std::cmp::Ordering::Greater => "extra data after last expected column".to_owned(),
        };
        Err(SqlError::new(SqlState::BAD_COPY_FILE_FORMAT, message))
    }
}

/// The value of ENCODE BYTES in the text form of its column's type.
fn bytes_as_text<'a>(bytes: &'a [u8], columns: &Columns) -> Result<Cow<'a, str>, SqlError> {
    let binary = columns.values().any(|c| columns.types[c] == SqlType::Bytea);
    if binary {
        let mut hex = String::with_capacity(2 + bytes.len() * 2);
        hex.push_str("\\x");
        bytes.iter().for_each(|b| {
            hex.push(char::from_digit(u32::from(b >> 4), 16).unwrap_or('0'));
            hex.push(char::from_digit(u32::from(b & 15), 16).unwrap_or('0'));
        });
        return Ok(Cow::Owned(hex));
    }
    text(bytes).map(Cow::Borrowed)
}

/// UTF-8, or the error PostgreSQL gives.
pub fn text(bytes: &[u8]) -> Result<&str, SqlError> {
    let shown = |at: usize| {
        let bytes = &bytes[at..(at + 3).min(bytes.len())];
        bytes.iter().map(|b| format!("0x{b:02x}")).collect::<Vec<_>>().join(" ")
    };
    let text = std::str::from_utf8(bytes).map_err(|e| {
        SqlError::new(
            SqlState("22021"),
            format!("invalid byte sequence for encoding \"UTF8\": {}", shown(e.valid_up_to())),
        )
    })?;
    match memchr::memchr(0, bytes) {
        None => Ok(text),
        Some(_) => Err(SqlError::new(
            SqlState("22021"),
            "invalid byte sequence for encoding \"UTF8\": 0x00",
        )),
    }
}
