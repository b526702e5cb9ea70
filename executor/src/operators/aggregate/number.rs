//! Results of exact sums and averages in the call's output type; what does not fit is NULL.

use std::sync::Arc;

use arrow::array::{
    ArrayRef, Decimal128Array, Float64Array, Int64Array, IntervalMonthDayNanoArray,
};
use arrow::compute::cast;
use arrow::datatypes::{DataType, IntervalMonthDayNano, i256};
use millrace_functions::datetime::scale;

use super::accumulator::WideSum;
use crate::error::ExecError;
use crate::state::Slot;

/// `sum` or `sum / count` of values at `scale`, rounded half away from zero to the output's scale.
pub fn numeric(
    sums: impl Iterator<Item = (WideSum, i64)>,
    scale: i8,
    avg: bool,
    output: &DataType,
    overflows: &mut u64,
) -> Result<ArrayRef, ExecError> {
    let (precision, out_scale) = match output {
        DataType::Decimal128(p, s) => (*p, *s),
        _ => (38, if avg { scale.max(18) } else { scale }),
    };
    if matches!(output, DataType::Float64 | DataType::Float32) {
        return floats(sums, scale, avg, output);
    }
    let limit = 10_i128.checked_pow(u32::from(precision)).unwrap_or(i128::MAX);
    let mut value = |(sum, count): (WideSum, i64)| -> Option<i128> {
        if count <= 0 {
            return None;
        }
        let scaled = sum.value().and_then(|sum| {
            rescale(sum, if avg { count } else { 1 }, i32::from(out_scale) - i32::from(scale))
        });
        let fits = scaled.filter(|v| v.unsigned_abs() < limit.unsigned_abs());
        if fits.is_none() {
            *overflows += 1;
        }
        fits
    };
    if output.is_integer() {
        let mut values: Vec<Option<i64>> = Vec::new();
        let mut over = 0;
        for row in sums {
            let known = row.1 > 0 && row.0.value().is_some();
            let v = value(row).and_then(|v| i64::try_from(v).ok());
            over += u64::from(known && v.is_none());
            values.push(v);
        }
        let narrow = cast(&Int64Array::from(values), output)?;
        *overflows += over;
        return Ok(narrow);
    }
    let values: Vec<Option<i128>> = sums.map(value).collect();
    let array = Decimal128Array::from(values);
    Ok(Arc::new(array.with_precision_and_scale(precision.max(1), out_scale)?))
}

fn floats(
    sums: impl Iterator<Item = (WideSum, i64)>,
    scale: i8,
    avg: bool,
    output: &DataType,
) -> Result<ArrayRef, ExecError> {
    let unit = 10f64.powi(i32::from(scale));
    let values = sums.map(|(sum, count)| {
        let divisor = if avg { count as f64 } else { 1.0 };
        if count > 0 { sum.value().map(|v| v as f64 / unit / divisor) } else { None }
    });
    Ok(cast(&Float64Array::from_iter(values), output)?)
}

/// `value * 10^shift / count`, rounded half away from zero.
fn rescale(value: i128, count: i64, shift: i32) -> Option<i128> {
    if count == 1 && shift == 0 {
        return Some(value);
    }
    let ten = |n: i32| i256::from_i128(10).checked_pow(n as u32);
    let mut numerator = i256::from_i128(value);
    let mut divisor = i256::from_i128(i128::from(count));
    if shift >= 0 {
        numerator = numerator.checked_mul(ten(shift)?)?;
    } else {
        divisor = divisor.checked_mul(ten(-shift)?)?;
    }
    let quotient = numerator.checked_div(divisor)?;
    let rest = numerator.checked_rem(divisor)?;
    let twice = rest.checked_add(rest)?.checked_abs()?;
    let away = if twice >= divisor.checked_abs()? {
        if numerator.is_negative() { i256::MINUS_ONE } else { i256::ONE }
    } else {
        i256::ZERO
    };
    quotient.checked_add(away)?.to_i128()
}

/// Sums or averages of intervals; a sum is one of each part.
pub fn interval(
    parts: &[Vec<WideSum>; 3],
    counts: &[i64],
    slots: &[Slot],
    avg: bool,
    overflows: &mut u64,
) -> ArrayRef {
    let values = slots.iter().map(|&s| {
        let s = s as usize;
        if counts[s] <= 0 {
            return None;
        }
        let months = parts[0][s].value().and_then(|v| i32::try_from(v).ok());
        let days = parts[1][s].value().and_then(|v| i32::try_from(v).ok());
        let nanos = parts[2][s]
            .value()
            .and_then(|v| v.checked_mul(1_000))
            .and_then(|v| i64::try_from(v).ok());
        let value =
            months.zip(days).zip(nanos).map(|((m, d), n)| IntervalMonthDayNano::new(m, d, n));
        let value = match avg {
            true => value.and_then(|sum| scale(sum, counts[s] as f64, true).ok()),
            false => value,
        };
        *overflows += u64::from(value.is_none());
        value
    });
    Arc::new(IntervalMonthDayNanoArray::from_iter(values))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn averages_round_half_away_from_zero() {
        assert_eq!(rescale(5, 2, 0), Some(3));
        assert_eq!(rescale(-5, 2, 0), Some(-3));
        assert_eq!(rescale(1, 3, 4), Some(3333));
        assert_eq!(rescale(25, 1, -1), Some(3));
        assert_eq!(rescale(i128::MAX, 1, 30), None);
    }
}
