//! Values on the wire: PostgreSQL's text and binary forms of every SQL type, in and out.
//!
//! Output goes from an Arrow column into a byte buffer ([`Column`]), input from bytes into an Arrow
//! builder ([`ColumnBuilder`]), both without an allocation a value. The text forms are PostgreSQL
//! 15's with its default settings (DateStyle ISO, IntervalStyle postgres, bytea_output hex,
//! extra_float_digits 1).

pub mod array;
pub mod binary;
pub mod builder;
pub mod datetime;
pub mod interval;
pub mod numeric;
pub mod output;

pub use builder::ColumnBuilder;
pub use output::Column;

use arrow::datatypes::DataType;
use millrace_common::{SqlError, SqlState, SqlType};

use crate::wire::Field;

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
        26 => 4,
        _ => -1,
    }
}

/// The RowDescription of columns. `types` are the SQL types as the planner knows them, where it does.
pub fn describe_column(name: &str, t: &DataType) -> Result<Field, SqlError> {
    let (type_oid, type_len, typmod) = describe_type(t)?;
    Ok(Field { name: name.to_owned(), type_oid, type_len, typmod })
}

/// PostgreSQL's OID of the array type over a scalar type.
pub fn array_oid(t: SqlType) -> u32 {
    match t {
        SqlType::Boolean => 1000,
        SqlType::Bytea => 1001,
        SqlType::SmallInt => 1005,
        SqlType::Int => 1007,
        SqlType::Text => 1009,
        SqlType::Varchar(_) => 1015,
        SqlType::BigInt => 1016,
        SqlType::Real => 1021,
        SqlType::Double => 1022,
        SqlType::Timestamp => 1115,
        SqlType::Date => 1182,
        SqlType::Time => 1183,
        SqlType::Timestamptz => 1185,
        SqlType::Interval => 1187,
        SqlType::Numeric(_) => 1231,
    }
}

/// The Arrow type of a parameter that a client declared by OID; `None`: to be inferred.
pub fn type_of_oid(oid: u32) -> Result<Option<DataType>, SqlError> {
    Ok(match oid {
        0 | 705 => None,
        // oid, xid, cid, regclass, regtype, regproc
        26 | 28 | 29 | 2205 | 2206 | 24 => Some(DataType::Int64),
        // name, "char", bpchar, json, jsonb, uuid arrive as their text
        18 | 19 | 1042 | 114 | 3802 | 2950 => Some(DataType::Utf8),
        1000..=1231 if scalar_of_array(oid).is_some() => scalar_of_array(oid).map(|t| {
            DataType::List(std::sync::Arc::new(arrow::datatypes::Field::new(
                "item",
                t.to_arrow(),
                true,
            )))
        }),
        _ => {
            let sql = millrace_rpc::catalog::ColumnType { oid, typmod: -1 }
                .to_sql()
                .map_err(|_| SqlError::unsupported(format!("a parameter of type oid {oid}")))?;
            Some(sql.to_arrow())
        }
    })
}

/// The element type of an array type's OID.
pub fn scalar_of_array(oid: u32) -> Option<SqlType> {
    use SqlType::*;
    [
        Boolean,
        Bytea,
        SmallInt,
        Int,
        Text,
        Varchar(None),
        BigInt,
        Real,
        Double,
        Timestamp,
        Date,
        Time,
        Timestamptz,
        Interval,
        Numeric(None),
    ]
    .into_iter()
    .find(|t| array_oid(*t) == oid)
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
