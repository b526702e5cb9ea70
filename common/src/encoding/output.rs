//! An Arrow column ready to be written row by row into DataRow or COPY buffers.

use std::fmt::Write;

use crate::SqlError;
use crate::types::UUID_BYTES;
use crate::zone::Zone;
use arrow::array::{
    Array, ArrayRef, AsArray, BinaryArray, BooleanArray, Date32Array, Decimal128Array,
    Decimal256Array, FixedSizeBinaryArray, Float32Array, Float64Array, Int16Array, Int32Array,
    Int64Array, IntervalMonthDayNanoArray, LargeStringArray, ListArray, StringArray,
    Time64MicrosecondArray, TimestampMicrosecondArray, UInt32Array,
};
use arrow::compute::cast;
use arrow::datatypes::{DataType, IntervalUnit, TimeUnit};
use bytes::{BufMut, BytesMut};

use super::interval::{Interval, write_interval};
use super::numeric::{
    SmallText, is_unconstrained, put_binary, write_decimal, write_f32, write_f64,
};
use super::{datetime, describe_type};

/// A column, downcast once a batch.
pub enum Column {
    Bool(BooleanArray),
    Int16(Int16Array),
    Int32(Int32Array),
    Int64(Int64Array),
    UInt32(UInt32Array),
    Float32(Float32Array),
    Float64(Float64Array),
    Text(StringArray),
    Json(LargeStringArray),
    Uuid(FixedSizeBinaryArray),
    Bytes(BinaryArray),
    Date(Date32Array),
    Time(Time64MicrosecondArray),
    Timestamp {
        values: TimestampMicrosecondArray,
        zone: bool,
    },
    /// Instants that are shown in another zone than UTC: that of the array's type.
    Zoned {
        values: TimestampMicrosecondArray,
        zone: Zone,
    },
    Interval(IntervalMonthDayNanoArray),
    Decimal128 {
        values: Decimal128Array,
        scale: i8,
        trim: bool,
    },
    Decimal256 {
        values: Decimal256Array,
        scale: i8,
    },
    List {
        values: ListArray,
        item: Box<Column>,
        item_oid: u32,
    },
    /// `regproc`: shown by name, sent as a number.
    Named {
        numbers: UInt32Array,
        names: StringArray,
    },
    /// `int2vector`, `oidvector`: an array that is printed as `1 2`.
    Vector(Box<Column>),
}

impl Column {
    /// Takes a column of any type that has a SQL type; types that only the engine makes are cast.
    pub fn new(array: &ArrayRef) -> Result<Column, SqlError> {
        let plain = normalise(array)?;
        Ok(match plain.data_type() {
            DataType::Boolean => Column::Bool(plain.as_boolean().clone()),
            DataType::Int16 => Column::Int16(plain.as_primitive().clone()),
            DataType::Int32 => Column::Int32(plain.as_primitive().clone()),
            DataType::Int64 => Column::Int64(plain.as_primitive().clone()),
            DataType::UInt32 => Column::UInt32(plain.as_primitive().clone()),
            DataType::Float32 => Column::Float32(plain.as_primitive().clone()),
            DataType::Float64 => Column::Float64(plain.as_primitive().clone()),
            DataType::Utf8 => Column::Text(plain.as_string().clone()),
            DataType::LargeUtf8 => Column::Json(plain.as_string().clone()),
            DataType::FixedSizeBinary(_) => Column::Uuid(plain.as_fixed_size_binary().clone()),
            DataType::Binary => Column::Bytes(plain.as_binary().clone()),
            DataType::Date32 => Column::Date(plain.as_primitive().clone()),
            DataType::Time64(TimeUnit::Microsecond) => Column::Time(plain.as_primitive().clone()),
            DataType::Timestamp(TimeUnit::Microsecond, zone) => {
                let values: TimestampMicrosecondArray = plain.as_primitive().clone();
                match zone.as_deref().filter(|name| *name != "UTC").and_then(Zone::of_name) {
                    Some(zone) if !zone.is_utc() => Column::Zoned { values, zone },
                    _ => Column::Timestamp { zone: zone.is_some(), values },
                }
            }
            DataType::Interval(IntervalUnit::MonthDayNano) => {
                Column::Interval(plain.as_primitive().clone())
            }
            DataType::Decimal128(p, s) => Column::Decimal128 {
                values: plain.as_primitive().clone(),
                scale: *s,
                trim: is_unconstrained(*p, *s),
            },
            DataType::Decimal256(_, s) => {
                Column::Decimal256 { values: plain.as_primitive().clone(), scale: *s }
            }
            DataType::List(_) => {
                let values = plain.as_list::<i32>().clone();
                let item = Box::new(Column::new(values.values())?);
                let item_oid = describe_type(values.values().data_type())?.0;
                Column::List { values, item, item_oid }
            }
            other => return Err(SqlError::unsupported(format!("output of the type {other}"))),
        })
    }

    /// Takes a column that a client is told to be of a type.
    pub fn of_type(array: &ArrayRef, oid: u32) -> Result<Column, SqlError> {
        match (oid, array.data_type()) {
            (26, DataType::Int64) => Column::new(
                &arrow::compute::cast(array, &DataType::UInt32).map_err(super::arrow_error)?,
            ),
            (22 | 30, DataType::List(_)) => Ok(Column::Vector(Box::new(Column::new(array)?))),
            _ => Column::new(array),
        }
    }

    fn array(&self) -> &dyn Array {
        match self {
            Column::Bool(a) => a,
            Column::Int16(a) => a,
            Column::Int32(a) => a,
            Column::Int64(a) => a,
            Column::UInt32(a) => a,
            Column::Float32(a) => a,
            Column::Float64(a) => a,
            Column::Text(a) => a,
            Column::Json(a) => a,
            Column::Uuid(a) => a,
            Column::Bytes(a) => a,
            Column::Date(a) => a,
            Column::Time(a) => a,
            Column::Timestamp { values, .. } | Column::Zoned { values, .. } => values,
            Column::Interval(a) => a,
            Column::Decimal128 { values, .. } => values,
            Column::Decimal256 { values, .. } => values,
            Column::List { values, .. } => values,
            Column::Named { numbers, .. } => numbers,
            Column::Vector(list) => list.array(),
        }
    }

    pub fn is_null(&self, row: usize) -> bool {
        self.array().is_null(row)
    }

    /// Appends a field of a DataRow: its length, then the value in a format.
    pub fn put_field(&self, row: usize, format: i16, buf: &mut BytesMut) -> Result<(), SqlError> {
        if self.is_null(row) {
            buf.put_i32(-1);
            return Ok(());
        }
        let start = buf.len();
        buf.put_i32(0);
        if format == 0 {
            self.put_text(row, buf)?
        } else {
            self.put_binary(row, buf)?
        }
        let length = (buf.len() - start - 4) as i32;
        buf[start..start + 4].copy_from_slice(&length.to_be_bytes());
        Ok(())
    }

    /// Appends the text of a value that is not NULL.
    pub fn put_text(&self, row: usize, buf: &mut BytesMut) -> Result<(), SqlError> {
        if let Column::Text(a) = self {
            buf.put_slice(a.value(row).as_bytes());
            return Ok(());
        }
        if let Column::Named { names, .. } = self {
            buf.put_slice(names.value(row).as_bytes());
            return Ok(());
        }
        if let Column::Json(a) = self {
            buf.put_slice(a.value(row).as_bytes());
            return Ok(());
        }
        if let Column::List { values, item, .. } = self {
            let (from, to) =
                (values.value_offsets()[row] as usize, values.value_offsets()[row + 1] as usize);
            return item.put_array_text(from, to, buf);
        }
        if let Column::Vector(list) = self {
            let start = buf.len();
            list.put_text(row, buf)?;
            // `{1,2}` without its braces, separated by blanks: elements are numbers.
            buf[start..].iter_mut().for_each(|c| *c = if *c == b',' { b' ' } else { *c });
            buf.truncate(buf.len() - 1);
            let inner = buf.split_off(start + 1);
            buf.truncate(start);
            buf.put_slice(&inner);
            return Ok(());
        }
        self.format_text(row, buf).map_err(|_| SqlError::internal("a value could not be printed"))
    }

    fn format_text(&self, row: usize, buf: &mut BytesMut) -> std::fmt::Result {
        match self {
            Column::Bool(a) => buf.write_str(if a.value(row) { "t" } else { "f" }),
            Column::Int16(a) => write!(buf, "{}", a.value(row)),
            Column::Int32(a) => write!(buf, "{}", a.value(row)),
            Column::Int64(a) => write!(buf, "{}", a.value(row)),
            Column::UInt32(a) => write!(buf, "{}", a.value(row)),
            Column::Float32(a) => write_f32(buf, a.value(row)),
            Column::Float64(a) => write_f64(buf, a.value(row)),
            Column::Bytes(a) => {
                const HEX: &[u8; 16] = b"0123456789abcdef";
                buf.put_slice(b"\\x");
                for b in a.value(row) {
                    buf.put_slice(&[HEX[usize::from(b >> 4)], HEX[usize::from(b & 15)]]);
                }
                Ok(())
            }
            Column::Uuid(a) => {
                for (i, b) in a.value(row).iter().enumerate() {
                    if matches!(i, 4 | 6 | 8 | 10) {
                        buf.put_u8(b'-');
                    }
                    write!(buf, "{b:02x}")?;
                }
                Ok(())
            }
            Column::Date(a) => datetime::write_date(buf, a.value(row)),
            Column::Time(a) => datetime::write_time(buf, a.value(row)),
            Column::Timestamp { values, zone } => {
                datetime::write_timestamp(buf, values.value(row), *zone)
            }
            Column::Zoned { values, zone } => {
                datetime::write_zoned(buf, values.value(row), *zone, false)
            }
            Column::Interval(a) => write_interval(buf, interval_at(a, row)),
            Column::Decimal128 { values, scale, trim } => {
                let mut digits = SmallText::default();
                write!(digits, "{}", values.value(row))?;
                write_decimal(buf, digits.as_str(), *scale, *trim)
            }
            Column::Decimal256 { values, scale } => {
                let mut digits = SmallText::default();
                write!(digits, "{}", values.value(row))?;
                write_decimal(buf, digits.as_str(), *scale, false)
            }
            Column::Text(_)
            | Column::Named { .. }
            | Column::Json(_)
            | Column::List { .. }
            | Column::Vector(_) => Ok(()),
        }
    }

    fn put_array_text(&self, from: usize, to: usize, buf: &mut BytesMut) -> Result<(), SqlError> {
        buf.put_u8(b'{');
        let mut text = BytesMut::new();
        for row in from..to {
            if row > from {
                buf.put_u8(b',');
            }
            if self.is_null(row) {
                buf.put_slice(b"NULL");
                continue;
            }
            text.clear();
            self.put_text(row, &mut text)?;
            let special =
                |c: &u8| matches!(c, b'{' | b'}' | b',' | b'"' | b'\\') || c.is_ascii_whitespace();
            if text.is_empty() || text.iter().any(special) || text.eq_ignore_ascii_case(b"null") {
                buf.put_u8(b'"');
                for c in &text {
                    if matches!(c, b'"' | b'\\') {
                        buf.put_u8(b'\\');
                    }
                    buf.put_u8(*c);
                }
                buf.put_u8(b'"');
            } else {
                buf.put_slice(&text);
            }
        }
        buf.put_u8(b'}');
        Ok(())
    }

    /// Appends the binary form of a value that is not NULL.
    pub fn put_binary(&self, row: usize, buf: &mut BytesMut) -> Result<(), SqlError> {
        match self {
            Column::Bool(a) => buf.put_u8(u8::from(a.value(row))),
            Column::Int16(a) => buf.put_i16(a.value(row)),
            Column::Int32(a) => buf.put_i32(a.value(row)),
            Column::Int64(a) => buf.put_i64(a.value(row)),
            Column::UInt32(a) => buf.put_u32(a.value(row)),
            Column::Float32(a) => buf.put_f32(a.value(row)),
            Column::Float64(a) => buf.put_f64(a.value(row)),
            Column::Text(a) => buf.put_slice(a.value(row).as_bytes()),
            Column::Named { numbers, .. } => buf.put_u32(numbers.value(row)),
            Column::Bytes(a) => buf.put_slice(a.value(row)),
            Column::Uuid(a) => buf.put_slice(a.value(row)),
            Column::Json(a) => {
                buf.put_u8(1);
                buf.put_slice(a.value(row).as_bytes());
            }
            Column::Date(a) => buf.put_i32(match a.value(row) {
                infinite @ (i32::MAX | i32::MIN) => infinite,
                days => days.saturating_sub(datetime::PG_EPOCH_DAYS),
            }),
            Column::Time(a) => buf.put_i64(a.value(row)),
            Column::Timestamp { values, .. } | Column::Zoned { values, .. } => {
                buf.put_i64(match values.value(row) {
                    infinite @ (i64::MAX | i64::MIN) => infinite,
                    us => us.saturating_sub(datetime::PG_EPOCH_US),
                })
            }
            Column::Interval(a) => {
                let v = interval_at(a, row);
                buf.put_i64(v.us);
                buf.put_i32(v.days);
                buf.put_i32(v.months);
            }
            Column::Decimal128 { scale, .. } | Column::Decimal256 { scale, .. } => {
                let mut text = BytesMut::with_capacity(48);
                self.put_text(row, &mut text)?;
                put_binary(buf, std::str::from_utf8(&text).unwrap_or("0"), *scale);
            }
            Column::Vector(list) => list.put_binary(row, buf)?,
            Column::List { values, item, item_oid } => {
                let (from, to) = (
                    values.value_offsets()[row] as usize,
                    values.value_offsets()[row + 1] as usize,
                );
                buf.put_i32(i32::from(from < to));
                buf.put_i32(i32::from((from..to).any(|i| item.is_null(i))));
                buf.put_u32(*item_oid);
                if from < to {
                    buf.put_i32((to - from) as i32);
                    buf.put_i32(1);
                }
                for i in from..to {
                    item.put_field(i, 1, buf)?;
                }
            }
        }
        Ok(())
    }
}

fn interval_at(a: &IntervalMonthDayNanoArray, row: usize) -> Interval {
    let v = a.value(row);
    Interval { months: v.months, days: v.days, us: v.nanoseconds / 1000 }
}

/// Casts what only the engine makes (views, unsigned, other time units) to the plain Arrow types.
fn normalise(array: &ArrayRef) -> Result<ArrayRef, SqlError> {
    let target = match array.data_type() {
        DataType::Int8 | DataType::UInt8 => DataType::Int16,
        DataType::UInt16 => DataType::Int32,
        DataType::UInt64 => DataType::Int64,
        DataType::Float16 => DataType::Float32,
        DataType::Decimal32(p, s) | DataType::Decimal64(p, s) => DataType::Decimal128(*p, *s),
        DataType::Utf8View | DataType::Null => DataType::Utf8,
        DataType::FixedSizeBinary(UUID_BYTES) => return Ok(array.clone()),
        DataType::LargeBinary | DataType::BinaryView | DataType::FixedSizeBinary(_) => {
            DataType::Binary
        }
        DataType::Date64 => DataType::Date32,
        DataType::Time32(_) | DataType::Time64(TimeUnit::Nanosecond) => {
            DataType::Time64(TimeUnit::Microsecond)
        }
        DataType::Timestamp(unit, zone) if *unit != TimeUnit::Microsecond => {
            DataType::Timestamp(TimeUnit::Microsecond, zone.clone())
        }
        DataType::Interval(unit) if *unit != IntervalUnit::MonthDayNano => {
            DataType::Interval(IntervalUnit::MonthDayNano)
        }
        DataType::Duration(_) => DataType::Interval(IntervalUnit::MonthDayNano),
        DataType::LargeList(item) => DataType::List(item.clone()),
        DataType::Dictionary(_, value) => value.as_ref().clone(),
        _ => return Ok(array.clone()),
    };
    let plain = cast(array, &target).map_err(|e| {
        SqlError::internal(format!("a result of type {} could not be cast: {e}", array.data_type()))
    })?;
    normalise(&plain)
}
