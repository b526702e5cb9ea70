//! Text as PostgreSQL reads it into each type, with its errors.

use millrace_common::encoding::builder::bytes_of_escape;
use millrace_common::encoding::datetime_text;
pub use millrace_common::encoding::datetime_text::fraction_us;
pub use millrace_common::zone::offset_us as zone_us;
use millrace_common::{SqlError, SqlState, SqlType};

pub use super::interval_text::interval;
use super::text::{days_from_civil, days_in_month};
use super::times::Zone;

const DAY_US: i64 = 86_400_000_000;

/// `invalid input syntax for type integer: "x"`
pub fn invalid(t: SqlType, text: &str) -> SqlError {
    let state = match t {
        SqlType::Date
        | SqlType::Time
        | SqlType::Timestamp
        | SqlType::Timestamptz
        | SqlType::Interval => SqlState::INVALID_DATETIME_FORMAT,
        _ => SqlState::INVALID_TEXT_REPRESENTATION,
    };
    SqlError::new(state, format!("invalid input syntax for type {}: \"{text}\"", input_name(t)))
}

/// A type's name in a syntax error, where PostgreSQL leaves "without time zone" out.
fn input_name(t: SqlType) -> String {
    match t {
        SqlType::Timestamp => "timestamp".into(),
        SqlType::Time => "time".into(),
        t => base_name(t),
    }
}

/// A type's name without its modifiers.
pub fn base_name(t: SqlType) -> String {
    match t {
        SqlType::Numeric(_) => "numeric".into(),
        SqlType::Varchar(_) => "character varying".into(),
        SqlType::Char(_) => "character".into(),
        SqlType::Array(e) => format!("{}[]", base_name(e.scalar())),
        t => t.to_string(),
    }
}

pub fn out_of_range(t: SqlType, text: &str) -> SqlError {
    let message = match t {
        SqlType::Real | SqlType::Double => format!("\"{text}\" is out of range for type {t}"),
        _ => format!("value \"{text}\" is out of range for type {t}"),
    };
    SqlError::new(SqlState::NUMERIC_VALUE_OUT_OF_RANGE, message)
}

pub fn boolean(text: &str) -> Result<bool, SqlError> {
    let t = text.trim().to_ascii_lowercase();
    let prefix = |word: &str, least: usize| t.len() >= least && word.starts_with(&t);
    if t == "1" || prefix("true", 1) || prefix("yes", 1) || prefix("on", 2) {
        Ok(true)
    } else if t == "0" || prefix("false", 1) || prefix("no", 1) || prefix("off", 2) {
        Ok(false)
    } else {
        Err(invalid(SqlType::Boolean, text))
    }
}

/// An integer in the range of `t`.
pub fn integer(text: &str, t: SqlType) -> Result<i64, SqlError> {
    let trimmed = text.trim_matches(|c: char| c.is_ascii_whitespace());
    let digits = trimmed.strip_prefix(['+', '-']).unwrap_or(trimmed);
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(invalid(t, text));
    }
    let (low, high) = match t {
        SqlType::SmallInt => (i64::from(i16::MIN), i64::from(i16::MAX)),
        SqlType::Int => (i64::from(i32::MIN), i64::from(i32::MAX)),
        _ => (i64::MIN, i64::MAX),
    };
    match trimmed.strip_prefix('+').unwrap_or(trimmed).parse::<i64>() {
        Ok(v) if (low..=high).contains(&v) => Ok(v),
        _ => Err(out_of_range(t, text)),
    }
}

pub fn float(text: &str, t: SqlType) -> Result<f64, SqlError> {
    let trimmed = text.trim();
    let unsigned = trimmed.strip_prefix(['+', '-']).unwrap_or(trimmed);
    let negative = trimmed.starts_with('-');
    match unsigned.to_ascii_lowercase().as_str() {
        "nan" => return Ok(f64::NAN),
        "inf" | "infinity" => {
            return Ok(if negative { f64::NEG_INFINITY } else { f64::INFINITY });
        }
        _ => {}
    }
    let plain = unsigned.bytes().all(|b| b.is_ascii_digit() || b".eE+-".contains(&b));
    let v = match trimmed.parse::<f64>() {
        Ok(v) if plain && !unsigned.is_empty() => v,
        _ => return Err(invalid(t, text)),
    };
    let narrow = t == SqlType::Real;
    let infinite = if narrow { (v as f32).is_infinite() } else { v.is_infinite() };
    let vanished = if narrow { v as f32 == 0.0 } else { v == 0.0 };
    let zero = !unsigned
        .split(['e', 'E'])
        .next()
        .unwrap_or("")
        .bytes()
        .any(|b| (b'1'..=b'9').contains(&b));
    if infinite || (vanished && !zero) {
        return Err(out_of_range(t, trimmed));
    }
    Ok(v)
}

/// Digits and scale of a number: `-1.50e1` is (-150, 1).
pub fn numeric(text: &str) -> Result<(i128, i32), SqlError> {
    let t = SqlType::Numeric(None);
    let trimmed = text.trim();
    let (negative, rest) = match trimmed.as_bytes().first() {
        Some(b'-') => (true, &trimmed[1..]),
        Some(b'+') => (false, &trimmed[1..]),
        _ => (false, trimmed),
    };
    if matches!(rest.to_ascii_lowercase().as_str(), "nan" | "inf" | "infinity") {
        return Err(SqlError::unsupported(format!("numeric \"{trimmed}\"")));
    }
    let (mantissa, exponent) = match rest.split_once(['e', 'E']) {
        Some((m, e)) => (m, e.parse::<i32>().map_err(|_| invalid(t, text))?),
        None => (rest, 0),
    };
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = || whole.bytes().chain(fraction.bytes());
    if whole.len() + fraction.len() == 0 || !digits().all(|b| b.is_ascii_digit()) {
        return Err(invalid(t, text));
    }
    let overflow = || numeric_overflow();
    let mut value: i128 = 0;
    for b in digits() {
        value = value
            .checked_mul(10)
            .and_then(|v| v.checked_add(i128::from(b - b'0')))
            .ok_or_else(overflow)?;
    }
    // PostgreSQL's bound of an exponent.
    if exponent.unsigned_abs() >= i32::MAX.unsigned_abs() / 2 {
        return Err(overflow());
    }
    let mut scale = fraction.len() as i32 - exponent;
    if value == 0 {
        scale = scale.max(0);
    }
    while scale < 0 {
        value = value.checked_mul(10).ok_or_else(overflow)?;
        scale += 1;
    }
    Ok((if negative { -value } else { value }, scale))
}

pub fn numeric_overflow() -> SqlError {
    SqlError::new(SqlState::NUMERIC_VALUE_OUT_OF_RANGE, "value overflows numeric format")
        .with_detail("Numeric values have at most 38 digits.")
}

fn field_range(text: &str) -> SqlError {
    SqlError::new(
        SqlState::DATETIME_FIELD_OVERFLOW,
        format!("date/time field value out of range: \"{text}\""),
    )
}

/// Day number of `YYYY-MM-DD` (also `/`, and `YYYYMMDD`).
fn date_part(part: &str, text: &str, t: SqlType) -> Result<i64, SqlError> {
    let bad = || invalid(t, text);
    let pieces: Vec<&str> = part.split(['-', '/']).collect();
    let (y, m, d) = match pieces.as_slice() {
        [y, m, d] => (*y, *m, *d),
        [all] if all.len() == 8 && all.is_ascii() => (&all[..4], &all[4..6], &all[6..]),
        _ => return Err(bad()),
    };
    let number = |s: &str| -> Result<i64, SqlError> {
        match s.bytes().all(|b| b.is_ascii_digit()) && (1..=6).contains(&s.len()) {
            true => s.parse().map_err(|_| bad()),
            false => Err(bad()),
        }
    };
    let (y, m, d) = (number(y)?, number(m)?, number(d)?);
    if pieces.len() == 3 && pieces[0].len() < 3 {
        return Err(field_range(text).with_hint("Dates are written year-month-day."));
    }
    if !(1..=12).contains(&m) || d < 1 || d > i64::from(days_in_month(y, m as u32)) || y < 1 {
        return Err(field_range(text));
    }
    Ok(days_from_civil(y, m as u32, d as u32))
}

/// Microseconds of `HH:MM[:SS[.ffffff]]`.
fn time_part(part: &str, text: &str, t: SqlType) -> Result<i64, SqlError> {
    let bad = || invalid(t, text);
    let mut pieces = part.split(':');
    let mut number = || -> Result<Option<&str>, SqlError> {
        match pieces.next() {
            Some(p) if !p.is_empty() => Ok(Some(p)),
            Some(_) => Err(bad()),
            None => Ok(None),
        }
    };
    let (h, m, s) = (number()?.ok_or_else(bad)?, number()?.ok_or_else(bad)?, number()?);
    if pieces.next().is_some() {
        return Err(bad());
    }
    let whole = |s: &str| -> Result<i64, SqlError> {
        match s.len() <= 2 && s.bytes().all(|b| b.is_ascii_digit()) {
            true => s.parse().map_err(|_| bad()),
            false => Err(bad()),
        }
    };
    let (h, m) = (whole(h)?, whole(m)?);
    let (s, us) = match s {
        None => (0, 0),
        Some(s) => {
            let (s, fraction) = s.split_once('.').unwrap_or((s, ""));
            (whole(s)?, fraction_us(fraction).ok_or_else(bad)?)
        }
    };
    if h > 24 || m > 59 || s > 60 || (h == 24 && (m, s, us) != (0, 0, 0)) {
        return Err(field_range(text));
    }
    Ok(((h * 60 + m) * 60 + s) * 1_000_000 + us)
}

pub fn date(text: &str) -> Result<i32, SqlError> {
    plain_date(text).or_else(|e| match datetime_text::parse(text) {
        Some(Some(read)) => Ok(read.days as i32),
        Some(None) => Err(field_range(text)),
        None => Err(e),
    })
}

fn plain_date(text: &str) -> Result<i32, SqlError> {
    let trimmed = text.trim();
    if trimmed.eq_ignore_ascii_case("epoch") {
        return Ok(0);
    }
    let part = trimmed.split([' ', 'T']).next().unwrap_or(trimmed);
    if part.len() < trimmed.len() {
        // A time of day is read and dropped.
        let us = plain_timestamp(trimmed, false).map_err(|_| invalid(SqlType::Date, text))?;
        return Ok(us.div_euclid(DAY_US) as i32);
    }
    let days = date_part(part, text, SqlType::Date)?;
    if datetime_text::in_calendar(days) { Ok(days as i32) } else { Err(field_range(text)) }
}

pub fn time(text: &str) -> Result<i64, SqlError> {
    time_part(text.trim(), text, SqlType::Time)
        .or_else(|e| datetime_text::time_of_day(text).ok_or(e))
}

/// Microseconds since 1970. With `tz`, an offset counts (default UTC); without, it is read and dropped.
pub fn timestamp(text: &str, tz: bool) -> Result<i64, SqlError> {
    plain_timestamp(text, tz).or_else(|e| match datetime_text::parse(text) {
        Some(None) => Err(field_range(text)),
        Some(Some(local)) => {
            let us = local.days.checked_mul(DAY_US).and_then(|d| d.checked_add(local.us));
            match (us, local.zone) {
                (None, _) => Err(field_range(text)),
                (Some(us), Some(zone)) if tz => Ok(zone.instant(us)),
                (Some(us), _) => Ok(us),
            }
        }
        None => Err(e),
    })
}

/// The same with an offset that counts; without one the time is of this zone.
pub fn timestamptz_in(text: &str, zone: Zone) -> Result<i64, SqlError> {
    let read =
        plain_parts(text, SqlType::Timestamptz).map(|(us, zone)| (us, zone.map(Zone::Fixed)));
    let (local, named) = read.or_else(|e| match datetime_text::parse(text) {
        Some(None) => Err(field_range(text)),
        Some(Some(read)) => {
            let us = read.days.checked_mul(DAY_US).and_then(|d| d.checked_add(read.us));
            us.map(|us| (us, read.zone)).ok_or_else(|| field_range(text))
        }
        None => Err(e),
    })?;
    Ok(named.unwrap_or(zone).instant(local))
}

fn plain_timestamp(text: &str, tz: bool) -> Result<i64, SqlError> {
    let t = if tz { SqlType::Timestamptz } else { SqlType::Timestamp };
    let (local, offset) = plain_parts(text, t)?;
    match offset.filter(|_| tz) {
        Some(offset) => local.checked_sub(offset).ok_or_else(|| field_range(text)),
        None => Ok(local),
    }
}

/// A local time in microseconds, and those of the offset that follows it.
fn plain_parts(text: &str, t: SqlType) -> Result<(i64, Option<i64>), SqlError> {
    let trimmed = text.trim();
    if trimmed.eq_ignore_ascii_case("epoch") {
        return Ok((0, Some(0)));
    }
    let (date, rest) = match trimmed.find([' ', 'T', 't']) {
        Some(i) => (&trimmed[..i], trimmed[i + 1..].trim()),
        None => (trimmed, ""),
    };
    let days = date_part(date, text, t)?;
    let (clock, zone) = match rest.find(|c: char| !(c.is_ascii_digit() || c == ':' || c == '.')) {
        Some(i) => (rest[..i].trim(), rest[i..].trim()),
        None => (rest, ""),
    };
    let us = if clock.is_empty() { 0 } else { time_part(clock, text, t)? };
    let offset = zone_us(zone).ok_or_else(|| invalid(t, text))?;
    let local = days.checked_mul(DAY_US).and_then(|d| d.checked_add(us));
    let local = local.filter(|_| datetime_text::in_calendar(days));
    local.map(|l| (l, (!zone.is_empty()).then_some(offset))).ok_or_else(|| field_range(text))
}

pub fn bytea(text: &str) -> Result<Vec<u8>, SqlError> {
    let bad = || invalid(SqlType::Bytea, text);
    if let Some(hex) = text.strip_prefix("\\x") {
        let digits: Vec<u8> = hex.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
        if !digits.len().is_multiple_of(2) {
            return Err(SqlError::new(
                SqlState::INVALID_PARAMETER_VALUE,
                "invalid hexadecimal data: odd number of digits",
            ));
        }
        let nibble = |b: u8| (b as char).to_digit(16).ok_or_else(bad);
        return digits
            .chunks_exact(2)
            .map(|p| Ok((nibble(p[0])? * 16 + nibble(p[1])?) as u8))
            .collect();
    }
    bytea_escape(text)
}

/// Bytes in the escape format: `\\000` is a byte, a double backslash one.
pub fn bytea_escape(text: &str) -> Result<Vec<u8>, SqlError> {
    bytes_of_escape(text).ok_or_else(|| invalid(SqlType::Bytea, text))
}

#[cfg(test)]
mod tests {
    use crate::testing::check;

    #[test]
    fn numbers() {
        check(&[
            ("'1_000'::int4", "error 22P02"),
            ("'-0'::int4", "0"),
            ("'00012'::int2", "12"),
            ("'--1'::int4", "error 22P02"),
            ("'+-1'::numeric", "error 22P02"),
            ("'1.'::float8", "1"),
            ("'.'::numeric", "error 22P02"),
            ("'1e5'::numeric(8,2)", "100000.00"),
            ("'-1.50E+1'::numeric", "-15"),
            ("'1e-3'::numeric", "0.001"),
            ("' 0.0 '::numeric", "0"),
            ("'Infinity '::float8", "Infinity"),
            ("'+inf'::float8", "Infinity"),
            ("'infinit'::float8", "error 22P02"),
            ("'1.7976931348623157e308'::float8", "1.7976931348623157e+308"),
            ("'5e-324'::float8", "5e-324"),
            ("'3.4028235e38'::float4", "3.4028235e+38"),
            ("'1 2'::float8", "error 22P02"),
            ("'123456789012345678901234567890123456789'::numeric", "error 22003"),
        ]);
    }

    #[test]
    fn booleans() {
        check(&[
            ("'TRUE'::bool", "true"),
            ("'tru'::bool", "true"),
            ("'yes'::bool", "true"),
            ("'n'::bool", "false"),
            ("'on'::bool", "true"),
            ("'off'::bool", "false"),
            ("'0'::bool", "false"),
            ("''::bool", "error 22P02"),
            ("'truex'::bool", "error 22P02"),
        ]);
    }

    #[test]
    fn dates() {
        check(&[
            ("'2024-1-5'::date", "2024-01-05"),
            ("'2000-02-30'::date", "error 22008"),
            ("'1900-02-29'::date", "error 22008"),
            ("'2024-00-10'::date", "error 22008"),
            ("'2024-01-32'::date", "error 22008"),
            ("'10000-01-01'::date", "10000-01-01"),
            ("'0000-01-01'::date", "error 22008"),
            ("'4714-11-24 BC'::date", "4714-11-24 BC"),
            ("'4714-11-23 BC'::date", "error 22008"),
            ("'abc'::date", "error 22007"),
            ("''::date", "error 22007"),
            ("'2024-02-29 junk'::date", "error 22007"),
            ("'2024-02-29 13:14'::date", "2024-02-29"),
        ]);
    }

    #[test]
    fn times_of_day() {
        check(&[
            ("'00:00'::time", "00:00:00"),
            ("'23:59:59.9999999'::time", "24:00:00"),
            ("'13:14:15.1234565'::time", "13:14:15.123456"),
            ("'040506'::time", "04:05:06"),
            ("'12:00 AM'::time", "00:00:00"),
            ("'24:00:01'::time", "error 22008"),
            ("'1'::time", "error 22007"),
        ]);
    }

    #[test]
    fn instants_and_offsets() {
        check(&[
            ("'2024-02-29 12:00-08'::timestamptz", "2024-02-29 20:00:00+00"),
            ("'2024-02-29 12:00+0530'::timestamptz", "2024-02-29 06:30:00+00"),
            ("'2024-02-29 12:00:00 UTC'::timestamptz", "2024-02-29 12:00:00+00"),
            ("'2024-02-29 12:00 Europe/Berlin'::timestamptz", "2024-02-29 11:00:00+00"),
            ("'2024-07-01 12:00 Europe/Berlin'::timestamptz", "2024-07-01 10:00:00+00"),
            ("'2024-02-29'::timestamptz", "2024-02-29 00:00:00+00"),
            ("'2024-02-29 12'::timestamp", "error 22007"),
            ("'2024-02-29 12:61'::timestamp", "error 22008"),
            ("'20240229T131415'::timestamp", "2024-02-29 13:14:15"),
            ("'294277-01-01'::timestamp", "error 22008"),
            ("'2024-02-29 23:59:59.9999995'::timestamp", "2024-03-01 00:00:00"),
            ("'0001-01-01 00:00:00 BC'::timestamp", "0001-01-01 00:00:00 BC"),
        ]);
    }

    #[test]
    fn bytes_as_digits_or_escapes() {
        check(&[
            ("'\\X00'::bytea", "error 22P02"),
            ("'\\x00 '::bytea", "\\x00"),
            ("'\\\\'::bytea", "\\x5c"),
            ("'\\'::bytea", "error 22P02"),
            ("'\\400'::bytea", "error 22P02"),
            ("'\\12'::bytea", "error 22P02"),
            ("''::bytea", "\\x"),
            ("'é\\000'::bytea", "\\xc3a900"),
        ]);
    }
}
