//! Text and binary input into Arrow builders, one per column: parameters, COPY and casts of literals.

use std::sync::Arc;

use crate::keys::one_nan;
use crate::types::UUID_BYTES;
use crate::zone::Zone;
use crate::{SqlError, SqlState, SqlType};
use arrow::array::{
    Array, ArrayBuilder, ArrayRef, BinaryBuilder, BooleanBuilder, Date32Builder, Decimal128Builder,
    Decimal256Builder, FixedSizeBinaryBuilder, Float32Builder, Float64Builder, Int16Builder,
    Int32Builder, Int64Builder, IntervalMonthDayNanoBuilder, LargeStringBuilder, ListArray,
    StringBuilder, Time64MicrosecondBuilder, TimestampMicrosecondBuilder,
};
use arrow::buffer::{NullBuffer, OffsetBuffer};
use arrow::datatypes::{DataType, Field, IntervalMonthDayNano, i256};

use super::interval::{Interval, parse_interval};
use super::{datetime, invalid_text, numeric, out_of_range};

enum Inner {
    Bool(BooleanBuilder),
    Int16(Int16Builder),
    Int32(Int32Builder),
    Int64(Int64Builder),
    Float32(Float32Builder),
    Float64(Float64Builder),
    Decimal128(Decimal128Builder),
    Decimal256(Decimal256Builder),
    Text(StringBuilder),
    Bytes(BinaryBuilder),
    Date(Date32Builder),
    Time(Time64MicrosecondBuilder),
    Timestamp(TimestampMicrosecondBuilder),
    Interval(IntervalMonthDayNanoBuilder),
    Uuid(FixedSizeBinaryBuilder),
    Json(LargeStringBuilder),
    List { items: Box<ColumnBuilder>, ends: Vec<i32>, valid: Vec<bool> },
}

/// Builds a column of one SQL type from text or binary values.
pub struct ColumnBuilder {
    sql: SqlType,
    precision: (u8, i8),
    /// Of instants whose text names none.
    zone: Zone,
    /// What `now` means; `None`: it is no value.
    now: Option<i64>,
    inner: Inner,
}

impl ColumnBuilder {
    pub fn new(sql: SqlType, capacity: usize) -> ColumnBuilder {
        let mut precision = (0, 0);
        let inner = match sql {
            SqlType::Boolean => Inner::Bool(BooleanBuilder::with_capacity(capacity)),
            SqlType::SmallInt => Inner::Int16(Int16Builder::with_capacity(capacity)),
            SqlType::Int => Inner::Int32(Int32Builder::with_capacity(capacity)),
            SqlType::BigInt => Inner::Int64(Int64Builder::with_capacity(capacity)),
            SqlType::Real => Inner::Float32(Float32Builder::with_capacity(capacity)),
            SqlType::Double => Inner::Float64(Float64Builder::with_capacity(capacity)),
            SqlType::Numeric(_) => match sql.to_arrow() {
                DataType::Decimal256(p, s) => {
                    precision = (p, s);
                    Inner::Decimal256(
                        Decimal256Builder::with_capacity(capacity).with_data_type(sql.to_arrow()),
                    )
                }
                t => {
                    if let DataType::Decimal128(p, s) = t {
                        precision = (p, s);
                    }
                    Inner::Decimal128(Decimal128Builder::with_capacity(capacity).with_data_type(t))
                }
            },
            SqlType::Text | SqlType::Varchar(_) | SqlType::Char(_) => {
                Inner::Text(StringBuilder::with_capacity(capacity, capacity * 16))
            }
            SqlType::Bytea => Inner::Bytes(BinaryBuilder::with_capacity(capacity, capacity * 16)),
            SqlType::Date => Inner::Date(Date32Builder::with_capacity(capacity)),
            SqlType::Time => Inner::Time(Time64MicrosecondBuilder::with_capacity(capacity)),
            SqlType::Timestamp | SqlType::Timestamptz => Inner::Timestamp(
                TimestampMicrosecondBuilder::with_capacity(capacity).with_data_type(sql.to_arrow()),
            ),
            SqlType::Interval => {
                Inner::Interval(IntervalMonthDayNanoBuilder::with_capacity(capacity))
            }
            SqlType::Uuid => {
                Inner::Uuid(FixedSizeBinaryBuilder::with_capacity(capacity, UUID_BYTES))
            }
            SqlType::Jsonb => {
                Inner::Json(LargeStringBuilder::with_capacity(capacity, capacity * 16))
            }
            SqlType::Array(e) => Inner::List {
                items: Box::new(ColumnBuilder::new(e.scalar(), capacity)),
                ends: Vec::with_capacity(capacity),
                valid: Vec::with_capacity(capacity),
            },
        };
        ColumnBuilder { sql, precision, zone: Zone::Fixed(0), now: None, inner }
    }

    /// Reads instants whose text names no zone as times of this one; without this, of UTC.
    pub fn in_zone(mut self, zone: Zone) -> ColumnBuilder {
        self.zone = zone;
        if let Inner::List { items, .. } = &mut self.inner {
            items.zone = zone;
        }
        self
    }

    /// Reads `now` and its like as of this instant; without this, they are errors.
    pub fn at(mut self, now: i64) -> ColumnBuilder {
        self.now = Some(now);
        if let Inner::List { items, .. } = &mut self.inner {
            items.now = Some(now);
        }
        self
    }

    pub fn append_null(&mut self) {
        match &mut self.inner {
            Inner::Bool(b) => b.append_null(),
            Inner::Int16(b) => b.append_null(),
            Inner::Int32(b) => b.append_null(),
            Inner::Int64(b) => b.append_null(),
            Inner::Float32(b) => b.append_null(),
            Inner::Float64(b) => b.append_null(),
            Inner::Decimal128(b) => b.append_null(),
            Inner::Decimal256(b) => b.append_null(),
            Inner::Text(b) => b.append_null(),
            Inner::Bytes(b) => b.append_null(),
            Inner::Date(b) => b.append_null(),
            Inner::Time(b) => b.append_null(),
            Inner::Timestamp(b) => b.append_null(),
            Inner::Interval(b) => b.append_null(),
            Inner::Uuid(b) => b.append_null(),
            Inner::Json(b) => b.append_null(),
            Inner::List { .. } => self.end_list(false),
        }
    }

    fn len(&self) -> usize {
        match &self.inner {
            Inner::Bool(b) => b.len(),
            Inner::Int16(b) => b.len(),
            Inner::Int32(b) => b.len(),
            Inner::Int64(b) => b.len(),
            Inner::Float32(b) => b.len(),
            Inner::Float64(b) => b.len(),
            Inner::Decimal128(b) => b.len(),
            Inner::Decimal256(b) => b.len(),
            Inner::Text(b) => b.len(),
            Inner::Bytes(b) => b.len(),
            Inner::Date(b) => b.len(),
            Inner::Time(b) => b.len(),
            Inner::Timestamp(b) => b.len(),
            Inner::Interval(b) => b.len(),
            Inner::Uuid(b) => b.len(),
            Inner::Json(b) => b.len(),
            Inner::List { ends, .. } => ends.len(),
        }
    }

    /// Ends the array whose elements have been appended.
    fn end_list(&mut self, is_valid: bool) {
        if let Inner::List { items, ends, valid } = &mut self.inner {
            ends.push(items.len() as i32);
            valid.push(is_valid);
        }
    }

    pub(super) fn push_uuid(&mut self, v: [u8; 16]) {
        if let Inner::Uuid(b) = &mut self.inner {
            b.append_value(v).expect("a uuid has sixteen bytes");
        }
    }

    /// Appends a value from PostgreSQL's text form.
    pub fn append_text(&mut self, text: &str) -> Result<(), SqlError> {
        if let Some(now) = self.now
            && let Some(us) = datetime::present(text, self.sql, self.zone, now)
        {
            match self.sql {
                SqlType::Date => self.push_date(us.div_euclid(datetime::DAY_US) as i32),
                _ => self.push_micros(us),
            }
            return Ok(());
        }
        let (precision, scale) = self.precision;
        match &mut self.inner {
            Inner::Bool(b) => b.append_value(parse_bool(text)?),
            Inner::Int16(b) => b.append_value(parse_int(text, "smallint")?),
            Inner::Int32(b) => b.append_value(parse_int(text, "integer")?),
            Inner::Int64(b) => b.append_value(parse_int(text, "bigint")?),
            Inner::Float32(b) => b.append_value(one_nan(numeric::parse_f32(text)?)),
            Inner::Float64(b) => b.append_value(one_nan(numeric::parse_f64(text)?)),
            Inner::Decimal128(b) => {
                let v: i256 = numeric::parse_decimal(text, precision, scale)?;
                b.append_value(
                    v.to_i128().ok_or_else(|| numeric::field_overflow(precision, scale))?,
                );
            }
            Inner::Decimal256(b) => b.append_value(numeric::parse_decimal(text, precision, scale)?),
            Inner::Text(b) => b.append_value(fit_varchar(text, self.sql)?),
            Inner::Bytes(b) => b.append_value(parse_bytea(text)?),
            Inner::Date(b) => b.append_value(datetime::parse_date(text)?),
            Inner::Time(b) => b.append_value(datetime::parse_time(text)?),
            Inner::Timestamp(b) => b.append_value(if self.sql == SqlType::Timestamptz {
                datetime::parse_timestamptz_in(text, self.zone)?
            } else {
                datetime::parse_timestamp(text)?
            }),
            Inner::Interval(_) => self.push_interval(parse_interval(text)?)?,
            Inner::Uuid(_) => self.push_uuid(parse_uuid(text)?),
            Inner::Json(b) => b.append_value(crate::json::canonical(text)?),
            Inner::List { items, .. } => {
                super::array::text(items, text.as_bytes())?;
                self.end_list(true);
            }
        }
        Ok(())
    }

    pub fn append_binary(&mut self, bytes: &[u8]) -> Result<(), SqlError> {
        if let Inner::List { items, .. } = &mut self.inner {
            super::array::binary(items, bytes)?;
            self.end_list(true);
            return Ok(());
        }
        let sql = self.sql;
        super::binary::append(self, sql, bytes)
    }

    pub(super) fn push_bool(&mut self, v: bool) {
        if let Inner::Bool(b) = &mut self.inner {
            b.append_value(v);
        }
    }

    pub(super) fn push_int(&mut self, v: i64, t: SqlType) -> Result<(), SqlError> {
        let over = || out_of_range(&t.to_string(), &v.to_string());
        match &mut self.inner {
            Inner::Int16(b) => b.append_value(i16::try_from(v).map_err(|_| over())?),
            Inner::Int32(b) => b.append_value(i32::try_from(v).map_err(|_| over())?),
            Inner::Int64(b) => b.append_value(v),
            _ => {}
        }
        Ok(())
    }

    pub(super) fn push_f32(&mut self, v: f32) {
        if let Inner::Float32(b) = &mut self.inner {
            b.append_value(one_nan(v));
        }
    }

    pub(super) fn push_f64(&mut self, v: f64) {
        if let Inner::Float64(b) = &mut self.inner {
            b.append_value(one_nan(v));
        }
    }

    pub(super) fn push_bytes(&mut self, v: &[u8]) {
        if let Inner::Bytes(b) = &mut self.inner {
            b.append_value(v);
        }
    }

    pub(super) fn push_date(&mut self, days: i32) {
        if let Inner::Date(b) = &mut self.inner {
            b.append_value(days);
        }
    }

    pub(super) fn push_micros(&mut self, us: i64) {
        match &mut self.inner {
            Inner::Time(b) => b.append_value(us),
            Inner::Timestamp(b) => b.append_value(us),
            _ => {}
        }
    }

    pub(super) fn push_interval(&mut self, v: Interval) -> Result<(), SqlError> {
        let nanoseconds = v.us.checked_mul(1000).ok_or_else(|| {
            SqlError::new(SqlState::DATETIME_FIELD_OVERFLOW, "interval out of range")
        })?;
        if let Inner::Interval(b) = &mut self.inner {
            b.append_value(IntervalMonthDayNano::new(v.months, v.days, nanoseconds));
        }
        Ok(())
    }

    pub fn finish(&mut self) -> ArrayRef {
        match &mut self.inner {
            Inner::Bool(b) => Arc::new(b.finish()),
            Inner::Int16(b) => Arc::new(b.finish()),
            Inner::Int32(b) => Arc::new(b.finish()),
            Inner::Int64(b) => Arc::new(b.finish()),
            Inner::Float32(b) => Arc::new(b.finish()),
            Inner::Float64(b) => Arc::new(b.finish()),
            Inner::Decimal128(b) => Arc::new(b.finish()),
            Inner::Decimal256(b) => Arc::new(b.finish()),
            Inner::Text(b) => Arc::new(b.finish()),
            Inner::Bytes(b) => Arc::new(b.finish()),
            Inner::Date(b) => Arc::new(b.finish()),
            Inner::Time(b) => Arc::new(b.finish()),
            Inner::Timestamp(b) => Arc::new(b.finish()),
            Inner::Interval(b) => Arc::new(b.finish()),
            Inner::Uuid(b) => Arc::new(b.finish()),
            Inner::Json(b) => Arc::new(b.finish()),
            Inner::List { items, ends, valid } => {
                let values = items.finish();
                let offsets = std::iter::once(0).chain(ends.drain(..)).collect::<Vec<i32>>();
                let nulls = NullBuffer::from(std::mem::take(valid));
                let item = Arc::new(Field::new_list_field(values.data_type().clone(), true));
                let offsets = OffsetBuffer::new(offsets.into());
                Arc::new(ListArray::new(item, offsets, values, Some(nulls)))
            }
        }
    }
}

/// One value of a type from a client's parameter, as a one-row column.
pub fn parameter(t: &DataType, format: i16, value: Option<&[u8]>) -> Result<ArrayRef, SqlError> {
    parameter_in(Zone::Fixed(0), t, format, value)
}

/// The same of a client in a zone.
pub fn parameter_in(
    zone: Zone,
    t: &DataType,
    format: i16,
    value: Option<&[u8]>,
) -> Result<ArrayRef, SqlError> {
    if let DataType::List(item) = t {
        return super::array::parameter(zone, item, format, value);
    }
    let sql = SqlType::from_arrow(t)?;
    let now = chrono::Utc::now().timestamp_micros();
    let mut builder = ColumnBuilder::new(sql, 1).in_zone(zone).at(now);
    match value {
        None => builder.append_null(),
        Some(bytes) if format == 1 => builder.append_binary(bytes)?,
        Some(bytes) => {
            builder.append_text(
                std::str::from_utf8(bytes).map_err(|_| super::binary::invalid_utf8())?,
            )?;
        }
    }
    Ok(builder.finish())
}

fn parse_int<T: std::str::FromStr<Err = std::num::ParseIntError>>(
    text: &str,
    name: &str,
) -> Result<T, SqlError> {
    use std::num::IntErrorKind::{NegOverflow, PosOverflow};
    text.trim().parse().map_err(|e: std::num::ParseIntError| match e.kind() {
        PosOverflow | NegOverflow => out_of_range(name, text.trim()),
        _ => invalid_text(name, text),
    })
}

fn parse_bool(text: &str) -> Result<bool, SqlError> {
    let t = text.trim();
    if t == "t" || t == "f" {
        return Ok(t == "t");
    }
    let is = |word: &str, least: usize| {
        t.len() >= least
            && t.len() <= word.len()
            && word.as_bytes()[..t.len()].eq_ignore_ascii_case(t.as_bytes())
    };
    if is("true", 1) || is("yes", 1) || is("on", 2) || t == "1" {
        Ok(true)
    } else if is("false", 1) || is("no", 1) || is("off", 2) || t == "0" {
        Ok(false)
    } else {
        Err(invalid_text("boolean", text))
    }
}

/// Checks a length; spaces beyond it are dropped, as the standard wants, and all at the end of a `char(n)`.
pub fn fit_varchar(text: &str, sql: SqlType) -> Result<&str, SqlError> {
    let (text, n) = match sql {
        SqlType::Varchar(Some(n)) => (text, n),
        SqlType::Char(n) => (text.trim_end_matches(' '), n),
        _ => return Ok(text),
    };
    match text.char_indices().nth(n as usize) {
        None => Ok(text),
        Some((cut, _)) if text[cut..].bytes().all(|b| b == b' ') => Ok(&text[..cut]),
        Some(_) => Err(SqlError::new(
            SqlState::STRING_DATA_RIGHT_TRUNCATION,
            format!("value too long for type {sql}"),
        )),
    }
}

/// 32 hexadecimal digits, with hyphens after any four of them, and braces around all.
pub fn parse_uuid(text: &str) -> Result<[u8; 16], SqlError> {
    let bad = || invalid_text("uuid", text);
    let inner = match text.strip_prefix('{') {
        Some(rest) => rest.strip_suffix('}').ok_or_else(bad)?,
        None => text,
    };
    let (mut out, mut digits) = ([0u8; 16], 0usize);
    for c in inner.chars() {
        match c.to_digit(16) {
            Some(d) if digits < 32 => {
                out[digits / 2] = out[digits / 2] << 4 | d as u8;
                digits += 1;
            }
            None if c == '-' && digits > 0 && digits.is_multiple_of(4) && digits < 32 => {}
            _ => return Err(bad()),
        }
    }
    if digits == 32 { Ok(out) } else { Err(bad()) }
}

fn parse_bytea(text: &str) -> Result<Vec<u8>, SqlError> {
    let invalid = || invalid_text("bytea", text);
    if let Some(hex) = text.strip_prefix("\\x") {
        let digits: Vec<u8> = hex
            .chars()
            .filter(|c| !c.is_ascii_whitespace())
            .map(|c| {
                c.to_digit(16).map(|d| d as u8).ok_or_else(|| {
                    SqlError::new(
                        SqlState::INVALID_PARAMETER_VALUE,
                        format!("invalid hexadecimal digit: \"{c}\""),
                    )
                })
            })
            .collect::<Result<_, _>>()?;
        if digits.len() % 2 == 1 {
            return Err(SqlError::new(
                SqlState::INVALID_PARAMETER_VALUE,
                "invalid hexadecimal data: odd number of digits",
            ));
        }
        return Ok(digits.chunks_exact(2).map(|d| d[0] << 4 | d[1]).collect());
    }
    bytes_of_escape(text).ok_or_else(invalid)
}

/// Bytes in the escape format: `\\000` is a byte, a double backslash one. `None`: no such text.
pub fn bytes_of_escape(text: &str) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(b) = bytes.next() {
        if b != b'\\' {
            out.push(b);
            continue;
        }
        match bytes.next()? {
            b'\\' => out.push(b'\\'),
            a @ b'0'..=b'3' => {
                let mut octal = || bytes.next().filter(|b| (b'0'..=b'7').contains(b));
                let (b, c) = (octal()?, octal()?);
                out.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
            }
            _ => return None,
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use bytes::BytesMut;

    use super::*;
    use crate::encoding::Column;
    use crate::types::Element;

    fn through(sql: SqlType, text: &str) -> Result<String, SqlError> {
        let mut b = ColumnBuilder::new(sql, 1);
        b.append_text(text)?;
        let column = Column::new(&b.finish())?;
        let mut out = BytesMut::new();
        column.put_text(0, &mut out)?;
        // Binary out and in again must be the same value.
        let mut binary = BytesMut::new();
        column.put_binary(0, &mut binary)?;
        let again = Column::new(&parameter(&sql.to_arrow(), 1, Some(&binary))?)?;
        let mut text = BytesMut::new();
        again.put_text(0, &mut text)?;
        assert_eq!(out, text, "{sql}");
        Ok(String::from_utf8(out.to_vec()).unwrap())
    }

    #[test]
    fn every_type_round_trips_in_text_and_binary() {
        for (sql, input, output) in [
            (SqlType::Boolean, "yes", "t"),
            (SqlType::SmallInt, " -5 ", "-5"),
            (SqlType::Int, "2147483647", "2147483647"),
            (SqlType::BigInt, "-9223372036854775808", "-9223372036854775808"),
            (SqlType::Real, "1.1", "1.1"),
            (SqlType::Double, "1e20", "1e+20"),
            (SqlType::Numeric(Some((10, 2))), "3.14159", "3.14"),
            (SqlType::Numeric(None), "3.14159", "3.14159"),
            (
                SqlType::Numeric(Some((60, 5))),
                "-1234567890123456789012345678901234567890.5",
                "-1234567890123456789012345678901234567890.50000",
            ),
            (SqlType::Text, "a\tb", "a\tb"),
            (SqlType::Varchar(Some(3)), "abc  ", "abc"),
            (SqlType::Bytea, "\\xDEadbeef", "\\xdeadbeef"),
            (SqlType::Bytea, "a\\\\b\\001", "\\x615c6201"),
            (SqlType::Date, "1999-12-31", "1999-12-31"),
            (SqlType::Time, "23:59:59.5", "23:59:59.5"),
            (SqlType::Timestamp, "2000-01-01 00:00:00", "2000-01-01 00:00:00"),
            (SqlType::Timestamptz, "2000-01-01 02:00:00+02", "2000-01-01 00:00:00+00"),
            (SqlType::Interval, "1 mon -2 days", "1 mon -2 days"),
            (
                SqlType::Uuid,
                "{A0EEBC999C0B4EF8-BB6D-6BB9BD380A11}",
                "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
            ),
            (SqlType::Jsonb, r#"{"b":1, "a" :[null]}"#, r#"{"a": [null], "b": 1}"#),
            (SqlType::Array(Element::Int), "{1, NULL,3}", "{1,NULL,3}"),
            (SqlType::Array(Element::Text), r#"{a,"b c",""}"#, r#"{a,"b c",""}"#),
            (SqlType::Array(Element::Text), "{}", "{}"),
        ] {
            assert_eq!(through(sql, input).unwrap(), output, "{sql} {input}");
        }
    }

    #[test]
    fn bad_text_names_type_and_value() {
        let e = through(SqlType::Int, "abc").unwrap_err();
        assert_eq!(
            (e.state.0, e.message.as_str()),
            ("22P02", "invalid input syntax for type integer: \"abc\"")
        );
        let e = through(SqlType::SmallInt, "40000").unwrap_err();
        assert_eq!(
            (e.state.0, e.message.as_str()),
            ("22003", "value \"40000\" is out of range for type smallint")
        );
        assert_eq!(through(SqlType::Varchar(Some(2)), "abc").unwrap_err().state.0, "22001");
        assert_eq!(through(SqlType::Boolean, "maybe").unwrap_err().state.0, "22P02");
    }
}
