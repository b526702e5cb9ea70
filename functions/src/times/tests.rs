use crate::testing::check;

#[test]
fn truncations() {
    check(&[
        ("date_trunc('hour', '2024-02-29 13:14:15.678'::timestamp)", "2024-02-29 13:00:00"),
        ("date_trunc('week', '2024-02-29 13:14'::timestamp)", "2024-02-26 00:00:00"),
        ("date_trunc('quarter', '2024-05-31'::timestamp)", "2024-04-01 00:00:00"),
        ("date_trunc('decade', '1999-12-31'::timestamp)", "1990-01-01 00:00:00"),
        ("date_trunc('century', '2000-12-31'::timestamp)", "1901-01-01 00:00:00"),
        ("date_trunc('millennium', '2000-12-31'::timestamp)", "1001-01-01 00:00:00"),
        (
            "date_trunc('milliseconds', '2024-02-29 13:14:15.678901'::timestamp)",
            "2024-02-29 13:14:15.678",
        ),
        ("date_trunc('day', '1969-12-31 23:59'::timestamp)", "1969-12-31 00:00:00"),
        ("date_trunc('year', '0044-03-15 BC'::timestamp)", "0044-01-01 00:00:00 BC"),
        ("date_trunc('month', '2024-02-29'::date)", "2024-02-01 00:00:00+00"),
        (
            "date_trunc('day', '2024-02-29 23:30+00'::timestamptz, 'Europe/Berlin')",
            "2024-02-29 23:00:00+00",
        ),
        ("date_trunc('month', '1 year 14 mons 3 days'::interval)", "2 years 2 mons"),
        ("date_trunc('hour', '-1 day -01:30'::interval)", "-1 days -01:00:00"),
        ("date_trunc('week', '10 days'::interval)", "error 0A000"),
        ("date_trunc('fortnight', '2024-02-29'::timestamp)", "error 22023"),
        ("date_trunc(NULL, '2024-02-29'::timestamp)", "NULL"),
        (
            "date_bin('15 minutes'::interval, '2020-02-11 15:44:17'::timestamp, '2001-01-01'::timestamp)",
            "2020-02-11 15:30:00",
        ),
        (
            "date_bin('15 minutes'::interval, '1990-02-11 15:44:17'::timestamp, '2001-01-01 00:02:30'::timestamp)",
            "1990-02-11 15:32:30",
        ),
        (
            "date_bin('1 mon'::interval, '2020-02-11'::timestamp, '2001-01-01'::timestamp)",
            "error 0A000",
        ),
        (
            "date_bin('0'::interval, '2020-02-11'::timestamp, '2001-01-01'::timestamp)",
            "error 22008",
        ),
        (
            "date_bin('-1 day'::interval, '2020-02-11'::timestamp, '2001-01-01'::timestamp)",
            "error 22008",
        ),
    ]);
}

#[test]
fn ages() {
    check(&[
        ("age('2001-04-10'::timestamp, '1957-06-13'::timestamp)", "43 years 9 mons 27 days"),
        ("age('1957-06-13'::timestamp, '2001-04-10'::timestamp)", "-43 years -9 mons -27 days"),
        ("age('2024-03-31'::timestamp, '2024-02-29'::timestamp)", "1 mon 2 days"),
        ("age('2024-02-29 01:00'::timestamp, '2024-02-28 02:00'::timestamp)", "23:00:00"),
        ("age('2024-01-01'::timestamptz, '2024-01-01'::timestamptz)", "00:00:00"),
        ("age('2023-03-01'::timestamp, '2023-01-31'::timestamp)", "1 mon 1 day"),
    ]);
}

#[test]
fn intervals_in_larger_units() {
    check(&[
        ("justify_hours('27 hours'::interval)", "1 day 03:00:00"),
        ("justify_days('35 days'::interval)", "1 mon 5 days"),
        ("justify_interval('1 mon -1 hour'::interval)", "29 days 23:00:00"),
        ("justify_interval('-1 mon 1 hour'::interval)", "-29 days -23:00:00"),
        ("justify_hours('-27 hours'::interval)", "-1 days -03:00:00"),
        ("justify_days('-35 days'::interval)", "-1 mons -5 days"),
        ("justify_days('2147483647 days 1 mon'::interval)", "5965232 years 5 mons 7 days"),
    ]);
}

#[test]
fn constructors() {
    check(&[
        ("make_date(2024, 2, 29)", "2024-02-29"),
        ("make_date(2023, 2, 29)", "error 22008"),
        ("make_date(-44, 3, 15)", "0044-03-15 BC"),
        ("make_date(0, 1, 1)", "error 22008"),
        ("make_time(8, 15, 23.5)", "08:15:23.5"),
        ("make_time(24, 0, 0)", "24:00:00"),
        ("make_time(24, 0, 1)", "error 22008"),
        ("make_time(8, 60, 0)", "error 22008"),
        ("make_timestamp(2024, 2, 29, 8, 15, 23.5)", "2024-02-29 08:15:23.5"),
        ("make_timestamp(2024, 2, 30, 0, 0, 0)", "error 22008"),
        ("make_timestamptz(2024, 7, 1, 12, 0, 0, 'Europe/Berlin')", "2024-07-01 10:00:00+00"),
        ("make_timestamptz(2024, 7, 1, 12, 0, 0, 'Nowhere/Land')", "error 22023"),
        ("make_interval(1, 2, 3, 4, 5, 6, 7.5)", "1 year 2 mons 25 days 05:06:07.5"),
        ("to_timestamp('1284352323.25'::float8)", "2010-09-13 04:32:03.25+00"),
        ("to_timestamp('-0.5'::float8)", "1969-12-31 23:59:59.5+00"),
        ("to_timestamp('1e20'::float8)", "error 22008"),
        ("to_timestamp('NaN'::float8)", "error 22008"),
    ]);
}

#[test]
fn overlaps() {
    check(&[
        (
            "overlaps('2001-02-16'::timestamp, '2001-12-21'::timestamp, '2001-10-30'::timestamp, '2002-10-30'::timestamp)",
            "true",
        ),
        (
            "overlaps('2001-02-16'::timestamp, '2001-03-01'::timestamp, '2001-03-01'::timestamp, '2001-04-01'::timestamp)",
            "false",
        ),
        (
            "overlaps('2001-03-01'::timestamp, '2001-02-01'::timestamp, '2001-02-15'::timestamp, '2001-02-15'::timestamp)",
            "true",
        ),
        (
            "overlaps('2001-03-01'::timestamp, '2001-03-01'::timestamp, '2001-03-01'::timestamp, '2001-03-01'::timestamp)",
            "true",
        ),
        (
            "overlaps('2001-02-16'::timestamp, NULL::timestamp, '2001-02-10'::timestamp, '2001-02-20'::timestamp)",
            "true",
        ),
        (
            "overlaps('2001-02-16'::timestamp, NULL::timestamp, '2001-02-10'::timestamp, '2001-02-12'::timestamp)",
            "NULL",
        ),
        (
            "overlaps('2001-02-16'::timestamp, '10 days'::interval, '2001-02-20'::timestamp, '-1 day'::interval)",
            "true",
        ),
    ]);
}

#[test]
fn time_zones() {
    check(&[
        ("timezone('Europe/Berlin', '2024-07-01 12:00'::timestamp)", "2024-07-01 10:00:00+00"),
        ("timezone('Europe/Berlin', '2024-07-01 12:00+00'::timestamptz)", "2024-07-01 14:00:00"),
        ("timezone('UTC', '2024-07-01 12:00'::timestamp)", "2024-07-01 12:00:00+00"),
        ("timezone('+03', '2024-07-01 12:00+00'::timestamptz)", "2024-07-01 09:00:00"),
        (
            "timezone('2 hours'::interval, '2024-07-01 12:00+00'::timestamptz)",
            "2024-07-01 14:00:00",
        ),
        ("timezone('1 mon'::interval, '2024-07-01 12:00+00'::timestamptz)", "error 22023"),
        ("timezone('Mars/Base', '2024-07-01 12:00'::timestamp)", "error 22023"),
        ("isfinite('2024-01-01'::date)", "true"),
        ("isfinite('1 day'::interval)", "true"),
        ("isfinite(NULL::timestamp)", "NULL"),
    ]);
}

#[test]
fn lengths_of_intervals() {
    check(&[
        // Microseconds of months of 30 days, by which intervals are compared.
        ("interval_span('1 mon 1 day 00:00:01'::interval)", "2678401000000"),
        ("interval_span('-00:00:00.000001'::interval)", "-1"),
    ]);
}
