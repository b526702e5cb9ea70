//! Values as text and bytes: PostgreSQL's text and binary forms of every SQL type, in and out. Used on
//! the wire, by COPY, and by sources and sinks.
//!
//! Output goes from an Arrow column into a byte buffer ([`Column`]), input from bytes into an Arrow
//! builder ([`ColumnBuilder`]), both without an allocation a value. The text forms are PostgreSQL
//! 15's with its default settings (DateStyle ISO, IntervalStyle postgres, bytea_output hex,
//! extra_float_digits 1).

pub mod array;
pub mod binary;
pub mod builder;
pub mod datetime;
pub mod datetime_text;
pub mod interval;
pub mod interval_text;
pub mod numeric;
pub mod output;

pub use builder::ColumnBuilder;
pub use output::Column;

use crate::types::Element;
use crate::{SqlError, SqlState, SqlType};
use arrow::datatypes::DataType;

/// Rows could not be put together: an internal error.
pub(crate) fn arrow_error(e: arrow::error::ArrowError) -> SqlError {
    SqlError::internal(format!("rows could not be put together: {e}"))
}

/// OID, `typlen` and typmod that describe an Arrow type to a client; arrays of scalars included.
pub fn describe_type(t: &DataType) -> Result<(u32, i16, i32), SqlError> {
    if let DataType::List(item) | DataType::LargeList(item) = t {
        return Ok((array_oid(SqlType::from_arrow(item.data_type())?), -1, -1));
    }
    if matches!(t, DataType::UInt32) {
        return Ok((26, 4, -1));
    }
    let t = SqlType::from_arrow(t)?;
    Ok((t.oid(), t.typlen(), t.typmod()))
}

/// `typlen` of the types that only system tables have.
pub fn catalog_type_len(oid: u32) -> i16 {
    match oid {
        18 => 1,
        19 => 64,
        24 | 26 => 4,
        _ => -1,
    }
}

/// PostgreSQL's OID of the array type over a scalar type.
pub fn array_oid(t: SqlType) -> u32 {
    // An array of arrays is an array of the same type; it is refused elsewhere.
    Element::of(t).map_or_else(|| t.oid(), Element::array_oid)
}

/// The element type of an array type's OID.
pub fn scalar_of_array(oid: u32) -> Option<SqlType> {
    Element::ALL.into_iter().find(|e| e.array_oid() == oid).map(Element::scalar)
}

/// `invalid input syntax for type …`.
pub fn invalid_text(type_name: &str, text: &str) -> SqlError {
    SqlError::new(
        SqlState::INVALID_TEXT_REPRESENTATION,
        format!("invalid input syntax for type {type_name}: \"{text}\""),
    )
}

/// `value "…" is out of range for type …`.
pub fn out_of_range(type_name: &str, text: &str) -> SqlError {
    SqlError::new(
        SqlState::NUMERIC_VALUE_OUT_OF_RANGE,
        format!("value \"{text}\" is out of range for type {type_name}"),
    )
}
