//! SQL types: PostgreSQL's names and OIDs on one side, Arrow's types on the other.

use std::fmt;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, IntervalUnit, TimeUnit};
use serde::{Deserialize, Serialize};

use crate::error::SqlError;

/// Precision and scale that stand for `numeric` without a typmod: 20 digits before the point, 18
/// after it. Values print without trailing zeros.
pub const UNCONSTRAINED_NUMERIC: (u8, i8) = (38, 18);

/// The key of a field's metadata that holds the length of a `char(n)`.
pub const CHAR_LENGTH: &str = "millrace.char";

/// A column type as the user declared it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SqlType {
    Boolean,
    SmallInt,
    Int,
    BigInt,
    Real,
    Double,
    /// `None`: without precision and scale.
    Numeric(Option<(u8, i8)>),
    Text,
    /// `varchar(n)`; `None`: without a length.
    Varchar(Option<u32>),
    /// `char(n)`: blanks at the end mean nothing. Values are kept without them and shown with them.
    Char(u32),
    Bytea,
    Date,
    Time,
    Timestamp,
    Timestamptz,
    Interval,
    Uuid,
    /// Documents in their canonical text.
    Jsonb,
    /// One dimension, numbered from 1.
    Array(Element),
}

/// The scalar types, as elements of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Element {
    Boolean,
    SmallInt,
    Int,
    BigInt,
    Real,
    Double,
    Numeric(Option<(u8, i8)>),
    Text,
    Varchar(Option<u32>),
    Bytea,
    Date,
    Time,
    Timestamp,
    Timestamptz,
    Interval,
    Uuid,
    Jsonb,
}

impl Element {
    /// Every element type, without modifiers.
    pub const ALL: [Element; 17] = [
        Element::Boolean,
        Element::SmallInt,
        Element::Int,
        Element::BigInt,
        Element::Real,
        Element::Double,
        Element::Numeric(None),
        Element::Text,
        Element::Varchar(None),
        Element::Bytea,
        Element::Date,
        Element::Time,
        Element::Timestamp,
        Element::Timestamptz,
        Element::Interval,
        Element::Uuid,
        Element::Jsonb,
    ];

    pub fn scalar(self) -> SqlType {
        match self {
            Element::Boolean => SqlType::Boolean,
            Element::SmallInt => SqlType::SmallInt,
            Element::Int => SqlType::Int,
            Element::BigInt => SqlType::BigInt,
            Element::Real => SqlType::Real,
            Element::Double => SqlType::Double,
            Element::Numeric(ps) => SqlType::Numeric(ps),
            Element::Text => SqlType::Text,
            Element::Varchar(n) => SqlType::Varchar(n),
            Element::Bytea => SqlType::Bytea,
            Element::Date => SqlType::Date,
            Element::Time => SqlType::Time,
            Element::Timestamp => SqlType::Timestamp,
            Element::Timestamptz => SqlType::Timestamptz,
            Element::Interval => SqlType::Interval,
            Element::Uuid => SqlType::Uuid,
            Element::Jsonb => SqlType::Jsonb,
        }
    }

    /// A scalar type as an element; `None` for an array.
    pub fn of(t: SqlType) -> Option<Element> {
        Some(match t {
            SqlType::Numeric(ps) => Element::Numeric(ps),
            SqlType::Varchar(n) => Element::Varchar(n),
            t => return Element::ALL.into_iter().find(|e| e.scalar() == t),
        })
    }

    /// PostgreSQL's OID of the array type.
    pub fn array_oid(self) -> u32 {
        match self {
            Element::Boolean => 1000,
            Element::Bytea => 1001,
            Element::SmallInt => 1005,
            Element::Int => 1007,
            Element::Text => 1009,
            Element::Varchar(_) => 1015,
            Element::BigInt => 1016,
            Element::Real => 1021,
            Element::Double => 1022,
            Element::Timestamp => 1115,
            Element::Date => 1182,
            Element::Time => 1183,
            Element::Timestamptz => 1185,
            Element::Interval => 1187,
            Element::Numeric(_) => 1231,
            Element::Uuid => 2951,
            Element::Jsonb => 3807,
        }
    }
}

/// Bytes of a `uuid`.
pub const UUID_BYTES: i32 = 16;

impl SqlType {
    /// The Arrow type that holds values of this type. Strings are `Utf8`, never views;
    /// times are in microseconds.
    pub fn to_arrow(self) -> DataType {
        match self {
            SqlType::Boolean => DataType::Boolean,
            SqlType::SmallInt => DataType::Int16,
            SqlType::Int => DataType::Int32,
            SqlType::BigInt => DataType::Int64,
            SqlType::Real => DataType::Float32,
            SqlType::Double => DataType::Float64,
            SqlType::Numeric(ps) => {
                let (p, s) = ps.unwrap_or(UNCONSTRAINED_NUMERIC);
                if p <= 38 { DataType::Decimal128(p, s) } else { DataType::Decimal256(p, s) }
            }
            SqlType::Text | SqlType::Varchar(_) | SqlType::Char(_) => DataType::Utf8,
            SqlType::Bytea => DataType::Binary,
            SqlType::Date => DataType::Date32,
            SqlType::Time => DataType::Time64(TimeUnit::Microsecond),
            SqlType::Timestamp => DataType::Timestamp(TimeUnit::Microsecond, None),
            SqlType::Timestamptz => DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into())),
            SqlType::Interval => DataType::Interval(IntervalUnit::MonthDayNano),
            SqlType::Uuid => DataType::FixedSizeBinary(UUID_BYTES),
            SqlType::Jsonb => DataType::LargeUtf8,
            SqlType::Array(e) => {
                DataType::List(Arc::new(Field::new_list_field(e.scalar().to_arrow(), true)))
            }
        }
    }

    /// The SQL type a client sees for an Arrow type (also those that only DataFusion makes).
    pub fn from_arrow(t: &DataType) -> Result<SqlType, SqlError> {
        Ok(match t {
            DataType::Boolean => SqlType::Boolean,
            DataType::Int8 | DataType::UInt8 | DataType::Int16 => SqlType::SmallInt,
            DataType::UInt16 | DataType::Int32 => SqlType::Int,
            DataType::UInt32 | DataType::Int64 | DataType::UInt64 => SqlType::BigInt,
            DataType::Float16 | DataType::Float32 => SqlType::Real,
            DataType::Float64 => SqlType::Double,
            DataType::Decimal32(p, s)
            | DataType::Decimal64(p, s)
            | DataType::Decimal128(p, s)
            | DataType::Decimal256(p, s) => {
                SqlType::Numeric(((*p, *s) != UNCONSTRAINED_NUMERIC).then_some((*p, *s)))
            }
            DataType::Utf8 | DataType::Utf8View | DataType::Null => SqlType::Text,
            DataType::LargeUtf8 => SqlType::Jsonb,
            DataType::List(item) | DataType::LargeList(item) => {
                match Element::of(SqlType::from_arrow(item.data_type())?) {
                    Some(element) => SqlType::Array(element),
                    None => {
                        let what = "an array of more than one dimension";
                        return Err(SqlError::unsupported(what));
                    }
                }
            }
            DataType::FixedSizeBinary(UUID_BYTES) => SqlType::Uuid,
            DataType::Binary
            | DataType::LargeBinary
            | DataType::BinaryView
            | DataType::FixedSizeBinary(_) => SqlType::Bytea,
            DataType::Date32 | DataType::Date64 => SqlType::Date,
            DataType::Time32(_) | DataType::Time64(_) => SqlType::Time,
            DataType::Timestamp(_, None) => SqlType::Timestamp,
            DataType::Timestamp(_, Some(_)) => SqlType::Timestamptz,
            DataType::Interval(_) | DataType::Duration(_) => SqlType::Interval,
            other => return Err(SqlError::unsupported(format!("the type {other}"))),
        })
    }

    /// The type of a column. `char(n)` is in the field's metadata, because its values are texts.
    pub fn of_field(field: &Field) -> Result<SqlType, SqlError> {
        match field.metadata().get(CHAR_LENGTH).and_then(|n| n.parse().ok()) {
            Some(n) if *field.data_type() == DataType::Utf8 => Ok(SqlType::Char(n)),
            _ => SqlType::from_arrow(field.data_type()),
        }
    }

    /// A nullable field of this type, whose metadata says what the Arrow type does not.
    pub fn to_field(self, name: &str) -> Field {
        Field::new(name, self.to_arrow(), true).with_metadata(self.metadata().into_iter().collect())
    }

    /// What the Arrow type does not say.
    pub fn metadata(self) -> Option<(String, String)> {
        match self {
            SqlType::Char(n) => Some((CHAR_LENGTH.to_owned(), n.to_string())),
            _ => None,
        }
    }

    /// PostgreSQL's OID of the type.
    pub fn oid(self) -> u32 {
        match self {
            SqlType::Boolean => 16,
            SqlType::Bytea => 17,
            SqlType::BigInt => 20,
            SqlType::SmallInt => 21,
            SqlType::Int => 23,
            SqlType::Text => 25,
            SqlType::Real => 700,
            SqlType::Double => 701,
            SqlType::Char(_) => 1042,
            SqlType::Varchar(_) => 1043,
            SqlType::Date => 1082,
            SqlType::Time => 1083,
            SqlType::Timestamp => 1114,
            SqlType::Timestamptz => 1184,
            SqlType::Interval => 1186,
            SqlType::Numeric(_) => 1700,
            SqlType::Uuid => 2950,
            SqlType::Jsonb => 3802,
            SqlType::Array(e) => e.array_oid(),
        }
    }

    /// PostgreSQL's `atttypmod`: −1 where there is none.
    pub fn typmod(self) -> i32 {
        match self {
            SqlType::Varchar(Some(n)) | SqlType::Char(n) => n as i32 + 4,
            SqlType::Numeric(Some((p, s))) => ((i32::from(p) << 16) | (i32::from(s) & 0x7ff)) + 4,
            SqlType::Array(e) => e.scalar().typmod(),
            _ => -1,
        }
    }

    /// PostgreSQL's `typlen`.
    pub fn typlen(self) -> i16 {
        match self {
            SqlType::Boolean => 1,
            SqlType::SmallInt => 2,
            SqlType::Int | SqlType::Real | SqlType::Date => 4,
            SqlType::BigInt
            | SqlType::Double
            | SqlType::Time
            | SqlType::Timestamp
            | SqlType::Timestamptz => 8,
            SqlType::Interval | SqlType::Uuid => 16,
            SqlType::Numeric(_)
            | SqlType::Text
            | SqlType::Varchar(_)
            | SqlType::Char(_)
            | SqlType::Bytea
            | SqlType::Jsonb
            | SqlType::Array(_) => -1,
        }
    }
}

/// As `format_type` prints it.
impl fmt::Display for SqlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SqlType::Boolean => f.write_str("boolean"),
            SqlType::SmallInt => f.write_str("smallint"),
            SqlType::Int => f.write_str("integer"),
            SqlType::BigInt => f.write_str("bigint"),
            SqlType::Real => f.write_str("real"),
            SqlType::Double => f.write_str("double precision"),
            SqlType::Numeric(None) => f.write_str("numeric"),
            SqlType::Numeric(Some((p, s))) => write!(f, "numeric({p},{s})"),
            SqlType::Text => f.write_str("text"),
            SqlType::Varchar(None) => f.write_str("character varying"),
            SqlType::Varchar(Some(n)) => write!(f, "character varying({n})"),
            SqlType::Char(n) => write!(f, "character({n})"),
            SqlType::Bytea => f.write_str("bytea"),
            SqlType::Date => f.write_str("date"),
            SqlType::Time => f.write_str("time without time zone"),
            SqlType::Timestamp => f.write_str("timestamp without time zone"),
            SqlType::Timestamptz => f.write_str("timestamp with time zone"),
            SqlType::Interval => f.write_str("interval"),
            SqlType::Uuid => f.write_str("uuid"),
            SqlType::Jsonb => f.write_str("jsonb"),
            SqlType::Array(e) => write!(f, "{}[]", e.scalar()),
        }
    }
}
