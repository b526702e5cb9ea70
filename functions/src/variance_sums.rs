//! Sums of values, squares and products, exact under additions and retractions in any order: what
//! variances, covariances and regressions follow from.
//!
//! Integers and numerics are summed as whole numbers of any size. A float is a whole number of 2^−1074, and
//! a product of two floats is the sum of two of them (the rounded product and what rounding lost), so
//! their sums are exact as well ([`ExactSum`]). Results are computed from the exact sums and rounded
//! once, so they do not depend on the order of the rows and never suffer from cancellation.
//!
//! The bytes are stored in state tables: a format on disk.

use arrow::datatypes::i256;
use millrace_common::{ExactSum, SqlError, SqlState};
use num_bigint::{BigInt, Sign};

/// Exponent of the unit of [`ExactSum`].
const UNIT: i32 = -1074;

/// A sum of whole numbers of any size.
#[derive(Clone, Debug, Default)]
pub struct Whole {
    small: i256,
    /// What did not fit into `small`; the sum is both together.
    large: Option<Box<BigInt>>,
}

fn big(v: i256) -> BigInt {
    BigInt::from_signed_bytes_le(&v.to_le_bytes())
}

impl Whole {
    fn add(&mut self, value: i256, weight: i64) {
        let product = value.checked_mul(i256::from_i128(i128::from(weight)));
        match product.and_then(|p| self.small.checked_add(p)) {
            Some(sum) => self.small = sum,
            None => **self.large.get_or_insert_default() += big(value) * weight,
        }
    }

    fn total(&self) -> BigInt {
        match &self.large {
            Some(large) => big(self.small) + large.as_ref(),
            None => big(self.small),
        }
    }

    fn from_total(total: BigInt) -> Whole {
        let bytes = total.to_signed_bytes_le();
        if bytes.len() > 32 {
            return Whole { small: i256::ZERO, large: Some(Box::new(total)) };
        }
        let fill = if total.sign() == Sign::Minus { 0xff } else { 0 };
        let mut all = [fill; 32];
        all[..bytes.len()].copy_from_slice(&bytes);
        Whole { small: i256::from_le_bytes(all), large: None }
    }
}

/// A sum as moments keep it.
pub trait Sum: Default {
    fn merge(&mut self, other: &Self);

    fn to_bytes(&self) -> Vec<u8>;

    /// `None`: damaged.
    fn from_bytes(bytes: &[u8]) -> Option<Self>;
}

impl Sum for Whole {
    fn merge(&mut self, other: &Whole) {
        self.add(other.small, 1);
        if let Some(large) = &other.large {
            **self.large.get_or_insert_default() += large.as_ref();
        }
    }

    fn to_bytes(&self) -> Vec<u8> {
        self.total().to_signed_bytes_le()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Whole> {
        Some(Whole::from_total(BigInt::from_signed_bytes_le(bytes)))
    }
}

impl Sum for ExactSum {
    fn merge(&mut self, other: &ExactSum) {
        ExactSum::merge(self, other);
    }

    fn to_bytes(&self) -> Vec<u8> {
        ExactSum::to_bytes(self)
    }

    fn from_bytes(bytes: &[u8]) -> Option<ExactSum> {
        ExactSum::from_bytes(bytes)
    }
}

/// Count, sum and sum of squares.
#[derive(Clone, Debug, Default)]
pub struct Moments<S> {
    n: i64,
    sum: S,
    squares: S,
}

impl<S: Sum> Moments<S> {
    pub fn merge(&mut self, other: &Moments<S>) {
        self.n += other.n;
        self.sum.merge(&other.sum);
        self.squares.merge(&other.squares);
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = self.n.to_le_bytes().to_vec();
        for sum in [&self.sum, &self.squares] {
            push_part(&mut out, &sum.to_bytes());
        }
        out
    }

    /// `None`: damaged.
    pub fn from_bytes(mut bytes: &[u8]) -> Option<Moments<S>> {
        let n = take_count(&mut bytes)?;
        let mut sum = || S::from_bytes(take_part(&mut bytes)?);
        let (sum, squares) = (sum()?, sum()?);
        bytes.is_empty().then_some(Moments { n, sum, squares })
    }
}

/// Of integers and numerics, in units of the last digit.
pub type WholeMoments = Moments<Whole>;

impl WholeMoments {
    pub fn add(&mut self, value: i128, weight: i64) {
        let wide = i256::from_i128(value);
        self.n += weight;
        self.sum.add(wide, weight);
        // A value has at most 38 digits, its square 76: 253 bits.
        self.squares.add(wide.wrapping_mul(wide), weight);
    }

    /// The variance of values with `scale` digits behind the point, or its root, in units of the last of
    /// `digits` digits, rounded half up; `None`: too few values.
    pub fn variance(&self, sample: bool, root: bool, scale: i8, digits: i8) -> Option<BigInt> {
        let least = if sample { 2 } else { 1 };
        if self.n < least {
            return None;
        }
        let n = BigInt::from(self.n);
        let sum = self.sum.total();
        // n²·variance, in units of the squares' last digit. Never negative.
        let mut numerator = &n * self.squares.total() - &sum * &sum;
        let mut divisor = if sample { &n * (&n - 1) } else { &n * &n };
        let shift = i32::from(digits) * if root { 2 } else { 1 } - 2 * i32::from(scale);
        let power = BigInt::from(10).pow(shift.unsigned_abs());
        if shift >= 0 {
            numerator *= power;
        } else {
            divisor *= power;
        }
        // Twice the result, cut, and then one up: half goes up.
        let twice: BigInt = if root {
            let four: BigInt = numerator * 4 / divisor;
            four.sqrt()
        } else {
            numerator * 2 / divisor
        };
        Some((twice + 1) / 2)
    }
}

/// Of floats.
pub type FloatMoments = Moments<ExactSum>;

impl FloatMoments {
    pub fn add(&mut self, value: f64, weight: i64) {
        self.n += weight;
        self.sum.add(value, weight);
        add_product(&mut self.squares, value, value, weight);
    }

    /// The variance, or its root; `None`: too few values.
    pub fn variance(&self, sample: bool, root: bool) -> Result<Option<f64>, SqlError> {
        let least = if sample { 2 } else { 1 };
        if self.n < least {
            return Ok(None);
        }
        let moment = Deviation::of(self.n, &self.sum, &self.sum, &self.squares)?;
        let n = BigInt::from(self.n);
        let divisor = if sample { &n * (&n - 1) } else { &n * &n };
        let variance = moment.over(&divisor);
        Ok(Some(if root { variance.sqrt() } else { variance }))
    }
}

/// Of pairs (y, x) of floats.
#[derive(Clone, Debug, Default)]
pub struct PairMoments {
    pub n: i64,
    x: ExactSum,
    y: ExactSum,
    xx: ExactSum,
    yy: ExactSum,
    xy: ExactSum,
}

/// Sums of squares and products of the deviations from the means.
pub struct Deviations {
    pub xx: f64,
    pub yy: f64,
    pub xy: f64,
}

impl PairMoments {
    pub fn add(&mut self, y: f64, x: f64, weight: i64) {
        self.n += weight;
        self.x.add(x, weight);
        self.y.add(y, weight);
        add_product(&mut self.xx, x, x, weight);
        add_product(&mut self.yy, y, y, weight);
        add_product(&mut self.xy, x, y, weight);
    }

    fn sums(&self) -> [&ExactSum; 5] {
        [&self.x, &self.y, &self.xx, &self.yy, &self.xy]
    }

    pub fn merge(&mut self, other: &PairMoments) {
        self.n += other.n;
        let own = [&mut self.x, &mut self.y, &mut self.xx, &mut self.yy, &mut self.xy];
        own.into_iter().zip(other.sums()).for_each(|(a, b)| a.merge(b));
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = self.n.to_le_bytes().to_vec();
        self.sums().into_iter().for_each(|sum| push_part(&mut out, &sum.to_bytes()));
        out
    }

    pub fn from_bytes(mut bytes: &[u8]) -> Option<PairMoments> {
        let n = take_count(&mut bytes)?;
        let mut sum = || ExactSum::from_bytes(take_part(&mut bytes)?);
        let (x, y, xx, yy, xy) = (sum()?, sum()?, sum()?, sum()?, sum()?);
        bytes.is_empty().then_some(PairMoments { n, x, y, xx, yy, xy })
    }

    /// Needs a pair at least.
    pub fn deviations(&self) -> Result<Deviations, SqlError> {
        let n = BigInt::from(self.n);
        let of = |a, b, ab| Ok::<f64, SqlError>(Deviation::of(self.n, a, b, ab)?.over(&n));
        Ok(Deviations {
            xx: of(&self.x, &self.x, &self.xx)?,
            yy: of(&self.y, &self.y, &self.yy)?,
            xy: of(&self.x, &self.y, &self.xy)?,
        })
    }

    /// The sums of x and of y.
    pub fn sum_values(&self) -> (f64, f64) {
        (self.x.value(), self.y.value())
    }
}

/// n·Σab − Σa·Σb, or not a number.
enum Deviation {
    /// In units of 2^(2·`UNIT`).
    Exact(BigInt),
    Nan,
}

impl Deviation {
    fn of(n: i64, a: &ExactSum, b: &ExactSum, ab: &ExactSum) -> Result<Deviation, SqlError> {
        if !a.is_finite() || !b.is_finite() {
            return Ok(Deviation::Nan);
        }
        if !ab.is_finite() {
            return Err(SqlError::new(
                SqlState::NUMERIC_VALUE_OUT_OF_RANGE,
                "value out of range: overflow",
            ));
        }
        let products = (units(ab) * n) << UNIT.unsigned_abs();
        Ok(Deviation::Exact(products - units(a) * units(b)))
    }

    /// Divided by `divisor`, which is positive, and rounded to a float.
    fn over(&self, divisor: &BigInt) -> f64 {
        match self {
            Deviation::Exact(v) => quotient(v, divisor, 2 * UNIT),
            Deviation::Nan => f64::NAN,
        }
    }
}

/// Adds a·b without rounding: the rounded product and its error. (Where that is below the least float,
/// it is cut: the same for the same values, whenever they come and go.)
fn add_product(sum: &mut ExactSum, a: f64, b: f64, weight: i64) {
    let product = a * b;
    sum.add(product, weight);
    if product.is_finite() {
        sum.add(a.mul_add(b, -product), weight);
    }
}

fn units(sum: &ExactSum) -> BigInt {
    let (base, limbs) = sum.limbs();
    let bytes: Vec<u8> = limbs.iter().flat_map(|l| l.to_le_bytes()).collect();
    BigInt::from_signed_bytes_le(&bytes) << (64 * base)
}

/// `numerator / divisor × 2^exponent`, rounded to nearest (twice where the result is subnormal).
fn quotient(numerator: &BigInt, divisor: &BigInt, exponent: i32) -> f64 {
    /// More bits than a float has, with room for a last one that tells whether there was a rest.
    const BITS: i64 = 70;
    if numerator.sign() == Sign::NoSign {
        return 0.0;
    }
    let magnitude = numerator.magnitude();
    let shift = BITS + divisor.bits() as i64 - magnitude.bits() as i64;
    let (above, below) = match shift {
        0.. => (magnitude << shift as u64, divisor.magnitude().clone()),
        _ => (magnitude.clone(), divisor.magnitude() << shift.unsigned_abs()),
    };
    let whole = &above / &below;
    let rest = &whole * &below != above;
    let digits = whole.iter_u64_digits().rev().fold(0u128, |all, d| all << 64 | u128::from(d));
    let value = (digits | u128::from(rest)) as f64;
    let value = scale(value, exponent - shift as i32);
    if numerator.sign() == Sign::Minus { -value } else { value }
}

/// `value × 2^exponent`.
fn scale(mut value: f64, mut exponent: i32) -> f64 {
    let power = |e: i32| f64::from_bits(((e + 1023) as u64) << 52);
    while exponent > 1000 && value.is_finite() {
        value *= power(1000);
        exponent -= 1000;
    }
    while exponent < -1000 && value != 0.0 {
        value *= power(-1000);
        exponent += 1000;
    }
    value * power(exponent.clamp(-1000, 1000))
}

fn push_part(out: &mut Vec<u8>, part: &[u8]) {
    out.extend_from_slice(&(part.len() as u16).to_le_bytes());
    out.extend_from_slice(part);
}

fn take_part<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (length, rest) = bytes.split_at_checked(2)?;
    let length = u16::from_le_bytes(length.try_into().ok()?);
    let (part, rest) = rest.split_at_checked(usize::from(length))?;
    *bytes = rest;
    Some(part)
}

fn take_count(bytes: &mut &[u8]) -> Option<i64> {
    let (count, rest) = bytes.split_at_checked(8)?;
    *bytes = rest;
    Some(i64::from_le_bytes(count.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(values: &[f64]) -> FloatMoments {
        let mut all = FloatMoments::default();
        values.iter().for_each(|v| all.add(*v, 1));
        all
    }

    #[test]
    fn variances_of_floats_do_not_cancel() {
        // (1e9+1, 1e9+2, 1e9+4): the deviations are −4/3, −1/3, 5/3, their squares sum to 42/9.
        let all = floats(&[1e9 + 1.0, 1e9 + 2.0, 1e9 + 4.0]);
        assert_eq!(all.variance(true, false).ok().flatten(), Some(7.0 / 3.0));
        assert_eq!(all.variance(false, false).ok().flatten(), Some(14.0 / 9.0));
        // Squares that no float holds: 0.1 is not a tenth.
        assert_eq!(floats(&[0.1, 0.1, 0.1]).variance(true, true).ok().flatten(), Some(0.0));
        // The root of the rounded variance.
        assert_eq!(
            floats(&[1e-140, 3e-140]).variance(false, true).ok().flatten(),
            Some(1.0000000000000001e-140)
        );
        assert_eq!(floats(&[1.0]).variance(true, false).ok().flatten(), None);
        assert!(floats(&[1e200, 1.0]).variance(true, false).is_err());
        assert!(
            floats(&[1.0, f64::INFINITY])
                .variance(true, false)
                .is_ok_and(|v| v.is_some_and(f64::is_nan))
        );
    }

    #[test]
    fn what_is_retracted_leaves_no_trace() {
        let mut all = floats(&[0.3, -7.25]);
        let before = all.to_bytes();
        for v in [1e300, f64::NAN, 0.7, -1e-300] {
            all.add(v, 2);
        }
        for v in [-1e-300, 0.7, f64::NAN, 1e300] {
            all.add(v, -2);
        }
        assert_eq!(all.to_bytes(), before);
        let again = FloatMoments::from_bytes(&before).map(|m| m.to_bytes());
        assert_eq!(again, Some(before));
        assert!(FloatMoments::from_bytes(&[1, 2, 3]).is_none());
    }

    #[test]
    fn variances_of_whole_numbers_are_rounded_once() {
        let mut all = WholeMoments::default();
        [1, 2, 4].into_iter().for_each(|v| all.add(v, 1));
        let text = |v: Option<BigInt>| v.map(|v| v.to_string());
        // 7/3, and its root 1.52752523165194666886…
        assert_eq!(text(all.variance(true, false, 0, 4)), Some("23333".into()));
        assert_eq!(text(all.variance(true, true, 0, 16)), Some("15275252316519467".into()));
        // With two digits behind the point: 0.00023333…
        assert_eq!(text(all.variance(true, false, 2, 6)), Some("233".into()));
        // Sums beyond 256 bits, and back again.
        let largest = 10i128.pow(38) - 1;
        all.add(largest, 1 << 60);
        all.add(-largest, 1 << 60);
        let stored = all.to_bytes();
        let Some(mut all) = WholeMoments::from_bytes(&stored) else { panic!("cannot be read") };
        assert_eq!(all.to_bytes(), stored);
        all.add(largest, -(1 << 60));
        all.add(-largest, -(1 << 60));
        assert_eq!(text(all.variance(true, false, 0, 4)), Some("23333".into()));
    }

    #[test]
    fn regression_of_a_line() {
        let mut all = PairMoments::default();
        [(3.0, 1.0), (5.0, 2.0), (9.0, 4.0)].into_iter().for_each(|(y, x)| all.add(y, x, 1));
        let Ok(d) = all.deviations() else { panic!("finite") };
        // y = 2x + 1, Σ(x − 7/3)² = 14/3.
        assert_eq!((d.xx, d.yy, d.xy), (14.0 / 3.0, 56.0 / 3.0, 28.0 / 3.0));
        let again = PairMoments::from_bytes(&all.to_bytes()).map(|m| m.to_bytes());
        assert_eq!(again, Some(all.to_bytes()));
    }

    /// Stored state must stay readable.
    #[test]
    fn the_bytes_are_pinned() {
        let hex = |bytes: Vec<u8>| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        let mut whole = WholeMoments::default();
        whole.add(-3, 1);
        whole.add(5, 1);
        assert_eq!(hex(whole.to_bytes()), "0200000000000000010002010022");
        assert_eq!(
            hex(floats(&[1.5]).to_bytes()),
            concat!(
                "0100000000000000",
                "0c00000000100000000000000600",
                "0c00000000100000000000000900"
            )
        );
    }
}
