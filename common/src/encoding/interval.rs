//! Intervals: months, days and microseconds, printed and read in PostgreSQL's default style.

use std::fmt::Write;

use crate::SqlError;

use super::datetime::write_fraction;

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

pub fn parse_interval(text: &str) -> Result<Interval, SqlError> {
    super::interval_text::read(text, None)
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
