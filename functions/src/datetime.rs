//! Arithmetic of dates, times and intervals.

use std::sync::Arc;

use arrow::array::*;
use arrow::datatypes::*;
use datafusion::common::Result;
use millrace_common::encoding::datetime_text::in_calendar;
use millrace_common::{SqlError, SqlState};

use super::arith::ArithOp;
use super::kernels::{Loaded, map2};
use super::text::{civil_from_days, days_from_civil, days_in_month};
use crate::error::{division_by_zero, external};

const DAY_US: i64 = 86_400_000_000;
/// 4714-11-24 BC, where PostgreSQL's calendar begins.
const FIRST_TIMESTAMP: i64 = -2_440_588 * DAY_US;

type Interval = IntervalMonthDayNano;
type Iv = IntervalMonthDayNanoType;
type Ts = TimestampMicrosecondType;
type Tm = Time64MicrosecondType;

fn timestamp_range() -> SqlError {
    SqlError::new(SqlState::DATETIME_FIELD_OVERFLOW, "timestamp out of range")
}

fn date_range() -> SqlError {
    SqlError::new(SqlState::DATETIME_FIELD_OVERFLOW, "date out of range")
}

fn interval_range() -> SqlError {
    SqlError::new(SqlState::DATETIME_FIELD_OVERFLOW, "interval out of range")
}

pub fn binary(
    op: ArithOp,
    l: &Loaded,
    r: &Loaded,
    lt: &DataType,
    rt: &DataType,
    output: &DataType,
) -> Result<ArrayRef> {
    use DataType as D;
    let negative = op == ArithOp::Sub;
    let with_zone =
        |a: TimestampMicrosecondArray| -> ArrayRef { Arc::new(a.with_data_type(output.clone())) };
    Ok(match (lt, rt) {
        (D::Date32, D::Int32) => {
            Arc::new(map2::<Date32Type, Int32Type, Date32Type>(l, r, |d, n| {
                add_days(d, n, negative)
            })?)
        }
        (D::Int32, D::Date32) => {
            Arc::new(map2::<Int32Type, Date32Type, Date32Type>(l, r, |n, d| add_days(d, n, false))?)
        }
        (D::Date32, D::Date32) => {
            let difference = |a: i32, b: i32| a.checked_sub(b).ok_or_else(date_range);
            Arc::new(map2::<Date32Type, Date32Type, Int32Type>(l, r, difference)?)
        }
        (D::Timestamp(_, _), D::Interval(_)) => {
            with_zone(map2::<Ts, Iv, Ts>(l, r, |t, i| shift(t, i, negative))?)
        }
        (D::Interval(_), D::Timestamp(_, _)) => {
            with_zone(map2::<Iv, Ts, Ts>(l, r, |i, t| shift(t, i, false))?)
        }
        (D::Timestamp(_, _), D::Time64(_)) => with_zone(map2::<Ts, Tm, Ts>(l, r, add_time)?),
        (D::Time64(_), D::Timestamp(_, _)) => {
            with_zone(map2::<Tm, Ts, Ts>(l, r, |us, t| add_time(t, us))?)
        }
        (D::Timestamp(_, _), D::Timestamp(_, _)) => Arc::new(map2::<Ts, Ts, Iv>(l, r, |a, b| {
            let us = a.checked_sub(b).ok_or_else(interval_range)?;
            interval(0, us / DAY_US, us % DAY_US)
        })?),
        (D::Time64(_), D::Time64(_)) => {
            Arc::new(map2::<Tm, Tm, Iv>(l, r, |a, b| interval(0, 0, a - b))?)
        }
        (D::Time64(_), D::Interval(_)) => {
            Arc::new(map2::<Tm, Iv, Tm>(l, r, |t, i| Ok(shift_time(t, i, negative)))?)
        }
        (D::Interval(_), D::Time64(_)) => {
            Arc::new(map2::<Iv, Tm, Tm>(l, r, |i, t| Ok(shift_time(t, i, false)))?)
        }
        (D::Interval(_), D::Interval(_)) => {
            Arc::new(map2::<Iv, Iv, Iv>(l, r, |a, b| combine(a, b, negative))?)
        }
        (D::Interval(_), D::Float64) => {
            let divide = op == ArithOp::Div;
            Arc::new(map2::<Iv, Float64Type, Iv>(l, r, |i, f| scale(i, f, divide))?)
        }
        (D::Float64, D::Interval(_)) => {
            Arc::new(map2::<Float64Type, Iv, Iv>(l, r, |f, i| scale(i, f, false))?)
        }
        _ => {
            let message = format!("operator {} of {lt} and {rt}", op.symbol());
            return Err(external(SqlError::internal(message)));
        }
    })
}

fn add_days(date: i32, days: i32, negative: bool) -> Result<i32, SqlError> {
    let sum = if negative { date.checked_sub(days) } else { date.checked_add(days) };
    sum.filter(|days| in_calendar(i64::from(*days))).ok_or_else(date_range)
}

fn add_time(t: i64, us: i64) -> Result<i64, SqlError> {
    t.checked_add(us).ok_or_else(timestamp_range)
}

/// A timestamp and an interval: months first (clamped to the month's last day), then days, then time.
pub fn shift(t: i64, i: Interval, negative: bool) -> Result<i64, SqlError> {
    let sign = if negative { -1 } else { 1 };
    let (mut days, us) = (t.div_euclid(DAY_US), t.rem_euclid(DAY_US));
    if i.months != 0 {
        let (year, month, day) = civil_from_days(days);
        let months = year * 12 + i64::from(month) - 1 + sign * i64::from(i.months);
        let (year, month) = (months.div_euclid(12), months.rem_euclid(12) as u32 + 1);
        days = days_from_civil(year, month, day.min(days_in_month(year, month)));
    }
    days += sign * i64::from(i.days);
    days.checked_mul(DAY_US)
        .and_then(|d| d.checked_add(us))
        .and_then(|t| t.checked_add(sign * (i.nanoseconds / 1000)))
        .filter(|t| *t >= FIRST_TIMESTAMP)
        .ok_or_else(timestamp_range)
}

fn shift_time(t: i64, i: Interval, negative: bool) -> i64 {
    let us = i.nanoseconds / 1000;
    (if negative { t - us } else { t + us }).rem_euclid(DAY_US)
}

/// An interval of months, days and microseconds.
pub fn interval(months: i64, days: i64, us: i64) -> Result<Interval, SqlError> {
    match (i32::try_from(months), i32::try_from(days), us.checked_mul(1000)) {
        (Ok(m), Ok(d), Some(ns)) => Ok(Interval::new(m, d, ns)),
        _ => Err(interval_range()),
    }
}

fn combine(a: Interval, b: Interval, negative: bool) -> Result<Interval, SqlError> {
    let sign = if negative { -1 } else { 1 };
    interval(
        i64::from(a.months) + sign * i64::from(b.months),
        i64::from(a.days) + sign * i64::from(b.days),
        a.nanoseconds / 1000 + sign * (b.nanoseconds / 1000),
    )
}

pub fn negate_interval(i: Interval) -> Result<Interval, SqlError> {
    combine(Interval::new(0, 0, 0), i, true)
}

/// An interval times (or over) a number: fractions of months go to days, of days to time.
pub fn scale(i: Interval, by: f64, divide: bool) -> Result<Interval, SqlError> {
    if divide && by == 0.0 {
        return Err(division_by_zero());
    }
    let apply = |v: f64| if divide { v / by } else { v * by };
    let months = apply(f64::from(i.months));
    let days = apply(f64::from(i.days));
    // Guard against results like 2.9999999996 days, as PostgreSQL does.
    let tidy = |v: f64| (v * 1e6).round_ties_even() / 1e6;
    let month_days = tidy((months - months.trunc()) * 30.0);
    let mut day_us = tidy((days - days.trunc() + month_days - month_days.trunc()) * 86_400.0) * 1e6;
    let mut whole = days.trunc() + month_days.trunc();
    if day_us.abs() >= DAY_US as f64 {
        let extra = (day_us / DAY_US as f64).trunc();
        whole += extra;
        day_us -= extra * DAY_US as f64;
    }
    let us = (apply((i.nanoseconds / 1000) as f64) + day_us).round_ties_even();
    let bounded = |v: f64| v.is_finite() && v.abs() < 9e18;
    if !bounded(months) || !bounded(whole) || !bounded(us) {
        return Err(interval_range());
    }
    interval(months.trunc() as i64, whole as i64, us as i64)
}

#[cfg(test)]
mod tests {
    use crate::testing::check;

    #[test]
    fn dates_and_days() {
        check(&[
            ("'2024-02-28'::date + 2", "2024-03-01"),
            ("2 + '2023-02-28'::date", "2023-03-02"),
            ("'2024-03-01'::date - 1", "2024-02-29"),
            ("'2024-03-01'::date - '2024-02-01'::date", "29"),
            ("'2024-02-28'::date + NULL::int4", "NULL"),
            ("'2024-02-28'::date - '2024-02-29'", "-1"),
            ("'4714-11-24 BC'::date - 1", "error 22008"),
            ("'2024-01-01'::date + 2147483647", "error 22008"),
            ("'0001-01-01'::date - 1", "0001-12-31 BC"),
        ]);
    }

    #[test]
    fn months_end_at_their_last_day() {
        check(&[
            ("'2024-01-31'::date + '1 mon'::interval", "2024-02-29 00:00:00"),
            ("'2024-03-31'::timestamp - '1 mon'::interval", "2024-02-29 00:00:00"),
            ("'2023-01-31 10:00'::timestamp + '1 mon 1 day'::interval", "2023-03-01 10:00:00"),
            ("'2024-02-29'::timestamp + '1 year'::interval", "2025-02-28 00:00:00"),
            ("'2024-02-29'::timestamptz - '4 years'::interval", "2020-02-29 00:00:00+00"),
            (
                "'1 mon'::interval + '2024-05-31 01:02:03.000004'::timestamp",
                "2024-06-30 01:02:03.000004",
            ),
            ("'0001-01-01'::timestamp - '1 day'::interval", "0001-12-31 00:00:00 BC"),
        ]);
    }

    #[test]
    fn timestamps_and_times() {
        check(&[
            ("'2024-01-01'::date + '23:59:59.5'::time", "2024-01-01 23:59:59.5"),
            ("'01:30'::time + '2024-01-01 23:00'::timestamp", "2024-01-02 00:30:00"),
            ("'2024-01-02 01:00'::timestamp - '2024-01-01 02:00'::timestamp", "23:00:00"),
            ("'2024-01-01 02:00'::timestamp - '2024-01-03 03:00'::timestamp", "-2 days -01:00:00"),
            ("'2024-01-01 02:00'::timestamp - '2023-12-31'::date", "1 day 02:00:00"),
            ("'2024-01-01 02:00'::timestamptz - '2024-01-01'::timestamp", "02:00:00"),
            ("'2024-01-01'::timestamp + '1 day'", "2024-01-02 00:00:00"),
            ("'23:00'::time + '2 hours'::interval", "01:00:00"),
            ("'01:00'::time - '2 hours'::interval", "23:00:00"),
            ("'01:00'::time - '26 hours'::interval", "23:00:00"),
            ("'2 days 01:00'::interval + '23:30'::time", "00:30:00"),
            ("'01:00'::time - '02:30'::time", "-01:30:00"),
            ("'4713-01-01 BC'::timestamp - '2 years'::interval", "error 22008"),
            ("NULL::timestamp - '2024-01-01'::timestamp", "NULL"),
        ]);
    }

    #[test]
    fn intervals_add_part_by_part() {
        check(&[
            ("'1 mon 2 days 03:00'::interval + '-1 mon 1 day 21:00'::interval", "3 days 24:00:00"),
            ("'1 day'::interval - '24:00'::interval", "1 day -24:00:00"),
            ("'2147483647 days'::interval + '1 day'::interval", "error 22008"),
            ("'1 mon'::interval - NULL::interval", "NULL"),
        ]);
    }

    #[test]
    fn fractions_of_intervals_go_to_smaller_parts() {
        check(&[
            ("'1 mon'::interval * 0.5", "15 days"),
            ("'1 mon 1 day'::interval * 1.5", "1 mon 16 days 12:00:00"),
            ("'1 year'::interval / 7", "1 mon 21 days 10:17:08.5344"),
            ("'1 day'::interval / 3", "08:00:00"),
            ("'1 day'::interval * '-0.5'::float8", "-12:00:00"),
            ("2 * '1 day 01:00'::interval", "2 days 02:00:00"),
            ("'1 mon 15 days 12:00'::interval / 0.25", "4 mons 60 days 48:00:00"),
            ("'1 mon'::interval * '2.9999999996'::float8", "2 mons 30 days"),
            ("'1 day'::interval / 0", "error 22012"),
            ("'1 day'::interval * '1e300'::float8", "error 22008"),
            ("'1 day'::interval * 'NaN'::float8", "error 22008"),
            ("'2147483647 mons'::interval * 2", "error 22008"),
        ]);
    }
}
