//! PostgreSQL's functions of dates, times and intervals.

use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, Decimal128Array};
use arrow::datatypes::IntervalMonthDayNano as Interval;
use arrow::datatypes::IntervalMonthDayNanoType;
pub use millrace_common::zone::Zone;
use millrace_common::zone::{named, offset_us, posix};
use millrace_common::{SqlError, SqlState, SqlType as T};

use super::call::{Args, Def, Out, over};
use super::datetime::interval;
use super::round::{EPOCH_2000_US, rounded};
use super::text::{civil_from_days, days_from_civil, days_in_month, push_interval_text};
use super::zones::truncate_in;
use super::{number_format, time_format};

pub const DAY_US: i64 = 86_400_000_000;
const NUM: T = T::Numeric(None);
const TS: T = T::Timestamp;
const TZ: T = T::Timestamptz;

pub fn invalid(message: impl Into<String>) -> SqlError {
    SqlError::new(SqlState::INVALID_PARAMETER_VALUE, message)
}

pub fn field_range(message: impl Into<String>) -> SqlError {
    SqlError::new(SqlState::DATETIME_FIELD_OVERFLOW, message)
}

pub fn us_of(i: Interval) -> i64 {
    i.nanoseconds / 1000
}

/// The length that intervals are compared by: 24 hours are a day, 30 days a month.
fn length_us(i: Interval) -> i128 {
    let days = i128::from(i.months) * 30 + i128::from(i.days);
    days * i128::from(DAY_US) + i128::from(us_of(i))
}

/// The lengths of a column of intervals, as `interval_span` has them.
pub fn lengths(column: &ArrayRef) -> Result<ArrayRef, SqlError> {
    let intervals = column.as_primitive_opt::<IntervalMonthDayNanoType>();
    let intervals = intervals.ok_or_else(|| SqlError::internal("no column of intervals"))?;
    let lengths: Decimal128Array = intervals.iter().map(|i| i.map(length_us)).collect();
    let lengths = lengths.with_precision_and_scale(38, 0);
    Ok(Arc::new(lengths.map_err(|e| SqlError::internal(e.to_string()))?))
}

/// A zone as AT TIME ZONE names it.
pub fn zone(name: &str) -> Result<Zone, SqlError> {
    named(name).ok_or_else(|| invalid(format!("time zone \"{name}\" not recognized")))
}

/// The zone of `make_timestamptz`, where a number is east of Greenwich, as it is in texts.
fn zone_of_parts(name: &str) -> Result<Zone, SqlError> {
    if name.starts_with(|c: char| c.is_ascii_digit()) {
        let message = format!("invalid input syntax for type numeric time zone: \"{name}\"");
        let hint = "Numeric time zones must have \"-\" or \"+\" as first character.";
        return Err(invalid(message).with_hint(hint));
    }
    if !name.starts_with(['+', '-']) {
        return zone(name);
    }
    // A POSIX zone may have seconds, and is west.
    let with_seconds = || match posix(name) {
        Some(Zone::Fixed(us)) => Some(-us),
        _ => None,
    };
    match offset_us(name).or_else(with_seconds) {
        Some(us) if us.abs() < 16 * 3_600_000_000 => Ok(Zone::Fixed(us)),
        Some(_) => Err(invalid(format!("numeric time zone \"{name}\" out of range"))),
        None => Err(invalid(format!("time zone \"{name}\" not recognized"))),
    }
}

/// What `AT TIME ZONE interval` adds to UTC.
fn offset_of(i: Interval) -> Result<i64, SqlError> {
    if i.months == 0 && i.days == 0 {
        return Ok(us_of(i));
    }
    let mut shown = String::new();
    push_interval_text(&mut shown, i.months, i.days, us_of(i));
    let message = format!("interval time zone \"{shown}\" must not include months or days");
    Err(invalid(message))
}

/// `age`: the difference in years, months, days and time.
fn age_of(later: i64, earlier: i64) -> Result<Interval, SqlError> {
    let negative = later < earlier;
    let (a, b) = if negative { (earlier, later) } else { (later, earlier) };
    let split = |t: i64| {
        let (y, m, d) = civil_from_days(t.div_euclid(DAY_US));
        (y, i64::from(m), i64::from(d), t.rem_euclid(DAY_US))
    };
    let ((y1, m1, d1, t1), (y2, m2, d2, t2)) = (split(a), split(b));
    let (mut months, mut days, mut us) = ((y1 - y2) * 12 + m1 - m2, d1 - d2, t1 - t2);
    if us < 0 {
        us += DAY_US;
        days -= 1;
    }
    if days < 0 {
        // A month of the length of the earlier date's; of the later's predecessor when negative.
        let length = days_in_month(y2, m2 as u32);
        days += i64::from(length);
        months -= 1;
    }
    let sign = if negative { -1 } else { 1 };
    interval(sign * months, sign * days, sign * us)
}

/// Gives a number of `unit`s and the rest below one the same sign.
fn with_one_sign(units: &mut i64, rest: &mut i64, unit: i64) {
    if *units > 0 && *rest < 0 {
        *rest += unit;
        *units -= 1;
    } else if *units < 0 && *rest > 0 {
        *rest -= unit;
        *units += 1;
    }
}

fn justify_hours(i: Interval) -> (i64, i64, i64) {
    let us = us_of(i);
    let (mut days, mut us) = (i64::from(i.days) + us / DAY_US, us % DAY_US);
    with_one_sign(&mut days, &mut us, DAY_US);
    (i64::from(i.months), days, us)
}

fn justify_days(i: Interval) -> (i64, i64, i64) {
    let days = i64::from(i.days);
    let (mut months, mut days) = (i64::from(i.months) + days / 30, days % 30);
    with_one_sign(&mut months, &mut days, 30);
    (months, days, us_of(i))
}

fn justify_interval(i: Interval) -> (i64, i64, i64) {
    let (mut months, mut days, mut us) = (i64::from(i.months), i64::from(i.days), us_of(i));
    days += us / DAY_US;
    us %= DAY_US;
    months += days / 30;
    days %= 30;
    if months > 0 && (days < 0 || (days == 0 && us < 0)) {
        days += 30;
        months -= 1;
    } else if months < 0 && (days > 0 || (days == 0 && us > 0)) {
        days -= 30;
        months += 1;
    }
    with_one_sign(&mut days, &mut us, DAY_US);
    (months, days, us)
}

fn justified(out: &mut Out, (months, days, us): (i64, i64, i64)) -> Result<(), SqlError> {
    out.interval(interval(months, days, us)?)
}

fn make_interval(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let n = |i: usize| if a.len() > i { i64::from(a.int(i)) } else { 0 };
    let seconds = if a.len() > 6 { a.float(6) } else { 0.0 };
    let out_of_range = || field_range("interval out of range");
    let us = (seconds * 1e6).round_ties_even();
    // What is beyond all numbers becomes the last one, which no interval holds.
    let us = if us.is_nan() { None } else { Some(us as i64) };
    let us = us.and_then(|us| us.checked_add((n(4) * 60 + n(5)) * 60_000_000));
    let us = us.ok_or_else(out_of_range)?;
    out.interval(interval(n(0) * 12 + n(1), n(2) * 7 + n(3), us)?)
}

fn civil(y: i32, m: i32, d: i32) -> Result<i64, SqlError> {
    // A negative year is BC.
    let year = if y < 0 { i64::from(y) + 1 } else { i64::from(y) };
    let bad = || field_range(format!("date field value out of range: {y}-{m:02}-{d:02}"));
    let month = u32::try_from(m).ok().filter(|m| (1..=12).contains(m)).ok_or_else(bad)?;
    let day = u32::try_from(d).ok().filter(|d| *d >= 1 && *d <= days_in_month(year, month));
    if y == 0 || !(-4712..=294_276).contains(&y) {
        return Err(bad());
    }
    Ok(days_from_civil(year, month, day.ok_or_else(bad)?))
}

fn clock(h: i32, m: i32, s: f64) -> Result<i64, SqlError> {
    let bad = || field_range(format!("time field value out of range: {h}:{m:02}:{s:02}"));
    let whole = h == 24 && m == 0 && s == 0.0;
    if !whole && (!(0..24).contains(&h) || !(0..60).contains(&m) || !(0.0..=60.0).contains(&s)) {
        return Err(bad());
    }
    Ok((i64::from(h) * 60 + i64::from(m)) * 60_000_000 + (s * 1e6).round_ties_even() as i64)
}

fn make_timestamp(a: &Args) -> Result<i64, SqlError> {
    let days = civil(a.int(0), a.int(1), a.int(2))?;
    let time = clock(a.int(3), a.int(4), a.float(5))?;
    let us = days.checked_mul(DAY_US).and_then(|us| us.checked_add(time));
    us.ok_or_else(|| {
        let (y, m, d, h, min, s) = (a.int(0), a.int(1), a.int(2), a.int(3), a.int(4), a.float(5));
        field_range(format!("timestamp out of range: {y}-{m:02}-{d:02} {h}:{min:02}:{s:02}"))
    })
}

/// `date_trunc` of a local time.
pub fn truncate(unit: &str, t: i64, kind: &str) -> Result<i64, SqlError> {
    let unknown = || invalid(format!("unit \"{unit}\" not recognized for type {kind}"));
    let days = t.div_euclid(DAY_US);
    let (year, month, _) = civil_from_days(days);
    let first = |y: i64, m: u32| days_from_civil(y, m, 1) * DAY_US;
    // Centuries and millennia begin with their year 1.
    let group = |n: i64| if year > 0 { (year - 1) / n * n + 1 } else { -((-year) / n * n + n - 1) };
    Ok(match unit.to_ascii_lowercase().as_str() {
        "microseconds" | "microsecond" | "us" | "usec" | "usecs" => t,
        "milliseconds" | "millisecond" | "ms" | "msec" | "msecs" => t - t.rem_euclid(1000),
        "second" | "seconds" | "sec" | "secs" | "s" => t - t.rem_euclid(1_000_000),
        "minute" | "minutes" | "min" | "mins" | "m" => t - t.rem_euclid(60_000_000),
        "hour" | "hours" | "hr" | "hrs" | "h" => t - t.rem_euclid(3_600_000_000),
        "day" | "days" | "d" => days * DAY_US,
        "week" | "weeks" | "w" => (days - (days + 3).rem_euclid(7)) * DAY_US,
        "month" | "months" | "mon" | "mons" => first(year, month),
        "quarter" => first(year, (month - 1) / 3 * 3 + 1),
        "year" | "years" | "yr" | "yrs" | "y" => first(year, 1),
        "decade" | "decades" | "dec" | "decs" => first(year.div_euclid(10) * 10, 1),
        "century" | "centuries" | "c" | "cent" => first(group(100), 1),
        "millennium" | "millennia" | "mil" | "mils" => first(group(1000), 1),
        _ => return Err(unknown()),
    })
}

fn truncate_interval(unit: &str, i: Interval) -> Result<Interval, SqlError> {
    let us = us_of(i);
    let keep = |unit: i64| interval(i.months.into(), i.days.into(), us - us % unit);
    let months = |n: i32| interval((i.months - i.months % n).into(), 0, 0);
    match unit.to_ascii_lowercase().as_str() {
        "microseconds" | "microsecond" | "us" => Ok(i),
        "milliseconds" | "millisecond" | "ms" => keep(1000),
        "second" | "seconds" | "sec" | "s" => keep(1_000_000),
        "minute" | "minutes" | "min" | "m" => keep(60_000_000),
        "hour" | "hours" | "hr" | "h" => keep(3_600_000_000),
        "day" | "days" | "d" => interval(i.months.into(), i.days.into(), 0),
        "month" | "months" | "mon" => months(1),
        "quarter" => months(3),
        "year" | "years" | "y" => months(12),
        "decade" | "decades" => months(120),
        "century" | "centuries" => months(1200),
        "millennium" | "millennia" => months(12_000),
        "week" | "weeks" => Err(SqlError::new(
            SqlState::FEATURE_NOT_SUPPORTED,
            format!("unit \"{unit}\" not supported for type interval"),
        )),
        _ => Err(invalid(format!("unit \"{unit}\" not recognized for type interval"))),
    }
}

fn date_bin(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let (stride, t, origin) = (a.interval(0), a.timestamp(1), a.timestamp(2));
    if stride.months != 0 {
        let message = "timestamps cannot be binned into intervals containing months or years";
        return Err(SqlError::new(SqlState::FEATURE_NOT_SUPPORTED, message));
    }
    let out_of_range = || field_range("interval out of range");
    let step = i64::from(stride.days).checked_mul(DAY_US);
    let step = step.and_then(|us| us.checked_add(us_of(stride))).ok_or_else(out_of_range)?;
    if step <= 0 {
        return Err(field_range("stride must be greater than zero"));
    }
    let diff = t.checked_sub(origin).ok_or_else(out_of_range)?;
    let start = diff.div_euclid(step).checked_mul(step).and_then(|us| us.checked_add(origin));
    out.timestamp(start.ok_or_else(|| field_range("timestamp out of range"))?)
}

/// A span of time by its ends, the lesser first; of two that are known only one is, `None` for the other.
type Span = (i64, Option<i64>);

/// `None`: neither end is known.
fn span(a: Option<i64>, b: Option<i64>) -> Option<Span> {
    match (a, b) {
        (Some(a), Some(b)) => Some((a.min(b), Some(a.max(b)))),
        (Some(one), None) | (None, Some(one)) => Some((one, None)),
        (None, None) => None,
    }
}

/// Whether two spans of time have an instant in common; `None`: the ends that are not known decide it.
fn have_common((s1, e1): Span, (s2, e2): Span) -> Option<bool> {
    // The one that starts first has to reach the other's start.
    let (later, later_end, first_end) = match s1.cmp(&s2) {
        std::cmp::Ordering::Greater => (s1, e1, e2?),
        std::cmp::Ordering::Less => (s2, e2, e1?),
        std::cmp::Ordering::Equal => return e1.and(e2).map(|_| true),
    };
    if later < first_end { Some(true) } else { later_end.map(|_| false) }
}

fn put_overlap(out: &mut Out, a: Option<Span>, b: Option<Span>) -> Result<(), SqlError> {
    match a.zip(b).and_then(|(a, b)| have_common(a, b)) {
        Some(common) => out.boolean(common),
        None => {
            out.null();
            Ok(())
        }
    }
}

fn time_or_null(a: &Args, i: usize) -> Option<i64> {
    (!a.is_null(i)).then(|| a.timestamp(i))
}

fn overlaps(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let of = |i: usize| span(time_or_null(a, i), time_or_null(a, i + 1));
    put_overlap(out, of(0), of(2))
}

fn overlaps_interval(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let of = |i: usize| -> Result<Option<Span>, SqlError> {
        let start = time_or_null(a, i);
        let end = match start.filter(|_| !a.is_null(i + 1)) {
            Some(start) => Some(super::datetime::shift(start, a.interval(i + 1), false)?),
            None => None,
        };
        Ok(span(start, end))
    };
    put_overlap(out, of(0)?, of(2)?)
}

fn conversions() -> Vec<Def> {
    vec![
        Def::new(
            "timezone",
            &[
                over(&[T::Text, TS], TZ, |a, out| {
                    out.timestamp(zone(a.text(0))?.instant(a.timestamp(1)))
                }),
                over(&[T::Text, TZ], TS, |a, out| {
                    out.timestamp(zone(a.text(0))?.local(a.timestamp(1)))
                }),
                over(&[T::Interval, TS], TZ, |a, out| {
                    let us = a.timestamp(1).checked_sub(offset_of(a.interval(0))?);
                    out.timestamp(us.ok_or_else(|| field_range("timestamp out of range"))?)
                }),
                over(&[T::Interval, TZ], TS, |a, out| {
                    let us = a.timestamp(1).checked_add(offset_of(a.interval(0))?);
                    out.timestamp(us.ok_or_else(|| field_range("timestamp out of range"))?)
                }),
            ],
        ),
        Def::new(
            "to_timestamp",
            &[
                over(&[T::Double], TZ, |a, out| match a.float(0) {
                    s if s.is_nan() => Err(field_range("timestamp cannot be NaN")),
                    s if s.abs() > 9e12 => {
                        Err(field_range(format!("timestamp out of range: \"{s}\"")))
                    }
                    // Counted from 2000, as PostgreSQL does: a float has more digits there.
                    s => {
                        let since = (s - EPOCH_2000_US as f64 / 1e6) * 1e6;
                        out.timestamp(since.round_ties_even() as i64 + EPOCH_2000_US)
                    }
                }),
                over(&[T::Text, T::Text], TZ, |a, out| {
                    out.timestamp(time_format::parse(a.text(0), a.text(1))?)
                }),
            ],
        ),
        Def::new(
            "to_date",
            &[over(&[T::Text, T::Text], T::Date, |a, out| {
                let us = time_format::parse(a.text(0), a.text(1))?;
                out.date(us.div_euclid(DAY_US) as i32)
            })],
        ),
        to_char(),
        Def::new(
            "to_number",
            &[over(&[T::Text, T::Text], NUM, |a, out| {
                out.numeric(number_format::parse(a.text(0), a.text(1))?)
            })],
        ),
    ]
}

fn to_char() -> Def {
    Def::new(
        "to_char",
        &[
            over(&[TZ, T::Text], T::Text, |a, out| {
                let t = time_format::Moment::of_timestamp(a.timestamp(0), true);
                out.text(&time_format::print(&t, a.text(1))?)
            }),
            over(&[TS, T::Text], T::Text, |a, out| {
                let t = time_format::Moment::of_timestamp(a.timestamp(0), false);
                out.text(&time_format::print(&t, a.text(1))?)
            }),
            over(&[T::Interval, T::Text], T::Text, |a, out| {
                let t = time_format::Moment::of_interval(a.interval(0));
                out.text(&time_format::print(&t, a.text(1))?)
            }),
            over(&[T::Int, T::Text], T::Text, |a, out| {
                let n = super::numeric::Num::new(a.int(0).into(), 0);
                out.text(&number_format::print(&n, a.text(1))?)
            }),
            over(&[T::BigInt, T::Text], T::Text, |a, out| {
                let n = super::numeric::Num::new(a.big(0).into(), 0);
                out.text(&number_format::print(&n, a.text(1))?)
            }),
            over(&[NUM, T::Text], T::Text, |a, out| {
                out.text(&number_format::print(&a.numeric(0), a.text(1))?)
            }),
            over(&[T::Real, T::Text], T::Text, |a, out| {
                out.text(&number_format::print_float(f64::from(a.real(0)), 6, a.text(1))?)
            }),
            over(&[T::Double, T::Text], T::Text, |a, out| {
                out.text(&number_format::print_float(a.float(0), 15, a.text(1))?)
            }),
        ],
    )
}

fn truncations() -> Vec<Def> {
    vec![
        Def::new(
            "date_trunc",
            &[
                over(&[T::Text, TS], TS, |a, out| {
                    let kind = "timestamp without time zone";
                    out.timestamp(truncate(a.text(0), a.timestamp(1), kind)?)
                }),
                over(&[T::Text, TZ], TZ, |a, out| {
                    let kind = "timestamp with time zone";
                    out.timestamp(truncate(a.text(0), a.timestamp(1), kind)?)
                }),
                over(&[T::Text, T::Interval], T::Interval, |a, out| {
                    out.interval(truncate_interval(a.text(0), a.interval(1))?)
                }),
                over(&[T::Text, TZ, T::Text], TZ, |a, out| {
                    out.timestamp(truncate_in(zone(a.text(2))?, a.text(0), a.timestamp(1))?)
                }),
            ],
        ),
        Def::new(
            "date_bin",
            &[
                over(&[T::Interval, TS, TS], TS, date_bin),
                over(&[T::Interval, TZ, TZ], TZ, date_bin),
            ],
        ),
    ]
}

pub fn defs() -> Vec<Def> {
    let mut all = conversions();
    all.extend(truncations());
    all.extend(ages());
    all.extend(constructors());
    all.extend([
        Def::new(
            "isfinite",
            &[
                over(&[T::Date], T::Boolean, |_, out| out.boolean(true)),
                over(&[TS], T::Boolean, |_, out| out.boolean(true)),
                over(&[TZ], T::Boolean, |_, out| out.boolean(true)),
                over(&[T::Interval], T::Boolean, |_, out| out.boolean(true)),
            ],
        ),
        Def::new(
            "clock_timestamp",
            &[over(&[], TZ, |_, out| out.timestamp(chrono::Utc::now().timestamp_micros()))],
        )
        .volatile(),
        Def::new(
            "overlaps",
            &[
                over(&[TS, TS, TS, TS], T::Boolean, overlaps),
                over(&[TZ, TZ, TZ, TZ], T::Boolean, overlaps),
                over(&[TS, T::Interval, TS, T::Interval], T::Boolean, overlaps_interval),
                over(&[TZ, T::Interval, TZ, T::Interval], T::Boolean, overlaps_interval),
            ],
        )
        .takes_nulls(),
        Def::new(
            "interval_span",
            &[over(&[T::Interval], T::Numeric(Some((38, 0))), |a, out| {
                out.numeric(super::numeric::Num::new(length_us(a.interval(0)), 0))
            })],
        ),
        Def::new(
            "round_seconds",
            &[
                over(&[TS, T::Int], TS, |a, out| {
                    out.timestamp(rounded(a.timestamp(0), a.int(1), EPOCH_2000_US))
                }),
                over(&[TZ, T::Int], TZ, |a, out| {
                    out.timestamp(rounded(a.timestamp(0), a.int(1), EPOCH_2000_US))
                }),
                over(&[T::Time, T::Int], T::Time, |a, out| {
                    out.time(rounded(a.time(0), a.int(1), 0))
                }),
                over(&[T::Interval, T::Int], T::Interval, |a, out| {
                    let i = a.interval(0);
                    let us = rounded(us_of(i), a.int(1), 0);
                    out.interval(interval(i.months.into(), i.days.into(), us)?)
                }),
            ],
        ),
    ]);
    all
}

/// The time between two times, and intervals in larger units.
fn ages() -> Vec<Def> {
    let age = |a: &Args, out: &mut Out| out.interval(age_of(a.timestamp(0), a.timestamp(1))?);
    vec![
        Def::new("age", &[over(&[TS, TS], T::Interval, age), over(&[TZ, TZ], T::Interval, age)]),
        Def::new(
            "justify_hours",
            &[over(&[T::Interval], T::Interval, |a, out| {
                justified(out, justify_hours(a.interval(0)))
            })],
        ),
        Def::new(
            "justify_days",
            &[over(&[T::Interval], T::Interval, |a, out| {
                justified(out, justify_days(a.interval(0)))
            })],
        ),
        Def::new(
            "justify_interval",
            &[over(&[T::Interval], T::Interval, |a, out| {
                justified(out, justify_interval(a.interval(0)))
            })],
        ),
    ]
}

/// Values put together of their fields.
fn constructors() -> Vec<Def> {
    vec![
        Def::new(
            "make_interval",
            &[
                over(&[], T::Interval, make_interval),
                over(&[T::Int], T::Interval, make_interval),
                over(&[T::Int; 2], T::Interval, make_interval),
                over(&[T::Int; 3], T::Interval, make_interval),
                over(&[T::Int; 4], T::Interval, make_interval),
                over(&[T::Int; 5], T::Interval, make_interval),
                over(&[T::Int; 6], T::Interval, make_interval),
                over(
                    &[T::Int, T::Int, T::Int, T::Int, T::Int, T::Int, T::Double],
                    T::Interval,
                    make_interval,
                ),
            ],
        ),
        Def::new(
            "make_date",
            &[over(&[T::Int, T::Int, T::Int], T::Date, |a, out| {
                out.date(civil(a.int(0), a.int(1), a.int(2))? as i32)
            })],
        ),
        Def::new(
            "make_time",
            &[over(&[T::Int, T::Int, T::Double], T::Time, |a, out| {
                out.time(clock(a.int(0), a.int(1), a.float(2))?)
            })],
        ),
        Def::new(
            "make_timestamp",
            &[over(&[T::Int, T::Int, T::Int, T::Int, T::Int, T::Double], TS, |a, out| {
                out.timestamp(make_timestamp(a)?)
            })],
        ),
        Def::new(
            "make_timestamptz",
            &[
                over(&[T::Int, T::Int, T::Int, T::Int, T::Int, T::Double], TZ, |a, out| {
                    out.timestamp(make_timestamp(a)?)
                }),
                over(
                    &[T::Int, T::Int, T::Int, T::Int, T::Int, T::Double, T::Text],
                    TZ,
                    |a, out| out.timestamp(zone_of_parts(a.text(6))?.instant(make_timestamp(a)?)),
                ),
            ],
        ),
    ]
}

#[cfg(test)]
mod tests;
