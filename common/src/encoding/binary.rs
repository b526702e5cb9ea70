//! Binary parameters.

use crate::{SqlError, SqlState, SqlType};

use super::builder::ColumnBuilder;
use super::interval::Interval;
use super::{datetime, numeric};

pub(super) fn wrong() -> SqlError {
    SqlError::new(
        SqlState::INVALID_BINARY_REPRESENTATION,
        "incorrect binary data format in bind parameter",
    )
}

/// PostgreSQL's dates, in days since 2000: from 4714-11-24 BC.
const DATES: std::ops::Range<i32> = -2_451_545..2_145_031_949;
/// The beginning of its timestamps, in microseconds since 2000. Ours end where those since 1970 do.
const FIRST_TIMESTAMP: i64 = -2_451_545 * datetime::DAY_US;

fn beyond(what: &str) -> SqlError {
    SqlError::new(SqlState::DATETIME_FIELD_OVERFLOW, format!("{what} out of range"))
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
        SqlType::Numeric(_) => builder.append_text(&numeric::binary_to_text(bytes)?)?,
        SqlType::Text | SqlType::Varchar(_) | SqlType::Char(_) => {
            builder.append_text(std::str::from_utf8(bytes).map_err(|_| invalid_utf8())?)?;
        }
        SqlType::Bytea => builder.push_bytes(bytes),
        SqlType::Date => builder.push_date(match i32::from_be_bytes(fixed(bytes)?) {
            i32::MAX | i32::MIN => return Err(datetime::infinite()),
            days if DATES.contains(&days) => days + datetime::PG_EPOCH_DAYS,
            _ => return Err(beyond("date")),
        }),
        SqlType::Time => builder.push_micros(match i64::from_be_bytes(fixed(bytes)?) {
            us if (0..=datetime::DAY_US).contains(&us) => us,
            _ => return Err(beyond("time")),
        }),
        SqlType::Timestamp | SqlType::Timestamptz => {
            builder.push_micros(match i64::from_be_bytes(fixed(bytes)?) {
                i64::MAX | i64::MIN => return Err(datetime::infinite()),
                us if us < FIRST_TIMESTAMP => return Err(beyond("timestamp")),
                us => match us.checked_add(datetime::PG_EPOCH_US) {
                    // The greatest number would be shown as infinity.
                    Some(us) if us < i64::MAX => us,
                    _ => return Err(beyond("timestamp")),
                },
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

#[cfg(test)]
mod tests {
    use super::*;

    fn read(t: SqlType, bytes: &[u8]) -> Result<(), SqlError> {
        append(&mut ColumnBuilder::new(t, 1), t, bytes)
    }

    /// What PostgreSQL 15 says of the same bytes in COPY.
    #[test]
    fn what_postgres_refuses_is_refused() {
        let case = |t: SqlType, number: i64, ok: bool| {
            let bytes = match t {
                SqlType::Date => i32::try_from(number).unwrap().to_be_bytes().to_vec(),
                _ => number.to_be_bytes().to_vec(),
            };
            let state = read(t, &bytes).err().map(|e| e.state.0);
            assert_eq!(state, (!ok).then_some("22008"), "{t} {number}");
        };
        case(SqlType::Time, 90_000_000_000, false);
        case(SqlType::Time, 86_400_000_000, true);
        case(SqlType::Time, 86_400_000_001, false);
        case(SqlType::Time, -1, false);
        case(SqlType::Date, 2_147_483_646, false);
        case(SqlType::Date, -2_451_545, true);
        case(SqlType::Date, -2_451_546, false);
        for t in [SqlType::Timestamp, SqlType::Timestamptz] {
            case(t, i64::MAX - 1, false);
            case(t, -211_813_488_000_000_000, true);
            case(t, -211_813_488_000_000_001, false);
        }
    }

    #[test]
    fn infinity_is_refused() {
        for days in [i32::MAX, i32::MIN] {
            let e = read(SqlType::Date, &days.to_be_bytes()).unwrap_err();
            assert_eq!(e.state, SqlState::FEATURE_NOT_SUPPORTED);
        }
        for t in [SqlType::Timestamp, SqlType::Timestamptz] {
            for us in [i64::MAX, i64::MIN] {
                let e = read(t, &us.to_be_bytes()).unwrap_err();
                assert_eq!(e.message, datetime::infinite().message);
            }
        }
    }
}
