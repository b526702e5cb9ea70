use crate::testing::check;

#[test]
fn times_are_printed() {
    check(&[
        (
            "to_char('2024-02-29 13:04:05.678901'::timestamp, 'YYYY-MM-DD HH24:MI:SS.US')",
            "2024-02-29 13:04:05.678901",
        ),
        (
            "to_char('2024-02-29 13:04:05.678901'::timestamp, 'HH12:MI AM, FMHH:MI pm')",
            "01:04 PM, 1:04 pm",
        ),
        (
            "to_char('2024-02-29 13:04:05.678901'::timestamp, 'Day, FMDay, DY, dy')",
            "Thursday , Thursday, THU, thu",
        ),
        (
            "to_char('2024-02-29 13:04:05.678901'::timestamp, 'MONTH|FMMonth|Mon|mon|RM|FMrm')",
            "FEBRUARY |February|Feb|feb|II  |ii",
        ),
        (
            "to_char('2024-02-29 13:04:05.678901'::timestamp, 'DDD D ID W WW IW Q CC J')",
            "060 5 4 5 09 09 1 21 2460370",
        ),
        (
            "to_char('2024-02-29 13:04:05.678901'::timestamp, 'Y,YYY YYY YY Y IYYY IYY IY I')",
            "2,024 024 24 4 2024 024 24 4",
        ),
        (
            "to_char('2024-02-29 13:04:05.678901'::timestamp, 'MS US FF1 FF2 FF3 FF4 FF5 FF6 SSSS SSSSS')",
            "678 678901 6 67 678 6789 67890 678901 47045 47045",
        ),
        ("to_char('2024-02-29 13:04:05.678901'::timestamp, 'DDth DDTH FMDDth')", "29th 29TH 29th"),
        (
            "to_char('2024-02-29 13:04:05.678901'::timestamp, '\"Year:\" YYYY \"\\\"x\\\"\"')",
            "Year: 2024 \"x\"",
        ),
        ("to_char('2024-02-29 00:00'::timestamp, 'HH12 HH24 A.M.')", "12 00 A.M."),
        ("to_char('0044-03-15 BC'::timestamp, 'YYYY BC b.c.')", "0044 BC b.c."),
        (
            "to_char('2024-02-29 13:04:05+00'::timestamptz, 'TZ tz OF TZH:TZM')",
            "UTC utc +00 +00:00",
        ),
        ("to_char('2021-01-03'::timestamp, 'IYYY-IW-ID IDDD')", "2020-53-7 371"),
        ("to_char(NULL::timestamp, 'YYYY')", "NULL"),
        ("to_char('12345-01-02'::timestamp, 'YYYY-MM')", "12345-01"),
    ]);
}

#[test]
fn intervals_are_printed() {
    check(&[
        ("to_char('15h 2m 12s'::interval, 'HH24:MI:SS')", "15:02:12"),
        ("to_char('50 hours'::interval, 'HH24 HH12')", "50 02"),
        ("to_char('1 year 2 mons 3 days'::interval, 'YYYY MM DD')", "0001 02 03"),
        ("to_char('1 day'::interval, 'YYYY-\"x\"')", "0000-x"),
    ]);
}

#[test]
fn dates_are_read() {
    check(&[
        ("to_date('05 Dec 2000', 'DD Mon YYYY')", "2000-12-05"),
        ("to_date('2024-060', 'YYYY-DDD')", "2024-02-29"),
        ("to_date('20240229', 'YYYYMMDD')", "2024-02-29"),
        ("to_date('44-03-15 BC', 'YYYY-MM-DD BC')", "0044-03-15 BC"),
        ("to_date('2021-53-7', 'IYYY-IW-ID')", "2022-01-09"),
        ("to_date('February 29, 2024', 'FMMonth DD, YYYY')", "2024-02-29"),
        ("to_date('99', 'YY')", "1999-01-01"),
        ("to_date('69', 'YY')", "2069-01-01"),
        ("to_date('70', 'YY')", "1970-01-01"),
        ("to_date('2460370', 'J')", "2024-02-29"),
        ("to_date('2023-02-29', 'YYYY-MM-DD')", "error 22008"),
        ("to_date('2024-13-01', 'YYYY-MM-DD')", "error 22008"),
        ("to_date('2024-366', 'YYYY-DDD')", "2024-12-31"),
        ("to_date('xx', 'YYYY')", "error 22007"),
        ("to_date('2024-01-01', 'YYYY-IW-ID')", "error 22007"),
        ("to_date('Foo', 'Mon')", "error 22007"),
        ("to_date(NULL, 'YYYY')", "NULL"),
    ]);
}

#[test]
fn times_are_read() {
    check(&[
        (
            "to_timestamp('05 Dec 2000 13:14:15', 'DD Mon YYYY HH24:MI:SS')",
            "2000-12-05 13:14:15+00",
        ),
        ("to_timestamp('2000-12-05 1:14 PM', 'YYYY-MM-DD HH12:MI PM')", "2000-12-05 13:14:00+00"),
        ("to_timestamp('2000-12-05 12:00 AM', 'YYYY-MM-DD HH12:MI AM')", "2000-12-05 00:00:00+00"),
        (
            "to_timestamp('2000-12-05 01:02:03.4', 'YYYY-MM-DD HH24:MI:SS.MS')",
            "2000-12-05 01:02:03.4+00",
        ),
        (
            "to_timestamp('2000-12-05 01:02:03.000045', 'YYYY-MM-DD HH24:MI:SS.US')",
            "2000-12-05 01:02:03.000045+00",
        ),
        ("to_timestamp('2000-12-05 86399', 'YYYY-MM-DD SSSS')", "2000-12-05 23:59:59+00"),
        (
            "to_timestamp('2011-12-18 11:38 -05', 'YYYY-MM-DD HH12:MI TZH')",
            "2011-12-18 16:38:00+00",
        ),
        (
            "to_timestamp('2011-12-18 11:38 +05:20', 'YYYY-MM-DD HH12:MI TZH:TZM')",
            "2011-12-18 06:18:00+00",
        ),
        ("to_timestamp('2000JUN', 'YYYYMON')", "2000-06-01 00:00:00+00"),
        ("to_timestamp('2000    JUN', 'YYYY MON')", "2000-06-01 00:00:00+00"),
        ("to_timestamp('15 \"text\" 2000', 'DD \"text\" YYYY')", "error 22007"),
        ("to_timestamp('25', 'HH24')", "error 22008"),
        ("to_timestamp('13', 'HH12')", "error 22007"),
        ("to_timestamp('10:61', 'HH24:MI')", "error 22008"),
        ("to_timestamp('1', 'OF')", "error 0A000"),
    ]);
}
