use crate::testing::check;

#[test]
fn roots_powers_and_logarithms() {
    check(&[
        ("sqrt('2'::float8)", "1.4142135623730951"),
        ("sqrt('-1'::float8)", "error 2201F"),
        ("sqrt(-1)", "error 2201F"),
        ("exp('710'::float8)", "error 22003"),
        ("exp('-750'::float8)", "error 22003"),
        ("ln('0'::float8)", "error 2201E"),
        ("ln('-1'::float8)", "error 2201E"),
        ("ln('Infinity'::float8)", "Infinity"),
        ("log('100'::float8)", "2"),
        ("log10('0.001'::float8)", "-3"),
        ("power('2'::float8, '0.5'::float8)", "1.4142135623730951"),
        ("power('NaN'::float8, '0'::float8)", "1"),
        ("power('1'::float8, 'NaN'::float8)", "1"),
        ("power('0'::float8, '-1'::float8)", "error 2201F"),
        ("power('-8'::float8, '0.5'::float8)", "error 2201F"),
        ("power('1e200'::float8, '2'::float8)", "error 22003"),
        ("power('1e-200'::float8, '2'::float8)", "error 22003"),
        ("power('-Infinity'::float8, '3'::float8)", "-Infinity"),
        ("sqrt(NULL::float8)", "NULL"),
    ]);
}

#[test]
fn numerics_have_results_with_digits() {
    check(&[
        ("sqrt('-1'::numeric)", "error 2201F"),
        ("ln('0'::numeric)", "error 2201E"),
        ("log('2'::numeric, '64'::numeric)", "6.000000000000000000"),
        ("log('1000'::numeric)", "3.000000000000000000"),
        ("power('2'::numeric, '-2'::numeric)", "0.250000000000000000"),
        ("power('0'::numeric, '-1'::numeric)", "error 2201F"),
        ("power('-8'::numeric, '0.5'::numeric)", "error 2201F"),
        ("power('2'::numeric, '100'::numeric)", "1267650600228229401496703205376.0000000"),
    ]);
}

#[test]
fn trigonometry() {
    check(&[
        ("sin('0'::float8)", "0"),
        ("cos('Infinity'::float8)", "error 22003"),
        ("sin('NaN'::float8)", "NaN"),
        ("tand('45'::float8)", "1"),
        ("tand('90'::float8)", "Infinity"),
        ("sind('30'::float8)", "0.5"),
        ("cosd('60'::float8)", "0.5"),
        ("cosd('120'::float8)", "-0.5"),
        ("cotd('0'::float8)", "Infinity"),
        ("asin('2'::float8)", "error 22003"),
        ("acosd('0.5'::float8)", "60"),
        ("atan2d('1'::float8, '1'::float8)", "45"),
        ("acosh('0.5'::float8)", "error 22003"),
        ("atanh('1'::float8)", "Infinity"),
        ("cot('0'::float8)", "Infinity"),
        ("degrees('Infinity'::float8)", "Infinity"),
        ("radians('180'::float8)", "3.141592653589793"),
        ("tan('0'::float8)", "0"),
    ]);
}

#[test]
fn rounding_of_numerics_is_half_away_from_zero() {
    check(&[
        ("round(2.5)", "3"),
        ("round(-2.5)", "-3"),
        ("round(2.45, 1)", "2.5"),
        ("round(-2.45, 1)", "-2.5"),
        ("round(1250, -2)", "1300"),
        ("round(12345.678, -2)", "12300"),
        ("round(0.5, -1)", "0"),
        ("round(1.5, 3)", "1.500"),
        ("trunc(2.9)", "2"),
        ("trunc(-2.99, 1)", "-2.9"),
        ("trunc(1999, -3)", "1000"),
        ("round(NULL::numeric, 1)", "NULL"),
    ]);
}

#[test]
fn rounding_of_floats_is_half_to_even() {
    check(&[
        ("round('2.5'::float8)", "2"),
        ("round('-0.5'::float8)", "-0"),
        ("round('3.5'::float8)", "4"),
        ("trunc('-2.9'::float8)", "-2"),
        ("round('NaN'::float8)", "NaN"),
        ("round(5)", "5"),
        ("round('2.5')", "2"),
    ]);
}

#[test]
fn whole_numbers() {
    check(&[
        ("div(7, 2)", "3"),
        ("div(-7, 2)", "-3"),
        ("div(7.5, 0)", "error 22012"),
        ("gcd(12, -18)", "6"),
        ("gcd(0, 0)", "0"),
        ("gcd('-2147483648'::int4, '-2147483648'::int4)", "error 22003"),
        ("gcd('-2147483648'::int4, 0)", "error 22003"),
        ("gcd('0.9'::numeric, '0.6'::numeric)", "0.300000000000000000"),
        ("lcm(4, 6)", "12"),
        ("lcm(0, 5)", "0"),
        ("lcm('2147483647'::int4, 2)", "error 22003"),
        ("lcm(1.5, 1.0)", "3.0"),
        ("factorial(0)", "1"),
        ("factorial(20)", "2432902008176640000"),
        ("factorial(25)", "15511210043330985984000000"),
        ("factorial(-1)", "error 22003"),
    ]);
}

#[test]
fn digits_of_numerics() {
    check(&[
        ("scale(1.500)", "3"),
        ("min_scale(1.500)", "1"),
        ("trim_scale(1.500)", "1.5"),
        ("trim_scale('100'::numeric)", "100"),
        ("scale(NULL::numeric)", "NULL"),
    ]);
}

#[test]
fn hexadecimal_digits() {
    check(&[
        ("to_hex(255)", "ff"),
        ("to_hex(-1)", "ffffffff"),
        ("to_hex('-1'::int8)", "ffffffffffffffff"),
        ("to_hex('9223372036854775807'::int8)", "7fffffffffffffff"),
        ("to_hex(0)", "0"),
    ]);
}

#[test]
fn buckets_of_equal_width() {
    check(&[
        ("width_bucket('5.35'::float8, '0.024'::float8, '10.06'::float8, 5)", "3"),
        ("width_bucket('0'::float8, '1'::float8, '5'::float8, 4)", "0"),
        ("width_bucket('5'::float8, '1'::float8, '5'::float8, 4)", "5"),
        ("width_bucket('2'::float8, '5'::float8, '1'::float8, 4)", "4"),
        ("width_bucket(5.35, 0.024, 10.06, 5)", "3"),
        ("width_bucket(10.06, 0.024, 10.06, 5)", "6"),
        ("width_bucket(3.5, 5.0, 1.0, 4)", "2"),
        ("width_bucket(1, 1, 1, 4)", "error 2201G"),
        ("width_bucket(1, 1, 5, 0)", "error 2201G"),
        ("width_bucket('NaN'::float8, '1'::float8, '5'::float8, 4)", "error 2201G"),
    ]);
}
