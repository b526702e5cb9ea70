//! Intervals: months, days and microseconds, printed and read in PostgreSQL's default style.

use std::fmt::Write;

use crate::{SqlError, SqlState};

use super::datetime::{DAY_US, write_fraction};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interval {
    pub months: i32,
    pub days: i32,
    pub us: i64,
}

pub fn write_interval(out: &mut impl Write, v: Interval) -> std::fmt::Result {
    let mut first = true;
    // A sign is written on a positive field that follows a negative one.
    let mut before_negative = false;
    for (n, unit) in [(v.months / 12, "year"), (v.months % 12, "mon"), (v.days, "day")] {
        if n == 0 {
            continue;
        }
        let space = if first { "" } else { " " };
        let sign = if before_negative && n > 0 { "+" } else { "" };
        let plural = if n == 1 { "" } else { "s" };
        write!(out, "{space}{sign}{n} {unit}{plural}")?;
        (first, before_negative) = (false, n < 0);
    }
    if v.us != 0 || first {
        let space = if first { "" } else { " " };
        let sign = if v.us < 0 {
            "-"
        } else if before_negative {
            "+"
        } else {
            ""
        };
        let us = v.us.unsigned_abs();
        let s = us / 1_000_000;
        write!(out, "{space}{sign}{:02}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60)?;
        write_fraction(out, (us % 1_000_000) as i64)?;
    }
    Ok(())
}

fn bad(text: &str) -> SqlError {
    SqlError::new(
        SqlState::INVALID_DATETIME_FORMAT,
        format!("invalid input syntax for type interval: \"{text}\""),
    )
}

/// Sums of fields in floating units, kept apart until the end.
#[derive(Default)]
struct Sum {
    months: f64,
    days: f64,
    us: f64,
}

impl Sum {
    fn add(&mut self, n: f64, unit: &str) -> Option<()> {
        let u = unit.to_ascii_lowercase();
        match u.as_str() {
            "us" | "usec" | "usecs" | "microsecond" | "microseconds" => self.us += n,
            "ms" | "msec" | "msecs" | "millisecond" | "milliseconds" => self.us += n * 1e3,
            "s" | "sec" | "secs" | "second" | "seconds" => self.us += n * 1e6,
            "m" | "min" | "mins" | "minute" | "minutes" => self.us += n * 6e7,
            "h" | "hr" | "hrs" | "hour" | "hours" => self.us += n * 3.6e9,
            "d" | "day" | "days" => self.days(n),
            "w" | "week" | "weeks" => self.days(n * 7.0),
            "mon" | "mons" | "month" | "months" => self.months(n),
            "y" | "yr" | "yrs" | "year" | "years" => self.months += (n * 12.0).round(),
            "decade" | "decades" => self.months += (n * 120.0).round(),
            "century" | "centuries" => self.months += (n * 1200.0).round(),
            _ => return None,
        }
        Some(())
    }

    fn days(&mut self, n: f64) {
        self.days += n.trunc();
        self.us += n.fract() * DAY_US as f64;
    }

    fn months(&mut self, n: f64) {
        self.months += n.trunc();
        self.days(n.fract() * 30.0);
    }

    fn finish(self, sign: f64) -> Option<Interval> {
        let fits = |v: f64, max: f64| (v.abs() <= max).then_some(v * sign);
        Some(Interval {
            months: fits(self.months, f64::from(i32::MAX))? as i32,
            days: fits(self.days, f64::from(i32::MAX))? as i32,
            us: fits(self.us.round(), 9.2e18)? as i64,
        })
    }
}

pub fn parse_interval(text: &str) -> Result<Interval, SqlError> {
    let t = text.trim();
    let out_of_range = || {
        SqlError::new(
            SqlState::DATETIME_FIELD_OVERFLOW,
            format!("interval field value out of range: \"{text}\""),
        )
    };
    let sum = if t.starts_with(['P', 'p']) { parse_iso(t) } else { parse_verbose(t) };
    let (sum, sign) = sum.ok_or_else(|| bad(text))?;
    sum.finish(sign).ok_or_else(out_of_range)
}

/// `P1Y2M3DT4H5M6S`.
fn parse_iso(t: &str) -> Option<(Sum, f64)> {
    let mut sum = Sum::default();
    let (mut time, mut rest, mut any) = (false, &t[1..], false);
    while !rest.is_empty() {
        if let Some(r) = rest.strip_prefix(['T', 't']) {
            (time, rest) = (true, r);
            continue;
        }
        let end = rest.find(|c: char| c.is_ascii_alphabetic())?;
        let n: f64 = rest[..end].parse().ok()?;
        let unit = match (rest.as_bytes()[end].to_ascii_uppercase(), time) {
            (b'Y', false) => "year",
            (b'M', false) => "month",
            (b'W', false) => "week",
            (b'D', false) => "day",
            (b'H', true) => "hour",
            (b'M', true) => "minute",
            (b'S', true) => "second",
            _ => return None,
        };
        sum.add(n, unit)?;
        (rest, any) = (&rest[end + 1..], true);
    }
    any.then_some((sum, 1.0))
}

/// `1 year 2 mons -3 days 04:05:06.7 ago`.
fn parse_verbose(t: &str) -> Option<(Sum, f64)> {
    let mut sum = Sum::default();
    let mut sign = 1.0;
    let mut words = t.split_whitespace().peekable();
    let mut any = false;
    if words.peek() == Some(&"@") {
        words.next();
    }
    while let Some(word) = words.next() {
        if word.eq_ignore_ascii_case("ago") {
            if words.next().is_some() {
                return None;
            }
            sign = -1.0;
            break;
        }
        if word.contains(':') {
            sum.us += parse_clock(word)?;
            any = true;
            continue;
        }
        let end = word
            .find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '-' | '+')))
            .unwrap_or(word.len());
        let n: f64 = word[..end].parse().ok()?;
        if end < word.len() {
            sum.add(n, &word[end..])?;
        } else {
            match words.peek() {
                // A bare number at the end, or before a clock: seconds, or days.
                None => sum.add(n, "second")?,
                Some(next) if next.contains(':') => sum.add(n, "day")?,
                Some(next) => {
                    sum.add(n, next)?;
                    words.next();
                }
            }
        }
        any = true;
    }
    any.then_some((sum, sign))
}

/// Microseconds of `[-]h:mm[:ss[.f]]`.
fn parse_clock(word: &str) -> Option<f64> {
    let (sign, body) = match word.as_bytes().first()? {
        b'-' => (-1.0, &word[1..]),
        b'+' => (1.0, &word[1..]),
        _ => (1.0, word),
    };
    let mut parts = body.split(':');
    let digits = |p: &str| {
        p.bytes().all(|b| b.is_ascii_digit() || b == b'.').then(|| p.parse::<f64>().ok())?
    };
    let h = digits(parts.next()?)?;
    let m = digits(parts.next()?)?;
    let s = parts.next().map_or(Some(0.0), digits)?;
    if parts.next().is_some() || m >= 60.0 || s > 60.0 {
        return None;
    }
    Some(sign * ((h * 60.0 + m) * 6e7 + (s * 1e6).round()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_read_and_print_as_postgres_does() {
        for (input, output) in [
            ("1 year 2 mons 3 days 04:05:06.7", "1 year 2 mons 3 days 04:05:06.7"),
            ("-1 year +3 days", "-1 years +3 days"),
            ("1 day -01:00:00", "1 day -01:00:00"),
            ("-1 day 02:03", "-1 days +02:03:00"),
            ("0", "00:00:00"),
            ("1.5 hours", "01:30:00"),
            ("90 minutes ago", "-01:30:00"),
            ("P1Y2M3DT4H5M6S", "1 year 2 mons 3 days 04:05:06"),
            ("1.5 months", "1 mon 15 days"),
            ("10s", "00:00:10"),
            ("2 weeks", "14 days"),
            ("100:00:00", "100:00:00"),
        ] {
            let mut out = String::new();
            write_interval(&mut out, parse_interval(input).unwrap()).unwrap();
            assert_eq!(out, output, "{input}");
        }
        assert_eq!(parse_interval("soon").unwrap_err().state.0, "22007");
        assert_eq!(parse_interval("").unwrap_err().state.0, "22007");
    }
}
