use crate::testing::check;

#[test]
fn overloads_are_chosen_by_types() {
    check(&[
        // The exact type, then implicit casts to it.
        ("length('\\x00ff00'::bytea)", "3"),
        ("length('größe'::text)", "5"),
        ("round('2.5'::float8)", "2"),
        ("round('2.5'::numeric)", "3"),
        ("round('2.5'::float4)", "2"),
        ("round(5)", "5"),
        ("to_hex('10'::int8)", "a"),
        ("gcd('12'::int2, '18'::int8)", "6"),
        ("gcd(12, 18.0)", "6.0"),
        ("sqrt('16'::int8)", "4"),
        ("substr('abc'::varchar(3), 2)", "bc"),
        ("date_trunc('day', '2024-02-29'::date)", "2024-02-29 00:00:00+00"),
    ]);
}

#[test]
fn literals_of_unknown_type() {
    check(&[
        ("length('größe')", "5"),
        ("round('2.5')", "2"),
        ("round('2.5', 1)", "2.5"),
        ("gcd('12', 18)", "6"),
        ("sqrt('16')", "4"),
        ("length(NULL)", "NULL"),
    ]);
}

#[test]
fn calls_that_no_overload_fits() {
    check(&[
        ("length(true)", "error 42883"),
        ("length()", "error 42883"),
        ("length('a'::text, 'b'::text, 'c'::text, 'd'::text)", "error 42883"),
        ("round('2.5'::float8, 1)", "error 42883"),
        ("substr(5, 1)", "error 42883"),
        ("upper(1)", "error 42883"),
        ("initcap('2024-01-01'::date)", "error 42883"),
        ("gcd('1'::float8, '2'::float8)", "error 42883"),
        ("to_hex(1.5)", "error 42883"),
        ("factorial(1.5)", "error 42883"),
        ("nosuchfunction(1)", "error 42883"),
    ]);
}

#[test]
fn functions_that_are_refused_by_name() {
    check(&[("regexp_matches('a', 'a')", "error 0A000"), ("to_ascii(5)", "error 0A000")]);
}

#[test]
fn arguments_of_any_type() {
    check(&[
        ("concat(1, 'a', true, NULL, '2024-02-29'::date)", "1at2024-02-29"),
        ("concat('{1,NULL}'::int4[], '1 day'::interval, '\\x01'::bytea)", "{1,NULL}1 day\\x01"),
        ("num_nulls(1, NULL, '2024-02-29'::date)", "1"),
        ("quote_literal('2024-02-29'::date)", "'2024-02-29'"),
        ("jsonb_build_array(1.50, 'a', '2024-02-29'::date)", "[1.50, \"a\", \"2024-02-29\"]"),
    ]);
}

#[test]
fn a_null_makes_a_strict_call_null() {
    check(&[
        ("upper(NULL::text)", "NULL"),
        ("round(NULL::numeric, 2)", "NULL"),
        ("substr('abc', NULL::int4)", "NULL"),
        ("concat(NULL, 'a')", "a"),
        ("num_nulls(NULL::int4)", "1"),
    ]);
}
