//! An exact sum of floats: the same bits whatever the order of additions and retractions.
//!
//! Every finite f64 is an integer times 2^−1074, so the sum is kept as one big two's-complement integer
//! in those units, of which only the 64-bit limbs between the least and the most significant ones in
//! use are stored: two or three for values of similar size. NaN and the infinities are counted
//! apart, so that they can be retracted too. The result is rounded once, to nearest, ties to even.
//!
//! The serialised form is canonical (equal sums have equal bytes) and is an on-disk format.

use std::fmt;

/// Bits below 1.0 in the unit 2^−1074.
const UNIT_EXPONENT: i32 = 1074;

#[derive(Clone, Default, PartialEq, Eq)]
pub struct ExactSum {
    nan: i64,
    positive_infinity: i64,
    negative_infinity: i64,
    /// Limbs below `limbs[0]` are zero; this many.
    base: u32,
    /// Two's complement, least significant first; above the last one its sign goes on.
    limbs: Vec<u64>,
}

impl ExactSum {
    pub fn new() -> ExactSum {
        ExactSum::default()
    }

    /// Adds `value` `weight` times; a negative weight takes it back.
    pub fn add(&mut self, value: f64, weight: i64) {
        if value.is_nan() {
            self.nan += weight;
        } else if value == f64::INFINITY {
            self.positive_infinity += weight;
        } else if value == f64::NEG_INFINITY {
            self.negative_infinity += weight;
        } else if value != 0.0 && weight != 0 {
            let bits = value.to_bits();
            let exponent = (bits >> 52 & 0x7ff) as u32;
            let fraction = (bits & ((1 << 52) - 1)) as i128;
            // Value = mantissa × 2^shift units; subnormals have no hidden bit.
            let (mantissa, shift) = match exponent {
                0 => (fraction, 0),
                e => (fraction | 1 << 52, e - 1),
            };
            let signed = if bits >> 63 == 1 { -mantissa } else { mantissa };
            self.add_shifted(signed * i128::from(weight), shift);
        }
    }

    /// Adds another sum.
    pub fn merge(&mut self, other: &ExactSum) {
        self.combine(other, 1);
    }

    /// Takes another sum back.
    pub fn subtract(&mut self, other: &ExactSum) {
        self.combine(other, -1);
    }

    fn combine(&mut self, other: &ExactSum, sign: i64) {
        self.nan += sign * other.nan;
        self.positive_infinity += sign * other.positive_infinity;
        self.negative_infinity += sign * other.negative_infinity;
        let last = other.limbs.len().wrapping_sub(1);
        for (i, &limb) in other.limbs.iter().enumerate() {
            // Only the last limb carries the sign; the ones below are plain digits.
            let digit = if i == last { i128::from(limb as i64) } else { i128::from(limb) };
            self.add_shifted(i128::from(sign) * digit, (other.base + i as u32) * 64);
        }
    }

    /// Adds `v × 2^shift` units.
    fn add_shifted(&mut self, v: i128, shift: u32) {
        if v == 0 {
            return;
        }
        let (limb, bit) = (shift / 64, shift % 64);
        let low = (v as u128) << bit;
        // What the shift pushed out above 128 bits, sign extended.
        let high = if bit == 0 { v >> 127 } else { v >> (128 - bit) };
        let parts = [low as u64, (low >> 64) as u64, high as u64];
        // The sum of two numbers may need one limb more than the longer one.
        self.reserve(limb, limb + 4);
        let start = (limb - self.base) as usize;
        let extension = if high < 0 { u64::MAX } else { 0 };
        let mut carry = false;
        for (i, slot) in self.limbs[start..].iter_mut().enumerate() {
            let part = parts.get(i).copied().unwrap_or(extension);
            let (a, c1) = slot.overflowing_add(part);
            let (b, c2) = a.overflowing_add(u64::from(carry));
            *slot = b;
            carry = c1 || c2;
        }
        self.trim();
    }

    /// Makes limbs `from..to` present, and one above them for the carry.
    fn reserve(&mut self, from: u32, to: u32) {
        if self.limbs.is_empty() {
            self.base = from;
        }
        if from < self.base {
            let missing = (self.base - from) as usize;
            self.limbs.splice(0..0, std::iter::repeat_n(0, missing));
            self.base = from;
        }
        let needed = (to - self.base) as usize;
        let length = needed.max(self.limbs.len() + 1);
        let extension = if self.is_negative() { u64::MAX } else { 0 };
        self.limbs.resize(length, extension);
    }

    fn is_negative(&self) -> bool {
        self.limbs.last().is_some_and(|l| l >> 63 == 1)
    }

    /// Drops limbs that say nothing: sign extension above, zeros below.
    fn trim(&mut self) {
        while let [.., below, top] = self.limbs.as_slice() {
            let implied = if below >> 63 == 1 { u64::MAX } else { 0 };
            if *top != implied {
                break;
            }
            self.limbs.pop();
        }
        if self.limbs == [0] {
            self.limbs.clear();
        }
        let zeros = self.limbs.iter().take_while(|l| **l == 0).count();
        if zeros > 0 {
            self.limbs.drain(..zeros);
            self.base += zeros as u32;
        }
        if self.limbs.is_empty() {
            self.base = 0;
        }
    }

    /// Whether the sum is that of no values (or of values that cancel out).
    pub fn is_zero(&self) -> bool {
        *self == ExactSum::default()
    }

    /// The sum, rounded to nearest. A finite sum beyond f64's range is an infinity; see
    /// [`ExactSum::overflows`].
    pub fn value(&self) -> f64 {
        let (up, down) = (self.positive_infinity > 0, self.negative_infinity > 0);
        if self.nan > 0 || (up && down) {
            return f64::NAN;
        }
        if up {
            return f64::INFINITY;
        }
        if down {
            return f64::NEG_INFINITY;
        }
        self.finite_value()
    }

    /// Whether all values were finite and their sum is not.
    pub fn overflows(&self) -> bool {
        self.nan == 0
            && self.positive_infinity == 0
            && self.negative_infinity == 0
            && self.finite_value().is_infinite()
    }

    fn finite_value(&self) -> f64 {
        if self.limbs.is_empty() {
            return 0.0;
        }
        let negative = self.is_negative();
        let mut magnitude = self.limbs.clone();
        if negative {
            let mut carry = true;
            for limb in &mut magnitude {
                let (v, c) = (!*limb).overflowing_add(u64::from(carry));
                *limb = v;
                carry = c;
            }
        }
        let Some(top) = magnitude.iter().rposition(|l| *l != 0) else {
            return 0.0;
        };
        let bits = (top as u32 + self.base) * 64 + 64 - magnitude[top].leading_zeros();
        let result = if bits <= 53 {
            // At most 53 bits of units: exact, perhaps subnormal. Only limb 0 can be in use.
            scale(magnitude[top], 0)
        } else {
            let drop = bits - 53;
            let at = |bit: u32| -> bool {
                match (bit / 64).checked_sub(self.base) {
                    Some(i) => magnitude.get(i as usize).is_some_and(|l| l >> (bit % 64) & 1 == 1),
                    None => false,
                }
            };
            let mantissa = (0..53).fold(0u64, |m, i| m | u64::from(at(drop + i)) << i);
            let half = at(drop - 1);
            let half_at = drop - 1;
            let below = magnitude.iter().enumerate().any(|(i, limb)| {
                let start = (i as u32 + self.base) * 64;
                match half_at.checked_sub(start) {
                    Some(n) if n >= 64 => *limb != 0,
                    Some(n) => *limb & ((1u64 << n) - 1) != 0,
                    None => false,
                }
            });
            let up = half && (below || mantissa & 1 == 1);
            scale(mantissa + u64::from(up), drop)
        };
        if negative { -result } else { result }
    }

    /// Whether no value was NaN or infinite.
    pub fn is_finite(&self) -> bool {
        self.nan == 0 && self.positive_infinity == 0 && self.negative_infinity == 0
    }

    /// The sum of the finite values as a two's-complement number of 2^−1074, in limbs of 64 bits, least
    /// significant first, and how many limbs of zeros are left out below them.
    pub fn limbs(&self) -> (u32, &[u64]) {
        (self.base, &self.limbs)
    }

    /// Bytes of memory beyond the struct itself.
    pub fn heap_size(&self) -> usize {
        self.limbs.capacity() * 8
    }

    /// Appends the canonical bytes: the three counts, the base, the limbs.
    pub fn serialize(&self, out: &mut Vec<u8>) {
        for count in [self.nan, self.positive_infinity, self.negative_infinity] {
            // Zig-zag, so that the usual zero is one byte.
            push_varint(out, ((count << 1) ^ (count >> 63)) as u64);
        }
        push_varint(out, u64::from(self.base));
        self.limbs.iter().for_each(|l| out.extend_from_slice(&l.to_le_bytes()));
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(4 + self.limbs.len() * 8);
        self.serialize(&mut out);
        out
    }

    /// The sum that [`ExactSum::serialize`] wrote; `None` for other bytes.
    pub fn from_bytes(mut bytes: &[u8]) -> Option<ExactSum> {
        let mut count = || -> Option<i64> {
            let v = take_varint(&mut bytes)?;
            Some((v >> 1) as i64 ^ -((v & 1) as i64))
        };
        let (nan, positive_infinity, negative_infinity) = (count()?, count()?, count()?);
        let base = u32::try_from(take_varint(&mut bytes)?).ok()?;
        if !bytes.len().is_multiple_of(8) || base > 64 || bytes.len() > 64 * 8 {
            return None;
        }
        let limbs = bytes
            .chunks_exact(8)
            .map(|c| c.try_into().map(u64::from_le_bytes).ok())
            .collect::<Option<_>>()?;
        Some(ExactSum { nan, positive_infinity, negative_infinity, base, limbs })
    }
}

/// `mantissa × 2^drop` units as a float, by its bits: `mantissa` ≤ 2^53.
fn scale(mantissa: u64, drop: u32) -> f64 {
    if drop == 0 {
        // Below 2^53 units the integer is the bit pattern (subnormal or the first binades), or nearly.
        return mantissa as f64 * 2f64.powi(-UNIT_EXPONENT / 2) * 2f64.powi(-UNIT_EXPONENT / 2);
    }
    let (mantissa, drop) = if mantissa == 1 << 53 { (1 << 52, drop + 1) } else { (mantissa, drop) };
    let exponent = u64::from(drop) + 1;
    if exponent >= 0x7ff {
        return f64::INFINITY;
    }
    f64::from_bits(exponent << 52 | (mantissa & ((1 << 52) - 1)))
}

fn push_varint(out: &mut Vec<u8>, mut v: u64) {
    while v >= 0x80 {
        out.push(v as u8 | 0x80);
        v >>= 7;
    }
    out.push(v as u8);
}

fn take_varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut v = 0u64;
    for shift in (0..64).step_by(7) {
        let (&first, rest) = bytes.split_first()?;
        *bytes = rest;
        v |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Some(v);
        }
    }
    None
}

impl fmt::Debug for ExactSum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ExactSum({})", self.value())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small generator (SplitMix64): the tests need no more.
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ z >> 31
        }

        fn below(&mut self, n: u64) -> u64 {
            self.next() % n
        }
    }

    fn sum(values: &[f64]) -> ExactSum {
        let mut s = ExactSum::new();
        values.iter().for_each(|v| s.add(*v, 1));
        s
    }

    #[test]
    fn single_values_come_back() {
        let cases = [
            0.0,
            1.0,
            -1.0,
            0.1,
            1e300,
            -1e-300,
            f64::MAX,
            f64::MIN,
            f64::MIN_POSITIVE,
            5e-324,
            -5e-324,
            2.225_073_858_507_201e-308,
            4.4e-308,
            9007199254740993.0,
        ];
        for v in cases {
            assert_eq!(sum(&[v]).value(), v, "{v:e}");
        }
        let mut rng = Random(1);
        for _ in 0..20_000 {
            let v = f64::from_bits(rng.next());
            if v.is_finite() {
                assert_eq!(sum(&[v]).value(), v, "{v:e}");
            }
        }
    }

    #[test]
    fn sums_are_exact() {
        assert_eq!(sum(&[1e308, 1.0, -1e308]).value(), 1.0);
        assert_eq!(sum(&[1e16, 1.0, 1.0]).value(), 10000000000000002.0);
        assert_eq!(sum(&[0.1; 10]).value(), 1.0);
        assert_eq!(sum(&[f64::MAX, f64::MAX, -f64::MAX]).value(), f64::MAX);
        // Ties go to even; a bit below the half decides.
        assert_eq!(sum(&[9007199254740992.0, 1.0]).value(), 9007199254740992.0);
        assert_eq!(sum(&[9007199254740992.0, 1.0, 5e-324]).value(), 9007199254740994.0);
        assert_eq!(sum(&[-9007199254740992.0, -1.0, -5e-324]).value(), -9007199254740994.0);
    }

    #[test]
    fn order_and_retraction_do_not_matter() {
        let mut rng = Random(7);
        for _ in 0..300 {
            let mut values: Vec<f64> = (0..1 + rng.below(40))
                .map(|_| (rng.below(1000) as f64 - 499.7) * 10f64.powi(rng.below(600) as i32 - 300))
                .collect();
            let forward = sum(&values);
            for i in (1..values.len()).rev() {
                values.swap(i, rng.below(i as u64 + 1) as usize);
            }
            let mut other = sum(&values);
            assert_eq!(forward, other);
            assert_eq!(forward.to_bytes(), other.to_bytes());
            for v in &values {
                other.add(*v, -1);
            }
            assert!(other.is_zero());
        }
    }

    #[test]
    fn weights_and_merges_add_up() {
        let mut weighted = ExactSum::new();
        weighted.add(0.1, 1_000_003);
        weighted.add(-2.5e200, i64::MAX);
        let mut halves = ExactSum::new();
        let (mut a, mut b) = (ExactSum::new(), ExactSum::new());
        a.add(0.1, 1_000_000);
        a.add(-2.5e200, i64::MAX - 5);
        b.add(0.1, 3);
        b.add(-2.5e200, 5);
        halves.merge(&a);
        halves.merge(&b);
        assert_eq!(weighted, halves);
        halves.subtract(&a);
        assert_eq!(halves, b);
    }

    #[test]
    fn special_values_are_counted() {
        let mut s = sum(&[1.0, f64::NAN, f64::INFINITY]);
        assert!(s.value().is_nan());
        s.add(f64::NAN, -1);
        assert_eq!(s.value(), f64::INFINITY);
        s.add(f64::NEG_INFINITY, 1);
        assert!(s.value().is_nan());
        s.add(f64::INFINITY, -1);
        assert_eq!(s.value(), f64::NEG_INFINITY);
        s.add(f64::NEG_INFINITY, -1);
        assert_eq!(s.value(), 1.0);
        assert!(!s.overflows());
        assert!(sum(&[f64::MAX, f64::MAX]).overflows());
    }

    #[test]
    fn bytes_round_trip_and_are_pinned() {
        let s = sum(&[1.5, -0.25, f64::NAN]);
        assert_eq!(ExactSum::from_bytes(&s.to_bytes()), Some(s.clone()));
        let hex: String = s.to_bytes().iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, "020000100000000000000500");
        assert_eq!(ExactSum::from_bytes(&[0, 0]), None);
        assert_eq!(ExactSum::from_bytes(&ExactSum::new().to_bytes()), Some(ExactSum::new()));
    }
}
