//! Numerics and floats: text, PostgreSQL's base-10000 binary form, and the scale of a column.

use std::fmt::Write;

use crate::types::UNCONSTRAINED_NUMERIC;
use crate::{SqlError, SqlState};
use arrow::datatypes::i256;
use bytes::{BufMut, BytesMut};

use super::binary::wrong;
use super::{invalid_text, out_of_range};

/// Whether a decimal stands for `numeric` without precision: its zeros at the end are not printed.
pub fn is_unconstrained(precision: u8, scale: i8) -> bool {
    (precision, scale) == UNCONSTRAINED_NUMERIC
}

/// Writes the digits of an unscaled value with its point.
pub fn write_decimal(
    out: &mut impl Write,
    digits: &str,
    scale: i8,
    trim: bool,
) -> std::fmt::Result {
    let (sign, digits) = match digits.strip_prefix('-') {
        Some(rest) => ("-", rest),
        None => ("", digits),
    };
    if scale <= 0 {
        let zeros = if digits == "0" { 0 } else { usize::from(scale.unsigned_abs()) };
        return write!(out, "{sign}{digits}{:0<zeros$}", "");
    }
    let scale = scale as usize;
    let (whole, fraction, pad) = if digits.len() > scale {
        let (w, f) = digits.split_at(digits.len() - scale);
        (w, f, 0)
    } else {
        ("0", digits, scale - digits.len())
    };
    let fraction = if trim { fraction.trim_end_matches('0') } else { fraction };
    if fraction.is_empty() && (trim || scale == 0) {
        return write!(out, "{sign}{whole}");
    }
    write!(out, "{sign}{whole}.{:0<pad$}{fraction}", "")
}

/// A decimal text as an unscaled integer of `precision` and `scale`, rounded half away from zero.
pub fn parse_decimal(text: &str, precision: u8, scale: i8) -> Result<i256, SqlError> {
    let t = text.trim();
    let syntax = || invalid_text("numeric", text);
    let (negative, body) = match t.as_bytes().first().ok_or_else(syntax)? {
        b'-' => (true, &t[1..]),
        b'+' => (false, &t[1..]),
        _ => (false, t),
    };
    if body.eq_ignore_ascii_case("nan") || body.to_ascii_lowercase().starts_with("inf") {
        return Err(SqlError::unsupported(format!("the numeric value {t}")));
    }
    let (mantissa, exponent) = match body.find(['e', 'E']) {
        Some(i) => (&body[..i], body[i + 1..].parse::<i32>().map_err(|_| syntax())?),
        None => (body, 0),
    };
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits_only = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
    if (whole.is_empty() && fraction.is_empty()) || !digits_only(whole) || !digits_only(fraction) {
        return Err(syntax());
    }
    let overflow = || field_overflow(precision, scale);
    // The value is (whole ++ fraction) * 10^(exponent - len(fraction)); wanted at 10^-scale.
    let point = whole.len() as i64 + i64::from(exponent) + i64::from(scale);
    let digits = || whole.bytes().chain(fraction.bytes());
    let mut value = i256::ZERO;
    let ten = i256::from_i128(10);
    let mut push = |d: u8| -> Option<()> {
        value = value.checked_mul(ten)?.checked_add(i256::from_i128(i128::from(d)))?;
        Some(())
    };
    for d in digits().take(point.clamp(0, 1 << 20) as usize) {
        push(d - b'0').ok_or_else(overflow)?;
    }
    let have = (whole.len() + fraction.len()) as i64;
    if digits().any(|d| d != b'0') {
        for _ in have..point.min(have + 200) {
            push(0).ok_or_else(overflow)?;
        }
    }
    if point >= 0 && digits().nth(point as usize).is_some_and(|d| d >= b'5') {
        value = value.checked_add(i256::ONE).ok_or_else(overflow)?;
    }
    let limit = ten.checked_pow(u32::from(precision)).ok_or_else(overflow)?;
    if value >= limit {
        return Err(overflow());
    }
    Ok(if negative { value.wrapping_neg() } else { value })
}

/// PostgreSQL's error for a value that a column's precision cannot hold.
pub fn field_overflow(precision: u8, scale: i8) -> SqlError {
    let power = i32::from(precision) - i32::from(scale);
    let bound = if power == 0 { "1".to_owned() } else { format!("10^{power}") };
    SqlError::new(SqlState::NUMERIC_VALUE_OUT_OF_RANGE, "numeric field overflow").with_detail(format!(
        "A field with precision {precision}, scale {scale} must round to an absolute value less than {bound}."
    ))
}

/// The base-10000 form: ndigits, weight, sign, dscale, digits.
pub fn put_binary(buf: &mut BytesMut, text: &str, scale: i8) {
    let (sign, body) = match text.strip_prefix('-') {
        Some(rest) => (0x4000u16, rest),
        None => (0, text),
    };
    let (whole, fraction) = body.split_once('.').unwrap_or((body, ""));
    let whole = whole.trim_start_matches('0');
    let mut digits: Vec<u16> = Vec::with_capacity(16);
    let group = |s: &[u8]| s.iter().fold(0u16, |a, b| a * 10 + u16::from(b - b'0'));
    let head = whole.len() % 4;
    if head > 0 {
        digits.push(group(&whole.as_bytes()[..head]));
    }
    digits.extend(whole.as_bytes()[head..].chunks(4).map(group));
    let mut weight = digits.len() as i16 - 1;
    for chunk in fraction.as_bytes().chunks(4) {
        digits.push(group(chunk) * 10u16.pow(4 - chunk.len() as u32));
    }
    let leading = digits.iter().take_while(|d| **d == 0).count();
    digits.drain(..leading);
    weight -= leading as i16;
    while digits.last() == Some(&0) {
        digits.pop();
    }
    if digits.is_empty() {
        weight = 0;
    }
    buf.put_i16(digits.len() as i16);
    buf.put_i16(weight);
    buf.put_u16(if digits.is_empty() { 0 } else { sign });
    buf.put_i16(i16::from(scale.max(0)).min(fraction.len() as i16));
    digits.iter().for_each(|d| buf.put_u16(*d));
}

/// The text of a binary numeric.
pub fn binary_to_text(bytes: &[u8]) -> Result<String, SqlError> {
    let word = |i: usize| Some(u16::from_be_bytes([*bytes.get(i * 2)?, *bytes.get(i * 2 + 1)?]));
    let (Some(n), Some(sign), Some(dscale)) = (word(0), word(2), word(3)) else {
        return Err(wrong());
    };
    let n = usize::from(n);
    if bytes.len() != 8 + n * 2 {
        return Err(wrong());
    }
    match sign {
        0xc000 => return Ok("NaN".to_owned()),
        0xd000 => return Ok("Infinity".to_owned()),
        0xf000 => return Ok("-Infinity".to_owned()),
        0 | 0x4000 => {}
        _ => return Err(invalid_external("sign")),
    }
    if dscale > MAX_DSCALE {
        return Err(invalid_external("scale"));
    }
    if (0..n).any(|i| word(4 + i).is_none_or(|digit| digit >= 10_000)) {
        return Err(invalid_external("digit"));
    }
    finite_text(&word, n).ok_or_else(wrong)
}

/// As many digits behind the point as PostgreSQL's header has bits for.
const MAX_DSCALE: u16 = 0x3fff;

fn invalid_external(part: &str) -> SqlError {
    SqlError::new(
        SqlState::INVALID_BINARY_REPRESENTATION,
        format!("invalid {part} in external \"numeric\" value"),
    )
}

/// The text of a number's words: `n` of digits after a header of four.
fn finite_text(word: &impl Fn(usize) -> Option<u16>, n: usize) -> Option<String> {
    let (weight, sign, dscale) = (word(1)? as i16, word(2)?, usize::from(word(3)?));
    let digit = |i: i32| if (0..n as i32).contains(&i) { word(4 + i as usize) } else { Some(0) };
    let mut out = String::from(if sign == 0x4000 { "-" } else { "" });
    for i in 0..=i32::from(weight).max(0) {
        let d = if weight < 0 { 0 } else { digit(i)? };
        if i == 0 { write!(out, "{d}").ok()? } else { write!(out, "{d:04}").ok()? }
    }
    if dscale > 0 {
        out.push('.');
        let start = out.len();
        let mut i = i32::from(weight) + 1;
        // Groups between the point and the first stored digit are zero.
        let mut lead = -1 - i32::from(weight);
        while out.len() - start < dscale {
            if lead > 0 {
                out.push_str("0000");
                lead -= 1;
                i = 0;
            } else {
                write!(out, "{:04}", digit(i)?).ok()?;
                i += 1;
            }
        }
        out.truncate(start + dscale);
    }
    Some(out)
}

/// A double as PostgreSQL prints it: the shortest digits that read back, `%g`-like layout.
pub fn write_f64(out: &mut impl Write, v: f64) -> std::fmt::Result {
    let mut shortest = SmallText::default();
    write!(shortest, "{v:e}")?;
    let digits = shortest
        .as_str()
        .split('e')
        .next()
        .map_or(0, |m| m.bytes().filter(u8::is_ascii_digit).count());
    // Of two equally short and equally near texts PostgreSQL takes the even one, Rust the upper. There
    // are two only where the last digit is finer than a double's.
    if digits >= TIED_DIGITS {
        let mut nearest = SmallText::default();
        write!(nearest, "{v:.*e}", digits - 1)?;
        if nearest.as_str() != shortest.as_str() && nearest.as_str().parse() == Ok(v) {
            shortest = nearest;
        }
    }
    write_float(out, v, &format_args!("{}", shortest.as_str()), 15)
}

/// Fewer digits than these never tie.
const TIED_DIGITS: usize = 16;

pub fn write_f32(out: &mut impl Write, v: f32) -> std::fmt::Result {
    write_float(out, f64::from(v), &format_args!("{v:e}"), 6)
}

/// Rust's `{:e}` gives the shortest round-trip digits as `d.ddde±x`; only the layout differs.
fn write_float(
    out: &mut impl Write,
    v: f64,
    shortest: &std::fmt::Arguments<'_>,
    max_exp: i32,
) -> std::fmt::Result {
    if v.is_nan() {
        return out.write_str("NaN");
    }
    if v.is_infinite() {
        return out.write_str(if v > 0.0 { "Infinity" } else { "-Infinity" });
    }
    let mut small = SmallText::default();
    small.write_fmt(*shortest)?;
    let text = small.as_str();
    let (sign, text) = text.strip_prefix('-').map_or(("", text), |t| ("-", t));
    let Some((mantissa, exponent)) = text.split_once('e') else { return out.write_str(text) };
    let exponent: i32 = exponent.parse().map_err(|_| std::fmt::Error)?;
    if v == 0.0 {
        return write!(out, "{sign}0");
    }
    if !(-4..max_exp).contains(&exponent) {
        let e = exponent.unsigned_abs();
        return write!(out, "{sign}{mantissa}e{}{e:02}", if exponent < 0 { '-' } else { '+' });
    }
    let (first, rest) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    out.write_str(sign)?;
    if exponent < 0 {
        let zeros = exponent.unsigned_abs() as usize - 1;
        return write!(out, "0.{:0<zeros$}{first}{rest}", "");
    }
    let e = exponent as usize;
    if rest.len() <= e {
        let zeros = e - rest.len();
        write!(out, "{first}{rest}{:0<zeros$}", "")
    } else {
        write!(out, "{first}{}.{}", &rest[..e], &rest[e..])
    }
}

/// A stack buffer for one number's text.
pub struct SmallText {
    bytes: [u8; 96],
    len: usize,
}

impl Default for SmallText {
    fn default() -> SmallText {
        SmallText { bytes: [0; 96], len: 0 }
    }
}

impl SmallText {
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..self.len]).unwrap_or("")
    }
}

impl Write for SmallText {
    fn write_str(&mut self, s: &str) -> std::fmt::Result {
        let end = self.len + s.len();
        self.bytes.get_mut(self.len..end).ok_or(std::fmt::Error)?.copy_from_slice(s.as_bytes());
        self.len = end;
        Ok(())
    }
}

/// A double from text.
pub fn parse_f64(text: &str) -> Result<f64, SqlError> {
    parse_float(text, "double precision", f64::is_infinite)
}

/// A real from text.
pub fn parse_f32(text: &str) -> Result<f32, SqlError> {
    parse_float(text, "real", f32::is_infinite)
}

fn parse_float<T: std::str::FromStr + Copy>(
    text: &str,
    kind: &str,
    infinite: fn(T) -> bool,
) -> Result<T, SqlError> {
    let v: T = float_text(text, kind)?.parse().map_err(|_| invalid_text(kind, text))?;
    if infinite(v) && !text.to_ascii_lowercase().contains("inf") {
        return Err(out_of_range_float(text, kind));
    }
    Ok(v)
}

fn float_text<'a>(text: &'a str, kind: &str) -> Result<&'a str, SqlError> {
    let t = text.trim();
    if t.is_empty() { Err(invalid_text(kind, text)) } else { Ok(t) }
}

fn out_of_range_float(text: &str, kind: &str) -> SqlError {
    let mut e = out_of_range(kind, text);
    e.message = format!("\"{}\" is out of range for type {kind}", text.trim());
    e
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f64_text(v: f64) -> String {
        let mut s = String::new();
        write_f64(&mut s, v).unwrap();
        s
    }

    #[test]
    fn floats_print_as_postgres_does() {
        for (v, text) in [
            (1.0, "1"),
            (0.1, "0.1"),
            (-0.0, "-0"),
            (1e15, "1e+15"),
            (1e14, "100000000000000"),
            (123456.789, "123456.789"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1.5e300, "1.5e+300"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-Infinity"),
            (0.30000000000000004, "0.30000000000000004"),
            (-25080735.477539063, "-25080735.477539062"),
        ] {
            assert_eq!(f64_text(v), text);
        }
        let mut s = String::new();
        write_f32(&mut s, 1e6).unwrap();
        assert_eq!(s, "1e+06");
    }

    fn round_trip(text: &str, p: u8, s: i8, trim: bool) -> String {
        let v = parse_decimal(text, p, s).unwrap();
        let mut out = String::new();
        write_decimal(&mut out, &v.to_string(), s, trim).unwrap();
        out
    }

    #[test]
    fn decimals_keep_the_scale_of_their_column() {
        assert_eq!(round_trip("1.5", 10, 2, false), "1.50");
        assert_eq!(round_trip("-0.005", 10, 2, false), "-0.01");
        assert_eq!(round_trip("0.004", 10, 2, false), "0.00");
        assert_eq!(round_trip("12e3", 10, 0, false), "12000");
        assert_eq!(round_trip("1.500", 38, 18, true), "1.5");
        assert_eq!(round_trip("100", 38, 18, true), "100");
        assert_eq!(round_trip("1e-3", 38, 18, true), "0.001");
        assert_eq!(parse_decimal("1000", 5, 2).unwrap_err().state.0, "22003");
        assert_eq!(parse_decimal("1x", 5, 2).unwrap_err().state.0, "22P02");
    }

    #[test]
    fn binary_numerics_round_trip() {
        for text in [
            "0",
            "1",
            "-1",
            "10000",
            "12345678.9",
            "0.00001234",
            "0.5",
            "-99999999.99999999",
            "1.0000001",
        ] {
            let mut buf = BytesMut::new();
            let scale = text.split_once('.').map_or(0, |(_, f)| f.len() as i8);
            put_binary(&mut buf, text, scale);
            assert_eq!(binary_to_text(&buf).unwrap(), text);
        }
    }

    #[test]
    fn broken_binary_numerics_are_errors() {
        let case = |words: &[u16], message: &str| {
            let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_be_bytes()).collect();
            let e = binary_to_text(&bytes).unwrap_err();
            assert_eq!((e.state.0, e.message.as_str()), ("22P03", message));
        };
        case(&[1, 0, 0, 0, 10_000], "invalid digit in external \"numeric\" value");
        case(&[1, 0, 0x1234, 0, 1], "invalid sign in external \"numeric\" value");
        case(&[1, 0, 0, 0x4000, 1], "invalid scale in external \"numeric\" value");
        for words in [&[1, 0, 0][..], &[1, 0, 0, 0], &[1, 0, 0, 0, 1, 2], &[1, 0, 0xc000, 0]] {
            case(words, "incorrect binary data format in bind parameter");
        }
    }
}
