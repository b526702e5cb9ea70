//! Assignment casts: a computed column into a table's column, by PostgreSQL's rules.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Float64Array, Int64Array, StringBuilder};
use arrow::compute::{CastOptions, cast_with_options};
use arrow::datatypes::DataType;
use arrow::util::display::FormatOptions;
use bytes::BytesMut;
use millrace_common::{SqlError, SqlState, SqlType};
use millrace_functions::cast::convert;
use millrace_rpc::catalog::{ColumnType, Relation};

use crate::encoding::builder::fit_varchar;
use crate::encoding::{Column, numeric};
use crate::wire::Field;

/// Casts a column for assignment to `name` of type `to`.
pub fn assign(array: &ArrayRef, name: &str, to: SqlType) -> Result<ArrayRef, SqlError> {
    let target = to.to_arrow();
    if array.data_type() == &DataType::Null || array.null_count() == array.len() {
        return Ok(arrow::array::new_null_array(&target, array.len()));
    }
    if let SqlType::Text | SqlType::Varchar(_) | SqlType::Char(_) = to {
        return to_text(array, to);
    }
    if array.data_type() == &target {
        return Ok(array.clone());
    }
    let from = SqlType::from_arrow(array.data_type())?;
    check(from, name, to)?;
    match (from, to) {
        (SqlType::Real | SqlType::Double, SqlType::SmallInt | SqlType::Int | SqlType::BigInt) => {
            let floats = checked_cast(array, &DataType::Float64, to)?;
            round_floats(floats.as_primitive(), to).and_then(|a| checked_cast(&a, &target, to))
        }
        (SqlType::Numeric(_), SqlType::SmallInt | SqlType::Int | SqlType::BigInt) => {
            // Rounds half away from zero, then narrows.
            let whole = checked_cast(array, &DataType::Decimal128(38, 0), to)?;
            checked_cast(&whole, &target, to)
        }
        // By the digits that a float has, as its text shows them.
        (SqlType::Real | SqlType::Double, SqlType::Numeric(_)) => convert(array, to),
        (_, SqlType::Numeric(Some((p, s)))) => {
            checked_cast(array, &target, to).map_err(|_| numeric::field_overflow(p, s))
        }
        _ => checked_cast(array, &target, to),
    }
}

/// Whether a type may be assigned to a column.
pub fn check(from: SqlType, name: &str, to: SqlType) -> Result<(), SqlError> {
    let to_text = matches!(to, SqlType::Text | SqlType::Varchar(_) | SqlType::Char(_));
    if to_text || assignable(from, to) { Ok(()) } else { Err(mismatch(name, from, to)) }
}

/// The same for the columns of a query, which may return no row that would tell.
pub fn check_fields(fields: &[Field], table: &Relation, targets: &[usize]) -> Result<(), SqlError> {
    for (field, target) in fields.iter().zip(targets) {
        // A type that only the catalogs know says nothing here.
        let Ok(from) = (ColumnType { oid: field.type_oid, typmod: -1 }).to_sql() else { continue };
        let column = &table.columns[*target];
        check(from, &column.name, column.sql_type()?)?;
    }
    Ok(())
}

fn is_number(t: SqlType) -> bool {
    matches!(
        t,
        SqlType::SmallInt
            | SqlType::Int
            | SqlType::BigInt
            | SqlType::Real
            | SqlType::Double
            | SqlType::Numeric(_)
    )
}

fn assignable(from: SqlType, to: SqlType) -> bool {
    use SqlType::{Date, Interval, Time, Timestamp, Timestamptz};
    (is_number(from) && is_number(to))
        || matches!(
            (from, to),
            (Date, Timestamp | Timestamptz)
                | (Timestamp, Date | Time | Timestamptz)
                | (Timestamptz, Date | Time | Timestamp)
                | (Time, Interval)
                | (Interval, Time)
        )
        || std::mem::discriminant(&from) == std::mem::discriminant(&to)
}

/// `column "a" is of type integer but expression is of type text`.
pub fn mismatch(name: &str, from: SqlType, to: SqlType) -> SqlError {
    SqlError::new(
        SqlState::DATATYPE_MISMATCH,
        format!("column \"{name}\" is of type {to} but expression is of type {from}"),
    )
    .with_hint("You will need to rewrite or cast the expression.")
}

fn checked_cast(array: &ArrayRef, target: &DataType, to: SqlType) -> Result<ArrayRef, SqlError> {
    let options = CastOptions { safe: false, format_options: FormatOptions::default() };
    cast_with_options(array, target, &options).map_err(|_| {
        SqlError::new(SqlState::NUMERIC_VALUE_OUT_OF_RANGE, format!("{to} out of range"))
    })
}

/// Rounds half to even, as C's rint does for PostgreSQL.
fn round_floats(array: &Float64Array, to: SqlType) -> Result<ArrayRef, SqlError> {
    let limit = 9_223_372_036_854_775_808.0;
    let mut out = Int64Array::builder(array.len());
    for v in array {
        match v {
            None => out.append_null(),
            Some(v) if (-limit..limit).contains(&v.round_ties_even()) => {
                out.append_value(v.round_ties_even() as i64)
            }
            Some(_) => {
                return Err(SqlError::new(
                    SqlState::NUMERIC_VALUE_OUT_OF_RANGE,
                    format!("{to} out of range"),
                ));
            }
        }
    }
    Ok(Arc::new(out.finish()))
}

/// Any type has an assignment cast to text.
fn to_text(array: &ArrayRef, to: SqlType) -> Result<ArrayRef, SqlError> {
    let bounded = matches!(to, SqlType::Varchar(Some(_)) | SqlType::Char(_));
    if array.data_type() == &DataType::Utf8 && !bounded {
        return Ok(array.clone());
    }
    let column = Column::new(array)?;
    let mut out = StringBuilder::with_capacity(array.len(), array.len() * 8);
    let mut text = BytesMut::new();
    for row in 0..array.len() {
        if column.is_null(row) {
            out.append_null();
            continue;
        }
        text.clear();
        column.put_text(row, &mut text)?;
        let text =
            std::str::from_utf8(&text).map_err(|_| SqlError::internal("text is not UTF-8"))?;
        let text = match (array.data_type(), text) {
            (DataType::Boolean, "t") => "true",
            (DataType::Boolean, "f") => "false",
            (_, other) => other,
        };
        out.append_value(fit_varchar(text, to)?);
    }
    Ok(Arc::new(out.finish()))
}

#[cfg(test)]
mod tests {
    use arrow::array::{Decimal128Array, Int32Array, StringArray};

    use super::*;

    #[test]
    fn numbers_narrow_with_postgres_rounding_and_errors() {
        let floats: ArrayRef = Arc::new(Float64Array::from(vec![Some(2.5), Some(3.5), None]));
        let ints = assign(&floats, "a", SqlType::Int).unwrap();
        assert_eq!(
            ints.as_any().downcast_ref(),
            Some(&Int32Array::from(vec![Some(2), Some(4), None]))
        );
        let decimals: ArrayRef =
            Arc::new(Decimal128Array::from(vec![25, -25]).with_precision_and_scale(5, 1).unwrap());
        let ints = assign(&decimals, "a", SqlType::Int).unwrap();
        assert_eq!(ints.as_any().downcast_ref(), Some(&Int32Array::from(vec![3, -3])));
        let big: ArrayRef = Arc::new(Int64Array::from(vec![1 << 40]));
        let e = assign(&big, "a", SqlType::Int).unwrap_err();
        assert_eq!((e.state.0, e.message.as_str()), ("22003", "integer out of range"));
    }

    #[test]
    fn text_is_not_assigned_to_numbers() {
        let text: ArrayRef = Arc::new(StringArray::from(vec!["1"]));
        assert_eq!(assign(&text, "a", SqlType::Int).unwrap_err().state.0, "42804");
        let ints: ArrayRef = Arc::new(Int32Array::from(vec![17]));
        let text = assign(&ints, "a", SqlType::Varchar(Some(2))).unwrap();
        assert_eq!(text.as_string::<i32>().value(0), "17");
        assert_eq!(assign(&ints, "a", SqlType::Varchar(Some(1))).unwrap_err().state.0, "22001");
    }
}
