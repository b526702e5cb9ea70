//! Binary parameters.

use crate::{SqlError, SqlState, SqlType};

use super::builder::ColumnBuilder;
use super::interval::Interval;
use super::{datetime, numeric};

fn wrong() -> SqlError {
    SqlError::new(
        SqlState::INVALID_BINARY_REPRESENTATION,
        "incorrect binary data format in bind parameter",
    )
}

fn fixed<const N: usize>(bytes: &[u8]) -> Result<[u8; N], SqlError> {
    bytes.try_into().map_err(|_| wrong())
}

/// Appends a value in PostgreSQL's binary form. Integers of another width are taken where they fit:
/// drivers bind by the type they chose, the planner may infer a wider one.
pub fn append(builder: &mut ColumnBuilder, t: SqlType, bytes: &[u8]) -> Result<(), SqlError> {
    match t {
        SqlType::Boolean => builder.push_bool(fixed::<1>(bytes)?[0] != 0),
        SqlType::SmallInt | SqlType::Int | SqlType::BigInt => {
            builder.push_int(integer(bytes)?, t)?
        }
        SqlType::Real => builder.push_f32(match bytes.len() {
            8 => f64::from_be_bytes(fixed(bytes)?) as f32,
            _ => f32::from_be_bytes(fixed(bytes)?),
        }),
        SqlType::Double => builder.push_f64(match bytes.len() {
            4 => f64::from(f32::from_be_bytes(fixed(bytes)?)),
            _ => f64::from_be_bytes(fixed(bytes)?),
        }),
        SqlType::Numeric(_) => {
            builder.append_text(&numeric::binary_to_text(bytes).ok_or_else(wrong)?)?
        }
        SqlType::Text | SqlType::Varchar(_) | SqlType::Char(_) => {
            builder.append_text(std::str::from_utf8(bytes).map_err(|_| invalid_utf8())?)?;
        }
        SqlType::Bytea => builder.push_bytes(bytes),
        SqlType::Date => builder.push_date(match i32::from_be_bytes(fixed(bytes)?) {
            infinite @ (i32::MAX | i32::MIN) => infinite,
            days => days.saturating_add(datetime::PG_EPOCH_DAYS),
        }),
        SqlType::Time => builder.push_micros(i64::from_be_bytes(fixed(bytes)?)),
        SqlType::Timestamp | SqlType::Timestamptz => {
            builder.push_micros(match i64::from_be_bytes(fixed(bytes)?) {
                infinite @ (i64::MAX | i64::MIN) => infinite,
                us => us.saturating_add(datetime::PG_EPOCH_US),
            });
        }
        SqlType::Uuid => builder.push_uuid(fixed::<16>(bytes)?),
        SqlType::Jsonb => match bytes.split_first() {
            // A version number comes first.
            Some((1, text)) => {
                builder.append_text(std::str::from_utf8(text).map_err(|_| invalid_utf8())?)?;
            }
            _ => return Err(wrong()),
        },
        SqlType::Array(_) => return Err(wrong()),
        SqlType::Interval => {
            let b: [u8; 16] = fixed(bytes)?;
            builder.push_interval(Interval {
                us: i64::from_be_bytes(fixed(&b[..8])?),
                days: i32::from_be_bytes(fixed(&b[8..12])?),
                months: i32::from_be_bytes(fixed(&b[12..])?),
            })?;
        }
    }
    Ok(())
}

fn integer(bytes: &[u8]) -> Result<i64, SqlError> {
    Ok(match bytes.len() {
        2 => i64::from(i16::from_be_bytes(fixed(bytes)?)),
        4 => i64::from(i32::from_be_bytes(fixed(bytes)?)),
        8 => i64::from_be_bytes(fixed(bytes)?),
        _ => return Err(wrong()),
    })
}

pub fn invalid_utf8() -> SqlError {
    SqlError::new(SqlState("22021"), "invalid byte sequence for encoding \"UTF8\"")
}
