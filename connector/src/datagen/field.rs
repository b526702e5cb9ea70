//! The values of one column: `fields.<column>.<property>` of the WITH clause.

use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, BooleanArray, BooleanBufferBuilder, FixedSizeBinaryBuilder, Float64Array,
    Int64Array, StringBuilder, TimestampMicrosecondArray, make_array,
};
use arrow::buffer::NullBuffer;
use arrow::compute::{CastOptions, cast, cast_with_options};
use arrow::datatypes::DataType;
use millrace_common::encoding::datetime::{parse_timestamp, parse_timestamptz};
use millrace_common::types::{UNCONSTRAINED_NUMERIC, UUID_BYTES};
use millrace_common::{SqlError, SqlState, SqlType};
use millrace_rpc::catalog::Relation;

use crate::{ConnectorError, options};

const PROPERTIES: &[&str] =
    &["kind", "start", "end", "step", "min", "max", "length", "keys", "skew", "prefix", "nulls"];

/// How numbers are drawn.
#[derive(Clone, Debug)]
enum Draw {
    /// `start + n * step`, beginning again after `count` values.
    Sequence { start: i64, step: i64, count: u64 },
    /// Uniform in `min..=max`.
    Uniform { min: i64, max: i64 },
    /// `min` plus a rank from 0 that Zipf's law gives.
    Zipf { min: i64, zipf: Zipf },
}

/// What a number is shown as.
#[derive(Clone, Debug)]
enum Shape {
    Integer(DataType),
    /// Microseconds.
    Timestamp(DataType),
    Date,
    /// Uniform between two floats.
    Float {
        min: f64,
        max: f64,
        to: DataType,
    },
    Boolean,
    /// `prefix` and the number, which is in `fitting`.
    Numbered {
        prefix: String,
        fitting: (i64, i64),
    },
    /// So many random letters.
    Letters {
        length: usize,
    },
    /// Of version 4, one for each number.
    Uuid,
}

#[derive(Clone, Debug)]
pub struct Field {
    /// For errors.
    column: String,
    sql_type: SqlType,
    seed: u64,
    draw: Draw,
    shape: Shape,
    /// Of 2^64 values so many are null.
    nulls: u64,
}

/// A strong mixing of 64 bits (the finaliser of SplitMix64, Steele et al. 2014).
pub fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// 53 random bits as a float in `0..1`.
fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// Reads the properties of one column.
struct Properties<'a> {
    relation: &'a Relation,
    column: &'a str,
}

impl Properties<'_> {
    fn name(&self, property: &str) -> String {
        format!("fields.{}.{property}", self.column)
    }

    fn text(&self, property: &str) -> Option<&str> {
        self.relation.option(&self.name(property))
    }

    fn bad(&self, property: &str, what: &str) -> SqlError {
        let (name, text) = (self.name(property), self.text(property).unwrap_or_default());
        options::invalid(format!("invalid value for option \"{name}\": \"{text}\""))
            .with_hint(format!("Give {what}."))
    }

    fn number<T: std::str::FromStr>(
        &self,
        property: &str,
        default: T,
        what: &str,
    ) -> Result<T, SqlError> {
        match self.text(property) {
            None => Ok(default),
            Some(text) => text.trim().parse().map_err(|_| self.bad(property, what)),
        }
    }

    /// A column that can hold no nulls is to have some.
    fn nulls_of_none(&self) -> SqlError {
        let (name, text) = (self.name("nulls"), self.text("nulls").unwrap_or_default());
        let column = self.column;
        options::invalid(format!(
            "value \"{text}\" of option \"{name}\" makes nulls, which column \"{column}\" cannot hold"
        ))
        .with_hint("Leave the option out, or NOT NULL and PRIMARY KEY of the column.")
    }

    /// An integer, or for times what they are read as: microseconds, days.
    fn point(&self, property: &str, default: i64, t: SqlType) -> Result<i64, SqlError> {
        let Some(text) = self.text(property) else { return Ok(default) };
        let bad = |_| self.bad(property, &format!("a value of type {t}"));
        match t {
            SqlType::Timestamp => parse_timestamp(text).map_err(bad),
            SqlType::Timestamptz => parse_timestamptz(text).map_err(bad),
            SqlType::Date => parse_timestamp(text).map(|us| us.div_euclid(DAY_US)).map_err(bad),
            _ => self.number(property, default, "a whole number"),
        }
    }

    /// A text is so many letters, or a prefix and a number.
    fn is_numbered(&self) -> bool {
        self.text("prefix").is_some() || self.text("kind").is_some_and(|kind| kind != "random")
    }

    /// The whole numbers that the column holds; of a text, those for which its prefix leaves room.
    fn range(&self, t: SqlType) -> Result<(i64, i64), SqlError> {
        let (SqlType::Varchar(Some(n)) | SqlType::Char(n)) = t else { return Ok(range(t)) };
        if !self.is_numbered() {
            return Ok(range(t));
        }
        let (most, prefix) = (n as usize, self.text("prefix").unwrap_or_default());
        match most.checked_sub(prefix.chars().count()) {
            // The sign of a negative number takes a place.
            Some(room @ 1..) => Ok((-largest(room - 1), largest(room))),
            _ => {
                let most = most.saturating_sub(1);
                Err(self.bad("prefix", &format!("at most {most} characters: a number follows")))
            }
        }
    }

    /// The same, refused where the column's type does not hold it.
    fn fitting(&self, property: &str, default: i64, t: SqlType) -> Result<i64, SqlError> {
        let (low, high) = self.range(t)?;
        let value = self.point(property, default.clamp(low, high), t)?;
        if (low..=high).contains(&value) {
            return Ok(value);
        }
        Err(self.beyond(property, t, low, high))
    }

    /// A bound of random floats or decimals, likewise.
    fn fitting_float(&self, property: &str, default: f64, t: SqlType) -> Result<f64, SqlError> {
        let most = most(t);
        let value: f64 = self.number(property, default.min(most), "a number")?;
        if (-most..=most).contains(&value) {
            return Ok(value);
        }
        Err(self.beyond(property, t, -most, most))
    }

    fn beyond<T: std::fmt::Debug>(&self, property: &str, t: SqlType, low: T, high: T) -> SqlError {
        let (name, text) = (self.name(property), self.text(property).unwrap_or_default());
        let column = self.column;
        options::invalid(format!(
            "value \"{text}\" of option \"{name}\" does not fit column \"{column}\" of type {t}"
        ))
        .with_hint(format!("Give a value from {low:?} to {high:?}."))
    }

    /// Values that a valid option leads to, but that the column's type does not hold.
    fn runs_over(&self, property: &str, reached: i128, t: SqlType, hint: String) -> SqlError {
        let (name, column) = (self.name(property), self.column);
        options::invalid(format!(
            "the values of option \"{name}\" reach {reached}, which does not fit column \"{column}\" of type {t}"
        ))
        .with_hint(hint)
    }

    fn step(&self, t: SqlType) -> Result<i64, SqlError> {
        match t {
            SqlType::Timestamp | SqlType::Timestamptz => {
                let second = std::time::Duration::from_secs(1);
                let step = options::duration(self.relation, &self.name("step"), second)?;
                Ok(step.as_micros() as i64)
            }
            _ => self.number("step", 1, "a whole number"),
        }
    }
}

const DAY_US: i64 = 86_400_000_000;

/// The whole numbers that a column holds; for times as they are read: microseconds, days.
fn range(t: SqlType) -> (i64, i64) {
    match t {
        SqlType::SmallInt => (i64::from(i16::MIN), i64::from(i16::MAX)),
        SqlType::Int | SqlType::Date => (i64::from(i32::MIN), i64::from(i32::MAX)),
        SqlType::Numeric(declared) => {
            let (precision, scale) = declared.unwrap_or(UNCONSTRAINED_NUMERIC);
            let digits = usize::try_from(i32::from(precision) - i32::from(scale)).unwrap_or(0);
            (-largest(digits), largest(digits))
        }
        _ => (i64::MIN, i64::MAX),
    }
}

/// The greatest number of so many digits, as far as there are such numbers.
fn largest(digits: usize) -> i64 {
    let power = u32::try_from(digits).ok().and_then(|d| 10i64.checked_pow(d));
    power.map_or(i64::MAX, |n| n - 1)
}

/// The greatest number of a column of fractions.
fn most(t: SqlType) -> f64 {
    match t {
        SqlType::Real => f64::from(f32::MAX),
        SqlType::Numeric(declared) => {
            let (precision, scale) = declared.unwrap_or(UNCONSTRAINED_NUMERIC);
            if precision > FLOAT_DIGITS {
                // The greatest float below a power of ten, which is read as exactly as a float can be.
                let power = format!("1e{}", i32::from(precision) - i32::from(scale)).parse::<f64>();
                return power.unwrap_or(f64::MAX).next_down();
            }
            (10f64.powi(i32::from(precision)) - 1.0) / 10f64.powi(i32::from(scale))
        }
        _ => f64::MAX,
    }
}

/// So many decimal digits a float holds whatever they are.
const FLOAT_DIGITS: u8 = f64::DIGITS as u8;

/// 2024-01-01, in microseconds since 1970: where timestamps begin by default.
const FIRST_TIME_US: i64 = 1_704_067_200_000_000;

impl Field {
    /// `rows`: how many the whole stream has; `u64::MAX`: endless.
    pub fn new(
        relation: &Relation,
        column: &str,
        t: SqlType,
        seed: u64,
        rows: u64,
    ) -> Result<Field, SqlError> {
        let p = Properties { relation, column };
        let prefix = format!("fields.{column}.");
        for option in &relation.options {
            if let Some(property) = option.name.strip_prefix(&prefix)
                && !PROPERTIES.contains(&property)
            {
                return Err(options::invalid(format!("unknown option \"{}\"", option.name))
                    .with_hint(format!("Properties of a field: {}.", PROPERTIES.join(", "))));
            }
        }
        let kind = p.text("kind").unwrap_or(match t {
            SqlType::Timestamp | SqlType::Timestamptz => "sequence",
            _ => "random",
        });
        let draw = draw(&p, kind, t, rows)?;
        let shape = shape(&p, kind, t)?;
        let share: f64 = p.number("nulls", 0.0, "a share between 0 and 1")?;
        if !(0.0..=1.0).contains(&share) {
            return Err(p.bad("nulls", "a share between 0 and 1"));
        }
        if share > 0.0 && relation.columns.iter().any(|c| c.name == column && !c.nullable) {
            return Err(p.nulls_of_none());
        }
        let nulls = (share * u64::MAX as f64) as u64;
        Ok(Field { column: column.to_owned(), sql_type: t, seed, draw, shape, nulls })
    }

    fn bits(&self, number: u64) -> u64 {
        mix(self.seed ^ mix(number))
    }

    fn number(&self, number: u64) -> i64 {
        match &self.draw {
            Draw::Sequence { start, step, count } => {
                let at = if *count == 0 { number } else { number % count };
                start.wrapping_add((at as i64).wrapping_mul(*step))
            }
            Draw::Uniform { min, max } => {
                let span = max.wrapping_sub(*min) as u64;
                let drawn = match span.checked_add(1) {
                    None => self.bits(number),
                    Some(span) => ((u128::from(self.bits(number)) * u128::from(span)) >> 64) as u64,
                };
                min.wrapping_add(drawn as i64)
            }
            Draw::Zipf { min, zipf } => min.wrapping_add(zipf.rank(self.bits(number)) as i64),
        }
    }

    /// Bytes that a value takes at most, roughly.
    pub fn width(&self) -> usize {
        match &self.shape {
            Shape::Letters { length } => *length,
            Shape::Numbered { prefix, .. } => prefix.len() + 20,
            _ => 16,
        }
    }

    /// A sequence without an end has left what its column holds.
    fn run_out(&self) -> ConnectorError {
        let (column, t) = (&self.column, self.sql_type);
        let message = format!(
            "the sequence of option \"fields.{column}.kind\" no longer fits column \"{column}\" of type {t}"
        );
        let error = SqlError::new(SqlState::NUMERIC_VALUE_OUT_OF_RANGE, message);
        ConnectorError::Sql(error.with_hint(again(column)))
    }

    /// What the options allow does not fit: they are checked to, so a rounding went beyond.
    fn too_large(&self) -> ConnectorError {
        let (column, t) = (&self.column, self.sql_type);
        let message = format!("a random value does not fit column \"{column}\" of type {t}");
        let error = SqlError::new(SqlState::NUMERIC_VALUE_OUT_OF_RANGE, message);
        ConnectorError::Sql(error.with_hint(format!(
            "Create it anew with a smaller range of options \"fields.{column}.min\" and \"fields.{column}.max\"."
        )))
    }

    /// The values of rows with these numbers.
    pub fn values(&self, numbers: &[u64]) -> Result<ArrayRef, ConnectorError> {
        let drawn = || numbers.iter().map(|n| self.number(*n));
        let strict = CastOptions { safe: false, ..CastOptions::default() };
        let array: ArrayRef = match &self.shape {
            Shape::Integer(DataType::Int64) => Arc::new(Int64Array::from_iter_values(drawn())),
            Shape::Integer(to) => {
                let all = Int64Array::from_iter_values(drawn());
                cast_with_options(&all, to, &strict).map_err(|_| self.run_out())?
            }
            Shape::Timestamp(to) => {
                cast(&TimestampMicrosecondArray::from_iter_values(drawn()), to)?
            }
            Shape::Date => {
                let days = Int64Array::from_iter_values(drawn());
                let days = cast_with_options(&days, &DataType::Int32, &strict);
                cast(&days.map_err(|_| self.run_out())?, &DataType::Date32)?
            }
            Shape::Float { min, max, to } => {
                let value = |n: &u64| min + (max - min) * unit(self.bits(*n));
                let all = Float64Array::from_iter_values(numbers.iter().map(value));
                cast_with_options(&all, to, &strict).map_err(|_| self.too_large())?
            }
            Shape::Boolean => Arc::new(BooleanArray::from_iter(drawn().map(|v| Some(v & 1 == 1)))),
            Shape::Numbered { prefix, fitting: (low, high) } => {
                use std::fmt::Write;
                let mut texts = StringBuilder::with_capacity(numbers.len(), numbers.len() * 16);
                for value in drawn() {
                    if value < *low || value > *high {
                        return Err(self.run_out());
                    }
                    // Writing into a builder cannot fail.
                    let _ = write!(texts, "{prefix}{value}");
                    texts.append_value("");
                }
                Arc::new(texts.finish())
            }
            Shape::Letters { length } => self.letters(numbers, *length),
            Shape::Uuid => {
                let mut uuids = FixedSizeBinaryBuilder::with_capacity(numbers.len(), UUID_BYTES);
                for value in drawn() {
                    uuids.append_value(self.uuid(value))?;
                }
                Arc::new(uuids.finish())
            }
        };
        self.with_nulls(array, numbers)
    }

    fn uuid(&self, value: i64) -> [u8; 16] {
        let high = self.bits(value as u64);
        let low = mix(high);
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&high.to_be_bytes());
        bytes[8..].copy_from_slice(&low.to_be_bytes());
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        bytes
    }

    fn letters(&self, numbers: &[u64], length: usize) -> ArrayRef {
        let mut texts = StringBuilder::with_capacity(numbers.len(), numbers.len() * length);
        let mut text = String::with_capacity(length);
        for n in numbers {
            text.clear();
            let mut bits = self.bits(*n);
            for i in 0..length {
                // Thirteen letters are drawn from one word.
                if i > 0 && i % 13 == 0 {
                    bits = mix(bits ^ i as u64);
                }
                let shifted = bits >> (i % 13 * 4);
                text.push(char::from(b'a' + (shifted % 26) as u8));
            }
            texts.append_value(&text);
        }
        Arc::new(texts.finish())
    }

    fn with_nulls(&self, array: ArrayRef, numbers: &[u64]) -> Result<ArrayRef, ConnectorError> {
        if self.nulls == 0 {
            return Ok(array);
        }
        let mut valid = BooleanBufferBuilder::new(numbers.len());
        for n in numbers {
            valid.append(mix(self.bits(*n) ^ 0x6e75_6c6c) > self.nulls);
        }
        let nulls = NullBuffer::new(valid.finish());
        Ok(make_array(array.to_data().into_builder().nulls(Some(nulls)).build()?))
    }
}

fn draw(p: &Properties<'_>, kind: &str, t: SqlType, rows: u64) -> Result<Draw, SqlError> {
    match kind {
        "sequence" => sequence(p, t, rows),
        "random" if is_float(t) => Ok(Draw::Uniform { min: 0, max: 0 }),
        "random" => {
            let (low, high) = defaults(t);
            let (min, max) = (p.fitting("min", low, t)?, p.fitting("max", high, t)?);
            if max < min {
                return Err(p.bad("max", "a value that is not below min"));
            }
            Ok(Draw::Uniform { min, max })
        }
        "zipf" => zipf(p, t),
        _ => Err(p.bad("kind", "'sequence', 'random' or 'zipf'")),
    }
}

/// What numbers are drawn from where no option says it.
fn defaults(t: SqlType) -> (i64, i64) {
    match t {
        SqlType::Timestamp | SqlType::Timestamptz => (FIRST_TIME_US, FIRST_TIME_US + 365 * DAY_US),
        SqlType::Date => (19_723, 19_723 + 365),
        SqlType::Boolean => (0, 1),
        // As good as never the same twice.
        SqlType::Uuid => (0, i64::MAX),
        _ => (0, 1_000),
    }
}

fn sequence(p: &Properties<'_>, t: SqlType, rows: u64) -> Result<Draw, SqlError> {
    let first = match t {
        SqlType::Timestamp | SqlType::Timestamptz | SqlType::Date => defaults(t).0,
        _ => 0,
    };
    let (start, step) = (p.fitting("start", first, t)?, p.step(t)?);
    if p.text("end").is_some() {
        let span = p.fitting("end", 0, t)?.checked_sub(start);
        let steps = span.and_then(|s| s.checked_div(step)).filter(|s| *s >= 0);
        let steps = steps.ok_or_else(|| p.bad("end", "a value that the steps reach"))?;
        return Ok(Draw::Sequence { start, step, count: steps as u64 + 1 });
    }
    if rows != u64::MAX {
        let (low, high) = p.range(t)?;
        let last = i128::from(step) * i128::from(rows.saturating_sub(1)) + i128::from(start);
        if !(i128::from(low)..=i128::from(high)).contains(&last) {
            let property = if p.text("start").is_some() { "start" } else { "kind" };
            return Err(p.runs_over(property, last, t, again(p.column)));
        }
    }
    Ok(Draw::Sequence { start, step, count: 0 })
}

fn again(column: &str) -> String {
    format!("With option \"fields.{column}.end\" the sequence begins again after that value.")
}

fn zipf(p: &Properties<'_>, t: SqlType) -> Result<Draw, SqlError> {
    let keys: u64 = p.number("keys", 1_000, "a number of keys, at least 1")?;
    let skew: f64 = p.number("skew", 1.0, "a positive number")?;
    if keys == 0 {
        return Err(p.bad("keys", "a number of keys, at least 1"));
    }
    if !(skew > 0.0 && skew.is_finite()) {
        return Err(p.bad("skew", "a positive number"));
    }
    let min = p.fitting("min", 0, t)?;
    let last = i128::from(min) + i128::from(keys) - 1;
    if last > i128::from(p.range(t)?.1) {
        let hint = "Give fewer keys, or a lower min.".to_owned();
        return Err(p.runs_over("keys", last, t, hint));
    }
    Ok(Draw::Zipf { min, zipf: Zipf::new(keys, skew) })
}

fn is_float(t: SqlType) -> bool {
    matches!(t, SqlType::Real | SqlType::Double | SqlType::Numeric(_))
}

fn shape(p: &Properties<'_>, kind: &str, t: SqlType) -> Result<Shape, SqlError> {
    Ok(match t {
        SqlType::SmallInt | SqlType::Int | SqlType::BigInt => Shape::Integer(t.to_arrow()),
        SqlType::Timestamp | SqlType::Timestamptz => Shape::Timestamp(t.to_arrow()),
        SqlType::Date => Shape::Date,
        SqlType::Boolean => Shape::Boolean,
        SqlType::Real | SqlType::Double | SqlType::Numeric(_) if kind == "random" => {
            let min = p.fitting_float("min", 0.0, t)?;
            let max = p.fitting_float("max", 1_000.0, t)?;
            Shape::Float { min, max, to: t.to_arrow() }
        }
        SqlType::Real | SqlType::Double | SqlType::Numeric(_) => Shape::Integer(t.to_arrow()),
        SqlType::Text | SqlType::Varchar(_) | SqlType::Char(_) if !p.is_numbered() => {
            let most = if let SqlType::Varchar(Some(n)) | SqlType::Char(n) = t {
                n as usize
            } else {
                1 << 20
            };
            let length: usize = p.number("length", most.min(10), "a number of characters")?;
            if length > most {
                return Err(p.bad("length", &format!("at most {most}")));
            }
            Shape::Letters { length }
        }
        SqlType::Text | SqlType::Varchar(_) | SqlType::Char(_) => {
            let prefix = p.text("prefix").unwrap_or_default().to_owned();
            Shape::Numbered { prefix, fitting: p.range(t)? }
        }
        SqlType::Uuid => Shape::Uuid,
        other => {
            let what =
                format!("a column of type {other} (\"{}\") of connector \"datagen\"", p.column);
            return Err(SqlError::unsupported(what).with_hint(
                "Make it of another column: name type GENERATED ALWAYS AS (…) STORED.",
            ));
        }
    })
}

/// Zipf's law over ranks `0..keys` by rejection-inversion (Hörmann and Derflinger, 1996): no table,
/// whatever the number of keys.
#[derive(Clone, Copy, Debug)]
pub struct Zipf {
    keys: f64,
    skew: f64,
    h_first: f64,
    h_last: f64,
    shortcut: f64,
}

impl Zipf {
    pub fn new(keys: u64, skew: f64) -> Zipf {
        let mut zipf = Zipf { keys: keys as f64, skew, h_first: 0.0, h_last: 0.0, shortcut: 0.0 };
        zipf.h_first = zipf.h(1.5) - 1.0;
        zipf.h_last = zipf.h(zipf.keys + 0.5);
        zipf.shortcut = 2.0 - zipf.h_inverse(zipf.h(2.5) - 2f64.powf(-skew));
        zipf
    }

    /// The integral of `x^-skew`.
    fn h(&self, x: f64) -> f64 {
        let log = x.ln();
        expm1_over((1.0 - self.skew) * log) * log
    }

    fn h_inverse(&self, x: f64) -> f64 {
        let t = (x * (1.0 - self.skew)).max(-1.0);
        (ln1p_over(t) * x).exp()
    }

    /// A rank from random bits; further bits are derived when the first draw is rejected.
    pub fn rank(&self, mut bits: u64) -> u64 {
        loop {
            let u = self.h_last + unit(bits) * (self.h_first - self.h_last);
            let x = self.h_inverse(u);
            let k = x.round().clamp(1.0, self.keys);
            if k - x <= self.shortcut || u >= self.h(k + 0.5) - k.powf(-self.skew) {
                return k as u64 - 1;
            }
            bits = mix(bits);
        }
    }
}

/// `(e^x − 1) / x`, also near 0.
fn expm1_over(x: f64) -> f64 {
    if x.abs() > 1e-8 { x.exp_m1() / x } else { 1.0 + x / 2.0 }
}

/// `ln(1 + x) / x`, also near 0.
fn ln1p_over(x: f64) -> f64 {
    if x.abs() > 1e-8 { x.ln_1p() / x } else { 1.0 - x / 2.0 }
}
