//! Dates and times in the forms that people write: month names, `AM` and `PM`, zones by name, `BC`, month/day/year.
//!
//! This is what is tried where a text has none of the ISO forms, whoever reads those.

use super::datetime::{DAY_US, civil, days_from_civil, days_in_month};
use crate::zone::{Zone, named, offset_us};

/// The months' names; three letters of each are enough of it.
pub const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// A date and time of day, with the zone it named.
pub struct Local {
    pub days: i64,
    pub us: i64,
    pub zone: Option<Zone>,
}

#[derive(Default)]
struct Reader {
    numbers: Vec<String>,
    month: Option<u32>,
    date: Option<(i64, u32, u32)>,
    us: Option<i64>,
    pm: Option<bool>,
    bc: bool,
    zone: Option<Zone>,
}

const DAYS: [&str; 7] = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"];

fn month(word: &str) -> Option<u32> {
    let at = MONTHS.iter().position(|m| {
        word.eq_ignore_ascii_case(m)
            || word.eq_ignore_ascii_case(&m[..3])
            || (word.eq_ignore_ascii_case("sept") && m.starts_with("Sep"))
    });
    at.map(|m| m as u32 + 1)
}

/// Microseconds of `h:mm[:ss[.f]]`.
fn clock(text: &str) -> Option<i64> {
    let parts: Vec<&str> = text.split(':').collect();
    let whole = |s: &str| s.parse::<u32>().ok().filter(|_| s.len() <= 2).map(i64::from);
    let (h, m, s) = match parts.as_slice() {
        [h, m] => (whole(h)?, whole(m)?, "0"),
        [h, m, s] => (whole(h)?, whole(m)?, *s),
        _ => return None,
    };
    let (s, fraction) = s.split_once('.').unwrap_or((s, ""));
    let s = whole(s)?;
    (h < 24 && m < 60 && s <= 60)
        .then_some(((h * 60 + m) * 60 + s) * 1_000_000 + fraction_us(fraction)?)
}

/// Microseconds of the digits after the point, half of one rounded to the even one.
pub fn fraction_us(digits: &str) -> Option<i64> {
    if digits.is_empty() {
        return Some(0);
    }
    if !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    if digits.len() <= 6 {
        return format!("{digits:0<6}").parse().ok();
    }
    // As a float, as PostgreSQL has it: what it is rounded from is seldom quite a half.
    let part: f64 = format!("0.{digits}").parse().ok()?;
    Some((part * 1e6).round_ties_even() as i64)
}

/// `hhmm[ss]`.
fn compact_clock(digits: &str) -> Option<i64> {
    match digits.len() {
        4 => clock(&format!("{}:{}", &digits[..2], &digits[2..])),
        6 => clock(&format!("{}:{}:{}", &digits[..2], &digits[2..4], &digits[4..])),
        _ => None,
    }
}

/// Whether a text may be a time at all: PostgreSQL has a bound, too, and words are cut at any byte.
fn is_readable(text: &str) -> bool {
    text.is_ascii() && text.len() <= 128
}

/// `None`: not a date in these forms. `Some(None)`: one that does not exist.
pub fn parse(text: &str) -> Option<Option<Local>> {
    if !is_readable(text) {
        return None;
    }
    let mut r = Reader::default();
    for word in text.split(|c: char| c.is_whitespace() || c == ',').filter(|w| !w.is_empty()) {
        r.word(word)?;
    }
    r.finish()
}

/// Microseconds since midnight.
pub fn time_of_day(text: &str) -> Option<i64> {
    let trimmed = text.trim();
    if !is_readable(trimmed) {
        return None;
    }
    if trimmed.bytes().all(|b| b.is_ascii_digit()) {
        return compact_clock(trimmed);
    }
    let mut r = Reader::default();
    for word in trimmed.split_whitespace() {
        r.word(word)?;
    }
    match r.numbers.is_empty() && r.month.is_none() && r.date.is_none() {
        // What a zone adds to UTC depends on the day.
        true if matches!(r.zone, Some(Zone::Named(_))) => None,
        true => r.clock_us(),
        // A day is read and dropped.
        false => r.us.and(r.finish()?).map(|local| local.us),
    }
}

impl Reader {
    fn word(&mut self, word: &str) -> Option<()> {
        let lower = word.to_ascii_lowercase();
        match lower.as_str() {
            "am" | "pm" => {
                self.pm = Some(lower == "pm");
                return Some(());
            }
            "bc" | "ad" => {
                self.bc = lower == "bc";
                return Some(());
            }
            _ => {}
        }
        if let Some(m) = month(&lower) {
            self.month = Some(m);
            return Some(());
        }
        if lower.bytes().all(|b| b.is_ascii_alphabetic()) && lower.len() >= 3 {
            if DAYS.iter().any(|d| lower.starts_with(d)) && lower.len() <= 9 {
                return Some(());
            }
            self.zone = Some(named(word)?);
            return Some(());
        }
        if lower.contains(':') {
            return self.time(word);
        }
        if let Some((date, time)) = lower.split_once('t')
            && date.bytes().all(|b| b.is_ascii_digit() || b == b'-')
            && !date.is_empty()
        {
            self.word(date)?;
            self.us = Some(compact_clock(time)?);
            return Some(());
        }
        if lower.starts_with(['+', '-']) && (self.us.is_some() || self.date.is_some()) {
            self.zone = Some(Zone::Fixed(offset_us(&lower)?));
            return Some(());
        }
        // A date with the offset of its midnight.
        if let Some((date, _)) = lower.split_once('+')
            && !date.is_empty()
        {
            self.word(date)?;
            self.zone = Some(Zone::Fixed(offset_us(&lower[date.len()..])?));
            return Some(());
        }
        if let Some(date) = lower.strip_suffix('z')
            && date.starts_with(|c: char| c.is_ascii_digit())
        {
            self.zone = Some(Zone::Fixed(0));
            return self.word(date);
        }
        if lower.starts_with(|c: char| c.is_ascii_alphabetic()) {
            self.zone = Some(named(word)?);
            return Some(());
        }
        self.date_word(&lower)
    }

    /// A time, with an offset, a zone or half of a day that may follow at once.
    fn time(&mut self, word: &str) -> Option<()> {
        let end = word
            .find(|c: char| !(c.is_ascii_digit() || c == ':' || c == '.'))
            .unwrap_or(word.len());
        self.us = Some(clock(&word[..end])?);
        match &word[end..] {
            "" => Some(()),
            offset if offset.starts_with(['+', '-']) => {
                self.zone = Some(Zone::Fixed(offset_us(offset)?));
                Some(())
            }
            rest => self.word(rest),
        }
    }

    fn date_word(&mut self, word: &str) -> Option<()> {
        let parts: Vec<&str> = word.split(['-', '/', '.']).collect();
        let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
        match parts.as_slice() {
            [n] if digits(n) && n.len() == 8 => {
                self.date =
                    Some((n[..4].parse().ok()?, n[4..6].parse().ok()?, n[6..].parse().ok()?));
            }
            // After a day that is known they are a time.
            [n] if digits(n) && self.date.is_some() && self.us.is_none() => {
                self.us = Some(compact_clock(n)?);
            }
            [n] if digits(n) => self.numbers.push((*n).to_owned()),
            // Year and day of it.
            [y, d] if digits(y) && y.len() == 4 && digits(d) && d.len() == 3 => {
                let doy: i64 = d.parse().ok().filter(|d| (1..=366).contains(d))?;
                let year = y.parse().ok()?;
                let day = days_from_civil(year, 1, 1) + doy - 1;
                let (y, m, d) = civil(day);
                self.date = Some((y, m, d));
            }
            [a, b, c] => {
                if let Some(m) = month(b) {
                    self.month = Some(m);
                    self.numbers.extend([(*a).to_owned(), (*c).to_owned()]);
                } else if digits(a) && digits(b) && digits(c) {
                    self.date = Some(match a.len() > 2 {
                        true => (integer(a)?, of_calendar(b)?, of_calendar(c)?),
                        // Month, day, year.
                        false => (year(c, integer(c)?), of_calendar(a)?, of_calendar(b)?),
                    });
                } else {
                    return None;
                }
            }
            _ => return None,
        }
        Some(())
    }

    fn clock_us(&self) -> Option<i64> {
        let us = self.us?;
        const HOUR: i64 = 3_600_000_000;
        match self.pm {
            None => Some(us),
            Some(_) if us / HOUR > 12 || us / HOUR == 0 => None,
            Some(pm) => Some(us % (12 * HOUR) + if pm { 12 * HOUR } else { 0 }),
        }
    }

    fn finish(&self) -> Option<Option<Local>> {
        let (mut y, m, d) = match (self.date, self.month) {
            (Some(date), None) if self.numbers.is_empty() => date,
            (None, Some(month)) => {
                let [a, b] = self.numbers.as_slice() else { return None };
                match a.len() > 2 {
                    true => (integer(a)?, month, of_calendar(b)?),
                    // Before Christ there are no short years.
                    false if self.bc => (integer(b)?, month, of_calendar(a)?),
                    false => (year(b, integer(b)?), month, of_calendar(a)?),
                }
            }
            _ => return None,
        };
        if y == 0 || y > LAST_YEAR {
            return Some(None);
        }
        if self.bc {
            y = 1 - y;
        }
        if !(1..=12).contains(&m) || d < 1 || d > days_in_month(y, m) {
            return Some(None);
        }
        let us = match self.us {
            Some(_) => self.clock_us()?,
            None => 0,
        };
        debug_assert!(us <= DAY_US);
        let days = days_from_civil(y, m, d);
        Some(in_calendar(days).then_some(Local { days, us, zone: self.zone }))
    }
}

/// The year of PostgreSQL's last date.
const LAST_YEAR: i64 = 5_874_897;

/// Whether PostgreSQL has this day: 4714-11-24 BC to 5874897-12-31.
pub fn in_calendar(days: i64) -> bool {
    (-2_440_588..=2_145_031_948).contains(&days)
}

/// Two digits are a year near 2000.
fn year(text: &str, n: i64) -> i64 {
    match (text.len(), n) {
        (..=2, 0..70) => n + 2000,
        (..=2, _) => n + 1900,
        _ => n,
    }
}

fn integer(digits: &str) -> Option<i64> {
    digits.parse().ok()
}

/// The number of a month or a day.
fn of_calendar(digits: &str) -> Option<u32> {
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zone_by_name_needs_a_day() {
        const TEN: i64 = 36_000_000_000;
        assert_eq!(time_of_day("10:00 EST"), Some(TEN));
        assert_eq!(time_of_day("10:00 PM"), Some(TEN + 43_200_000_000));
        assert_eq!(time_of_day("10:00 America/New_York"), None);
        assert_eq!(time_of_day("Jan 1 2020 10:00 America/New_York"), Some(TEN));
        assert_eq!(time_of_day("Jan 1 2020"), None);
    }

    #[test]
    fn numbers_that_no_calendar_has() {
        let there = |text: &str| parse(text).map(|local| local.is_some());
        assert_eq!(there("Jan 1 290000"), Some(true));
        assert_eq!(there("Jan 1 9223372036854775807"), Some(false));
        assert_eq!(there("9223372036854775807/1/1"), Some(false));
        assert_eq!(there("2024/13/1"), Some(false));
        assert_eq!(there("2024/4294967297/1"), None);
        assert_eq!(there("2024 Jan 4294967297"), None);
    }
}
