use crate::testing::check;

#[test]
fn integers() {
    check(&[
        ("'32768'::int4::int2", "error 22003"),
        ("'-32768'::int4::int2", "-32768"),
        ("'2147483648'::int8::int4", "error 22003"),
        ("1::bool", "true"),
        ("0::bool", "false"),
        ("true::int4", "1"),
        ("5::text", "5"),
        ("7::numeric", "7"),
        ("7::numeric(3,2)", "7.00"),
        ("70::numeric(3,2)", "error 22003"),
        ("'9007199254740993'::int8::float8", "9.007199254740992e+15"),
        ("16777217::float4", "1.6777216e+07"),
    ]);
}

#[test]
fn numerics() {
    check(&[
        ("1.5::int4", "2"),
        ("2.5::int4", "3"),
        ("-2.5::int4", "-3"),
        ("'2147483647.5'::numeric::int4", "error 22003"),
        ("'-9223372036854775808.4'::numeric::int8", "-9223372036854775808"),
        ("'9223372036854775807.5'::numeric::int8", "error 22003"),
        ("1.005::numeric(4,2)", "1.01"),
        ("-1.005::numeric(4,2)", "-1.01"),
        ("99.999::numeric(4,2)", "error 22003"),
        ("1234::numeric(2,0)", "error 22003"),
        ("0.1::float8", "0.1"),
        ("1.50::text", "1.50"),
    ]);
}

#[test]
fn floats() {
    check(&[
        ("'2.5'::float8::int4", "2"),
        ("'3.5'::float8::int4", "4"),
        ("'-2.5'::float8::int4", "-2"),
        ("'2147483647.5'::float8::int4", "error 22003"),
        ("'NaN'::float8::int4", "error 22003"),
        ("'Infinity'::float8::int8", "error 22003"),
        ("'9.3e18'::float8::int8", "error 22003"),
        ("'1e40'::float8::float4", "error 22003"),
        ("'0.1'::float8::float4", "0.1"),
        ("'0.1'::float4::float8", "0.10000000149011612"),
        ("'0.1'::float8::numeric", "0.1"),
        ("'0.1'::float4::numeric", "0.1"),
        ("'1e-5'::float8::text", "1e-05"),
        ("'123456789.123456789'::float8::numeric", "123456789.123457"),
        ("'-0'::float8::text", "-0"),
        ("'1e300'::float8::numeric", "error 22003"),
    ]);
}

#[test]
fn texts_are_read() {
    check(&[
        ("' 12 '::int4", "12"),
        ("'12abc'::int4", "error 22P02"),
        ("''::int4", "error 22P02"),
        ("'+5'::int2", "5"),
        ("'32768'::int2", "error 22003"),
        ("'1.5'::int4", "error 22P02"),
        ("'-9223372036854775808'::int8", "-9223372036854775808"),
        ("'t'::bool", "true"),
        ("' YES '::bool", "true"),
        ("'of'::bool", "false"),
        ("'o'::bool", "error 22P02"),
        ("'1'::bool", "true"),
        ("'2'::bool", "error 22P02"),
        ("'1e3'::numeric", "1000"),
        ("'.5'::numeric", "0.5"),
        ("'5.'::numeric", "5"),
        ("'1e'::numeric", "error 22P02"),
        ("'infinity'::float8", "Infinity"),
        ("'-inf'::float4", "-Infinity"),
        ("'nan'::float8", "NaN"),
        ("'1e400'::float8", "error 22003"),
        ("'1e-400'::float8", "error 22003"),
        ("'1e39'::float4", "error 22003"),
        ("'0x10'::int4", "error 22P02"),
    ]);
}

#[test]
fn texts_are_cut_or_refused() {
    check(&[
        ("'abc'::varchar(2)", "ab"),
        ("'ab '::varchar(2)", "ab"),
        ("'abc'::text::varchar(2)", "ab"),
        ("'größe'::text::varchar(3)", "grö"),
        ("12345::varchar(3)", "123"),
        ("'abc'::char(5)", "abc"),
        ("'abcdef'::text::char(3)", "abc"),
        ("'abcdef'::char(3)", "abc"),
        ("true::text", "true"),
        ("NULL::varchar(2)", "NULL"),
    ]);
}

#[test]
fn bytes() {
    check(&[
        ("'\\x00fF'::bytea", "\\x00ff"),
        ("'\\x0'::bytea", "error 22023"),
        ("'a\\\\b\\001'::bytea", "\\x615c6201"),
        ("'a\\9'::bytea", "error 22P02"),
        ("'ä'::bytea", "\\xc3a4"),
        ("'\\x 01 02'::bytea", "\\x0102"),
        ("'\\x00ff'::bytea::text", "\\x00ff"),
    ]);
}

#[test]
fn dates_and_times() {
    check(&[
        ("'2024-02-29'::date", "2024-02-29"),
        ("'2023-02-29'::date", "error 22008"),
        ("'20240229'::date", "2024-02-29"),
        ("'2024/2/9'::date", "2024-02-09"),
        ("'0044-03-15 BC'::date", "0044-03-15 BC"),
        ("'2024-02-29 13:14:15.123456789'::timestamp", "2024-02-29 13:14:15.123457"),
        ("'2024-02-29T13:14:15Z'::timestamptz", "2024-02-29 13:14:15+00"),
        ("'2024-02-29 13:14+05:30'::timestamptz", "2024-02-29 07:44:00+00"),
        ("'2024-02-29 13:14+05:30'::timestamp", "2024-02-29 13:14:00"),
        ("'2024-02-29 24:00'::timestamp", "2024-03-01 00:00:00"),
        ("'2024-02-29 25:00'::timestamp", "error 22008"),
        ("'2024-13-01'::date", "error 22008"),
        ("'epoch'::timestamp", "1970-01-01 00:00:00"),
        ("'24:00:00'::time", "24:00:00"),
        ("'23:59:60'::time", "24:00:00"),
        ("'23:60'::time", "error 22008"),
        ("'1:02'::time", "01:02:00"),
        ("'04:05:06 PM'::time", "16:05:06"),
        ("'2024-02-29 13:14:15'::timestamp::date", "2024-02-29"),
        ("'1969-12-31 23:59:59'::timestamp::date", "1969-12-31"),
        ("'1969-12-31 23:59:59'::timestamp::time", "23:59:59"),
        ("'2024-02-29'::date::timestamp", "2024-02-29 00:00:00"),
        ("'2024-02-29 13:14'::timestamp::timestamptz", "2024-02-29 13:14:00+00"),
        ("'2024-02-29 13:14+02'::timestamptz::date", "2024-02-29"),
        ("'13:14'::time::interval", "13:14:00"),
        ("'50:00:00.5'::interval::time", "02:00:00.5"),
        ("'-01:00'::interval::time", "23:00:00"),
    ]);
}

#[test]
fn intervals() {
    check(&[
        ("'1 year 2 mons -3 days 04:05:06.789'::interval", "1 year 2 mons -3 days +04:05:06.789"),
        ("'P1Y2M3DT4H5M6.5S'::interval", "1 year 2 mons 3 days 04:05:06.5"),
        ("'1-2'::interval", "1 year 2 mons"),
        ("'3 4:05'::interval", "3 days 04:05:00"),
        ("'-1.5 days'::interval", "-1 days -12:00:00"),
        ("'1.5 months'::interval", "1 mon 15 days"),
        ("'2 weeks ago'::interval", "-14 days"),
        ("'abc'::interval", "error 22007"),
        ("'@ 1 minute'::interval", "00:01:00"),
        ("'0.5'::interval", "00:00:00.5"),
    ]);
}

#[test]
fn uuids_and_documents() {
    check(&[
        ("'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'::uuid", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
        ("'{a0eebc999c0b4ef8bb6d6bb9bd380a11}'::uuid", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
        ("'a0eebc99'::uuid", "error 22P02"),
        ("'1.5'::jsonb::int4", "2"),
        ("'1.5'::jsonb::numeric", "1.5"),
        ("'true'::jsonb::bool", "true"),
        ("'\"1\"'::jsonb::int4", "error 22023"),
        ("'1'::jsonb::bool", "error 22023"),
        ("'null'::jsonb::int4", "error 22023"),
        ("'{\"b\": 1, \"a\": 2}'::jsonb::text", "{\"a\": 2, \"b\": 1}"),
        ("'{'::jsonb", "error 22P02"),
    ]);
}

#[test]
fn arrays() {
    check(&[
        ("'{1,2,NULL}'::int4[]", "{1,2,NULL}"),
        ("'{ 1 , \"2\" }'::int4[]", "{1,2}"),
        (
            "'{a,\"b,c\",\"d\\\"e\",null,\"null\",\"\"}'::text[]",
            "{a,\"b,c\",\"d\\\"e\",NULL,\"null\",\"\"}",
        ),
        ("'{1,2'::int4[]", "error 22P02"),
        ("'{1,x}'::int4[]", "error 22P02"),
        ("'{}'::text[]", "{}"),
        ("'{1.5,2.5}'::numeric[]::int4[]", "{2,3}"),
        ("'{1,2}'::int4[]::text[]", "{1,2}"),
        ("'{1,2}'::int4[]::text", "{1,2}"),
        ("'{abc,de}'::varchar(2)[]", "{ab,de}"),
        ("'1'::int4[]", "error 22P02"),
        ("'{1,99999}'::int4[]::int2[]", "error 22003"),
    ]);
}

#[test]
fn casts_that_do_not_exist() {
    check(&[
        ("1::date", "error 42846"),
        ("true::int8", "error 42846"),
        ("true::float8", "error 42846"),
        ("'2024-01-01'::date::int4", "error 42846"),
        ("1.5::bool", "error 42846"),
        ("'\\x01'::bytea::int4", "error 42846"),
        ("'1 day'::interval::int4", "error 42846"),
        ("'01:00'::time::timestamp", "error 42846"),
        ("'{1}'::int4[]::int4", "error 42846"),
        ("'1'::jsonb::date", "error 42846"),
    ]);
}
