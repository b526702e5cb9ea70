//! What depends on the session's time zone, as functions that are given the zone: `bind::zones` puts them in place of
//! the plain ones where it is not UTC, so that a plan says its zone and nothing that runs it asks a session.

use arrow::datatypes::IntervalMonthDayNano as Interval;
use millrace_common::encoding::datetime::write_zoned;
use millrace_common::zone::Zone;
use millrace_common::{SqlError, SqlType as T};

use super::call::{Args, Def, Out, over};
use super::datetime::shift;
use super::time_format::Moment;
use super::times::{invalid, truncate};
use super::{parse, time_format};

/// The zone that an argument names.
fn zone(a: &Args, i: usize) -> Result<Zone, SqlError> {
    let name = a.text(i);
    Zone::of_name(name).ok_or_else(|| invalid(format!("time zone \"{name}\" not recognized")))
}

/// An instant and an interval: months and days in local time, then the time as it passes.
pub fn shift_in(zone: Zone, t: i64, i: Interval, negative: bool) -> Result<i64, SqlError> {
    let mut t = t;
    for part in [Interval::new(i.months, 0, 0), Interval::new(0, i.days, 0)] {
        if part.months != 0 || part.days != 0 {
            t = zone.instant(shift(zone.local(t), part, negative)?);
        }
    }
    shift(t, Interval::new(0, 0, i.nanoseconds), negative)
}

/// `date_trunc` of an instant. Parts of a day are cut off as they passed, so that an hour that comes twice stays apart.
pub fn truncate_in(zone: Zone, unit: &str, t: i64) -> Result<i64, SqlError> {
    const KIND: &str = "timestamp with time zone";
    const LAST_OF_DAY: i64 = 86_400_000_000 - 1;
    let local = zone.local(t);
    let cut = truncate(unit, local, KIND)?;
    let within_day = truncate(unit, LAST_OF_DAY, KIND)? > 0;
    Ok(if within_day { t - (local - cut) } else { zone.instant(cut) })
}

fn text_in(a: &Args, out: &mut Out, iso: bool) -> Result<(), SqlError> {
    let mut text = String::new();
    write_zoned(&mut text, a.timestamp(1), zone(a, 0)?, iso)
        .map_err(|_| SqlError::internal("a value could not be printed"))?;
    out.text(&text)
}

/// The fields `timezone`, `timezone_hour` and `timezone_minute` of `extract`.
fn offset_field(field: &str, seconds: i64) -> i64 {
    match field {
        "timezone_hour" => seconds / 3_600,
        "timezone_minute" => seconds / 60 % 60,
        _ => seconds,
    }
}

pub fn defs() -> Vec<Def> {
    const TS: T = T::Timestamp;
    const TZ: T = T::Timestamptz;
    vec![
        Def::new(
            "zoned_local",
            &[over(&[T::Text, TZ], TS, |a, out| out.timestamp(zone(a, 0)?.local(a.timestamp(1))))],
        ),
        Def::new(
            "zoned_instant",
            &[over(&[T::Text, TS], TZ, |a, out| {
                out.timestamp(zone(a, 0)?.instant(a.timestamp(1)))
            })],
        ),
        Def::new("zoned_text", &[over(&[T::Text, TZ], T::Text, |a, out| text_in(a, out, false))]),
        Def::new("zoned_iso", &[over(&[T::Text, TZ], T::Text, |a, out| text_in(a, out, true))]),
        Def::new(
            "zoned_read",
            &[over(&[T::Text, T::Text], TZ, |a, out| {
                out.timestamp(parse::timestamptz_in(a.text(1), zone(a, 0)?)?)
            })],
        ),
        Def::new(
            "zoned_add",
            &[over(&[T::Text, TZ, T::Interval], TZ, |a, out| {
                out.timestamp(shift_in(zone(a, 0)?, a.timestamp(1), a.interval(2), false)?)
            })],
        ),
        Def::new(
            "zoned_sub",
            &[over(&[T::Text, TZ, T::Interval], TZ, |a, out| {
                out.timestamp(shift_in(zone(a, 0)?, a.timestamp(1), a.interval(2), true)?)
            })],
        ),
        Def::new(
            "zoned_trunc",
            &[over(&[T::Text, T::Text, TZ], TZ, |a, out| {
                out.timestamp(truncate_in(zone(a, 0)?, a.text(1), a.timestamp(2))?)
            })],
        ),
        Def::new(
            "zoned_to_char",
            &[over(&[T::Text, TZ, T::Text], T::Text, |a, out| {
                let t = Moment::of_instant(a.timestamp(1), zone(a, 0)?);
                out.text(&time_format::print(&t, a.text(2))?)
            })],
        ),
        Def::new(
            "zoned_to_timestamp",
            &[over(&[T::Text, T::Text, T::Text], TZ, |a, out| {
                let t = time_format::parse(a.text(1), a.text(2))?;
                out.timestamp(match time_format::reads_zone(a.text(2)) {
                    true => t,
                    false => zone(a, 0)?.instant(t),
                })
            })],
        ),
        Def::new(
            "zoned_offset",
            &[over(&[T::Text, T::Text, TZ], T::Int, |a, out| {
                let seconds = zone(a, 0)?.offset(a.timestamp(2));
                out.int(offset_field(a.text(1), seconds) as i32)
            })],
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str, zone: Zone) -> i64 {
        parse::timestamptz_in(text, zone).unwrap()
    }

    #[test]
    fn days_are_local_and_hours_pass() {
        let berlin = Zone::of_name("Europe/Berlin").unwrap();
        let t = at("2024-03-30 12:00", berlin);
        let day = Interval::new(0, 1, 0);
        let hours = Interval::new(0, 0, 24 * 3_600_000_000_000);
        assert_eq!(shift_in(berlin, t, day, false).unwrap(), at("2024-03-31 12:00", berlin));
        assert_eq!(shift_in(berlin, t, hours, false).unwrap(), at("2024-03-31 13:00", berlin));
        let month = Interval::new(1, 0, 0);
        let last = at("2024-03-31 12:00", berlin);
        assert_eq!(shift_in(berlin, last, month, true).unwrap(), at("2024-02-29 12:00", berlin));
    }

    #[test]
    fn an_hour_that_comes_twice_stays_apart() {
        let berlin = Zone::of_name("Europe/Berlin").unwrap();
        // 02:30 of summer time, an hour before 02:30 of winter time.
        let first = at("2024-10-27 00:30+00", berlin);
        let cut = truncate_in(berlin, "hour", first).unwrap();
        assert_eq!(cut, at("2024-10-27 00:00+00", berlin));
        assert_eq!(truncate_in(berlin, "day", first).unwrap(), at("2024-10-27", berlin));
        assert_eq!(at("2024-10-27", berlin), at("2024-10-26 22:00+00", berlin));
    }
}
