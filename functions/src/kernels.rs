//! The inner loops of arithmetic: whole arrays, no scalars made on the way.

use std::sync::Arc;

use arrow::array::*;
use arrow::datatypes::*;
use arrow::error::ArrowError;
use datafusion::common::{Result, ScalarValue};
use datafusion::logical_expr::ColumnarValue;
use millrace_common::keys::one_nan;
use millrace_common::{SqlError, SqlState};

use super::arith::ArithOp;
use super::cast::div_round;
use super::datetime;
use super::parse::numeric_overflow;
use crate::error::{division_by_zero, external};

/// An operand: a column, or one value for all rows (`None`: NULL).
pub enum Arg<'a, T: ArrowPrimitiveType> {
    Array(&'a PrimitiveArray<T>),
    Scalar(Option<T::Native>),
}

/// Holds the one-row array of a scalar while its value is read.
pub struct Loaded {
    array: ArrayRef,
    scalar: bool,
}

pub fn load(value: &ColumnarValue) -> Result<Loaded> {
    Ok(match value {
        ColumnarValue::Array(a) => Loaded { array: Arc::clone(a), scalar: false },
        ColumnarValue::Scalar(s) => Loaded { array: s.to_array()?, scalar: true },
    })
}

impl Loaded {
    pub fn arg<T: ArrowPrimitiveType>(&self) -> Result<Arg<'_, T>> {
        let array = self.array.as_primitive_opt::<T>().ok_or_else(|| {
            external(SqlError::internal(format!("unexpected operand {}", self.array.data_type())))
        })?;
        Ok(match self.scalar {
            true => Arg::Scalar(array.is_valid(0).then(|| array.value(0))),
            false => Arg::Array(array),
        })
    }
}

fn carried(e: SqlError) -> ArrowError {
    ArrowError::ExternalError(Box::new(e))
}

/// Applies a fallible function to all pairs of values that are not NULL.
pub fn map2<A, B, O>(
    left: &Loaded,
    right: &Loaded,
    f: impl Fn(A::Native, B::Native) -> Result<O::Native, SqlError>,
) -> Result<PrimitiveArray<O>>
where
    A: ArrowPrimitiveType,
    B: ArrowPrimitiveType,
    O: ArrowPrimitiveType,
{
    Ok(match (left.arg::<A>()?, right.arg::<B>()?) {
        (Arg::Array(a), Arg::Array(b)) => {
            arrow::compute::try_binary(a, b, |x, y| f(x, y).map_err(carried))?
        }
        (Arg::Array(a), Arg::Scalar(Some(y))) => a.try_unary(|x| f(x, y)).map_err(external)?,
        (Arg::Scalar(Some(x)), Arg::Array(b)) => b.try_unary(|y| f(x, y)).map_err(external)?,
        (Arg::Array(a), Arg::Scalar(None)) => PrimitiveArray::new_null(a.len()),
        (Arg::Scalar(None), Arg::Array(b)) => PrimitiveArray::new_null(b.len()),
        (Arg::Scalar(x), Arg::Scalar(y)) => {
            let value = x.zip(y).map(|(x, y)| f(x, y)).transpose().map_err(external)?;
            std::iter::once(value).collect()
        }
    })
}

pub fn binary(
    op: ArithOp,
    left: &ColumnarValue,
    right: &ColumnarValue,
    _rows: usize,
    output: &DataType,
) -> Result<ColumnarValue> {
    let scalar = matches!((left, right), (ColumnarValue::Scalar(_), ColumnarValue::Scalar(_)));
    let (l, r) = (load(left)?, load(right)?);
    let array: ArrayRef = match (l.array.data_type(), r.array.data_type()) {
        (DataType::Int16, DataType::Int16) => integers::<Int16Type>(op, &l, &r, "smallint")?,
        (DataType::Int32, DataType::Int32) => integers::<Int32Type>(op, &l, &r, "integer")?,
        (DataType::Int64, DataType::Int64) => integers::<Int64Type>(op, &l, &r, "bigint")?,
        (DataType::Float32, DataType::Float32) => {
            Arc::new(map2::<Float32Type, Float32Type, Float32Type>(&l, &r, |a, b| float(op, a, b))?)
        }
        (DataType::Float64, DataType::Float64) => {
            let f = |a, b| float(op, a, b);
            Arc::new(map2::<Float64Type, Float64Type, Float64Type>(&l, &r, f)?)
        }
        (DataType::Decimal128(_, ls), DataType::Decimal128(_, rs)) => {
            decimals(op, &l, &r, i32::from(*ls), i32::from(*rs), output)?
        }
        (lt, rt) => datetime::binary(op, &l, &r, lt, rt, output)?,
    };
    Ok(match scalar {
        true => ColumnarValue::Scalar(ScalarValue::try_from_array(&array, 0)?),
        false => ColumnarValue::Array(array),
    })
}

pub fn out_of_range(name: &str) -> SqlError {
    SqlError::new(SqlState::NUMERIC_VALUE_OUT_OF_RANGE, format!("{name} out of range"))
}

fn integers<T>(op: ArithOp, l: &Loaded, r: &Loaded, name: &str) -> Result<ArrayRef>
where
    T: ArrowPrimitiveType,
    T::Native: ArrowNativeTypeOp,
{
    let zero = T::Native::ZERO;
    let range = |_: ArrowError| out_of_range(name);
    let out: PrimitiveArray<T> = match op {
        ArithOp::Add => map2::<T, T, T>(l, r, |a, b| a.add_checked(b).map_err(range))?,
        ArithOp::Sub => map2::<T, T, T>(l, r, |a, b| a.sub_checked(b).map_err(range))?,
        ArithOp::Mul => map2::<T, T, T>(l, r, |a, b| a.mul_checked(b).map_err(range))?,
        ArithOp::Div => map2::<T, T, T>(l, r, |a, b| match b == zero {
            true => Err(division_by_zero()),
            false => a.div_checked(b).map_err(range),
        })?,
        ArithOp::Mod => map2::<T, T, T>(l, r, |a, b| match b == zero {
            true => Err(division_by_zero()),
            // The least integer modulo −1 is 0.
            false => Ok(a.mod_wrapping(b)),
        })?,
    };
    Ok(Arc::new(out))
}

fn float_range(what: &str) -> SqlError {
    SqlError::new(SqlState::NUMERIC_VALUE_OUT_OF_RANGE, format!("value out of range: {what}"))
}

/// PostgreSQL's checks of a float result.
fn check<T: Float>(v: T, infinite: bool, zero: bool) -> Result<T, SqlError> {
    let wide: f64 = v.into();
    if wide.is_infinite() && !infinite {
        return Err(float_range("overflow"));
    }
    if wide == 0.0 && !zero {
        return Err(float_range("underflow"));
    }
    Ok(one_nan(v))
}

/// `real` and `double precision`.
trait Float: ArrowNativeTypeOp + From<f32> + Into<f64> {}

impl Float for f32 {}

impl Float for f64 {}

fn float<T: Float>(op: ArithOp, a: T, b: T) -> Result<T, SqlError> {
    let (wide_a, wide_b): (f64, f64) = (a.into(), b.into());
    let infinite = wide_a.is_infinite() || wide_b.is_infinite();
    let (no_a, no_b) = (wide_a == 0.0, wide_b == 0.0);
    match op {
        ArithOp::Add => check(a.add_wrapping(b), infinite, true),
        ArithOp::Sub => check(a.sub_wrapping(b), infinite, true),
        ArithOp::Mul => check(a.mul_wrapping(b), infinite, no_a || no_b),
        ArithOp::Div if no_b && !wide_a.is_nan() => Err(division_by_zero()),
        ArithOp::Div => {
            check(a.div_wrapping(b), wide_a.is_infinite(), no_a || wide_b.is_infinite())
        }
        ArithOp::Mod => Err(SqlError::internal("modulo of floats")),
    }
}

const MAX_NUMERIC: u128 = 10u128.pow(38);

fn fits(v: i128) -> Result<i128, SqlError> {
    if v.unsigned_abs() < MAX_NUMERIC { Ok(v) } else { Err(numeric_overflow()) }
}

fn pow10(n: i32) -> i128 {
    10i128.pow(n.clamp(0, 38) as u32)
}

fn decimals(
    op: ArithOp,
    l: &Loaded,
    r: &Loaded,
    ls: i32,
    rs: i32,
    output: &DataType,
) -> Result<ArrayRef> {
    let DataType::Decimal128(p, s) = *output else {
        return Err(external(SqlError::internal("numeric operator without numeric result")));
    };
    let out = i32::from(s);
    type D = Decimal128Type;
    let scaled = |v: i128, by: i128| v.checked_mul(by).ok_or_else(numeric_overflow);
    let (lf, rf) = (pow10(ls.max(rs) - ls), pow10(ls.max(rs) - rs));
    // Sums have the larger scale, or that of unconstrained numeric, which is larger still.
    let up = pow10(out - ls.max(rs));
    let down = pow10(ls.max(rs) - out);
    let settle = move |v: i128| -> Result<i128, SqlError> {
        fits(if down > 1 { div_round(v, down) } else { scaled(v, up)? })
    };
    let sum = |a: i128, b: i128, negative: bool| {
        let (a, b) = (scaled(a, lf)?, scaled(b, rf)?);
        let v = if negative { a.checked_sub(b) } else { a.checked_add(b) };
        settle(v.ok_or_else(numeric_overflow)?)
    };
    let array = match op {
        ArithOp::Add => map2::<D, D, D>(l, r, |a, b| sum(a, b, false))?,
        ArithOp::Sub => map2::<D, D, D>(l, r, |a, b| sum(a, b, true))?,
        ArithOp::Mod => map2::<D, D, D>(l, r, |a, b| match b {
            0 => Err(division_by_zero()),
            b => settle(scaled(a, lf)? % scaled(b, rf)?),
        })?,
        ArithOp::Mul if out == ls + rs => {
            let product = |a: i128, b: i128| a.checked_mul(b).ok_or_else(numeric_overflow);
            map2::<D, D, D>(l, r, |a, b| fits(product(a, b)?))?
        }
        ArithOp::Mul => map2::<D, D, D>(l, r, |a, b| mul_div(a, b, ls + rs - out))?,
        ArithOp::Div => map2::<D, D, D>(l, r, |a, b| divide(a, b, out + rs - ls))?,
    };
    Ok(Arc::new(array.with_precision_and_scale(p, s)?))
}

/// `a × b / 10^shift`, rounded; `shift` may be negative.
fn mul_div(a: i128, b: i128, shift: i32) -> Result<i128, SqlError> {
    if let Some(product) = a.checked_mul(b)
        && (0..=38).contains(&shift)
    {
        return fits(div_round(product, pow10(shift)));
    }
    let product = i256::from_i128(a).wrapping_mul(i256::from_i128(b));
    if shift < 0 {
        let wide = product.checked_mul(i256::from_i128(pow10(-shift)));
        return narrow(wide.ok_or_else(numeric_overflow)?);
    }
    narrow(wide_round(product, i256::from_i128(pow10(shift)))?)
}

/// `a × 10^shift / b`, rounded.
pub fn divide(a: i128, b: i128, shift: i32) -> Result<i128, SqlError> {
    if b == 0 {
        return Err(division_by_zero());
    }
    let (a, b) = if b < 0 { (-a, -b) } else { (a, b) };
    if (0..=38).contains(&shift)
        && let Some(scaled) = a.checked_mul(pow10(shift))
    {
        return fits(div_round(scaled, b));
    }
    let (mut n, mut d) = (i256::from_i128(a), i256::from_i128(b));
    let mut rest = shift;
    while rest > 0 {
        let step = rest.min(38);
        n = n.checked_mul(i256::from_i128(pow10(step))).ok_or_else(numeric_overflow)?;
        rest -= step;
    }
    if rest < 0 {
        d = d.checked_mul(i256::from_i128(pow10(-rest))).ok_or_else(numeric_overflow)?;
    }
    narrow(wide_round(n, d)?)
}

/// Rounds half away from zero; the divisor is positive.
fn wide_round(n: i256, d: i256) -> Result<i256, SqlError> {
    let (q, r) = match (n.checked_div(d), n.checked_rem(d)) {
        (Some(q), Some(r)) => (q, r),
        _ => return Err(numeric_overflow()),
    };
    let twice = r.wrapping_abs().wrapping_add(r.wrapping_abs());
    let step = if n.is_negative() { i256::MINUS_ONE } else { i256::ONE };
    Ok(if twice >= d { q.wrapping_add(step) } else { q })
}

fn narrow(v: i256) -> Result<i128, SqlError> {
    v.to_i128().ok_or_else(numeric_overflow).and_then(fits)
}

/// `-x`, or `|x|`.
pub fn negate(value: &ColumnarValue, abs: bool) -> Result<ColumnarValue> {
    let loaded = load(value)?;
    let a = &loaded.array;
    fn ints<T>(a: &ArrayRef, abs: bool, name: &str) -> Result<ArrayRef>
    where
        T: ArrowPrimitiveType,
        T::Native: ArrowNativeTypeOp,
    {
        let zero = T::Native::ZERO;
        let out: PrimitiveArray<T> = a
            .as_primitive::<T>()
            .try_unary(|v| match abs && v.is_ge(zero) {
                true => Ok(v),
                false => v.neg_checked().map_err(|_| out_of_range(name)),
            })
            .map_err(external)?;
        Ok(Arc::new(out))
    }
    let array: ArrayRef = match a.data_type() {
        DataType::Int16 => ints::<Int16Type>(a, abs, "smallint")?,
        DataType::Int32 => ints::<Int32Type>(a, abs, "integer")?,
        DataType::Int64 => ints::<Int64Type>(a, abs, "bigint")?,
        DataType::Float32 => Arc::new(
            a.as_primitive::<Float32Type>()
                .unary::<_, Float32Type>(|v| one_nan(if abs { v.abs() } else { -v })),
        ),
        DataType::Float64 => Arc::new(
            a.as_primitive::<Float64Type>()
                .unary::<_, Float64Type>(|v| one_nan(if abs { v.abs() } else { -v })),
        ),
        DataType::Decimal128(p, s) => Arc::new(
            a.as_primitive::<Decimal128Type>()
                .unary::<_, Decimal128Type>(|v| if abs { v.abs() } else { -v })
                .with_precision_and_scale(*p, *s)?,
        ),
        DataType::Interval(IntervalUnit::MonthDayNano) if !abs => Arc::new(
            a.as_primitive::<IntervalMonthDayNanoType>()
                .try_unary::<_, IntervalMonthDayNanoType, _>(datetime::negate_interval)
                .map_err(external)?,
        ),
        other => {
            let name = crate::types::type_name(&Some(other.clone()));
            return Err(external(SqlError::new(
                SqlState::UNDEFINED_FUNCTION,
                format!("function abs({name}) does not exist"),
            )));
        }
    };
    Ok(match value {
        ColumnarValue::Scalar(_) => ColumnarValue::Scalar(ScalarValue::try_from_array(&array, 0)?),
        ColumnarValue::Array(_) => ColumnarValue::Array(array),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::check;

    #[test]
    fn numerics_are_rounded_half_away_from_zero() {
        check(&[
            ("(1.0::numeric(38,0) / 6)::numeric(10,4)", "0.1667"),
            ("(-1.0::numeric(38,0) / 6)::numeric(10,4)", "-0.1667"),
            (
                "'0.5'::numeric(38,18) * '0.000000000000000003'::numeric(38,18)",
                "0.000000000000000002",
            ),
            (
                "'-0.5'::numeric(38,18) * '0.000000000000000003'::numeric(38,18)",
                "-0.000000000000000002",
            ),
            (
                "'99999999999999999999999999999999999999'::numeric(38,0) / '1'::numeric(38,0)",
                "error 22003",
            ),
            ("'12345678901234567890123456789012'::numeric(38,0) % '97'::numeric(38,0)", "71"),
            (
                "'1e20'::numeric(38,0) * '1e17'::numeric(38,0)",
                "10000000000000000000000000000000000000",
            ),
            ("'1e20'::numeric(38,0) * '1e18'::numeric(38,0)", "error 22003"),
        ]);
    }

    #[test]
    fn negation_has_a_range() {
        check(&[
            ("pg_neg('-9223372036854775808'::int8)", "error 22003"),
            ("pg_neg('9223372036854775807'::int8)", "-9223372036854775807"),
            ("pg_neg('-2147483648 mons'::interval)", "error 22008"),
            ("pg_neg('Infinity'::float4)", "-Infinity"),
            ("abs('-32768'::int2)", "error 22003"),
            ("abs('-2147483648'::int4)", "error 22003"),
            ("abs('-0.00'::numeric(5,2))", "0.00"),
        ]);
    }

    #[test]
    fn a_column_and_a_constant_meet_in_every_way() {
        let column = |values: Vec<Option<i32>>| {
            ColumnarValue::Array(Arc::new(Int32Array::from(values)) as ArrayRef)
        };
        let constant = |value: Option<i32>| ColumnarValue::Scalar(ScalarValue::Int32(value));
        let some = || column(vec![Some(7), None]);
        let cases = [
            (some(), column(vec![Some(2), Some(2)]), vec![Some(5), None]),
            (some(), constant(Some(2)), vec![Some(5), None]),
            (constant(Some(2)), some(), vec![Some(-5), None]),
            (some(), constant(None), vec![None, None]),
            (constant(None), some(), vec![None, None]),
            (constant(Some(2)), constant(Some(3)), vec![Some(-1)]),
            (constant(None), constant(Some(3)), vec![None]),
        ];
        for (left, right, expected) in cases {
            let found = binary(ArithOp::Sub, &left, &right, 2, &DataType::Int32).unwrap();
            let constants =
                matches!((&left, &right), (ColumnarValue::Scalar(_), ColumnarValue::Scalar(_)));
            assert_eq!(matches!(found, ColumnarValue::Scalar(_)), constants);
            let found = found.into_array(1).unwrap();
            assert_eq!(found.as_primitive::<Int32Type>(), &Int32Array::from(expected));
        }
    }

    #[test]
    fn rows_that_are_null_do_not_fail() {
        let zero = ColumnarValue::Array(Arc::new(Int32Array::from(vec![0, 0])) as ArrayRef);
        let none = ColumnarValue::Array(Arc::new(Int32Array::from(vec![None, None])) as ArrayRef);
        let found = binary(ArithOp::Div, &none, &zero, 2, &DataType::Int32).unwrap();
        assert_eq!(found.into_array(2).unwrap().null_count(), 2);
    }

    #[test]
    fn every_nan_is_the_one() {
        let other = f64::from_bits(f64::NAN.to_bits() | 1 << 63);
        let column = ColumnarValue::Array(Arc::new(Float64Array::from(vec![other])) as ArrayRef);
        let one = ColumnarValue::Scalar(ScalarValue::Float64(Some(1.0)));
        let sum = binary(ArithOp::Add, &column, &one, 1, &DataType::Float64).unwrap();
        for found in [sum, negate(&column, false).unwrap(), negate(&column, true).unwrap()] {
            let found = found.into_array(1).unwrap();
            let bits = found.as_primitive::<Float64Type>().value(0).to_bits();
            assert_eq!(bits, f64::NAN.to_bits());
        }
    }

    #[test]
    fn quotients_of_digits_are_shifted_and_rounded() {
        let cases = [
            ((1, 3, 2), 33),
            ((2, 3, 2), 67),
            ((-2, 3, 2), -67),
            ((2, -3, 2), -67),
            ((5, 2, 0), 3),
            ((-5, 2, 0), -3),
            ((12_345, 1, -2), 123),
            ((12_350, 1, -2), 124),
            ((1, 10i128.pow(37), 40), 1000),
        ];
        for ((a, b, shift), expected) in cases {
            assert_eq!(divide(a, b, shift).unwrap(), expected, "{a} / {b} shifted by {shift}");
        }
        let state = |found: Result<i128, SqlError>| found.unwrap_err().state;
        assert_eq!(state(divide(1, 0, 0)), SqlState::DIVISION_BY_ZERO);
        assert_eq!(state(divide(10, 1, 37)), SqlState::NUMERIC_VALUE_OUT_OF_RANGE);
        assert_eq!(state(divide(1, 1, 100)), SqlState::NUMERIC_VALUE_OUT_OF_RANGE);
    }

    #[test]
    fn negation_keeps_constants_and_refuses_other_types() {
        let constant = ColumnarValue::Scalar(ScalarValue::Int16(Some(i16::MIN)));
        assert!(negate(&constant, true).is_err());
        let constant = ColumnarValue::Scalar(ScalarValue::Int16(Some(5)));
        let found = negate(&constant, false).unwrap();
        assert!(matches!(found, ColumnarValue::Scalar(ScalarValue::Int16(Some(-5)))));
        let text = ColumnarValue::Scalar(ScalarValue::from("a"));
        let error = crate::error::sql_error_from_datafusion(negate(&text, false).unwrap_err());
        assert_eq!(error.state, SqlState::UNDEFINED_FUNCTION);
    }
}
