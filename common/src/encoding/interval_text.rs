//! The text forms of intervals: PostgreSQL's (`1 day 2:03`), the SQL standard's (`1-2 3 4:05`) and ISO 8601's
//! (`P1Y2M3DT4H5M6S`).

use super::datetime::DAY_US;
use super::datetime_text::fraction_us;
use super::interval::Interval;
use crate::{SqlError, SqlState};

/// A field of an interval, as `interval '…' HOUR TO MINUTE` names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Field {
    Year,
    Month,
    Day,
    Hour,
    Minute,
    Second,
}

/// From which field to which an interval goes.
pub type Span = (Field, Field);

enum Fault {
    Syntax,
    Range,
}

type Result<T> = std::result::Result<T, Fault>;

/// Months, days and microseconds of an interval.
pub fn interval(text: &str) -> std::result::Result<(i32, i32, i64), SqlError> {
    let i = read(text, None)?;
    Ok((i.months, i.days, i.us))
}

/// The same of an interval with fields: a number without a unit is of the last one, and what is less than that is cut off.
pub fn interval_of(text: &str, span: Span) -> std::result::Result<Interval, SqlError> {
    let i = read(text, Some(span))?;
    let kept = |us: i64, unit: i64| us - us % unit;
    Ok(match span.1 {
        Field::Year => Interval { months: i.months / 12 * 12, days: 0, us: 0 },
        Field::Month => Interval { days: 0, us: 0, ..i },
        Field::Day => Interval { us: 0, ..i },
        Field::Hour => Interval { us: kept(i.us, 3_600_000_000), ..i },
        Field::Minute => Interval { us: kept(i.us, 60_000_000), ..i },
        Field::Second => i,
    })
}

pub(super) fn read(text: &str, span: Option<Span>) -> std::result::Result<Interval, SqlError> {
    let trimmed = text.trim();
    let upper = trimmed.to_ascii_uppercase();
    let fields = match upper.strip_prefix('P') {
        Some(iso) => iso8601(iso),
        None => verbose(&trimmed.to_ascii_lowercase(), span),
    };
    let whole = |f: Fields| {
        // In nanoseconds, which they are kept in, there are fewer.
        f.us.checked_mul(1000).ok_or(Fault::Range)?;
        let small = |n: i64| i32::try_from(n).map_err(|_| Fault::Range);
        Ok(Interval { months: small(f.months)?, days: small(f.days)?, us: f.us })
    };
    fields.and_then(whole).map_err(|fault| match fault {
        Fault::Syntax => {
            let message = format!("invalid input syntax for type interval: \"{text}\"");
            SqlError::new(SqlState::INVALID_DATETIME_FORMAT, message)
        }
        Fault::Range => {
            let message = format!("interval field value out of range: \"{text}\"");
            SqlError::new(SqlState::DATETIME_FIELD_OVERFLOW, message)
        }
    })
}

/// Fields while they are read; fractions go down to the next smaller one.
#[derive(Default)]
struct Fields {
    months: i64,
    days: i64,
    us: i64,
}

/// A number: its whole part, and the fraction behind it with the same sign.
type Number = (i64, f64);

fn add(sum: &mut i64, n: i64, unit: i64) -> Result<()> {
    let more = n.checked_mul(unit).and_then(|more| sum.checked_add(more));
    *sum = more.ok_or(Fault::Range)?;
    Ok(())
}

impl Fields {
    fn add(&mut self, n: Number, unit: &str) -> Result<()> {
        let plural = unit.strip_suffix('s').filter(|u| u.len() > 1).unwrap_or(unit);
        match (unit, plural) {
            ("ms", _) => self.add_us(n, 1_000),
            ("us", _) => self.add_us(n, 1),
            (_, "millennia" | "millennium" | "mil") => self.add_years(n, 1_000),
            (_, "centurie" | "century" | "cent" | "c") => self.add_years(n, 100),
            (_, "decade" | "dec") => self.add_years(n, 10),
            (_, "year" | "yr" | "y") => self.add_years(n, 1),
            (_, "month" | "mon") => {
                add(&mut self.months, n.0, 1)?;
                self.add_part_of_days(n.1 * 30.0)
            }
            (_, "week" | "w") => {
                add(&mut self.days, n.0, 7)?;
                self.add_part_of_days(n.1 * 7.0)
            }
            (_, "day" | "d") => {
                add(&mut self.days, n.0, 1)?;
                self.add_us((0, n.1), DAY_US)
            }
            (_, "hour" | "hr" | "h") => self.add_us(n, 3_600_000_000),
            (_, "minute" | "min" | "m") => self.add_us(n, 60_000_000),
            (_, "second" | "sec" | "s" | "") => self.add_us(n, 1_000_000),
            (_, "millisecond" | "msec" | "mseconds") => self.add_us(n, 1_000),
            (_, "microsecond" | "usec" | "useconds") => self.add_us(n, 1),
            _ => Err(Fault::Syntax),
        }
    }

    /// A fraction of years is rounded to months.
    fn add_years(&mut self, n: Number, years: i64) -> Result<()> {
        add(&mut self.months, n.0, years * 12)?;
        let months = (n.1 * years as f64 * 12.0).round_ties_even();
        add(&mut self.months, months as i64, 1)
    }

    fn add_part_of_days(&mut self, days: f64) -> Result<()> {
        add(&mut self.days, days.trunc() as i64, 1)?;
        self.add_us((0, days.fract()), DAY_US)
    }

    /// As PostgreSQL has it, half a microsecond is none.
    fn add_us(&mut self, n: Number, unit: i64) -> Result<()> {
        add(&mut self.us, n.0, unit)?;
        let part = n.1 * unit as f64;
        let (whole, rest) = (part.trunc(), part.fract());
        let more = if rest.abs() > 0.5 { rest.signum() } else { 0.0 };
        add(&mut self.us, (whole + more) as i64, 1)
    }
}

/// A number with a sign.
fn number(text: &str) -> Result<Number> {
    let (sign, unsigned) = match text.strip_prefix('-') {
        Some(rest) => (-1, rest),
        None => (1, text.strip_prefix('+').unwrap_or(text)),
    };
    let (whole, fraction) = unsigned.split_once('.').unwrap_or((unsigned, ""));
    let digits = || whole.bytes().chain(fraction.bytes());
    if whole.len() + fraction.len() == 0 || !digits().all(|b| b.is_ascii_digit()) {
        return Err(Fault::Syntax);
    }
    let n = match whole {
        "" => 0,
        digits => digits.parse::<i64>().map_err(|_| Fault::Range)?,
    };
    let part = match fraction {
        "" => 0.0,
        digits => format!("0.{digits}").parse::<f64>().map_err(|_| Fault::Syntax)?,
    };
    Ok((sign * n, sign as f64 * part))
}

/// Numbers and units: `4seconds` is `4 seconds`, `1h2m` two of them.
fn words(text: &str) -> Vec<&str> {
    let mut words = Vec::new();
    for word in text.split_whitespace().filter(|w| *w != "@") {
        let mut rest = word;
        while let Some(first) = rest.bytes().next() {
            let alpha = first.is_ascii_alphabetic();
            let end = rest.find(|c: char| c.is_ascii_alphabetic() != alpha).unwrap_or(rest.len());
            words.push(&rest[..end]);
            rest = &rest[end..];
        }
    }
    words
}

fn verbose(text: &str, span: Option<Span>) -> Result<Fields> {
    let mut words = words(text);
    let ago = words.last() == Some(&"ago");
    if ago {
        words.pop();
    }
    if words.is_empty() {
        return Err(Fault::Syntax);
    }
    let last = span.map_or(Field::Second, |span| span.1);
    let mut fields = Fields::default();
    let mut i = 0;
    while let Some(word) = words.get(i).copied() {
        let next = words.get(i + 1).copied();
        let unit = next.filter(|u| u.starts_with(|c: char| c.is_ascii_alphabetic()));
        i += 1;
        if word.contains(':') {
            add(&mut fields.us, clock(word, span)?, 1)?;
        } else if let Some(months) = year_month(word) {
            add(&mut fields.months, months, 1)?;
        } else if let Some(unit) = unit {
            fields.add(number(word)?, unit)?;
            i += 1;
        } else {
            // A number alone: days before a time of day or before hours, else what is wanted last.
            let n = number(word)?;
            match next {
                Some(next) if next.contains(':') => fields.add(n, "day")?,
                Some(_) if last == Field::Hour && i + 1 == words.len() => fields.add(n, "day")?,
                None => fields.add(n, unit_of(last))?,
                Some(_) => return Err(Fault::Syntax),
            }
        }
    }
    if ago {
        let negative = |n: i64| n.checked_neg().ok_or(Fault::Range);
        fields = Fields {
            months: negative(fields.months)?,
            days: negative(fields.days)?,
            us: negative(fields.us)?,
        };
    }
    Ok(fields)
}

fn unit_of(field: Field) -> &'static str {
    match field {
        Field::Year => "year",
        Field::Month => "month",
        Field::Day => "day",
        Field::Hour => "hour",
        Field::Minute => "minute",
        Field::Second => "second",
    }
}

/// `1-2`: years and months.
fn year_month(word: &str) -> Option<i64> {
    let (sign, rest) = match word.strip_prefix('-') {
        Some(rest) => (-1, rest),
        None => (1, word.strip_prefix('+').unwrap_or(word)),
    };
    let (years, months) = rest.split_once('-')?;
    let (years, months): (u32, u32) = (years.parse().ok()?, months.parse().ok()?);
    (months < 12).then(|| sign * (i64::from(years) * 12 + i64::from(months)))
}

/// Microseconds of `[-]h:mm[:ss[.f]]`; `mm:ss.f` has a fraction and no hours, and so has what is to go from minutes to
/// seconds.
fn clock(word: &str, span: Option<Span>) -> Result<i64> {
    let (sign, rest) = match word.strip_prefix('-') {
        Some(rest) => (-1, rest),
        None => (1, word.strip_prefix('+').unwrap_or(word)),
    };
    let parts: Vec<&str> = rest.split(':').collect();
    let whole = |s: &str| s.parse::<u32>().map(i64::from).map_err(|_| Fault::Syntax);
    let no_hours = span == Some((Field::Minute, Field::Second));
    let (h, m, s) = match parts.as_slice() {
        [m, s] if no_hours || s.contains('.') => (0, whole(m)?, *s),
        [h, m] => (whole(h)?, whole(m)?, "0"),
        [h, m, s] => (whole(h)?, whole(m)?, *s),
        _ => return Err(Fault::Syntax),
    };
    let (s, fraction) = s.split_once('.').unwrap_or((s, ""));
    let s = whole(s)?;
    if m > 59 || s > 60 {
        return Err(Fault::Range);
    }
    let fraction = fraction_us(fraction).ok_or(Fault::Syntax)?;
    Ok(sign * (((h * 60 + m) * 60 + s) * 1_000_000 + fraction))
}

/// After the `P`: designators, or `YYYY-MM-DD[Thh:mm:ss]`.
fn iso8601(text: &str) -> Result<Fields> {
    let (date, time) = match text.split_once('T') {
        Some((date, time)) => (date, Some(time)),
        None => (text, None),
    };
    if date.is_empty() && time.is_none_or(str::is_empty) {
        return Err(Fault::Syntax);
    }
    let mut fields = Fields::default();
    match date.split('-').collect::<Vec<_>>().as_slice() {
        [y, m, d] if !y.is_empty() && !date.contains(|c: char| c.is_ascii_alphabetic()) => {
            let whole = |s: &str| s.parse::<u32>().map(i64::from).map_err(|_| Fault::Syntax);
            fields.months = whole(y)? * 12 + whole(m)?;
            fields.days = whole(d)?;
        }
        _ => designators(date, &mut fields, &[('Y', "y"), ('M', "mon"), ('W', "w"), ('D', "d")])?,
    }
    match time {
        Some(time) if time.contains(':') => add(&mut fields.us, clock(time, None)?, 1)?,
        Some(time) => designators(time, &mut fields, &[('H', "h"), ('M', "m"), ('S', "s")])?,
        None => {}
    }
    Ok(fields)
}

fn designators(text: &str, fields: &mut Fields, units: &[(char, &str)]) -> Result<()> {
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(|c: char| c.is_ascii_alphabetic()).ok_or(Fault::Syntax)?;
        let letter = rest[end..].chars().next().ok_or(Fault::Syntax)?;
        let unit = units.iter().find(|(l, _)| *l == letter).ok_or(Fault::Syntax)?.1;
        fields.add(number(&rest[..end])?, unit)?;
        rest = &rest[end + 1..];
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::interval::write_interval;
    use super::*;

    fn shown(i: Interval) -> String {
        let mut out = String::new();
        write_interval(&mut out, i).unwrap();
        out
    }

    /// As PostgreSQL 15 has them.
    #[test]
    fn fractions_are_rounded_as_in_postgres() {
        for (text, expected) in [
            ("1.5 us", "00:00:00.000001"),
            ("0.0000015 s", "00:00:00.000001"),
            ("00:00:00.0000025", "00:00:00.000002"),
            ("1.0000005 s", "00:00:01"),
            ("0.375 years", "4 mons"),
            ("0.125 years", "2 mons"),
            ("1.23456 mon", "1 mon 7 days 00:52:59.52"),
            ("0.1234567 weeks", "20:44:26.61216"),
            ("PT1.0000025S", "00:00:01.000002"),
            ("1.99999999 min", "00:01:59.999999"),
        ] {
            assert_eq!(shown(read(text, None).unwrap()), expected, "{text}");
        }
    }

    #[test]
    fn fields_say_what_numbers_mean_and_what_is_kept() {
        use Field::*;
        for (text, span, expected) in [
            ("12:34", (Minute, Second), "00:12:34"),
            ("12:34", (Hour, Minute), "12:34:00"),
            ("12:34", (Hour, Hour), "12:00:00"),
            ("1 2", (Day, Hour), "1 day 02:00:00"),
            ("1-2", (Year, Year), "1 year"),
            ("12.5", (Minute, Minute), "00:12:00"),
            ("1", (Year, Month), "1 mon"),
            ("1:2:3", (Minute, Second), "01:02:03"),
            ("-12:34", (Minute, Second), "-00:12:34"),
        ] {
            assert_eq!(shown(interval_of(text, span).unwrap()), expected, "{text}");
        }
        assert!(interval_of("1 2 3", (Day, Day)).is_err());
    }
}
