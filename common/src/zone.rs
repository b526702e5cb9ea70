//! Time zones: what their names mean, and what they add to UTC.
//!
//! A session's zone is a name of the IANA database, an offset in hours, or a POSIX name without summer time
//! (`<+02>-02`, `UTC+3`: positive is west of Greenwich). The tables of the database end with the year 2099; later years
//! are like those before with the same calendar, as the rules say that are in force then.

use std::borrow::Cow;
use std::fmt::Write;

use chrono::{DateTime, Offset, TimeZone};
use chrono_tz::{OffsetComponents, OffsetName, TZ_VARIANTS, Tz};

use crate::encoding::datetime::{DAY_US, civil, days_from_civil};

const SECOND_US: i64 = 1_000_000;
/// 2100-01-01, where the tables end.
const TABLES_END_US: i64 = 4_102_444_800 * SECOND_US;
/// Years of the tables in which every calendar occurs.
const LAST_YEARS: std::ops::Range<i64> = 2072..2100;
/// PostgreSQL's bound of an offset: less than 168 hours.
const MAX_OFFSET: i64 = 168 * 3_600;

/// Names of UTC, and of what never differs from it.
const OF_UTC: [&str; 18] = [
    "UTC",
    "Etc/UTC",
    "UCT",
    "Etc/UCT",
    "Universal",
    "Etc/Universal",
    "Zulu",
    "Etc/Zulu",
    "GMT",
    "Etc/GMT",
    "GMT0",
    "Etc/GMT0",
    "GMT+0",
    "Etc/GMT+0",
    "GMT-0",
    "Etc/GMT-0",
    "Greenwich",
    "Etc/Greenwich",
];

/// Abbreviations that PostgreSQL knows by default, in hours east of UTC.
const ABBREVIATIONS: [(&str, i64); 22] = [
    ("utc", 0),
    ("gmt", 0),
    ("z", 0),
    ("zulu", 0),
    ("uct", 0),
    ("est", -5),
    ("edt", -4),
    ("cst", -6),
    ("cdt", -5),
    ("mst", -7),
    ("mdt", -6),
    ("pst", -8),
    ("pdt", -7),
    ("cet", 1),
    ("cest", 2),
    ("bst", 1),
    ("wet", 0),
    ("west", 1),
    ("eet", 2),
    ("eest", 3),
    ("msk", 3),
    ("jst", 9),
];

/// The microseconds to add to UTC at an instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zone {
    Fixed(i64),
    Named(Tz),
}

/// A zone that a session can have: its name as PostgreSQL shows it; `None`: there is none.
pub fn of_session(text: &str) -> Option<(String, Zone)> {
    let name = text.trim();
    if let Some(seconds) = hours(name) {
        let in_range = seconds > -MAX_OFFSET && seconds < MAX_OFFSET;
        let zone = in_range.then(|| Zone::Fixed(seconds * SECOND_US))?;
        return Some((zone.name(), zone));
    }
    match by_name(name) {
        Some(tz) => Some((tz.name().to_owned(), Zone::Named(tz))),
        None => posix(name).map(|zone| (name.to_ascii_uppercase(), zone)),
    }
}

/// Seconds of a number of hours.
pub fn hours(text: &str) -> Option<i64> {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    let plain = digits.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    let hours = text.parse::<f64>().ok().filter(|_| plain)?;
    Some((hours * 3_600.0) as i64)
}

/// A zone of the IANA database, without regard to case.
pub fn by_name(name: &str) -> Option<Tz> {
    let insensitive = || TZ_VARIANTS.iter().find(|tz| tz.name().eq_ignore_ascii_case(name));
    name.parse::<Tz>().ok().or_else(|| insensitive().copied())
}

/// A POSIX name without summer time: an abbreviation, or anything in `<>`, then an offset to the west.
pub fn posix(name: &str) -> Option<Zone> {
    let offset = match name.strip_prefix('<') {
        Some(rest) => rest.split_once('>').filter(|(abbreviation, _)| !abbreviation.is_empty())?.1,
        None => {
            let end = name.find(|c: char| !c.is_ascii_alphabetic())?;
            // Only a sign tells a nameless offset from a number.
            let known = end >= 3 || (end == 0 && name.starts_with(['+', '-']));
            known.then(|| &name[end..])?
        }
    };
    let (sign, digits) = match offset.strip_prefix('-') {
        Some(digits) => (1, digits),
        None => (-1, offset.strip_prefix('+').unwrap_or(offset)),
    };
    let mut seconds = 0;
    let mut parts = digits.split(':');
    for (unit, most) in [(3_600, 167), (60, 59), (1, 59)] {
        let Some(part) = parts.next() else { break };
        let plain = (1..=3).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_digit());
        let n: i64 = part.parse().ok().filter(|n| plain && *n <= most)?;
        seconds += n * unit;
    }
    parts.next().is_none().then_some(Zone::Fixed(sign * seconds * SECOND_US))
}

/// A zone that a text names: an abbreviation, a name of the database, or a POSIX one, to which a number is west.
pub fn named(name: &str) -> Option<Zone> {
    let lower = name.trim().to_ascii_lowercase();
    if let Some((_, hours)) = ABBREVIATIONS.iter().find(|(n, _)| *n == lower) {
        return Some(Zone::Fixed(hours * 3_600 * SECOND_US));
    }
    if lower.starts_with(['+', '-']) || lower.starts_with(|c: char| c.is_ascii_digit()) {
        let signed = if lower.starts_with(['+', '-']) { lower } else { format!("+{lower}") };
        return offset_us(&signed).map(|us| Zone::Fixed(-us));
    }
    let name = name.trim();
    by_name(name).map(Zone::Named).or_else(|| posix(name))
}

/// Microseconds east of UTC of an offset in a text: `Z`, `+2`, `-03:30`, `+0530`.
pub fn offset_us(zone: &str) -> Option<i64> {
    if zone.is_empty() || ["z", "utc", "gmt"].contains(&zone.to_ascii_lowercase().as_str()) {
        return Some(0);
    }
    let sign = match zone.as_bytes()[0] {
        b'+' => 1,
        b'-' => -1,
        _ => return None,
    };
    let digits: String = zone[1..].chars().filter(|c| *c != ':').collect();
    if !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let (h, m) = match digits.len() {
        1 | 2 => (digits.parse::<i64>().ok()?, 0),
        4 => (digits[..2].parse().ok()?, digits[2..].parse().ok()?),
        _ => return None,
    };
    (h <= 15 && m < 60).then_some(sign * (h * 60 + m) * 60_000_000)
}

/// `+02`, `-03:30`, `-04:56:02`; with `minutes`, `+02:00`.
pub fn write_offset(out: &mut impl Write, seconds: i64, minutes: bool) -> std::fmt::Result {
    out.write_char(if seconds < 0 { '-' } else { '+' })?;
    write_hours(out, seconds, minutes)
}

fn write_hours(out: &mut impl Write, seconds: i64, minutes: bool) -> std::fmt::Result {
    let all = seconds.unsigned_abs();
    let (h, m, s) = (all / 3_600, all / 60 % 60, all % 60);
    write!(out, "{h:02}")?;
    if minutes || m != 0 || s != 0 {
        write!(out, ":{m:02}")?;
    }
    if s != 0 { write!(out, ":{s:02}") } else { Ok(()) }
}

/// An instant that the tables know, at which every zone is as at this one.
fn in_tables(us: i64) -> i64 {
    if us < TABLES_END_US {
        return us;
    }
    let year = civil(us.div_euclid(DAY_US)).0;
    let first = |year: i64| days_from_civil(year, 1, 1);
    let length = |year: i64| first(year + 1) - first(year);
    let alike = |y: &i64| (first(year) - first(*y)) % 7 == 0 && length(*y) == length(year);
    match LAST_YEARS.into_iter().find(alike) {
        Some(y) => us - (first(year) - first(y)) * DAY_US,
        None => us,
    }
}

impl Zone {
    /// A zone as [`Zone::name`] writes it, or a session has it.
    pub fn of_name(name: &str) -> Option<Zone> {
        match name.parse::<Tz>() {
            Ok(tz) => Some(Zone::Named(tz)),
            Err(_) => of_session(name).map(|(_, zone)| zone),
        }
    }

    pub fn name(self) -> String {
        let seconds = match self {
            Zone::Named(tz) => return tz.name().to_owned(),
            Zone::Fixed(us) => us / SECOND_US,
        };
        let (sign, opposite) = if seconds < 0 { ('-', '+') } else { ('+', '-') };
        let mut offset = String::new();
        // Writing to a string does not fail.
        let _ = write_hours(&mut offset, seconds, false);
        format!("<{sign}{offset}>{opposite}{offset}")
    }

    /// Whether it is UTC at every instant.
    pub fn is_utc(self) -> bool {
        match self {
            Zone::Fixed(us) => us == 0,
            Zone::Named(tz) => OF_UTC.contains(&tz.name()),
        }
    }

    fn span(tz: Tz, us: i64) -> Option<<Tz as TimeZone>::Offset> {
        let t = DateTime::from_timestamp_micros(in_tables(us))?;
        Some(tz.offset_from_utc_datetime(&t.naive_utc()))
    }

    /// Seconds east of Greenwich at an instant.
    pub fn offset(self, us: i64) -> i64 {
        match self {
            Zone::Fixed(offset) => offset / SECOND_US,
            Zone::Named(tz) => {
                Zone::span(tz, us).map_or(0, |span| span.fix().local_minus_utc().into())
            }
        }
    }

    /// What the zone is called at an instant.
    pub fn abbreviation(self, us: i64) -> Cow<'static, str> {
        let span = match self {
            Zone::Fixed(_) => None,
            Zone::Named(tz) => Zone::span(tz, us),
        };
        if let Some(name) = span.and_then(|s| s.abbreviation().map(str::to_owned)) {
            return Cow::Owned(name);
        }
        let mut offset = String::new();
        // Writing to a string does not fail.
        let _ = write_offset(&mut offset, self.offset(us), false);
        // The database writes `+0330`, a POSIX name what it was given.
        Cow::Owned(match self {
            Zone::Named(_) => offset.replace(':', ""),
            Zone::Fixed(_) => offset,
        })
    }

    /// Whether it is summer time at an instant.
    pub fn is_dst(self, us: i64) -> bool {
        match self {
            Zone::Fixed(_) => false,
            Zone::Named(tz) => Zone::span(tz, us).is_some_and(|s| !s.dst_offset().is_zero()),
        }
    }

    /// The local time of an instant.
    pub fn local(self, us: i64) -> i64 {
        match us {
            i64::MAX | i64::MIN => us,
            _ => us.saturating_add(self.offset(us) * SECOND_US),
        }
    }

    /// The instant of a local time: of two the later, in a gap by the offset before it.
    pub fn instant(self, local: i64) -> i64 {
        match (self, local) {
            (_, i64::MAX | i64::MIN) => local,
            (Zone::Fixed(offset), _) => local.saturating_sub(offset),
            (Zone::Named(_), _) => local.saturating_sub(self.offset_of_local(local) * SECOND_US),
        }
    }

    fn offset_of_local(self, local: i64) -> i64 {
        let at = |offset: i64| self.offset(local.saturating_sub(offset * SECOND_US));
        let before = self.offset(local.saturating_sub(DAY_US));
        let after = self.offset(local.saturating_add(DAY_US));
        // Between two changes that are close to each other.
        let between = at(before);
        let holds = |offset: &i64| at(*offset) == *offset;
        [after, before, between].into_iter().find(holds).unwrap_or(before)
    }
}

/// All zones of the database.
pub fn all() -> impl Iterator<Item = (&'static str, Zone)> {
    TZ_VARIANTS.iter().map(|tz| (tz.name(), Zone::Named(*tz)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encoding::datetime::{parse_timestamp, parse_timestamptz, write_zoned};

    fn shown(text: &str) -> Option<String> {
        of_session(text).map(|(name, _)| name)
    }

    #[test]
    fn names_are_shown_as_postgres_shows_them() {
        for (text, name) in [
            ("europe/berlin", "Europe/Berlin"),
            ("utc", "UTC"),
            ("est", "EST"),
            ("2", "<+02>-02"),
            ("+2", "<+02>-02"),
            ("-3.5", "<-03:30>+03:30"),
            ("5.5", "<+05:30>-05:30"),
            ("0", "<+00>-00"),
            ("<+02>-02", "<+02>-02"),
            ("utc+3", "UTC+3"),
            ("+02:00", "+02:00"),
        ] {
            assert_eq!(shown(text).as_deref(), Some(name), "{text}");
        }
        for text in ["Mars", "cest", "z", "200", "", "inf", "nan", "FOO3BAR", "<>3", "UTC+3:99"] {
            assert_eq!(shown(text), None, "{text}");
        }
        assert_eq!(shown("-99999999999999999999"), None);
        assert_eq!(Zone::of_name("<-00:30:15>+00:30:15"), Some(Zone::Fixed(-1_815_000_000)));
        assert_eq!(posix("+02:00"), Some(Zone::Fixed(-7_200_000_000)));
    }

    #[test]
    fn instants_have_the_offsets_of_their_time() {
        let zone = Zone::of_name("America/New_York").unwrap();
        for (local, out) in [
            ("2024-11-03 01:30", "2024-11-03 01:30:00-05"),
            ("2024-03-10 02:30", "2024-03-10 03:30:00-04"),
            ("1883-11-18 12:03:57", "1883-11-18 12:03:57-05"),
            ("1799-12-31 19:03:58", "1799-12-31 19:03:58-04:56:02"),
            ("9999-07-01 00:00", "9999-07-01 00:00:00-04"),
            ("9999-12-31 23:59:59", "9999-12-31 23:59:59-05"),
        ] {
            let mut text = String::new();
            let us = zone.instant(parse_timestamp(local).unwrap());
            write_zoned(&mut text, us, zone, false).unwrap();
            assert_eq!(text, out);
            assert_eq!(parse_timestamptz(&text).unwrap(), us, "{out}");
        }
        let tehran = Zone::of_name("Asia/Tehran").unwrap();
        let winter = parse_timestamptz("2026-01-01").unwrap();
        assert_eq!(tehran.abbreviation(winter), "+0330");
        assert_eq!(Zone::of_name("5.5").unwrap().abbreviation(winter), "+05:30");
        // A day that was left out: the offset before it, ten hours west.
        let apia = Zone::of_name("Pacific/Apia").unwrap();
        let gone = parse_timestamp("2011-12-30 12:00").unwrap();
        assert_eq!(apia.instant(gone) - gone, 10 * 3_600 * SECOND_US);
    }
}
