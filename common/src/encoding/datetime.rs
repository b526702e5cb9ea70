//! Dates, times and timestamps: proleptic Gregorian days and microseconds since 1970.
//!
//! `i64::MAX` / `i64::MIN` microseconds and `i32::MAX` / `i32::MIN` days are PostgreSQL's infinities. They are written as
//! such, but none is read.

use std::fmt::Write;

use super::datetime_text::{self, Local};
use crate::zone::{Zone, write_offset};
use crate::{SqlError, SqlState, SqlType};

pub const DAY_US: i64 = 86_400_000_000;
/// Days from 1970-01-01 to 2000-01-01, PostgreSQL's own origin.
pub const PG_EPOCH_DAYS: i32 = 10_957;
pub const PG_EPOCH_US: i64 = PG_EPOCH_DAYS as i64 * DAY_US;

/// Year, month, day of days since 1970 (Howard Hinnant's civil calendar).
pub fn civil(days: i64) -> (i64, u32, u32) {
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let doe = z.rem_euclid(146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let day = (doy - (153 * mp + 2) / 5 + 1) as u32;
    let month = if mp < 10 { mp + 3 } else { mp - 9 } as u32;
    (yoe + era * 400 + i64::from(month <= 2), month, day)
}

/// Days since 1970 of a date.
pub fn days_from_civil(year: i64, month: u32, day: u32) -> i64 {
    let y = if month <= 2 { year - 1 } else { year };
    let era = y.div_euclid(400);
    let yoe = y.rem_euclid(400);
    let mp = (i64::from(month) + 9) % 12;
    let doy = (153 * mp + 2) / 5 + i64::from(day) - 1;
    era * 146_097 + yoe * 365 + yoe / 4 - yoe / 100 + doy - 719_468
}

pub(super) fn days_in_month(year: i64, month: u32) -> u32 {
    match month {
        4 | 6 | 9 | 11 => 30,
        2 if year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) => 29,
        2 => 28,
        _ => 31,
    }
}

pub fn write_date(out: &mut impl Write, days: i32) -> std::fmt::Result {
    match days {
        i32::MAX => return out.write_str("infinity"),
        i32::MIN => return out.write_str("-infinity"),
        _ => {}
    }
    let bc = write_ymd(out, i64::from(days))?;
    if bc { out.write_str(" BC") } else { Ok(()) }
}

/// Writes the date; whether it is before Christ.
fn write_ymd(out: &mut impl Write, days: i64) -> Result<bool, std::fmt::Error> {
    let (year, month, day) = civil(days);
    let bc = year <= 0;
    write!(out, "{:04}-{month:02}-{day:02}", if bc { 1 - year } else { year })?;
    Ok(bc)
}

pub fn write_time(out: &mut impl Write, us: i64) -> std::fmt::Result {
    let (s, frac) = (us / 1_000_000, us % 1_000_000);
    write!(out, "{:02}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60)?;
    write_fraction(out, frac)
}

/// `.ffffff` without trailing zeros; nothing for zero.
pub fn write_fraction(out: &mut impl Write, frac: i64) -> std::fmt::Result {
    if frac == 0 {
        return Ok(());
    }
    let (mut f, mut width) = (frac, 6);
    while f % 10 == 0 {
        f /= 10;
        width -= 1;
    }
    write!(out, ".{f:0width$}")
}

pub fn write_timestamp(out: &mut impl Write, us: i64, with_zone: bool) -> std::fmt::Result {
    match us {
        i64::MAX => return out.write_str("infinity"),
        i64::MIN => return out.write_str("-infinity"),
        _ => {}
    }
    let bc = write_ymd(out, us.div_euclid(DAY_US))?;
    out.write_char(' ')?;
    write_time(out, us.rem_euclid(DAY_US))?;
    if with_zone {
        out.write_str("+00")?;
    }
    if bc { out.write_str(" BC") } else { Ok(()) }
}

/// An instant as it is shown in a zone, with the offset; as ISO 8601 writes it, if asked.
pub fn write_zoned(out: &mut impl Write, us: i64, zone: Zone, iso: bool) -> std::fmt::Result {
    if matches!(us, i64::MAX | i64::MIN) {
        return write_timestamp(out, us, true);
    }
    let offset = zone.offset(us);
    let local = us.saturating_add(offset * 1_000_000);
    let bc = write_ymd(out, local.div_euclid(DAY_US))?;
    out.write_char(if iso { 'T' } else { ' ' })?;
    write_time(out, local.rem_euclid(DAY_US))?;
    write_offset(out, offset, iso)?;
    if bc { out.write_str(" BC") } else { Ok(()) }
}

fn bad(kind: &str, text: &str) -> SqlError {
    SqlError::new(
        SqlState::INVALID_DATETIME_FORMAT,
        format!("invalid input syntax for type {kind}: \"{text}\""),
    )
}

fn overflow(text: &str) -> SqlError {
    SqlError::new(
        SqlState::DATETIME_FIELD_OVERFLOW,
        format!("date/time field value out of range: \"{text}\""),
    )
}

/// Why a text is no date or time.
enum Fault {
    Syntax,
    Range,
}

impl Fault {
    fn into_error(self, kind: &str, text: &str) -> SqlError {
        match self {
            Fault::Syntax => bad(kind, text),
            Fault::Range => overflow(text),
        }
    }
}

/// Reads the ISO forms, and where the text has none of them, those that people write.
fn read(text: &str) -> Result<Local, Fault> {
    match parse(text) {
        Err(Fault::Syntax) => match datetime_text::parse(text) {
            Some(Some(local)) => Ok(local),
            Some(None) => Err(Fault::Range),
            None => Err(Fault::Syntax),
        },
        read => read,
    }
}

/// What `now`, `today` and their like are of an instant in a zone, in microseconds: of a time of day since midnight,
/// of an instant in UTC, of others in local time.
pub fn present(text: &str, t: SqlType, zone: Zone, now: i64) -> Option<i64> {
    if !matches!(t, SqlType::Date | SqlType::Time | SqlType::Timestamp | SqlType::Timestamptz) {
        return None;
    }
    let text = text.trim();
    if !text.starts_with(|c: char| c.is_ascii_alphabetic()) {
        return None;
    }
    let local = zone.local(now);
    let midnight = local - local.rem_euclid(DAY_US);
    let at = match (text.to_ascii_lowercase().as_str(), t) {
        ("now", SqlType::Timestamptz) => return Some(now),
        ("now", SqlType::Time) => local - midnight,
        ("allballs", SqlType::Time) => 0,
        (_, SqlType::Time) => return None,
        ("now", _) => local,
        ("today", _) => midnight,
        ("tomorrow", _) => midnight + DAY_US,
        ("yesterday", _) => midnight - DAY_US,
        _ => return None,
    };
    Some(if t == SqlType::Timestamptz { zone.instant(at) } else { at })
}

/// Days since 1970 of a date in text.
pub fn parse_date(text: &str) -> Result<i32, SqlError> {
    if is_epoch(text)? {
        return Ok(0);
    }
    let parsed = read(text).map_err(|f| f.into_error("date", text))?;
    i32::try_from(parsed.days).map_err(|_| overflow(text))
}

/// Microseconds since midnight.
pub fn parse_time(text: &str) -> Result<i64, SqlError> {
    let read = plain_time(text.trim()).or_else(|fault| match fault {
        Fault::Syntax => datetime_text::time_of_day(text).ok_or(fault),
        Fault::Range => Err(fault),
    });
    read.map_err(|f| f.into_error("time", text))
}

/// A timestamp's time of day is taken too, and an offset is dropped, as in PostgreSQL.
fn plain_time(t: &str) -> Result<i64, Fault> {
    if t.contains('-') && t.find('-') < t.find(':') {
        return parse(t).map(|p| p.us);
    }
    let (clock, zone) = split_zone(t);
    if !zone.is_empty() {
        parse_zone(zone)?;
    }
    parse_clock(clock)
}

/// Microseconds since 1970; a zone in the text is ignored, as PostgreSQL does.
pub fn parse_timestamp(text: &str) -> Result<i64, SqlError> {
    parse_moment(text, "timestamp", None)
}

/// Microseconds since 1970 in UTC; without a zone the text is UTC.
pub fn parse_timestamptz(text: &str) -> Result<i64, SqlError> {
    parse_timestamptz_in(text, Zone::Fixed(0))
}

/// Microseconds since 1970 in UTC; without a zone the text is of this one.
pub fn parse_timestamptz_in(text: &str, zone: Zone) -> Result<i64, SqlError> {
    parse_moment(text, "timestamp with time zone", Some(zone))
}

fn parse_moment(text: &str, kind: &str, zone: Option<Zone>) -> Result<i64, SqlError> {
    if is_epoch(text)? {
        return Ok(0);
    }
    let p = read(text).map_err(|f| f.into_error(kind, text))?;
    let local = p.days.checked_mul(DAY_US).and_then(|d| d.checked_add(p.us));
    local
        .and_then(|t| match (zone, p.zone) {
            (None, _) => Some(t),
            (Some(_), Some(Zone::Fixed(offset))) => t.checked_sub(offset),
            (Some(zone), named) => Some(named.unwrap_or(zone).instant(t)),
        })
        .ok_or_else(|| {
            SqlError::new(
                SqlState::DATETIME_FIELD_OVERFLOW,
                format!("timestamp out of range: \"{text}\""),
            )
        })
}

/// 0A000 for a date or a time without end, wherever it comes from: no function knows what to do with one.
pub fn infinite() -> SqlError {
    SqlError::unsupported("infinity of dates and times")
}

/// Whether a text is the word for 1970-01-01. PostgreSQL's other such words are refused.
fn is_epoch(text: &str) -> Result<bool, SqlError> {
    let t = text.trim();
    let is = |word: &str| t.eq_ignore_ascii_case(word);
    if is("infinity") || is("-infinity") {
        return Err(infinite());
    }
    Ok(is("epoch"))
}

fn parse(text: &str) -> Result<Local, Fault> {
    let mut t = text.trim();
    let mut bc = false;
    if let Some(rest) = t.strip_suffix("BC").or_else(|| t.strip_suffix("bc")) {
        (t, bc) = (rest.trim_end(), true);
    } else if let Some(rest) = t.strip_suffix("AD").or_else(|| t.strip_suffix("ad")) {
        t = rest.trim_end();
    }
    let (date, rest) = match t.find([' ', 'T', 't']) {
        Some(i) => (&t[..i], t[i + 1..].trim_start()),
        None => (t, ""),
    };
    let days = parse_ymd(date, bc)?;
    if rest.is_empty() {
        return Ok(Local { days, us: 0, zone: None });
    }
    let (clock, zone) = split_zone(rest);
    let us = parse_clock(clock)?;
    let offset = if zone.is_empty() { None } else { Some(parse_zone(zone)?) };
    Ok(Local { days, us, zone: offset.map(|s| Zone::Fixed(i64::from(s) * 1_000_000)) })
}

fn parse_ymd(date: &str, bc: bool) -> Result<i64, Fault> {
    let number = |s: &str| s.parse::<u32>().map_err(|_| Fault::Syntax);
    let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
    let (year, month, day) = if digits(date) && date.len() == 8 {
        (number(&date[..4])?, number(&date[4..6])?, number(&date[6..])?)
    } else {
        let separator = if date.contains('/') { '/' } else { '-' };
        let mut parts = date.split(separator);
        let (Some(a), Some(b), Some(c), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(Fault::Syntax);
        };
        if !(digits(a) && digits(b) && digits(c)) {
            return Err(Fault::Syntax);
        }
        if a.len() >= 3 {
            (number(a)?, number(b)?, number(c)?)
        } else {
            // DateStyle ISO, MDY
            (number(c)?, number(a)?, number(b)?)
        }
    };
    let year = if bc { 1 - i64::from(year) } else { i64::from(year) };
    if !(1..=12).contains(&month)
        || day == 0
        || day > days_in_month(year, month)
        || (year == 0 && !bc)
    {
        return Err(Fault::Range);
    }
    if !(-4713..=294_276).contains(&year) {
        return Err(Fault::Range);
    }
    Ok(days_from_civil(year, month, day))
}

/// The clock and what follows it.
fn split_zone(t: &str) -> (&str, &str) {
    match t.find(|c: char| !(c.is_ascii_digit() || c == ':' || c == '.')) {
        Some(i) => (&t[..i], t[i..].trim()),
        None => (t, ""),
    }
}

fn parse_clock(clock: &str) -> Result<i64, Fault> {
    let (hms, fraction) = clock.split_once('.').unwrap_or((clock, ""));
    let mut parts = hms.split(':');
    let mut next = |required: bool| match parts.next() {
        Some(p) if !p.is_empty() && p.len() <= 2 => p.parse::<i64>().map_err(|_| Fault::Syntax),
        None if !required => Ok(0),
        _ => Err(Fault::Syntax),
    };
    let (h, m, s) = (next(true)?, next(true)?, next(false)?);
    if parts.next().is_some() {
        return Err(Fault::Syntax);
    }
    let us = parse_fraction(fraction)?;
    if m > 59 || s > 60 || h > 24 || (h == 24 && (m, s, us) != (0, 0, 0)) {
        return Err(Fault::Range);
    }
    Ok(((h * 60 + m) * 60 + s) * 1_000_000 + us)
}

fn parse_fraction(digits: &str) -> Result<i64, Fault> {
    super::datetime_text::fraction_us(digits).ok_or(Fault::Syntax)
}

/// Seconds east of Greenwich.
fn parse_zone(zone: &str) -> Result<i32, Fault> {
    if matches!(zone.to_ascii_lowercase().as_str(), "z" | "utc" | "gmt" | "zulu" | "etc/utc") {
        return Ok(0);
    }
    let (sign, digits) = match zone.as_bytes().first() {
        Some(b'+') => (1, &zone[1..]),
        Some(b'-') => (-1, &zone[1..]),
        _ => return Err(Fault::Syntax),
    };
    let parts: Vec<&str> = if digits.contains(':') {
        digits.split(':').collect()
    } else if digits.len() == 4 && digits.is_ascii() {
        vec![&digits[..2], &digits[2..]]
    } else {
        vec![digits]
    };
    let mut seconds = 0;
    for (part, unit) in parts.iter().zip([3600, 60, 1]) {
        if part.is_empty() || part.len() > 2 {
            return Err(Fault::Syntax);
        }
        seconds += part.parse::<i32>().map_err(|_| Fault::Syntax)? * unit;
    }
    if parts.len() > 3 || seconds > 57_599 {
        return Err(Fault::Range);
    }
    Ok(sign * seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timestamp(text: &str) -> String {
        let mut out = String::new();
        write_timestamp(&mut out, parse_timestamp(text).unwrap(), false).unwrap();
        out
    }

    #[test]
    fn timestamps_read_and_print_as_postgres_does() {
        for (input, output) in [
            ("2024-02-29 12:34:56.789", "2024-02-29 12:34:56.789"),
            ("2024-02-29T12:34:56Z", "2024-02-29 12:34:56"),
            ("20240229", "2024-02-29 00:00:00"),
            ("1/2/2024 3:04", "2024-01-02 03:04:00"),
            ("0044-03-15 00:00:00 BC", "0044-03-15 00:00:00 BC"),
            ("1969-12-31 23:59:59.999999", "1969-12-31 23:59:59.999999"),
            ("12024-01-01", "12024-01-01 00:00:00"),
            ("2024-01-01 24:00:00", "2024-01-02 00:00:00"),
        ] {
            assert_eq!(timestamp(input), output, "{input}");
        }
    }

    #[test]
    fn infinity_is_refused() {
        for text in ["infinity", " -Infinity"] {
            assert_eq!(parse_date(text).unwrap_err().state, SqlState::FEATURE_NOT_SUPPORTED);
            assert_eq!(parse_timestamp(text).unwrap_err().message, infinite().message);
            assert_eq!(parse_timestamptz(text).unwrap_err().message, infinite().message);
        }
        // PostgreSQL 15 does not know the plus.
        assert_eq!(parse_date("+infinity").unwrap_err().state.0, "22007");
        assert_eq!(parse_date(" Epoch").unwrap(), 0);
    }

    #[test]
    fn zones_shift_only_timestamptz() {
        assert_eq!(parse_timestamptz("1970-01-01 01:00:00+01").unwrap(), 0);
        assert_eq!(parse_timestamptz("1970-01-01 05:30:00+05:30").unwrap(), 0);
        assert_eq!(parse_timestamp("1970-01-01 01:00:00+01").unwrap(), 3_600_000_000);
    }

    /// What a COPY of PostgreSQL 15 in New York reads.
    #[test]
    fn people_write_times_in_many_ways() {
        let zone = Zone::of_name("America/New_York").unwrap();
        for (text, utc) in [
            ("2026-11-01 01:30 EST", "2026-11-01 06:30"),
            ("2026-11-01 01:30 America/New_York", "2026-11-01 06:30"),
            ("20261101 0130", "2026-11-01 06:30"),
            ("Nov 1 2026 1:30 PM", "2026-11-01 18:30"),
            ("2026-11-01 01:30 UTC", "2026-11-01 01:30"),
        ] {
            let read = parse_timestamptz_in(text, zone).unwrap();
            assert_eq!(read, parse_timestamp(utc).unwrap(), "{text}");
        }
        assert_eq!(parse_date("Nov 1 2026").unwrap(), parse_date("2026-11-01").unwrap());
        assert_eq!(parse_time("10:00 PM").unwrap(), parse_time("22:00").unwrap());
        assert_eq!(parse_time("10:00 foo").unwrap_err().state.0, "22007");
        assert_eq!(parse_time("10:00 America/New_York").unwrap_err().state.0, "22007");
        let now = parse_timestamp("2026-11-22 03:00").unwrap();
        let words = |text: &str, t: SqlType| present(text, t, zone, now);
        let midnight = parse_timestamp("2026-11-21").unwrap();
        assert_eq!(words("now", SqlType::Timestamptz), Some(now));
        assert_eq!(words(" Today ", SqlType::Date), Some(midnight));
        assert_eq!(words("today", SqlType::Timestamptz), Some(zone.instant(midnight)));
        assert_eq!(words("now", SqlType::Time), Some(22 * 3_600_000_000));
        assert_eq!(words("now", SqlType::Text), None);
    }

    #[test]
    fn nonsense_is_refused_with_postgres_codes() {
        assert_eq!(parse_date("2024-13-01").unwrap_err().state.0, "22008");
        assert_eq!(parse_date("2023-02-29").unwrap_err().state.0, "22008");
        assert_eq!(parse_date("yesterdayish").unwrap_err().state.0, "22007");
        assert_eq!(parse_time("25:00").unwrap_err().state.0, "22008");
        assert_eq!(parse_timestamp("2024-01-01 1é").unwrap_err().state.0, "22007");
    }

    #[test]
    fn the_calendar_inverts_itself() {
        for days in (-1_000_000..1_000_000).step_by(997) {
            let (y, m, d) = civil(days);
            assert_eq!(days_from_civil(y, m, d), days);
        }
    }
}
