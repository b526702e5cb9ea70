//! The text forms of intervals: PostgreSQL's (`1 day 2:03`), the SQL standard's (`1-2 3 4:05`) and ISO 8601's
//! (`P1Y2M3DT4H5M6S`).

use millrace_common::{SqlError, SqlState, SqlType};

use super::parse::{fraction_us, invalid};

const DAY_US: f64 = 86_400_000_000.0;

/// Fields while they are read; fractions go down to the next smaller one.
#[derive(Default)]
struct Fields {
    months: f64,
    days: f64,
    us: f64,
}

/// Months, days and microseconds of an interval.
pub fn interval(text: &str) -> Result<(i32, i32, i64), SqlError> {
    let bad = || invalid(SqlType::Interval, text);
    let trimmed = text.trim();
    let upper = trimmed.to_ascii_uppercase();
    let fields = match upper.strip_prefix('P') {
        Some(iso) => iso8601(iso).ok_or_else(bad)?,
        None => verbose(&trimmed.to_ascii_lowercase()).ok_or_else(bad)?,
    };
    let (months, days, us) = (fields.months.trunc(), fields.days.trunc(), fields.us.round());
    if months.abs() > f64::from(i32::MAX) || days.abs() > f64::from(i32::MAX) || us.abs() > 9e15 {
        return Err(SqlError::new(
            SqlState::DATETIME_FIELD_OVERFLOW,
            format!("interval field value out of range: \"{text}\""),
        ));
    }
    Ok((months as i32, days as i32, us as i64))
}

impl Fields {
    fn add(&mut self, n: f64, unit: &str) -> Option<()> {
        let plural = unit.strip_suffix('s').filter(|u| u.len() > 1).unwrap_or(unit);
        let (months, days, us) = match (unit, plural) {
            ("ms", _) => (0.0, 0.0, 1e3),
            ("us", _) => (0.0, 0.0, 1.0),
            (_, "millennia" | "millennium" | "mil") => (12_000.0, 0.0, 0.0),
            (_, "centurie" | "century" | "cent" | "c") => (1200.0, 0.0, 0.0),
            (_, "decade" | "dec") => (120.0, 0.0, 0.0),
            (_, "year" | "yr" | "y") => (12.0, 0.0, 0.0),
            (_, "month" | "mon") => (1.0, 0.0, 0.0),
            (_, "week" | "w") => (0.0, 7.0, 0.0),
            (_, "day" | "d") => (0.0, 1.0, 0.0),
            (_, "hour" | "hr" | "h") => (0.0, 0.0, 3.6e9),
            (_, "minute" | "min" | "m") => (0.0, 0.0, 6e7),
            (_, "second" | "sec" | "s" | "") => (0.0, 0.0, 1e6),
            (_, "millisecond" | "msec" | "mseconds") => (0.0, 0.0, 1e3),
            (_, "microsecond" | "usec" | "useconds") => (0.0, 0.0, 1.0),
            _ => return None,
        };
        // A fraction of a year is rounded to months, of a month is 30 days, of a day 24 hours.
        let total = n * months;
        match months > 1.0 {
            true => self.months += total.round(),
            false => {
                self.months += total.trunc();
                self.add_days(total.fract() * 30.0);
            }
        }
        self.add_days(n * days);
        self.us += n * us;
        Some(())
    }

    fn add_days(&mut self, days: f64) {
        let tidy = (days * 1e9).round() / 1e9;
        self.days += tidy.trunc();
        self.us += (tidy.fract() * DAY_US).round();
    }
}

/// A number with a sign.
fn number(text: &str) -> Option<f64> {
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    let good = unsigned.bytes().all(|b| b.is_ascii_digit() || b == b'.')
        && unsigned.bytes().any(|b| b.is_ascii_digit());
    if good { text.parse().ok() } else { None }
}

fn verbose(text: &str) -> Option<Fields> {
    let mut words: Vec<&str> = Vec::new();
    for word in text.split_whitespace().filter(|w| *w != "@") {
        // `4seconds` is `4 seconds`, `1h2m` two of them.
        let mut rest = word;
        while !rest.is_empty() {
            let alpha = rest.as_bytes()[0].is_ascii_alphabetic();
            let end = rest.find(|c: char| c.is_ascii_alphabetic() != alpha).unwrap_or(rest.len());
            words.push(&rest[..end]);
            rest = &rest[end..];
        }
    }
    let ago = words.last() == Some(&"ago");
    if ago {
        words.pop();
    }
    if words.is_empty() {
        return None;
    }
    let mut fields = Fields::default();
    let mut i = 0;
    while i < words.len() {
        let word = words[i];
        let unit = words.get(i + 1).copied();
        if word.contains(':') {
            fields.us += clock(word)?;
            i += 1;
        } else if let Some(months) = year_month(word) {
            fields.months += months;
            i += 1;
        } else if let Some(unit) = unit.filter(|u| u.as_bytes()[0].is_ascii_alphabetic()) {
            fields.add(number(word)?, unit)?;
            i += 2;
        } else {
            // A number alone: days before a time of day, else seconds.
            let n = number(word)?;
            match unit {
                Some(next) if next.contains(':') => fields.add(n, "day")?,
                None => fields.add(n, "second")?,
                Some(_) => return None,
            }
            i += 1;
        }
    }
    if ago {
        fields = Fields { months: -fields.months, days: -fields.days, us: -fields.us };
    }
    Some(fields)
}

/// `1-2`: years and months.
fn year_month(word: &str) -> Option<f64> {
    let (sign, rest) = match word.strip_prefix('-') {
        Some(rest) => (-1.0, rest),
        None => (1.0, word.strip_prefix('+').unwrap_or(word)),
    };
    let (years, months) = rest.split_once('-')?;
    let (years, months): (u32, u32) = (years.parse().ok()?, months.parse().ok()?);
    (months < 12).then(|| sign * (f64::from(years) * 12.0 + f64::from(months)))
}

/// Microseconds of `[-]h:mm[:ss[.f]]`; `mm:ss.f` has a fraction and no hours.
fn clock(word: &str) -> Option<f64> {
    let (sign, rest) = match word.strip_prefix('-') {
        Some(rest) => (-1.0, rest),
        None => (1.0, word.strip_prefix('+').unwrap_or(word)),
    };
    let parts: Vec<&str> = rest.split(':').collect();
    let whole = |s: &str| s.parse::<u32>().ok().map(i64::from);
    let (h, m, s) = match parts.as_slice() {
        [m, s] if s.contains('.') => (0, whole(m)?, *s),
        [h, m] => (whole(h)?, whole(m)?, "0"),
        [h, m, s] => (whole(h)?, whole(m)?, *s),
        _ => return None,
    };
    let (s, fraction) = s.split_once('.').unwrap_or((s, ""));
    let s = whole(s)?;
    if m > 59 || s > 59 {
        return None;
    }
    Some(sign * (((h * 60 + m) * 60 + s) * 1_000_000 + fraction_us(fraction)?) as f64)
}

/// After the `P`: designators, or `YYYY-MM-DD[Thh:mm:ss]`.
fn iso8601(text: &str) -> Option<Fields> {
    let (date, time) = match text.split_once('T') {
        Some((date, time)) => (date, Some(time)),
        None => (text, None),
    };
    if date.is_empty() && time.is_none_or(str::is_empty) {
        return None;
    }
    let mut fields = Fields::default();
    match date.split('-').collect::<Vec<_>>().as_slice() {
        [y, m, d] if !y.is_empty() && !date.contains(|c: char| c.is_ascii_alphabetic()) => {
            fields.months = f64::from(y.parse::<u32>().ok()? * 12 + m.parse::<u32>().ok()?);
            fields.days = f64::from(d.parse::<u32>().ok()?);
        }
        _ => designators(date, &mut fields, &[('Y', "y"), ('M', "mon"), ('W', "w"), ('D', "d")])?,
    }
    match time {
        Some(time) if time.contains(':') => fields.us += clock(time)?,
        Some(time) => designators(time, &mut fields, &[('H', "h"), ('M', "m"), ('S', "s")])?,
        None => {}
    }
    Some(fields)
}

fn designators(text: &str, fields: &mut Fields, units: &[(char, &str)]) -> Option<()> {
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(|c: char| c.is_ascii_alphabetic())?;
        let letter = rest[end..].chars().next()?;
        let unit = units.iter().find(|(l, _)| *l == letter)?.1;
        fields.add(number(&rest[..end])?, unit)?;
        rest = &rest[end + 1..];
    }
    Some(())
}
