//! Values as PostgreSQL prints them (DateStyle ISO, IntervalStyle postgres, TimeZone UTC).
//!
//! The casts to text and the wire protocol's text format are the same thing, so both use this.

use std::fmt::Write;

const DAY_US: i64 = 86_400_000_000;

/// Year, month, day of a day number (0 = 1970-01-01), in the proleptic Gregorian calendar.
pub fn civil_from_days(days: i64) -> (i64, u32, u32) {
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let day_of_era = z.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = (day_of_year - (153 * shifted + 2) / 5 + 1) as u32;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 } as u32;
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, month, day)
}

/// The day number of a date.
pub fn days_from_civil(year: i64, month: u32, day: u32) -> i64 {
    let y = year - i64::from(month <= 2);
    let era = y.div_euclid(400);
    let year_of_era = y.rem_euclid(400);
    let shifted = (i64::from(month) + 9) % 12;
    let day_of_year = (153 * shifted + 2) / 5 + i64::from(day) - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

pub fn days_in_month(year: i64, month: u32) -> u32 {
    match month {
        4 | 6 | 9 | 11 => 30,
        2 if year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) => 29,
        2 => 28,
        _ => 31,
    }
}

fn push_date(out: &mut String, days: i64) -> bool {
    let (year, month, day) = civil_from_days(days);
    let bc = year <= 0;
    let shown = if bc { 1 - year } else { year };
    let _ = write!(out, "{shown:04}-{month:02}-{day:02}");
    bc
}

fn push_time(out: &mut String, us: i64) {
    let (s, fraction) = (us / 1_000_000, us % 1_000_000);
    let _ = write!(out, "{:02}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
    push_fraction(out, fraction);
}

/// `.123` for 123000 microseconds; nothing for 0.
fn push_fraction(out: &mut String, us: i64) {
    if us != 0 {
        let digits = format!("{us:06}");
        let _ = write!(out, ".{}", digits.trim_end_matches('0'));
    }
}

pub fn push_date_text(out: &mut String, days: i32) {
    if push_date(out, i64::from(days)) {
        out.push_str(" BC");
    }
}

pub fn push_time_text(out: &mut String, us: i64) {
    push_time(out, us);
}

pub fn push_timestamp_text(out: &mut String, us: i64, tz: bool) {
    let bc = push_date(out, us.div_euclid(DAY_US));
    out.push(' ');
    push_time(out, us.rem_euclid(DAY_US));
    if tz {
        out.push_str("+00");
    }
    if bc {
        out.push_str(" BC");
    }
}

pub fn timestamptz_text(us: i64) -> String {
    let mut out = String::new();
    push_timestamp_text(&mut out, us, true);
    out
}

pub fn push_interval_text(out: &mut String, months: i32, days: i32, us: i64) {
    let start = out.len();
    let mut after_negative = false;
    let mut part = |out: &mut String, n: i32, unit: &str| {
        if n == 0 {
            return;
        }
        if out.len() > start {
            out.push(' ');
        }
        let plus = if after_negative && n > 0 { "+" } else { "" };
        let plural = if n == 1 { "" } else { "s" };
        let _ = write!(out, "{plus}{n} {unit}{plural}");
        after_negative = n < 0;
    };
    part(out, months / 12, "year");
    part(out, months % 12, "mon");
    part(out, days, "day");
    if us != 0 || out.len() == start {
        if out.len() > start {
            out.push(' ');
        }
        if us < 0 {
            out.push('-');
        } else if after_negative {
            out.push('+');
        }
        let us = us.unsigned_abs();
        let s = us / 1_000_000;
        let _ = write!(out, "{:02}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
        push_fraction(out, (us % 1_000_000) as i64);
    }
}

/// A float in the fewest digits that read back as the same value.
pub fn push_float_text(out: &mut String, v: f64) {
    push_float(out, v, format_args!("{v:e}"), 15);
}

pub fn push_real_text(out: &mut String, v: f32) {
    push_float(out, f64::from(v), format_args!("{v:e}"), 6);
}

fn push_float(out: &mut String, v: f64, scientific: std::fmt::Arguments<'_>, large: i32) {
    if v.is_nan() {
        return out.push_str("NaN");
    }
    if v.is_infinite() {
        return out.push_str(if v > 0.0 { "Infinity" } else { "-Infinity" });
    }
    let text = scientific.to_string();
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let (sign, mantissa) = match mantissa.strip_prefix('-') {
        Some(m) => ("-", m),
        None => ("", mantissa),
    };
    let digits: String = mantissa.chars().filter(|c| *c != '.').collect();
    out.push_str(sign);
    if exponent < -4 || exponent >= large {
        out.push_str(&digits[..1]);
        if digits.len() > 1 {
            let _ = write!(out, ".{}", &digits[1..]);
        }
        let _ = write!(out, "e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs());
    } else if exponent < 0 {
        let _ = write!(out, "0.{}{digits}", "0".repeat((-exponent - 1) as usize));
    } else {
        let whole = exponent as usize + 1;
        if digits.len() <= whole {
            let _ = write!(out, "{digits}{}", "0".repeat(whole - digits.len()));
        } else {
            let _ = write!(out, "{}.{}", &digits[..whole], &digits[whole..]);
        }
    }
}

/// A numeric with all its digits; `trim`: without trailing zeros after the point.
pub fn push_numeric_text(out: &mut String, value: i128, scale: i8, trim: bool) {
    if value < 0 {
        out.push('-');
    }
    let digits = value.unsigned_abs().to_string();
    let scale = scale.max(0) as usize;
    let padded = match digits.len() <= scale {
        true => format!("{}{digits}", "0".repeat(scale + 1 - digits.len())),
        false => digits,
    };
    let (whole, fraction) = padded.split_at(padded.len() - scale);
    let fraction = if trim { fraction.trim_end_matches('0') } else { fraction };
    out.push_str(whole);
    if !fraction.is_empty() {
        out.push('.');
        out.push_str(fraction);
    }
}

pub fn push_uuid_text(out: &mut String, bytes: &[u8]) {
    for (i, b) in bytes.iter().enumerate() {
        if matches!(i, 4 | 6 | 8 | 10) {
            out.push('-');
        }
        let _ = write!(out, "{b:02x}");
    }
}

pub fn push_bytea_text(out: &mut String, bytes: &[u8]) {
    out.push_str("\\x");
    for b in bytes {
        let _ = write!(out, "{b:02x}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_print_as_in_postgres() {
        let cases = [
            (1.0, "1"),
            (0.1, "0.1"),
            (1e15, "1e+15"),
            (1e14, "100000000000000"),
            (123_456_789.125, "123456789.125"),
            (1e-5, "1e-05"),
            (0.0001, "0.0001"),
            (-0.0, "-0"),
            (1.5e300, "1.5e+300"),
            (f64::NEG_INFINITY, "-Infinity"),
        ];
        for (v, text) in cases {
            let mut out = String::new();
            push_float_text(&mut out, v);
            assert_eq!(out, text);
        }
    }

    #[test]
    fn calendar_round_trips() {
        for day in (-800_000..800_000).step_by(97) {
            let (y, m, d) = civil_from_days(day);
            assert_eq!(days_from_civil(y, m, d), day);
            assert!(d <= days_in_month(y, m));
        }
    }

    #[test]
    fn intervals_print_as_in_postgres() {
        let cases = [
            ((0, 0, 0), "00:00:00"),
            ((14, -3, 3_723_000_000), "1 year 2 mons -3 days +01:02:03"),
            ((0, 1, -500_000), "1 day -00:00:00.5"),
            ((-1, 0, 0), "-1 mons"),
        ];
        for ((m, d, us), text) in cases {
            let mut out = String::new();
            push_interval_text(&mut out, m, d, us);
            assert_eq!(out, text);
        }
    }
}
