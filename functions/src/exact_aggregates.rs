//! Aggregates whose state is a few exact sums that rows are added to and taken from: variances, covariances,
//! regressions, and the bits of integers. One state for batch and views.

use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, BinaryArray, BinaryBuilder, Decimal128Array, Float64Array, Int64Array,
};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Decimal128Type, Float64Type, Int64Type};
use datafusion::common::Result as PlanResult;
use datafusion::logical_expr::{
    ColumnarValue, ScalarFunctionArgs, ScalarUDF, Signature, Volatility,
};
use millrace_common::SqlError;
use millrace_common::keys::one_nan;
use num_bigint::BigInt;

use super::variance_sums::{FloatMoments, PairMoments, WholeMoments};
use crate::aggregate_kind::AggFunc;
use crate::error::external;
use crate::plain::PlainScalar;

/// Number of ones in each bit.
#[derive(Clone, Debug)]
pub struct Bits {
    n: i64,
    ones: [i64; 64],
}

/// The state of one group.
#[derive(Clone, Debug)]
pub enum Exact {
    Whole(WholeMoments),
    Floats(FloatMoments),
    Pairs(PairMoments),
    Bits(Box<Bits>),
}

/// Arguments in the form that is added.
pub enum Values {
    Whole(Decimal128Array),
    Floats(Float64Array),
    Pairs(BinaryArray),
    Bits(Int64Array),
}

/// A result in its final form; `None` is NULL.
pub enum Number {
    Float(Option<f64>),
    Numeric(Option<i128>),
    Integer(Option<i64>),
}

/// What calls of a function over one argument type are made of.
#[derive(Clone, Debug)]
pub struct ExactCall {
    func: AggFunc,
    kind: Kind,
    /// Digits behind the point of the argument.
    scale: i8,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Whole,
    Floats,
    Pairs,
    Bits,
}

impl ExactCall {
    /// `arg` is the type of the one argument; of pairs, what [`pair_entry`] makes of both.
    pub fn new(func: AggFunc, arg: &DataType) -> Result<ExactCall, SqlError> {
        let kind = match (func.shape(), arg) {
            (Shape::Pair, _) => Kind::Pairs,
            (Shape::Bits, _) => Kind::Bits,
            (Shape::Variance, t) if t.is_floating() => Kind::Floats,
            (Shape::Variance, t) if t.is_integer() || t.is_decimal() => Kind::Whole,
            _ => return Err(SqlError::internal(format!("{func:?} of {arg}"))),
        };
        let scale = match arg {
            DataType::Decimal128(_, s) => *s,
            _ => 0,
        };
        Ok(ExactCall { func, kind, scale })
    }

    pub fn empty(&self) -> Exact {
        match self.kind {
            Kind::Whole => Exact::Whole(WholeMoments::default()),
            Kind::Floats => Exact::Floats(FloatMoments::default()),
            Kind::Pairs => Exact::Pairs(PairMoments::default()),
            Kind::Bits => Exact::Bits(Box::new(Bits { n: 0, ones: [0; 64] })),
        }
    }

    pub fn values(&self, array: &ArrayRef) -> Result<Values, SqlError> {
        let to = |t: &DataType| cast(array, t).map_err(|e| SqlError::internal(e.to_string()));
        Ok(match self.kind {
            Kind::Whole => Values::Whole(
                to(&DataType::Decimal128(38, self.scale))?.as_primitive::<Decimal128Type>().clone(),
            ),
            Kind::Floats => {
                Values::Floats(to(&DataType::Float64)?.as_primitive::<Float64Type>().clone())
            }
            Kind::Pairs => Values::Pairs(array.as_binary::<i32>().clone()),
            Kind::Bits => Values::Bits(to(&DataType::Int64)?.as_primitive::<Int64Type>().clone()),
        })
    }

    /// The state that [`Exact::to_bytes`] wrote.
    pub fn read(&self, bytes: &[u8]) -> Result<Exact, SqlError> {
        let state = match self.kind {
            Kind::Whole => WholeMoments::from_bytes(bytes).map(Exact::Whole),
            Kind::Floats => FloatMoments::from_bytes(bytes).map(Exact::Floats),
            Kind::Pairs => PairMoments::from_bytes(bytes).map(Exact::Pairs),
            Kind::Bits => Bits::from_bytes(bytes).map(|b| Exact::Bits(Box::new(b))),
        };
        state.ok_or_else(|| SqlError::internal("the state of an aggregate cannot be read"))
    }

    /// The result in the form of `output`.
    pub fn result(&self, state: &Exact, output: &DataType) -> Result<Number, SqlError> {
        Ok(match state {
            Exact::Bits(bits) => Number::Integer(bits.result(self.func)),
            Exact::Pairs(pairs) => match self.func {
                AggFunc::RegrCount => Number::Integer(Some(pairs.n)),
                _ => Number::Float(self.pair_result(pairs)?),
            },
            Exact::Floats(moments) => {
                let (sample, root) = self.func.variance();
                Number::Float(moments.variance(sample, root)?)
            }
            Exact::Whole(moments) => {
                let (sample, root) = self.func.variance();
                let DataType::Decimal128(precision, digits) = output else {
                    return Err(SqlError::internal(format!("a variance as {output}")));
                };
                let value = moments.variance(sample, root, self.scale, *digits);
                Number::Numeric(value.map(|v| bounded(&v, *precision)).transpose()?)
            }
        })
    }

    fn pair_result(&self, pairs: &PairMoments) -> Result<Option<f64>, SqlError> {
        let least = if self.func == AggFunc::CovarSamp { 2 } else { 1 };
        if pairs.n < least {
            return Ok(None);
        }
        let n = pairs.n as f64;
        match self.func {
            AggFunc::RegrAvgx => return Ok(Some(pairs.sum_values().0 / n)),
            AggFunc::RegrAvgy => return Ok(Some(pairs.sum_values().1 / n)),
            _ => {}
        }
        let d = pairs.deviations()?;
        let defined = |ok: bool, v: f64| ok.then_some(v);
        Ok(match self.func {
            AggFunc::CovarPop => Some(d.xy / n),
            AggFunc::CovarSamp => Some(d.xy / (n - 1.0)),
            AggFunc::Corr => defined(
                d.xx != 0.0 && d.yy != 0.0,
                (d.xy / root_of_product(d.xx, d.yy)).clamp(-1.0, 1.0),
            ),
            AggFunc::RegrSlope => defined(d.xx != 0.0, d.xy / d.xx),
            AggFunc::RegrIntercept => {
                let (x, y) = pairs.sum_values();
                defined(d.xx != 0.0, (y - x * d.xy / d.xx) / n)
            }
            AggFunc::RegrR2 if d.xx != 0.0 && d.yy == 0.0 => Some(1.0),
            AggFunc::RegrR2 => defined(d.xx != 0.0, (d.xy * d.xy) / (d.xx * d.yy)),
            AggFunc::RegrSxx => Some(d.xx),
            AggFunc::RegrSyy => Some(d.yy),
            AggFunc::RegrSxy => Some(d.xy),
            other => return Err(SqlError::internal(format!("{other:?} is no function of pairs"))),
        })
    }
}

/// √(a·b), also where the product leaves the range of a float.
fn root_of_product(a: f64, b: f64) -> f64 {
    let product = a * b;
    if product.is_normal() { product.sqrt() } else { a.sqrt() * b.sqrt() }
}

fn bounded(v: &BigInt, precision: u8) -> Result<i128, SqlError> {
    let limit = 10i128.checked_pow(u32::from(precision)).unwrap_or(i128::MAX);
    i128::try_from(v)
        .ok()
        .filter(|v| v.unsigned_abs() < limit.unsigned_abs())
        .ok_or_else(super::parse::numeric_overflow)
}

impl Exact {
    /// Adds a value, which is not NULL; a negative weight takes it back.
    #[inline]
    pub fn add(&mut self, values: &Values, row: usize, weight: i64) {
        match (self, values) {
            (Exact::Whole(m), Values::Whole(v)) => m.add(v.value(row), weight),
            (Exact::Floats(m), Values::Floats(v)) => m.add(v.value(row), weight),
            (Exact::Bits(bits), Values::Bits(v)) => bits.add(v.value(row), weight),
            (Exact::Pairs(m), Values::Pairs(v)) => {
                if let Some((y, x)) = read_pair(v.value(row)) {
                    m.add(y, x, weight);
                }
            }
            _ => debug_assert!(false, "values of another kind than the state"),
        }
    }

    pub fn merge(&mut self, other: &Exact) {
        match (self, other) {
            (Exact::Whole(a), Exact::Whole(b)) => a.merge(b),
            (Exact::Floats(a), Exact::Floats(b)) => a.merge(b),
            (Exact::Pairs(a), Exact::Pairs(b)) => a.merge(b),
            (Exact::Bits(a), Exact::Bits(b)) => {
                a.n += b.n;
                a.ones.iter_mut().zip(b.ones).for_each(|(a, b)| *a += b);
            }
            _ => debug_assert!(false, "states of two kinds"),
        }
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        match self {
            Exact::Whole(m) => m.to_bytes(),
            Exact::Floats(m) => m.to_bytes(),
            Exact::Pairs(m) => m.to_bytes(),
            Exact::Bits(bits) => bits.to_bytes(),
        }
    }

    /// Bytes of memory, about.
    pub fn size(&self) -> usize {
        match self {
            Exact::Whole(_) => 160,
            Exact::Floats(_) => 200,
            Exact::Pairs(_) => 480,
            Exact::Bits(_) => 560,
        }
    }
}

impl Bits {
    fn add(&mut self, value: i64, weight: i64) {
        self.n += weight;
        let mut left = value as u64;
        while left != 0 {
            self.ones[left.trailing_zeros() as usize] += weight;
            left &= left - 1;
        }
    }

    fn result(&self, func: AggFunc) -> Option<i64> {
        let bit = |ones: i64| match func {
            AggFunc::BitAnd => ones == self.n,
            AggFunc::BitOr => ones > 0,
            _ => ones & 1 == 1,
        };
        let bits = self.ones.iter().rev().fold(0u64, |all, ones| all << 1 | u64::from(bit(*ones)));
        (self.n > 0).then_some(bits as i64)
    }

    /// The count, the highest bit in use, and the counts up to it.
    fn to_bytes(&self) -> Vec<u8> {
        let used = self.ones.iter().rposition(|n| *n != 0).map_or(0, |at| at + 1);
        let counts = [self.n].into_iter().chain(self.ones[..used].iter().copied());
        counts.flat_map(i64::to_le_bytes).collect()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Bits> {
        let (counts, rest) = bytes.as_chunks::<8>();
        let (n, counts) = counts.split_first()?;
        if !rest.is_empty() || counts.len() > 64 {
            return None;
        }
        let mut ones = [0; 64];
        ones.iter_mut().zip(counts).for_each(|(to, from)| *to = i64::from_le_bytes(*from));
        Some(Bits { n: i64::from_le_bytes(*n), ones })
    }
}

/// Results as a column of type `output`.
pub fn column(results: Vec<Number>, output: &DataType) -> Result<ArrayRef, SqlError> {
    let internal = |e: arrow::error::ArrowError| SqlError::internal(e.to_string());
    let float = |n: &Number| if let Number::Float(v) = n { v.map(one_nan) } else { None };
    let numeric = |n: &Number| if let Number::Numeric(v) = n { *v } else { None };
    let integer = |n: &Number| if let Number::Integer(v) = n { *v } else { None };
    Ok(match output {
        DataType::Float64 => Arc::new(results.iter().map(float).collect::<Float64Array>()),
        DataType::Decimal128(p, s) => {
            let values = results.iter().map(numeric).collect::<Decimal128Array>();
            Arc::new(values.with_precision_and_scale(*p, *s).map_err(internal)?)
        }
        t => {
            let values: ArrayRef = Arc::new(results.iter().map(integer).collect::<Int64Array>());
            cast(&values, t).map_err(internal)?
        }
    })
}

/// `pair_entry(y, x)`: two floats as one value, NULL if one of them is. Equal pairs have equal bytes.
pub fn pair_entry() -> Arc<ScalarUDF> {
    let signature =
        Signature::exact(vec![DataType::Float64, DataType::Float64], Volatility::Immutable);
    PlainScalar::new("pair_entry", signature, |_| Ok(DataType::Binary), paired).strict().udf()
}

fn paired(args: ScalarFunctionArgs) -> PlanResult<ColumnarValue> {
    let [y, x] = args.args.as_slice() else {
        return Err(external(SqlError::internal("pair_entry takes two arguments")));
    };
    let (y, x) = (y.to_array(args.number_rows)?, x.to_array(args.number_rows)?);
    Ok(ColumnarValue::Array(Arc::new(pairs(&y, &x))))
}

/// Two columns of floats as one of pairs.
pub fn pairs(y: &ArrayRef, x: &ArrayRef) -> BinaryArray {
    let (y, x) = (y.as_primitive::<Float64Type>(), x.as_primitive::<Float64Type>());
    // One zero, and one NaN.
    let plain = |v: f64| if v.is_nan() { f64::NAN } else { v + 0.0 };
    let mut out = BinaryBuilder::with_capacity(y.len(), y.len() * 16);
    for row in 0..y.len() {
        if y.is_null(row) || x.is_null(row) {
            out.append_null();
            continue;
        }
        let mut pair = [0; 16];
        pair[..8].copy_from_slice(&plain(y.value(row)).to_le_bytes());
        pair[8..].copy_from_slice(&plain(x.value(row)).to_le_bytes());
        out.append_value(pair);
    }
    out.finish()
}

fn read_pair(bytes: &[u8]) -> Option<(f64, f64)> {
    let ([y, x], []) = bytes.as_chunks::<8>() else { return None };
    Some((f64::from_le_bytes(*y), f64::from_le_bytes(*x)))
}

/// How a function takes its arguments.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Shape {
    Variance,
    Pair,
    Bits,
    /// Not one of these functions.
    Other,
}

impl AggFunc {
    pub fn shape(self) -> Shape {
        use AggFunc as F;
        match self {
            F::VarPop | F::VarSamp | F::StddevPop | F::StddevSamp => Shape::Variance,
            F::BitAnd | F::BitOr | F::BitXor => Shape::Bits,
            F::CovarPop
            | F::CovarSamp
            | F::Corr
            | F::RegrCount
            | F::RegrAvgx
            | F::RegrAvgy
            | F::RegrSxx
            | F::RegrSyy
            | F::RegrSxy
            | F::RegrSlope
            | F::RegrIntercept
            | F::RegrR2 => Shape::Pair,
            _ => Shape::Other,
        }
    }

    /// Whether its state is exact sums: see the module.
    pub fn is_exact(self) -> bool {
        self.shape() != Shape::Other
    }

    /// Of a sample, and the root.
    fn variance(self) -> (bool, bool) {
        let sample = matches!(self, AggFunc::VarSamp | AggFunc::StddevSamp);
        (sample, matches!(self, AggFunc::StddevPop | AggFunc::StddevSamp))
    }
}

#[cfg(test)]
mod tests {
    use AggFunc as F;
    use arrow::array::{Int32Array, StringArray};

    use super::*;
    use crate::cast::to_text;

    fn texts(found: &ArrayRef) -> Vec<Option<String>> {
        let texts = to_text(found).unwrap();
        let texts: &StringArray = texts.as_string::<i32>();
        texts.iter().map(|t| t.map(str::to_owned)).collect()
    }

    fn result(call: &ExactCall, state: &Exact, output: &DataType) -> Option<String> {
        let number = call.result(state, output).unwrap();
        texts(&column(vec![number], output).unwrap()).remove(0)
    }

    fn floats(values: &[f64]) -> ArrayRef {
        Arc::new(Float64Array::from(values.to_vec()))
    }

    /// A call over five rows, in the forms of its arguments.
    fn calls() -> Vec<(ExactCall, ArrayRef, DataType)> {
        let whole: ArrayRef = Arc::new(Int32Array::from(vec![12, 10, -3, 10, 7]));
        let some = floats(&[1.5, -2.0, 1e300, f64::NAN, f64::INFINITY]);
        let (y, x) = (floats(&[1.0, 2.0, 4.0, 8.0, 16.0]), floats(&[3.0, 1.0, -2.0, 0.5, 9.0]));
        let both: ArrayRef = Arc::new(pairs(&y, &x));
        let made = |func, array: &ArrayRef, output: DataType| {
            (ExactCall::new(func, array.data_type()).unwrap(), Arc::clone(array), output)
        };
        vec![
            made(F::VarSamp, &whole, DataType::Decimal128(38, 16)),
            made(F::StddevPop, &some, DataType::Float64),
            made(F::Corr, &both, DataType::Float64),
            made(F::RegrCount, &both, DataType::Int64),
            made(F::BitAnd, &whole, DataType::Int32),
            made(F::BitXor, &whole, DataType::Int32),
        ]
    }

    #[test]
    fn what_is_taken_back_was_never_there() {
        for (call, array, output) in calls() {
            let values = call.values(&array).unwrap();
            let (mut some, mut all) = (call.empty(), call.empty());
            (0..2).for_each(|row| some.add(&values, row, 1));
            (0..5).for_each(|row| all.add(&values, row, 1));
            (2..5).for_each(|row| all.add(&values, row, -1));
            assert_eq!(all.to_bytes(), some.to_bytes(), "{call:?}");
            assert_eq!(result(&call, &all, &output), result(&call, &some, &output));
            (0..2).for_each(|row| all.add(&values, row, -1));
            assert_eq!(all.to_bytes(), call.empty().to_bytes(), "{call:?}");
        }
    }

    #[test]
    fn a_weight_counts_as_so_many_rows() {
        for (call, array, output) in calls() {
            let values = call.values(&array).unwrap();
            let (mut one_by_one, mut at_once) = (call.empty(), call.empty());
            (0..3).for_each(|_| one_by_one.add(&values, 0, 1));
            at_once.add(&values, 0, 3);
            assert_eq!(at_once.to_bytes(), one_by_one.to_bytes(), "{call:?}");
            assert_eq!(result(&call, &at_once, &output), result(&call, &one_by_one, &output));
        }
    }

    #[test]
    fn merged_and_stored_states_are_those_of_all_rows() {
        for (call, array, _) in calls() {
            let values = call.values(&array).unwrap();
            let mut all = call.empty();
            (0..5).for_each(|row| all.add(&values, row, 1));
            for middle in 0..=5 {
                let (mut first, mut last) = (call.empty(), call.empty());
                (0..middle).for_each(|row| first.add(&values, row, 1));
                (middle..5).for_each(|row| last.add(&values, row, 1));
                first.merge(&call.read(&last.to_bytes()).unwrap());
                assert_eq!(first.to_bytes(), all.to_bytes(), "{call:?} at row {middle}");
            }
        }
    }

    #[test]
    fn damaged_states_are_errors() {
        for (call, ..) in calls() {
            let bytes = call.empty().to_bytes();
            assert!(call.read(&[bytes.as_slice(), &[0]].concat()).is_err(), "{call:?}");
        }
        let bits = ExactCall::new(F::BitOr, &DataType::Int64).unwrap();
        assert!(bits.read(&[]).is_err());
        assert!(bits.read(&[0; 66 * 8]).is_err());
    }

    #[test]
    fn equal_pairs_have_equal_bytes() {
        let other_nan = f64::from_bits(f64::NAN.to_bits() | 1 << 63);
        let (y, x) = (floats(&[0.0, f64::NAN]), floats(&[1.0, 1.0]));
        let (same_y, same_x) = (floats(&[-0.0, other_nan]), floats(&[1.0, 1.0]));
        assert_eq!(pairs(&y, &x), pairs(&same_y, &same_x));
        let partly: ArrayRef = Arc::new(Float64Array::from(vec![None, Some(1.0)]));
        let found = pairs(&partly, &x);
        assert!(found.is_null(0) && found.is_valid(1));
    }

    #[test]
    fn functions_take_types_that_they_have_sums_of() {
        assert!(ExactCall::new(F::VarPop, &DataType::Utf8).is_err());
        assert!(ExactCall::new(F::Sum, &DataType::Int32).is_err());
        assert_eq!(F::Count.shape(), Shape::Other);
        assert_eq!(F::RegrR2.shape(), Shape::Pair);
    }

    #[test]
    fn correlations_of_extreme_values_stay_in_range() {
        let (y, x) = (floats(&[1e200, 2e200, 3e200]), floats(&[1e-200, 2e-200, 3e-200]));
        let both: ArrayRef = Arc::new(pairs(&y, &x));
        let call = ExactCall::new(F::Corr, both.data_type()).unwrap();
        let values = call.values(&both).unwrap();
        let mut state = call.empty();
        (0..3).for_each(|row| state.add(&values, row, 1));
        // Or PostgreSQL's error for a square that is no float.
        match call.result(&state, &DataType::Float64) {
            Ok(Number::Float(Some(found))) => assert!((-1.0..=1.0).contains(&found)),
            Ok(_) => panic!("a correlation of different values is a number"),
            Err(e) => assert_eq!(e.state, millrace_common::SqlState::NUMERIC_VALUE_OUT_OF_RANGE),
        }
    }
}
