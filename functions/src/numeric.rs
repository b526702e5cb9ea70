//! Arithmetic of numerics with a scale of their own, as PostgreSQL computes it: the display scales of its
//! `numeric.c` (at least sixteen significant digits), results rounded half away from zero.

use datafusion::common::ScalarValue;
use millrace_common::{SqlError, SqlState};
use num_bigint::{BigInt, Sign};

use super::parse::numeric_overflow;
use crate::error::division_by_zero;

const MIN_SIG_DIGITS: i32 = 16;
const MAX_SCALE: i32 = 1000;
/// Digits beyond the result's that the series are computed with.
const GUARD: i32 = 12;

/// `value / 10^scale`.
#[derive(Clone, Debug, PartialEq)]
pub struct Num {
    value: BigInt,
    scale: i32,
}

fn pow10(n: i32) -> BigInt {
    BigInt::from(10).pow(n.max(0) as u32)
}

fn is_zero(v: &BigInt) -> bool {
    v.sign() == Sign::NoSign
}

fn error(state: &'static str, message: &str) -> SqlError {
    SqlError::new(SqlState(state), message)
}

/// `n / d`, rounded half away from zero.
fn div_round(n: &BigInt, d: &BigInt) -> BigInt {
    let (n, d) = if d.sign() == Sign::Minus { (-n, -d) } else { (n.clone(), d.clone()) };
    let sign = n.sign();
    let q: BigInt = (BigInt::from_biguint(Sign::Plus, n.magnitude().clone()) * 2 + &d) / (&d * 2);
    if sign == Sign::Minus { -q } else { q }
}

impl Num {
    pub fn new(value: i128, scale: i8) -> Num {
        Num { value: BigInt::from(value), scale: i32::from(scale) }
    }

    pub fn from_big(value: BigInt, scale: i32) -> Num {
        Num { value, scale }
    }

    pub fn scale(&self) -> i32 {
        self.scale
    }

    pub fn is_zero(&self) -> bool {
        is_zero(&self.value)
    }

    pub fn is_negative(&self) -> bool {
        self.value.sign() == Sign::Minus
    }

    pub fn is_integer(&self) -> bool {
        is_zero(&(&self.value % pow10(self.scale)))
    }

    /// The same number at another scale, rounded.
    pub fn rescale(&self, scale: i32) -> Num {
        let value = match scale >= self.scale {
            true => &self.value * pow10(scale - self.scale),
            false => div_round(&self.value, &pow10(self.scale - scale)),
        };
        Num { value, scale }
    }

    /// Toward zero.
    pub fn truncate(&self, scale: i32) -> Num {
        match scale >= self.scale {
            true => self.rescale(scale),
            false => Num { value: &self.value / pow10(self.scale - scale), scale },
        }
    }

    pub fn round(&self, digits: i32) -> Num {
        let digits = digits.clamp(-MAX_SCALE, MAX_SCALE);
        self.rescale(digits).rescale(digits.max(0))
    }

    pub fn trunc(&self, digits: i32) -> Num {
        let digits = digits.clamp(-MAX_SCALE, MAX_SCALE);
        self.truncate(digits).rescale(digits.max(0))
    }

    /// Without trailing zeros after the point.
    pub fn trimmed(&self) -> Num {
        let mut n = self.clone();
        let ten = BigInt::from(10);
        while n.scale > 0 && is_zero(&(&n.value % &ten)) {
            n.value /= &ten;
            n.scale -= 1;
        }
        n
    }

    pub fn to_f64(&self) -> f64 {
        self.to_text().parse().unwrap_or(f64::NAN)
    }

    pub fn to_text(&self) -> String {
        let digits = self.value.magnitude().to_string();
        let scale = self.scale.max(0) as usize;
        let digits = format!("{digits:0>width$}", width = scale + 1);
        let (whole, fraction) = digits.split_at(digits.len() - scale);
        let sign = if self.is_negative() { "-" } else { "" };
        match fraction.is_empty() {
            true => format!("{sign}{whole}"),
            false => format!("{sign}{whole}.{fraction}"),
        }
    }

    /// The integer part, if it fits.
    pub fn to_i64(&self) -> Option<i64> {
        i64::try_from(&self.truncate(0).value).ok()
    }

    /// The digits at a numeric(p, s), or the overflow error.
    pub fn to_digits(&self, p: u8, s: i8) -> Result<i128, SqlError> {
        let v =
            i128::try_from(&self.rescale(i32::from(s)).value).map_err(|_| numeric_overflow())?;
        match v.unsigned_abs() < 10u128.pow(u32::from(p)) {
            true => Ok(v),
            false => Err(numeric_overflow()),
        }
    }

    /// As a constant with the value's own scale, or the largest that 38 digits leave.
    pub fn to_scalar(&self) -> Result<ScalarValue, SqlError> {
        let whole = self.truncate(0).value.magnitude().to_string().len() as i32;
        let scale = self.scale.min(38 - whole.min(38)).max(0);
        let mut n = self.rescale(scale);
        if i128::try_from(&n.value).map_or(true, |v| v.unsigned_abs() >= 10u128.pow(38)) {
            n = self.rescale((scale - 1).max(0));
        }
        let value = n.to_digits(38, n.scale as i8)?;
        let digits = value.unsigned_abs().to_string().len() as i32;
        let precision = digits.max(n.scale).clamp(1, 38);
        Ok(ScalarValue::Decimal128(Some(value), precision as u8, n.scale as i8))
    }

    /// PostgreSQL's weight (power of 10000 of the first digit) and the first one and two digits.
    fn weight(&self) -> (i32, i64, i64, bool) {
        if self.is_zero() {
            return (0, 0, 0, false);
        }
        // Aligned to groups of four digits around the point.
        let up = (4 - self.scale.rem_euclid(4)) % 4;
        let digits = (&self.value * pow10(up)).magnitude().to_string();
        let groups_after = (self.scale + up) / 4;
        let groups = digits.len().div_ceil(4);
        let first_len = digits.len() - (groups - 1) * 4;
        let first: i64 = digits[..first_len].parse().unwrap_or(0);
        let trimmed = digits.trim_end_matches('0').len();
        let second = trimmed > first_len;
        let two = match groups > 1 {
            true => digits[..first_len + 4].parse().unwrap_or(0),
            false => first * 10_000,
        };
        (groups as i32 - 1 - groups_after, first, two, second)
    }

    pub fn add(&self, other: &Num) -> Num {
        let scale = self.scale.max(other.scale);
        Num { value: self.rescale(scale).value + other.rescale(scale).value, scale }
    }

    pub fn sub(&self, other: &Num) -> Num {
        let scale = self.scale.max(other.scale);
        Num { value: self.rescale(scale).value - other.rescale(scale).value, scale }
    }

    pub fn mul(&self, other: &Num) -> Num {
        Num { value: &self.value * &other.value, scale: self.scale + other.scale }
    }

    pub fn neg(&self) -> Num {
        Num { value: -&self.value, scale: self.scale }
    }

    pub fn cmp(&self, other: &Num) -> std::cmp::Ordering {
        let scale = self.scale.max(other.scale);
        self.rescale(scale).value.cmp(&other.rescale(scale).value)
    }

    /// `self / other` at a given scale.
    pub fn div_scaled(&self, other: &Num, scale: i32) -> Result<Num, SqlError> {
        if other.is_zero() {
            return Err(division_by_zero());
        }
        let shift = scale + other.scale - self.scale;
        let (n, d) = match shift >= 0 {
            true => (&self.value * pow10(shift), other.value.clone()),
            false => (self.value.clone(), &other.value * pow10(-shift)),
        };
        Ok(Num { value: div_round(&n, &d), scale })
    }

    /// `self / other` with the scale that PostgreSQL selects (`select_div_scale`).
    pub fn div(&self, other: &Num) -> Result<Num, SqlError> {
        let (w1, f1, ..) = self.weight();
        let (w2, f2, ..) = other.weight();
        let qweight = w1 - w2 - i32::from(f1 <= f2);
        let scale = MIN_SIG_DIGITS - qweight * 4;
        let scale = scale.max(self.scale).max(other.scale).clamp(0, MAX_SCALE);
        self.div_scaled(other, scale)
    }

    /// The quotient's integer part.
    pub fn div_trunc(&self, other: &Num) -> Result<Num, SqlError> {
        if other.is_zero() {
            return Err(division_by_zero());
        }
        let scale = self.scale.max(other.scale);
        let value = self.rescale(scale).value / other.rescale(scale).value;
        Ok(Num { value, scale: 0 })
    }

    pub fn rem(&self, other: &Num) -> Result<Num, SqlError> {
        if other.is_zero() {
            return Err(division_by_zero());
        }
        let scale = self.scale.max(other.scale);
        Ok(Num { value: self.rescale(scale).value % other.rescale(scale).value, scale })
    }

    pub fn gcd(&self, other: &Num) -> Num {
        let scale = self.scale.max(other.scale);
        let (mut a, mut b) = (self.rescale(scale).value, other.rescale(scale).value);
        while !is_zero(&b) {
            (a, b) = (b.clone(), a % &b);
        }
        Num { value: BigInt::from_biguint(Sign::Plus, a.magnitude().clone()), scale }
    }

    pub fn abs(&self) -> Num {
        if self.is_negative() { self.neg() } else { self.clone() }
    }

    pub fn sqrt(&self) -> Result<Num, SqlError> {
        if self.is_negative() {
            return Err(error("2201F", "cannot take square root of a negative number"));
        }
        let (weight, ..) = self.weight();
        let scale =
            (MIN_SIG_DIGITS - ((weight + 1) * 4 / 2 - 1)).max(self.scale).clamp(0, MAX_SCALE);
        // One digit more, then rounded.
        let shift = 2 * (scale + 1) - self.scale;
        let root = (&self.value * pow10(shift)).sqrt();
        Ok(Num { value: root, scale: scale + 1 }.rescale(scale))
    }

    /// `e^self` with `scale` digits after the point.
    fn exp_scaled(&self, scale: i32) -> Result<Num, SqlError> {
        let approx = self.to_f64();
        if approx > 100.0 {
            return Err(numeric_overflow());
        }
        if approx < -2500.0 {
            return Ok(Num { value: BigInt::from(0), scale });
        }
        // Halve until small, then square back.
        let mut halvings = 0;
        let mut size = approx.abs();
        while size > 0.01 {
            size /= 2.0;
            halvings += 1;
        }
        let wide = scale + GUARD + halvings / 3 + approx.abs() as i32;
        let one = pow10(wide);
        let x = self.rescale(wide.max(self.scale)).rescale(wide).value >> halvings as u32;
        let (mut sum, mut term, mut n) = (one.clone(), one.clone(), 1);
        loop {
            term = &term * &x / &one / n;
            if is_zero(&term) || term == BigInt::from(-1) {
                break;
            }
            sum += &term;
            n += 1;
        }
        for _ in 0..halvings {
            sum = &sum * &sum / &one;
        }
        Ok(Num { value: sum, scale: wide }.rescale(scale))
    }

    pub fn exp(&self) -> Result<Num, SqlError> {
        let weight = (self.to_f64() * std::f64::consts::LOG10_E).clamp(-2000.0, 2000.0);
        let scale = (MIN_SIG_DIGITS - weight as i32).max(self.scale).clamp(0, MAX_SCALE);
        self.exp_scaled(scale)
    }

    /// `ln(self)` of a positive number with `scale` digits.
    fn ln_scaled(&self, scale: i32) -> Num {
        let mut x = self.rescale((scale + GUARD).max(self.scale) + 50);
        // Take roots until close to 1.
        let mut roots = 0u32;
        let close = |x: &Num| (x.to_f64() - 1.0).abs() < 0.05;
        let inner = x.scale;
        while !close(&x) && roots < 64 {
            x = Num { value: (&x.value * pow10(inner)).sqrt(), scale: inner };
            roots += 1;
        }
        let unit = pow10(inner);
        // ln x = 2 artanh((x − 1) / (x + 1)).
        let z = (&x.value - &unit) * &unit / (&x.value + &unit);
        let z2 = &z * &z / &unit;
        let (mut sum, mut term, mut n) = (z.clone(), z, 1);
        loop {
            term = &term * &z2 / &unit;
            n += 2;
            let part = &term / n;
            if is_zero(&part) {
                break;
            }
            sum += part;
        }
        Num { value: (sum * 2) << roots, scale: inner }.rescale(scale)
    }

    fn positive(&self) -> Result<(), SqlError> {
        match (self.is_zero(), self.is_negative()) {
            (true, _) => Err(error("2201E", "cannot take logarithm of zero")),
            (_, true) => Err(error("2201E", "cannot take logarithm of a negative number")),
            _ => Ok(()),
        }
    }

    /// PostgreSQL's `estimate_ln_dweight`.
    fn ln_weight(&self) -> i32 {
        let v = self.to_f64();
        if (0.9..=1.1).contains(&v) {
            let x = self.sub(&Num::new(1, 0));
            if x.is_zero() {
                return 0;
            }
            let (weight, first, ..) = x.weight();
            return weight * 4 + (first as f64).log10() as i32;
        }
        let (weight, first, two, second) = self.weight();
        let (digits, weight) = if second { (two, weight * 4 - 4) } else { (first, weight * 4) };
        let ln = (digits as f64).ln() + f64::from(weight) * std::f64::consts::LN_10;
        ln.abs().log10() as i32
    }

    pub fn ln(&self) -> Result<Num, SqlError> {
        self.positive()?;
        let scale = (MIN_SIG_DIGITS - self.ln_weight()).max(self.scale).clamp(0, MAX_SCALE);
        Ok(self.ln_scaled(scale))
    }

    pub fn log(&self, base: &Num) -> Result<Num, SqlError> {
        base.positive()?;
        self.positive()?;
        let scale = MIN_SIG_DIGITS - (self.ln_weight() - base.ln_weight());
        let scale = scale.max(base.scale).max(self.scale).clamp(0, MAX_SCALE);
        let (n, d) = (self.ln_scaled(scale + 24), base.ln_scaled(scale + 24));
        n.div_scaled(&d, scale)
    }

    pub fn power(&self, exponent: &Num) -> Result<Num, SqlError> {
        if self.is_zero() && exponent.is_negative() {
            return Err(error("2201F", "zero raised to a negative power is undefined"));
        }
        if self.is_negative() && !exponent.is_integer() {
            let message = "a negative number raised to a non-integer power yields a complex result";
            return Err(error("2201F", message));
        }
        if let (true, Some(n)) = (exponent.is_integer(), exponent.to_i64()) {
            let scale = MIN_SIG_DIGITS.max(self.scale);
            return self.power_int(n, scale);
        }
        if self.is_zero() {
            return Ok(Num { value: BigInt::from(0), scale: MIN_SIG_DIGITS });
        }
        let rough = exponent.to_f64() * self.to_f64().ln() * std::f64::consts::LOG10_E;
        if rough > 40.0 {
            return Err(numeric_overflow());
        }
        let scale = MIN_SIG_DIGITS - rough.max(-2000.0) as i32;
        let scale = scale.max(self.scale).max(exponent.scale).clamp(0, MAX_SCALE);
        let ln = self.ln_scaled(scale + 48);
        ln.mul(exponent).rescale(scale + 44).exp_scaled(scale)
    }

    fn power_int(&self, n: i64, scale: i32) -> Result<Num, SqlError> {
        let weight = self.to_f64().abs().log10() * n as f64;
        if !self.is_zero() && weight > 40.0 {
            return Err(numeric_overflow());
        }
        if weight < -1100.0 || (n.unsigned_abs() > 100_000 && weight < -40.0) {
            return Ok(Num { value: BigInt::from(0), scale });
        }
        // Enough digits that the roundings of the products do not reach the result.
        let wide = scale + 40 + if n < 0 { (-weight).max(0.0) as i32 } else { weight.abs() as i32 };
        let (mut base, mut result) = (self.clone(), Num::new(1, 0));
        let mut left = n.unsigned_abs();
        while left > 0 {
            if left & 1 == 1 {
                result = result.mul(&base);
            }
            left >>= 1;
            if left > 0 {
                base = base.mul(&base);
            }
            for x in [&mut base, &mut result] {
                if x.scale > wide * 2 {
                    *x = x.rescale(wide * 2);
                }
            }
        }
        match n < 0 {
            true => Num::new(1, 0).div_scaled(&result, scale),
            false => Ok(result.rescale(scale)),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::check;

    #[test]
    fn roots() {
        check(&[
            ("sqrt('0'::numeric)", "0.000000000000000000"),
            ("sqrt('1e-10'::numeric)", "0.000010000000000000000"),
            ("sqrt('0.0001'::numeric)", "0.010000000000000000"),
        ]);
    }

    #[test]
    fn exponentials_and_logarithms() {
        check(&[
            ("exp('0'::numeric)", "1.000000000000000000"),
            ("exp('-20'::numeric)", "0.000000002061153622438558"),
            ("exp('1000'::numeric)", "error 22003"),
            ("ln('1'::numeric)", "0.000000000000000000"),
            ("ln('-1'::numeric)", "error 2201E"),
            ("log('10'::numeric, '0.01'::numeric)", "-2.000000000000000000"),
            ("log('0.5'::numeric, '8'::numeric)", "-3.000000000000000000"),
            ("log('1'::numeric, '8'::numeric)", "error 22012"),
            ("log('0'::numeric, '8'::numeric)", "error 2201E"),
        ]);
    }

    #[test]
    fn powers() {
        check(&[
            ("power('10'::numeric, '20'::numeric)", "100000000000000000000.00000000000000000"),
            ("power('1.1'::numeric, '10'::numeric)", "2.593742460100000000"),
            ("power('0'::numeric, '0'::numeric)", "1.000000000000000000"),
            ("power('0'::numeric, '5'::numeric)", "0.000000000000000000"),
            ("power('-2'::numeric, '3'::numeric)", "-8.000000000000000000"),
            ("power('-2'::numeric, '2'::numeric)", "4.000000000000000000"),
            ("power('-2'::numeric, '0.5'::numeric)", "error 2201F"),
            ("power('10'::numeric, '-10'::numeric)", "0.000000000100000000"),
            ("power('10'::numeric, '40'::numeric)", "error 22003"),
        ]);
    }

    #[test]
    fn quotients_and_remainders() {
        check(&[
            ("div('9.9'::numeric, '3'::numeric)", "3"),
            ("div('-9.9'::numeric, '2'::numeric)", "-4"),
            ("gcd('-0.12'::numeric, '0.18'::numeric)", "0.060000000000000000"),
            ("lcm('0.12'::numeric, '0.18'::numeric)", "0.360000000000000000"),
        ]);
    }

    #[test]
    fn digits_that_are_cut() {
        check(&[
            ("trunc('-0.000000000000000000009'::numeric, 20)", "0.00000000000000000000"),
            ("round('9.995'::numeric, 2)", "10.00"),
            ("round('99.5'::numeric)", "100"),
            ("round('55'::numeric, -2)", "100"),
            ("round('-55'::numeric, -2)", "-100"),
            ("round('49'::numeric, -2)", "0"),
            ("trim_scale('-0.0500'::numeric)", "-0.05"),
        ]);
    }
}
