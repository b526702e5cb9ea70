//! PostgreSQL's functions of numbers.

use millrace_common::{SqlError, SqlState, SqlType as T};

use super::call::{Args, Def, Out, Overload, over};
use super::kernels::out_of_range;
use super::numeric::Num;
use super::parse::numeric_overflow;

const NUM: T = T::Numeric(None);

fn error(state: &'static str, message: &str) -> SqlError {
    SqlError::new(SqlState(state), message)
}

fn range(what: &str) -> SqlError {
    SqlError::new(SqlState::NUMERIC_VALUE_OUT_OF_RANGE, what)
}

/// A float result: infinite or zero where no argument was is an error.
fn checked(out: &mut Out, v: f64, from_infinite: bool) -> Result<(), SqlError> {
    match v.is_infinite() && !from_infinite {
        true => Err(range("value out of range: overflow")),
        false => out.float(v),
    }
}

/// A function of a float that fails on NaN results of numbers and on overflow.
macro_rules! float_fn {
    ($name:literal, $f:expr) => {
        Def::new(
            $name,
            &[over(&[T::Double], T::Double, |a, out| {
                let x = a.float(0);
                let f: fn(f64) -> f64 = $f;
                let v = f(x);
                if v.is_nan() && !x.is_nan() {
                    return Err(range("input is out of range"));
                }
                checked(out, v, x.is_infinite())
            })],
        )
    };
}

/// A function of a float whose result may be infinite.
fn any_size(a: &Args, out: &mut Out, f: fn(f64) -> f64) -> Result<(), SqlError> {
    let (x, v) = (a.float(0), f(a.float(0)));
    match v.is_nan() && !x.is_nan() {
        true => Err(range("input is out of range")),
        false => out.float(v),
    }
}

fn log_domain(x: f64) -> Result<(), SqlError> {
    match x {
        0.0 => Err(error("2201E", "cannot take logarithm of zero")),
        x if x < 0.0 => Err(error("2201E", "cannot take logarithm of a negative number")),
        _ => Ok(()),
    }
}

fn power(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let (x, y) = (a.float(0), a.float(1));
    if x == 0.0 && y < 0.0 {
        return Err(error("2201F", "zero raised to a negative power is undefined"));
    }
    if x < 0.0 && y.is_finite() && y.fract() != 0.0 {
        let message = "a negative number raised to a non-integer power yields a complex result";
        return Err(error("2201F", message));
    }
    let v = x.powf(y);
    if v == 0.0 && x != 0.0 && x.is_finite() && y.is_finite() {
        return Err(range("value out of range: underflow"));
    }
    checked(out, v, x.is_infinite() || y.is_infinite())
}

fn gcd(mut a: i128, mut b: i128) -> i128 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a.abs()
}

fn lcm(a: i128, b: i128) -> i128 {
    match gcd(a, b) {
        0 => 0,
        g => (a / g * b).abs(),
    }
}

fn to_int(out: &mut Out, v: i128) -> Result<(), SqlError> {
    out.int(i32::try_from(v).map_err(|_| out_of_range("integer"))?)
}

fn to_big(out: &mut Out, v: i128) -> Result<(), SqlError> {
    out.big(i64::try_from(v).map_err(|_| out_of_range("bigint"))?)
}

fn factorial(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let n = a.big(0);
    if n < 0 {
        return Err(range("factorial of a negative number is undefined"));
    }
    if n > 33 {
        return Err(numeric_overflow());
    }
    out.numeric(Num::new((1..=i128::from(n)).product(), 0))
}

/// The bucket of a value among `count` of equal width between two bounds.
fn width_bucket(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let (x, low, high, count) = (a.numeric(0), a.numeric(1), a.numeric(2), a.int(3));
    if count <= 0 {
        return Err(error("2201G", "count must be greater than zero"));
    }
    if low == high || low.cmp(&high).is_eq() {
        return Err(error("2201G", "lower bound cannot equal upper bound"));
    }
    let up = low.cmp(&high).is_lt();
    let (before, after) = match up {
        true => (x.cmp(&low).is_lt(), x.cmp(&high).is_ge()),
        false => (x.cmp(&low).is_gt(), x.cmp(&high).is_le()),
    };
    let bucket = match (before, after) {
        (true, _) => 0,
        (_, true) => i64::from(count) + 1,
        _ => {
            let (n, d) = (x.sub(&low), high.sub(&low));
            let scaled = n.mul(&Num::new(count.into(), 0));
            scaled.div_trunc(&d)?.to_i64().unwrap_or(0) + 1
        }
    };
    to_int(out, bucket.into())
}

fn width_bucket_float(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let (x, low, high, count) = (a.float(0), a.float(1), a.float(2), a.int(3));
    if count <= 0 {
        return Err(error("2201G", "count must be greater than zero"));
    }
    if x.is_nan() || low.is_nan() || high.is_nan() {
        return Err(error("2201G", "operand, lower bound, and upper bound cannot be NaN"));
    }
    if low == high {
        return Err(error("2201G", "lower bound cannot equal upper bound"));
    }
    let (before, after) = match low < high {
        true => (x < low, x >= high),
        false => (x > low, x <= high),
    };
    let bucket = match (before, after) {
        (true, _) => 0,
        (_, true) => i128::from(count) + 1,
        _ => ((x - low) / (high - low) * f64::from(count)) as i128 + 1,
    };
    to_int(out, bucket)
}

/// An angle in degrees brought into the first quadrant, and the signs that its sine and its cosine have there.
fn first_quadrant(x: f64) -> (f64, f64, f64) {
    let (mut r, mut sine, mut cosine) = (x % 360.0, 1.0, 1.0);
    if r < 0.0 {
        (r, sine) = (-r, -sine);
    }
    if r > 180.0 {
        (r, sine) = (360.0 - r, -sine);
    }
    if r > 90.0 {
        (r, cosine) = (180.0 - r, -cosine);
    }
    (r, sine, cosine)
}

/// Sines of up to 30 degrees and cosines of up to 60, exact at both ends.
fn small_sine(x: f64) -> f64 {
    x.to_radians().sin() / 30f64.to_radians().sin() / 2.0
}

fn small_cosine(x: f64) -> f64 {
    1.0 - (1.0 - x.to_radians().cos()) / (1.0 - 60f64.to_radians().cos()) / 2.0
}

/// Of the first quadrant.
fn sine(x: f64) -> f64 {
    if x <= 30.0 { small_sine(x) } else { small_cosine(90.0 - x) }
}

fn cosine(x: f64) -> f64 {
    if x <= 60.0 { small_cosine(x) } else { small_sine(90.0 - x) }
}

fn sin_degrees(x: f64) -> f64 {
    let (r, sign, _) = first_quadrant(x);
    sign * sine(r)
}

fn cos_degrees(x: f64) -> f64 {
    let (r, _, sign) = first_quadrant(x);
    sign * cosine(r)
}

fn tan_degrees(x: f64) -> f64 {
    let (r, of_sine, of_cosine) = first_quadrant(x);
    let one = sine(45.0) / cosine(45.0);
    unsigned_zero(of_sine * of_cosine * (sine(r) / cosine(r) / one))
}

fn cot_degrees(x: f64) -> f64 {
    let (r, of_sine, of_cosine) = first_quadrant(x);
    let one = cosine(45.0) / sine(45.0);
    unsigned_zero(of_sine * of_cosine * (cosine(r) / sine(r) / one))
}

fn unsigned_zero(x: f64) -> f64 {
    if x == 0.0 { 0.0 } else { x }
}

/// Arc sines of 0 to 1, exact at both ends and at a half.
fn arc_sine(x: f64) -> f64 {
    match x <= 0.5 {
        true => x.asin() / 0.5f64.asin() * 30.0,
        false => 90.0 - x.acos() / 0.5f64.acos() * 60.0,
    }
}

fn arc_cosine(x: f64) -> f64 {
    match x <= 0.5 {
        true => 90.0 - x.asin() / 0.5f64.asin() * 30.0,
        false => x.acos() / 0.5f64.acos() * 60.0,
    }
}

fn asin_degrees(x: f64) -> f64 {
    if x < 0.0 { -arc_sine(-x) } else { arc_sine(x) }
}

fn acos_degrees(x: f64) -> f64 {
    if x < 0.0 { 90.0 + arc_sine(-x) } else { arc_cosine(x) }
}

/// An arc tangent in radians as degrees, exact at 45.
fn of_tangent(radians: f64) -> f64 {
    radians / 1f64.atan() * 45.0
}

fn overloads_of_sqrt() -> [Overload; 2] {
    [
        over(&[T::Double], T::Double, |a, out| match a.float(0) {
            x if x < 0.0 => Err(error("2201F", "cannot take square root of a negative number")),
            x => out.float(x.sqrt()),
        }),
        over(&[NUM], NUM, |a, out| out.numeric(a.numeric(0).sqrt()?)),
    ]
}

fn transcendental() -> Vec<Def> {
    vec![
        Def::new("sqrt", &overloads_of_sqrt()),
        Def::new(
            "exp",
            &[
                over(&[T::Double], T::Double, |a, out| {
                    let x = a.float(0);
                    let v = x.exp();
                    if v == 0.0 && x.is_finite() {
                        return Err(range("value out of range: underflow"));
                    }
                    checked(out, v, x.is_infinite())
                }),
                over(&[NUM], NUM, |a, out| out.numeric(a.numeric(0).exp()?)),
            ],
        ),
        Def::new(
            "ln",
            &[
                over(&[T::Double], T::Double, |a, out| {
                    log_domain(a.float(0))?;
                    out.float(a.float(0).ln())
                }),
                over(&[NUM], NUM, |a, out| out.numeric(a.numeric(0).ln()?)),
            ],
        ),
        Def::new("log", &[LOG10[0], LOG10[1], LOG_BASE]),
        Def::new("log10", &LOG10),
        Def::new(
            "power",
            &[
                over(&[T::Double, T::Double], T::Double, power),
                over(&[NUM, NUM], NUM, |a, out| out.numeric(a.numeric(0).power(&a.numeric(1))?)),
            ],
        ),
        float_fn!("cbrt", cbrt),
    ]
}

/// Of angles in radians and in degrees.
fn trigonometric() -> Vec<Def> {
    vec![
        float_fn!("sin", f64::sin),
        float_fn!("cos", f64::cos),
        Def::new("tan", &[over(&[T::Double], T::Double, |a, out| any_size(a, out, f64::tan))]),
        Def::new(
            "cot",
            &[over(&[T::Double], T::Double, |a, out| out.float(1.0 / a.float(0).tan()))],
        ),
        float_fn!("asin", f64::asin),
        float_fn!("acos", f64::acos),
        float_fn!("atan", f64::atan),
        float_fn!("sinh", f64::sinh),
        float_fn!("cosh", f64::cosh),
        float_fn!("tanh", f64::tanh),
        float_fn!("asinh", f64::asinh),
        float_fn!("acosh", f64::acosh),
        Def::new(
            "atanh",
            &[over(&[T::Double], T::Double, |a, out| match a.float(0) {
                x if !(-1.0..=1.0).contains(&x) => Err(range("input is out of range")),
                x => out.float(x.atanh()),
            })],
        ),
        float_fn!("sind", sin_degrees),
        float_fn!("cosd", cos_degrees),
        Def::new("tand", &[over(&[T::Double], T::Double, |a, out| any_size(a, out, tan_degrees))]),
        Def::new("cotd", &[over(&[T::Double], T::Double, |a, out| any_size(a, out, cot_degrees))]),
        float_fn!("asind", asin_degrees),
        float_fn!("acosd", acos_degrees),
        float_fn!("atand", |x| of_tangent(x.atan())),
        Def::new(
            "atan2d",
            &[over(&[T::Double, T::Double], T::Double, |a, out| {
                out.float(of_tangent(a.float(0).atan2(a.float(1))))
            })],
        ),
        Def::new(
            "degrees",
            &[over(&[T::Double], T::Double, |a, out| {
                checked(out, a.float(0) / (std::f64::consts::PI / 180.0), a.float(0).is_infinite())
            })],
        ),
        Def::new(
            "radians",
            &[over(&[T::Double], T::Double, |a, out| {
                out.float(a.float(0) * (std::f64::consts::PI / 180.0))
            })],
        ),
    ]
}

const LOG10: [Overload; 2] = [
    over(&[T::Double], T::Double, |a, out| {
        log_domain(a.float(0))?;
        out.float(a.float(0).log10())
    }),
    over(&[NUM], NUM, |a, out| out.numeric(a.numeric(0).log(&Num::new(10, 0))?)),
];

const LOG_BASE: Overload = over(&[NUM, NUM], NUM, |a, out| {
    let v = a.numeric(1).log(&a.numeric(0))?;
    out.numeric(v)
});

fn cbrt(x: f64) -> f64 {
    x.cbrt()
}

pub fn defs() -> Vec<Def> {
    let mut all = transcendental();
    all.extend(trigonometric());
    all.extend(whole_numbers());
    all.extend(common_factors());
    all.extend([
        Def::new("factorial", &[over(&[T::BigInt], NUM, factorial)]),
        Def::new(
            "width_bucket",
            &[
                over(&[T::Double, T::Double, T::Double, T::Int], T::Int, width_bucket_float),
                over(&[NUM, NUM, NUM, T::Int], T::Int, width_bucket),
            ],
        ),
        Def::new("scale", &[over(&[NUM], T::Int, |a, out| out.int(a.numeric(0).scale()))]),
        Def::new(
            "min_scale",
            &[over(&[NUM], T::Int, |a, out| out.int(a.numeric(0).trimmed().scale()))],
        ),
        Def::new("trim_scale", &[over(&[NUM], NUM, |a, out| out.numeric(a.numeric(0).trimmed()))]),
        Def::new(
            "to_hex",
            &[
                over(&[T::Int], T::Text, |a, out| out.text(&format!("{:x}", a.int(0)))),
                over(&[T::BigInt], T::Text, |a, out| out.text(&format!("{:x}", a.big(0)))),
            ],
        ),
    ]);
    all
}

/// Numbers without their fractions.
fn whole_numbers() -> Vec<Def> {
    vec![
        Def::new(
            "round",
            &[
                over(&[T::Double], T::Double, |a, out| out.float(a.float(0).round_ties_even())),
                over(&[NUM], NUM, |a, out| out.numeric(a.numeric(0).round(0))),
                over(&[NUM, T::Int], NUM, |a, out| out.numeric(a.numeric(0).round(a.int(1)))),
            ],
        ),
        Def::new(
            "trunc",
            &[
                over(&[T::Double], T::Double, |a, out| out.float(a.float(0).trunc())),
                over(&[NUM], NUM, |a, out| out.numeric(a.numeric(0).trunc(0))),
                over(&[NUM, T::Int], NUM, |a, out| out.numeric(a.numeric(0).trunc(a.int(1)))),
            ],
        ),
        Def::new(
            "div",
            &[over(&[NUM, NUM], NUM, |a, out| out.numeric(a.numeric(0).div_trunc(&a.numeric(1))?))],
        ),
    ]
}

/// What two numbers have in common.
fn common_factors() -> Vec<Def> {
    vec![
        Def::new(
            "gcd",
            &[
                over(&[T::Int, T::Int], T::Int, |a, out| {
                    to_int(out, gcd(a.int(0).into(), a.int(1).into()))
                }),
                over(&[T::BigInt, T::BigInt], T::BigInt, |a, out| {
                    to_big(out, gcd(a.big(0).into(), a.big(1).into()))
                }),
                over(&[NUM, NUM], NUM, |a, out| out.numeric(a.numeric(0).gcd(&a.numeric(1)))),
            ],
        ),
        Def::new(
            "lcm",
            &[
                over(&[T::Int, T::Int], T::Int, |a, out| {
                    to_int(out, lcm(a.int(0).into(), a.int(1).into()))
                }),
                over(&[T::BigInt, T::BigInt], T::BigInt, |a, out| {
                    to_big(out, lcm(a.big(0).into(), a.big(1).into()))
                }),
                over(&[NUM, NUM], NUM, |a, out| {
                    let (x, y) = (a.numeric(0), a.numeric(1));
                    let g = x.gcd(&y);
                    match g.is_zero() {
                        true => out.numeric(g),
                        false => out.numeric(x.div_trunc(&g)?.mul(&y).abs()),
                    }
                }),
            ],
        ),
    ]
}

#[cfg(test)]
mod tests;
