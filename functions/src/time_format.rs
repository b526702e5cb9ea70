//! Template patterns of dates and times, both ways: `to_char`, `to_timestamp`, `to_date`.

use std::borrow::Cow;
use std::fmt::Write;

use arrow::datatypes::IntervalMonthDayNano;
use millrace_common::encoding::datetime_text::MONTHS;
use millrace_common::{SqlError, SqlState};

use super::extract::iso_week;
use super::text::{civil_from_days, days_from_civil, days_in_month};
use super::times::{DAY_US, Zone, field_range, invalid};

const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const ROMAN: [&str; 12] =
    ["I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X", "XI", "XII"];

/// Pattern words, longer ones before their beginnings. Case matters in the names of months and days only.
const WORDS: [&str; 57] = [
    "SSSSS", "Y,YYY", "HH24", "HH12", "SSSS", "YYYY", "IYYY", "IDDD", "MONTH", "A.M.", "P.M.",
    "B.C.", "A.D.", "YYY", "IYY", "DDD", "DAY", "MON", "TZH", "TZM", "FF1", "FF2", "FF3", "FF4",
    "FF5", "FF6", "HH", "MI", "SS", "MS", "US", "AM", "PM", "BC", "AD", "YY", "IY", "MM", "DD",
    "ID", "DY", "WW", "IW", "CC", "RM", "TZ", "OF", "FM", "FX", "TM", "Y", "I", "D", "W", "Q", "J",
    "TH",
];

enum Part<'a> {
    Word { word: &'static str, text: &'a str, fill: bool, suffix: Option<&'a str> },
    Quoted(String),
    Char(char),
}

fn parts(pattern: &str) -> Vec<Part<'_>> {
    let mut out = Vec::new();
    let mut rest = pattern;
    let mut fill = true;
    while let Some(c) = rest.chars().next() {
        if c == '"' {
            let mut text = String::new();
            let mut chars = rest[1..].char_indices();
            let mut end = rest.len();
            while let Some((i, c)) = chars.next() {
                match c {
                    '\\' => text.extend(chars.next().map(|(_, c)| c)),
                    '"' => {
                        end = i + 2;
                        break;
                    }
                    c => text.push(c),
                }
            }
            out.push(Part::Quoted(text));
            rest = &rest[end.min(rest.len())..];
            continue;
        }
        let starts = |word: &&&str| {
            rest.is_char_boundary(word.len())
                && rest.len() >= word.len()
                && rest[..word.len()].eq_ignore_ascii_case(word)
        };
        let Some(word) = WORDS.iter().find(starts) else {
            out.push(Part::Char(c));
            rest = &rest[c.len_utf8()..];
            continue;
        };
        let text = &rest[..word.len()];
        rest = &rest[word.len()..];
        match *word {
            // Names in the language of the session, which is English, are not padded.
            "FM" | "TM" => {
                fill = false;
                continue;
            }
            "FX" => continue,
            "TH" => {
                out.extend(text.chars().map(Part::Char));
                continue;
            }
            _ => {}
        }
        let suffix = rest.get(..2).filter(|s| s.eq_ignore_ascii_case("th"));
        if suffix.is_some() {
            rest = &rest[2..];
        }
        out.push(Part::Word { word, text, fill, suffix });
        fill = true;
    }
    out
}

/// A time in its fields. Of an interval, hours may be many and there is no date.
pub struct Moment {
    year: i64,
    month: i64,
    day: i64,
    us: i64,
    days: Option<i64>,
    /// Seconds east of Greenwich, and what the zone is called; a local time has none.
    zone: Option<(i64, Cow<'static, str>)>,
}

impl Moment {
    pub fn of_timestamp(us: i64, zone: bool) -> Moment {
        let days = us.div_euclid(DAY_US);
        let (year, month, day) = civil_from_days(days);
        let (month, day) = (month.into(), day.into());
        let zone = zone.then_some((0, Cow::Borrowed("UTC")));
        Moment { year, month, day, us: us.rem_euclid(DAY_US), days: Some(days), zone }
    }

    /// An instant as a zone has it.
    pub fn of_instant(us: i64, zone: Zone) -> Moment {
        let named = Some((zone.offset(us), zone.abbreviation(us)));
        Moment { zone: named, ..Moment::of_timestamp(zone.local(us), false) }
    }

    /// Sign, hours and minutes of the offset.
    fn offset(&self) -> (char, i64, i64) {
        let seconds = self.zone.as_ref().map_or(0, |(seconds, _)| *seconds);
        let sign = if seconds < 0 { '-' } else { '+' };
        (sign, seconds.abs() / 3_600, seconds.abs() / 60 % 60)
    }

    pub fn of_interval(i: IntervalMonthDayNano) -> Moment {
        let (year, month) = (i64::from(i.months / 12), i64::from(i.months % 12));
        let us = i.nanoseconds / 1000;
        Moment { year, month, day: i.days.into(), us, days: None, zone: None }
    }

    /// The days since 1970; an error of an interval, which has none.
    fn date(&self) -> Result<i64, SqlError> {
        self.days.ok_or_else(|| {
            invalid("invalid format specification for an interval value")
                .with_hint("Intervals are not tied to specific calendar dates.")
        })
    }

    /// The year as it is counted in its era.
    fn shown_year(&self) -> i64 {
        if self.days.is_some() && self.year <= 0 { 1 - self.year } else { self.year }
    }
}

/// A name in the case of its pattern word, padded unless told not to.
fn push_name(out: &mut String, name: &str, word: &str, pad: usize) {
    let mut letters = word.chars();
    let first_upper = letters.next().is_some_and(char::is_uppercase);
    let second_upper = letters.next().is_some_and(char::is_uppercase);
    let text = match (first_upper, second_upper) {
        (true, true) => name.to_uppercase(),
        (true, false) => name.to_owned(),
        _ => name.to_lowercase(),
    };
    let _ = write!(out, "{text:<pad$}");
}

pub fn ordinal(n: i64, suffix: &str) -> String {
    let n = n.abs();
    let text = match (n % 10, n % 100) {
        (_, 11..=13) => "th",
        (1, _) => "st",
        (2, _) => "nd",
        (3, _) => "rd",
        _ => "th",
    };
    match suffix.starts_with('T') {
        true => text.to_uppercase(),
        false => text.to_owned(),
    }
}

pub fn print(t: &Moment, pattern: &str) -> Result<String, SqlError> {
    let mut out = String::new();
    for part in parts(pattern) {
        match part {
            Part::Quoted(text) => out.push_str(&text),
            Part::Char(c) => out.push(c),
            Part::Word { word, text, fill, suffix } => {
                let start = out.len();
                print_word(&mut out, t, word, text, fill)?;
                if let Some(suffix) = suffix
                    && let Ok(n) = out[start..].trim().parse::<i64>()
                {
                    out.push_str(&ordinal(n, suffix));
                }
            }
        }
    }
    Ok(out)
}

fn print_word(
    out: &mut String,
    t: &Moment,
    word: &str,
    text: &str,
    fill: bool,
) -> Result<(), SqlError> {
    if let Some((n, width)) = number_of_word(t, word)? {
        let width = if fill { width + usize::from(n < 0) } else { 0 };
        let _ = write!(out, "{n:0width$}");
        return Ok(());
    }
    match word {
        "Y,YYY" => {
            let year = t.shown_year();
            let _ = write!(out, "{},{:03}", year / 1000, year % 1000);
        }
        "TZH" | "TZM" | "OF" | "TZ" => print_zone(out, t, word, text, fill),
        "MONTH" => push_name(out, month_name(t)?, text, if fill { 9 } else { 0 }),
        "MON" => push_name(out, &month_name(t)?[..3], text, 0),
        "DAY" => {
            let name = DAYS[(t.date()? + 4).rem_euclid(7) as usize];
            push_name(out, name, text, if fill { 9 } else { 0 });
        }
        "DY" => push_name(out, &DAYS[(t.date()? + 4).rem_euclid(7) as usize][..3], text, 0),
        "RM" => {
            let name = ROMAN[((t.month - 1).clamp(0, 11)) as usize];
            let pad = if fill { 4 } else { 0 };
            let name = if text.starts_with('r') { name.to_lowercase() } else { name.to_owned() };
            let _ = write!(out, "{name:<pad$}");
        }
        "AM" | "PM" | "A.M." | "P.M." => {
            let half = if t.us / 3_600_000_000 % 24 < 12 { 'A' } else { 'P' };
            let full = if text.len() == 2 { format!("{half}M") } else { format!("{half}.M.") };
            let lower = text.starts_with(char::is_lowercase);
            out.push_str(&if lower { full.to_lowercase() } else { full });
        }
        "BC" | "AD" | "B.C." | "A.D." => {
            let full = match (t.year <= 0, text.len() == 2) {
                (true, true) => "BC",
                (true, false) => "B.C.",
                (false, true) => "AD",
                (false, false) => "A.D.",
            };
            let lower = text.starts_with(char::is_lowercase);
            out.push_str(&if lower { full.to_lowercase() } else { full.to_owned() });
        }
        _ => {}
    }
    Ok(())
}

/// What a word that is a number says, and the digits that it is filled up to.
fn number_of_word(t: &Moment, word: &str) -> Result<Option<(i64, usize)>, SqlError> {
    let year = t.shown_year();
    let (number, width) = match word {
        "YYYY" => (year, 4),
        "YYY" => (year % 1000, 3),
        "YY" => (year % 100, 2),
        "Y" => (year % 10, 1),
        "IYYY" => (iso_week(t.date()?).0, 4),
        "IYY" => (iso_week(t.date()?).0 % 1000, 3),
        "IY" => (iso_week(t.date()?).0 % 100, 2),
        "I" => (iso_week(t.date()?).0 % 10, 1),
        "MM" => (t.month, 2),
        "DD" => (t.day, 2),
        "DDD" => (t.date()? - days_from_civil(t.year, 1, 1) + 1, 3),
        "IDDD" => {
            let (week, day) = (iso_week(t.date()?).1, (t.date()? + 3).rem_euclid(7) + 1);
            ((week - 1) * 7 + day, 3)
        }
        "D" => ((t.date()? + 4).rem_euclid(7) + 1, 1),
        "ID" => ((t.date()? + 3).rem_euclid(7) + 1, 1),
        "WW" => ((t.date()? - days_from_civil(t.year, 1, 1)) / 7 + 1, 2),
        "W" => ((t.day - 1) / 7 + 1, 1),
        "IW" => (iso_week(t.date()?).1, 2),
        "Q" => ((t.month - 1) / 3 + 1, 1),
        "CC" => (if t.year > 0 { (t.year + 99) / 100 } else { t.year / 100 - 1 }, 2),
        "J" => (t.date()? + 2_440_588, 1),
        _ => return Ok(number_of_clock_word(t, word)),
    };
    Ok(Some((number, width)))
}

fn number_of_clock_word(t: &Moment, word: &str) -> Option<(i64, usize)> {
    let (hour, minute) = (t.us / 3_600_000_000, t.us / 60_000_000 % 60);
    let (second, us) = (t.us / 1_000_000 % 60, t.us % 1_000_000);
    Some(match word {
        "HH24" => (hour, 2),
        "HH12" | "HH" => (if hour % 12 == 0 { 12 } else { hour % 12 }, 2),
        "MI" => (minute, 2),
        "SS" => (second, 2),
        "SSSS" | "SSSSS" => (t.us / 1_000_000, 1),
        "MS" | "FF3" => (us / 1000, 3),
        "US" | "FF6" => (us, 6),
        "FF1" => (us / 100_000, 1),
        "FF2" => (us / 10_000, 2),
        "FF4" => (us / 100, 4),
        "FF5" => (us / 10, 5),
        _ => return None,
    })
}

fn print_zone(out: &mut String, t: &Moment, word: &str, text: &str, fill: bool) {
    let (sign, hours, minutes) = t.offset();
    // Writing to a string does not fail.
    let _ = match (word, &t.zone) {
        ("TZH", _) => write!(out, "{sign}{hours:02}"),
        ("TZM", _) => write!(out, "{minutes:02}"),
        ("OF", _) => {
            let width = if fill { 2 } else { 0 };
            let _ = write!(out, "{sign}{hours:0width$}");
            if minutes != 0 { write!(out, ":{minutes:02}") } else { Ok(()) }
        }
        (_, Some((_, name))) if text.starts_with('t') => write!(out, "{}", name.to_lowercase()),
        (_, Some((_, name))) => write!(out, "{name}"),
        (_, None) => Ok(()),
    };
}

fn month_name(t: &Moment) -> Result<&'static str, SqlError> {
    let name = usize::try_from(t.month - 1).ok().and_then(|m| MONTHS.get(m).copied());
    name.ok_or_else(|| invalid("invalid format specification for an interval value"))
}

/// What `to_timestamp` has read so far.
#[derive(Default)]
struct Read {
    year: Option<i64>,
    month: Option<i64>,
    day: Option<i64>,
    day_of_year: Option<i64>,
    julian: Option<i64>,
    hour: i64,
    minute: i64,
    second: i64,
    us: i64,
    half_day: Option<bool>,
    twelve: bool,
    bc: bool,
    /// Whether the offset is to the west, and its parts.
    west: bool,
    offset_hours: i64,
    offset_minutes: i64,
    /// Whether years, weeks and days are those of ISO 8601; `None`: none has been read.
    iso: Option<bool>,
    /// Of the year, 1 for the first.
    week: Option<i64>,
    week_of_month: Option<i64>,
    /// 1 for Monday.
    weekday: Option<i64>,
}

fn is_number(word: &str) -> bool {
    !matches!(
        word,
        "MONTH"
            | "MON"
            | "DAY"
            | "DY"
            | "AM"
            | "PM"
            | "A.M."
            | "P.M."
            | "BC"
            | "AD"
            | "B.C."
            | "A.D."
            | "TZ"
            | "OF"
            | "RM"
    )
}

/// The digits that a word takes at most.
fn width(word: &str) -> usize {
    match word {
        "YYYY" | "IYYY" | "Y,YYY" => 4,
        "YYY" | "DDD" | "MS" | "IYY" | "IDDD" | "FF3" => 3,
        "US" | "FF6" => 6,
        "SSSS" | "SSSSS" => 5,
        "J" => 7,
        "Y" | "I" | "D" | "ID" | "W" | "Q" | "FF1" => 1,
        "FF4" => 4,
        "FF5" => 5,
        _ => 2,
    }
}

fn bad_value(value: &str, word: &str) -> SqlError {
    let state = SqlState::INVALID_DATETIME_FORMAT;
    SqlError::new(state, format!("invalid value \"{value}\" for \"{word}\""))
}

/// Of digits that are no integer.
fn beyond(word: &str) -> SqlError {
    field_range(format!("value for \"{word}\" in source string is out of range"))
        .with_detail(format!("Value must be in the range {} to {}.", i32::MIN, i32::MAX))
}

/// Whether a text in the pattern says its offset.
pub fn reads_zone(pattern: &str) -> bool {
    parts(pattern).iter().any(|part| matches!(part, Part::Word { word: "TZH", .. }))
}

/// Microseconds of a text in a pattern, as UTC.
pub fn parse(text: &str, pattern: &str) -> Result<i64, SqlError> {
    let parts = parts(pattern);
    let mut read = Read::default();
    let mut rest = text;
    for (i, part) in parts.iter().enumerate() {
        match part {
            Part::Quoted(quoted) => {
                let skip = rest.char_indices().nth(quoted.chars().count());
                rest = skip.map_or("", |(at, _)| &rest[at..]);
            }
            Part::Char(c) if c.is_whitespace() => rest = rest.trim_start(),
            Part::Char(c) if c.is_alphanumeric() => {
                rest = rest.chars().next().map_or("", |c| &rest[c.len_utf8()..]);
            }
            Part::Char(_) => {
                rest = rest.trim_start();
                if let Some(c) = rest.chars().next()
                    && !c.is_alphanumeric()
                    && !matches!(c, '+' | '-') | matches!(parts[i], Part::Char('-' | '+'))
                {
                    rest = &rest[c.len_utf8()..];
                } else if rest.starts_with('-') {
                    rest = &rest[1..];
                }
            }
            Part::Word { word, fill, .. } => {
                rest = rest.trim_start();
                // Separators in front of a field that the pattern does not have.
                let loose =
                    rest.trim_start_matches(|c: char| !c.is_alphanumeric() && c != '-' && c != '+');
                if !matches!(*word, "TZH" | "OF") {
                    rest = loose;
                }
                let next_number = matches!(
                    parts.get(i + 1),
                    Some(Part::Word { word, .. }) if is_number(word)
                ) || matches!(parts.get(i + 1), Some(Part::Char(c)) if c.is_ascii_digit());
                rest = read_word(&mut read, word, rest, next_number && *fill)?;
            }
        }
    }
    finish(&read, text)
}

fn read_word<'a>(
    read: &mut Read,
    word: &'static str,
    rest: &'a str,
    fixed: bool,
) -> Result<&'a str, SqlError> {
    if word == "TZH" {
        let (west, unsigned) = match rest.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, rest.strip_prefix('+').unwrap_or(rest)),
        };
        read.west = west;
        return read_number(read, word, unsigned, fixed);
    }
    if is_number(word) {
        return read_number(read, word, rest, fixed);
    }
    read_name(read, word, rest)
}

fn read_number<'a>(
    read: &mut Read,
    word: &'static str,
    rest: &'a str,
    fixed: bool,
) -> Result<&'a str, SqlError> {
    let sign = usize::from(rest.starts_with(['-', '+']));
    let digits = rest[sign..].bytes().take_while(u8::is_ascii_digit).count();
    let digits = if fixed { digits.min(width(word)) } else { digits };
    if digits == 0 {
        let shown: String = rest.chars().take(width(word)).collect();
        return Err(bad_value(&shown, word).with_detail("Value must be an integer."));
    }
    let taken = &rest[..sign + digits];
    let n: i32 = taken.trim_start_matches('+').parse().map_err(|_| beyond(word))?;
    let n = i64::from(n);
    number(read, word, n, digits)?;
    let mut after = &rest[sign + digits..];
    if word == "Y,YYY"
        && let Some(more) = after.strip_prefix(',')
        && let Some(low) = more.get(..3).and_then(|l| l.parse::<i64>().ok())
    {
        read.year = Some(n * 1000 + low);
        after = &more[3..];
    }
    Ok(after)
}

/// The name of a month, a day, a half of the day or an era.
fn read_name<'a>(read: &mut Read, word: &'static str, rest: &'a str) -> Result<&'a str, SqlError> {
    let prefix = |name: &str| rest.get(..name.len()).is_some_and(|r| r.eq_ignore_ascii_case(name));
    let shown = || rest.chars().take(word.len().max(3)).collect::<String>();
    match word {
        "MONTH" | "MON" => {
            let found = MONTHS.iter().enumerate().find_map(|(i, name)| {
                let full = word == "MONTH" && prefix(name);
                match (full, prefix(&name[..3])) {
                    (true, _) => Some((i, name.len())),
                    (_, true) => Some((i, 3)),
                    _ => None,
                }
            });
            let (i, len) = found.ok_or_else(|| bad_value(&shown(), word))?;
            read.month = Some(i as i64 + 1);
            if read.iso.replace(false) == Some(true) {
                return Err(mixed());
            }
            Ok(&rest[len..])
        }
        "DAY" | "DY" => {
            let found = DAYS.iter().enumerate().find_map(|(day, name)| {
                let full = word == "DAY" && prefix(name);
                if full { Some((day, name.len())) } else { prefix(&name[..3]).then_some((day, 3)) }
            });
            let (day, len) = found.ok_or_else(|| bad_value(&shown(), word))?;
            read.weekday = Some((day as i64 + 6) % 7 + 1);
            Ok(&rest[len..])
        }
        "AM" | "PM" | "A.M." | "P.M." => {
            for (text, pm) in [("A.M.", false), ("P.M.", true), ("AM", false), ("PM", true)] {
                if prefix(text) {
                    read.half_day = Some(pm);
                    return Ok(&rest[text.len()..]);
                }
            }
            Err(bad_value(&shown(), word))
        }
        "BC" | "AD" | "B.C." | "A.D." => {
            for (text, bc) in [("B.C.", true), ("A.D.", false), ("BC", true), ("AD", false)] {
                if prefix(text) {
                    read.bc = bc;
                    return Ok(&rest[text.len()..]);
                }
            }
            Err(bad_value(&shown(), word))
        }
        "RM" => {
            let len = rest.bytes().take_while(|b| b"IVXivx".contains(b)).count();
            let found = ROMAN.iter().position(|r| r.eq_ignore_ascii_case(&rest[..len]));
            read.month = Some(found.ok_or_else(|| bad_value(&shown(), word))? as i64 + 1);
            Ok(&rest[len..])
        }
        _ => {
            let message = "formatting field \"TZ\" is only supported in to_char";
            Err(SqlError::new(SqlState::FEATURE_NOT_SUPPORTED, message))
        }
    }
}

fn number(read: &mut Read, word: &str, n: i64, digits: usize) -> Result<(), SqlError> {
    if let Some(iso) = convention(word)
        && read.iso.replace(iso).is_some_and(|before| before != iso)
    {
        return Err(mixed());
    }
    let fraction = |n: i64, width: usize| n * 10i64.pow(6) / 10i64.pow(width.min(9) as u32);
    match word {
        "YYYY" | "Y,YYY" | "IYYY" => read.year = Some(n),
        "YYY" | "YY" | "Y" | "IYY" | "IY" | "I" => {
            // The year nearest to 2020, as PostgreSQL does.
            read.year = Some(match digits {
                ..=2 if n < 70 => n + 2000,
                ..=2 => n + 1900,
                3 if n < 520 => n + 2000,
                3 => n + 1000,
                _ => n,
            });
        }
        "MM" => read.month = Some(n),
        "DD" => read.day = Some(n),
        "DDD" | "IDDD" => read.day_of_year = Some(n),
        "WW" | "IW" => read.week = Some(n).filter(|week| *week != 0),
        "W" => read.week_of_month = Some(n).filter(|week| *week != 0),
        // What is no other day is a Sunday.
        "ID" => read.weekday = Some(if (1..7).contains(&n) { n } else { 7 }),
        "J" => read.julian = Some(n),
        "HH24" => read.hour = n,
        "HH" | "HH12" => {
            read.hour = n;
            read.twelve = true;
        }
        "MI" => read.minute = n,
        "SS" => read.second = n,
        "SSSS" | "SSSSS" => {
            read.hour = n / 3600;
            read.minute = n / 60 % 60;
            read.second = n % 60;
        }
        "MS" | "US" | "FF1" | "FF2" | "FF3" | "FF4" | "FF5" | "FF6" => {
            read.us += fraction(n, digits);
        }
        "TZH" => read.offset_hours = n,
        "TZM" => read.offset_minutes = n,
        "D" | "Q" | "CC" => {}
        _ => return Err(SqlError::unsupported(format!("the template pattern {word} in input"))),
    }
    Ok(())
}

/// Whether a word is of ISO 8601's weeks, or of the calendar's months; `None`: of neither.
fn convention(word: &str) -> Option<bool> {
    match word {
        "IYYY" | "IYY" | "IY" | "I" | "IW" | "ID" | "IDDD" => Some(true),
        "YYYY" | "Y,YYY" | "YYY" | "YY" | "Y" | "MM" | "DD" | "DDD" | "D" | "WW" | "W" => {
            Some(false)
        }
        _ => None,
    }
}

fn mixed() -> SqlError {
    let message = "invalid combination of date conventions";
    SqlError::new(SqlState::INVALID_DATETIME_FORMAT, message)
        .with_hint("Do not mix Gregorian and ISO week date conventions in a formatting template.")
}

/// Weeks and days of weeks beyond this are out of range.
const MOST_WEEKS: i64 = 9_999;

/// The first day of a year of weeks.
fn first_monday(year: i64) -> i64 {
    let fourth = days_from_civil(year, 1, 4);
    fourth - (fourth + 3).rem_euclid(7)
}

fn finish(read: &Read, text: &str) -> Result<i64, SqlError> {
    let out_of_range = || field_range(format!("date/time field value out of range: \"{text}\""));
    let mut hour = read.hour;
    if read.twelve || read.half_day.is_some() {
        if !(1..=12).contains(&hour) {
            let message = format!("hour \"{hour}\" is invalid for the 12-hour clock");
            return Err(SqlError::new(SqlState::INVALID_DATETIME_FORMAT, message)
                .with_hint("Use the 24-hour clock, or give an hour between 1 and 12."));
        }
        hour = hour % 12 + if read.half_day == Some(true) { 12 } else { 0 };
    }
    if !(0..=24).contains(&hour)
        || !(0..60).contains(&read.minute)
        || !(0..=60).contains(&read.second)
    {
        return Err(out_of_range());
    }
    let mut year = read.year.unwrap_or(0);
    if read.bc {
        year = -year;
    }
    // There is no year 0: a negative one is so many before the year 1.
    if year < 0 {
        year += 1;
    }
    let counted = [read.week, read.week_of_month, read.weekday];
    if counted.into_iter().flatten().any(|n| !(1..=MOST_WEEKS).contains(&n)) {
        return Err(out_of_range());
    }
    let iso = read.iso == Some(true);
    let dated = read.month.is_some() || read.day.is_some();
    let days = match (read.julian, read.day_of_year, read.week) {
        (Some(julian), _, _) => julian - 2_440_588,
        (_, _, Some(week)) if iso => {
            first_monday(year) + (week - 1) * 7 + read.weekday.unwrap_or(1) - 1
        }
        (_, Some(doy), _) => {
            if !(1..=371).contains(&doy) || (doy > 366 && !iso) {
                return Err(out_of_range());
            }
            let first = if iso { first_monday(year) } else { days_from_civil(year, 1, 1) };
            first + doy - 1
        }
        (_, _, Some(week)) if !dated => days_from_civil(year, 1, 1) + (week - 1) * 7,
        _ => {
            let day = read.week_of_month.map(|week| (week - 1) * 7 + 1).or(read.day);
            let (month, day) = (read.month.unwrap_or(1), day.unwrap_or(1));
            if !(1..=12).contains(&month)
                || day < 1
                || day > i64::from(days_in_month(year, month as u32))
            {
                return Err(out_of_range());
            }
            days_from_civil(year, month as u32, day as u32)
        }
    };
    let clock = ((hour * 60 + read.minute) * 60 + read.second) * 1_000_000 + read.us;
    let offset = offset_us(read, text)?;
    days.checked_mul(DAY_US)
        .and_then(|d| d.checked_add(clock))
        .and_then(|t| t.checked_sub(offset))
        .ok_or_else(out_of_range)
}

/// Microseconds east of Greenwich.
fn offset_us(read: &Read, text: &str) -> Result<i64, SqlError> {
    const MOST_HOURS: i64 = 15;
    let (hours, minutes) = (read.offset_hours, read.offset_minutes);
    if !(0..=MOST_HOURS).contains(&hours) || !(0..60).contains(&minutes) {
        let message = format!("time zone displacement out of range: \"{text}\"");
        return Err(SqlError::new(SqlState("22009"), message));
    }
    let us = (hours * 60 + minutes) * 60_000_000;
    Ok(if read.west { -us } else { us })
}

#[cfg(test)]
mod tests;
