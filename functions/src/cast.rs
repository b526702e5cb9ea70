//! Casts, as PostgreSQL makes them: its text formats both ways, range checks and messages.
//!
//! One function a target type (`cast_to_int4`, …), so that a plan names them and a stored graph finds
//! them again. Modifiers (`varchar(n)`, `numeric(p,s)`) are literal arguments.

use std::sync::{Arc, OnceLock};

use arrow::array::*;
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::*;
use datafusion::common::{Result, ScalarValue};
use datafusion::logical_expr::{
    ColumnarValue, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature,
    Volatility,
};
use millrace_common::encoding::Column;
use millrace_common::encoding::array::array_items;
use millrace_common::encoding::builder::parse_uuid;
use millrace_common::json::{Doc, canonical};
use millrace_common::types::{Element, UNCONSTRAINED_NUMERIC, UUID_BYTES};
use millrace_common::{SqlError, SqlState, SqlType};

use super::{parse, text};
use crate::error::{external, sql_error_from_datafusion};
use crate::types::type_column_name;

const DAY_US: i64 = 86_400_000_000;

pub fn cast_functions() -> &'static [Arc<ScalarUDF>] {
    static ALL: OnceLock<Vec<Arc<ScalarUDF>>> = OnceLock::new();
    ALL.get_or_init(|| {
        // Modifiers aside.
        let scalars = Element::ALL.into_iter().map(Element::scalar).chain([SqlType::Char(1)]);
        let all = scalars.chain(Element::ALL.into_iter().map(SqlType::Array));
        all.map(|t| Arc::new(ScalarUDF::from(Cast::new(t)))).collect()
    })
}

/// The function for a cast, or error 42846.
pub fn cast_function(from: &DataType, to: SqlType) -> Result<Arc<ScalarUDF>, SqlError> {
    let source = SqlType::from_arrow(from)?;
    if !castable(source, to) {
        return Err(SqlError::new(
            SqlState::CANNOT_COERCE,
            format!("cannot cast type {} to {}", parse::base_name(source), parse::base_name(to)),
        ));
    }
    let name = function_name(to);
    let found = cast_functions().iter().find(|f| f.name() == name);
    found.cloned().ok_or_else(|| SqlError::internal(format!("no function {name}")))
}

fn function_name(to: SqlType) -> String {
    let array = if matches!(to, SqlType::Array(_)) { "_array" } else { "" };
    format!("cast_to_{}{array}", type_column_name(to))
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Boolean,
    Integer,
    Float,
    Numeric,
    Text,
    Bytea,
    Date,
    Time,
    Timestamp,
    Interval,
    Uuid,
    Jsonb,
    Array,
}

fn kind(t: SqlType) -> Kind {
    match t {
        SqlType::Boolean => Kind::Boolean,
        SqlType::SmallInt | SqlType::Int | SqlType::BigInt => Kind::Integer,
        SqlType::Real | SqlType::Double => Kind::Float,
        SqlType::Numeric(_) => Kind::Numeric,
        SqlType::Text | SqlType::Varchar(_) | SqlType::Char(_) => Kind::Text,
        SqlType::Bytea => Kind::Bytea,
        SqlType::Date => Kind::Date,
        SqlType::Time => Kind::Time,
        SqlType::Timestamp | SqlType::Timestamptz => Kind::Timestamp,
        SqlType::Interval => Kind::Interval,
        SqlType::Uuid => Kind::Uuid,
        SqlType::Jsonb => Kind::Jsonb,
        SqlType::Array(_) => Kind::Array,
    }
}

fn castable(from: SqlType, to: SqlType) -> bool {
    use Kind as K;
    if let (SqlType::Array(from), SqlType::Array(to)) = (from, to) {
        return castable(from.scalar(), to.scalar());
    }
    let (a, b) = (kind(from), kind(to));
    let number = |k: Kind| matches!(k, K::Integer | K::Float | K::Numeric);
    a == b
        || a == K::Text
        || b == K::Text
        || (number(a) && number(b))
        || (a == K::Jsonb && (number(b) || b == K::Boolean))
        || (a == K::Boolean && to == SqlType::Int)
        || (from == SqlType::Int && b == K::Boolean)
        || matches!((a, b), (K::Date, K::Timestamp) | (K::Timestamp, K::Date | K::Time))
        || matches!((a, b), (K::Time, K::Interval) | (K::Interval, K::Time))
}

/// Whether an INSERT may put a value of one type into a column of another.
pub fn assignable(from: &DataType, to: SqlType) -> bool {
    let Ok(from) = SqlType::from_arrow(from) else { return false };
    use Kind as K;
    let (a, b) = (kind(from), kind(to));
    let number = |k: Kind| matches!(k, K::Integer | K::Float | K::Numeric);
    a == b
        || b == K::Text
        || (number(a) && number(b))
        || matches!((a, b), (K::Date, K::Timestamp) | (K::Timestamp, K::Date | K::Time))
        || matches!((a, b), (K::Time, K::Interval) | (K::Interval, K::Time))
}

/// A literal of unknown type, read as `to`.
pub fn fold_literal(literal: &str, to: SqlType) -> Result<ScalarValue, SqlError> {
    let input: ArrayRef = Arc::new(StringArray::from(vec![literal]));
    let array = convert(&input, to)?;
    ScalarValue::try_from_array(&array, 0).map_err(sql_error_from_datafusion)
}

/// `value too long for type character varying(n)`, unless only spaces are too much.
pub fn check_length(value: &str, to: SqlType) -> Result<(), SqlError> {
    if let SqlType::Varchar(Some(n)) | SqlType::Char(n) = to
        && value.chars().skip(n as usize).any(|c| c != ' ')
    {
        return Err(SqlError::new(
            SqlState::STRING_DATA_RIGHT_TRUNCATION,
            format!("value too long for type {to}"),
        ));
    }
    Ok(())
}

/// A number's text as PostgreSQL types it: integer, bigint, else numeric with its digits.
pub fn parse_number(text: &str) -> Result<ScalarValue, SqlError> {
    if let Ok(v) = text.parse::<i32>() {
        return Ok(ScalarValue::Int32(Some(v)));
    }
    if let Ok(v) = text.parse::<i64>() {
        return Ok(ScalarValue::Int64(Some(v)));
    }
    let (value, scale) = match parse::numeric(text) {
        Ok(parts) => parts,
        // More digits than a numeric here can hold: the nearest float.
        Err(e) if e.state == SqlState::NUMERIC_VALUE_OUT_OF_RANGE => {
            return Ok(ScalarValue::Float64(Some(parse::float(text, SqlType::Double)?)));
        }
        Err(e) => return Err(e),
    };
    if scale > 38 {
        return Ok(ScalarValue::Float64(Some(parse::float(text, SqlType::Double)?)));
    }
    let digits = value.unsigned_abs().to_string().len() as i32;
    let precision = digits.max(scale).clamp(1, 38) as u8;
    Ok(ScalarValue::Decimal128(Some(value), precision, scale as i8))
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Cast {
    to: SqlType,
    name: String,
    signature: Signature,
}

impl Cast {
    fn new(to: SqlType) -> Cast {
        let signature = Signature::variadic_any(Volatility::Immutable);
        Cast { to, name: function_name(to), signature }
    }

    /// The target with the modifiers that the arguments give.
    fn target(&self, modifiers: &[i32]) -> SqlType {
        match (self.to, modifiers) {
            (SqlType::Varchar(_), [n]) => SqlType::Varchar(Some(*n as u32)),
            (SqlType::Char(_), [n]) => SqlType::Char(*n as u32),
            (SqlType::Numeric(_), [p, s]) => SqlType::Numeric(digits(*p, *s)),
            (SqlType::Array(Element::Varchar(_)), [n]) => {
                SqlType::Array(Element::Varchar(Some(*n as u32)))
            }
            (SqlType::Array(Element::Numeric(_)), [p, s]) => {
                SqlType::Array(Element::Numeric(digits(*p, *s)))
            }
            (t, _) => t,
        }
    }
}

/// Precision and scale, if there is a numeric of them: casts may be called by name.
fn digits(precision: i32, scale: i32) -> Option<(u8, i8)> {
    let precision = u8::try_from(precision).ok().filter(|p| (1..=38).contains(p))?;
    Some((precision, i8::try_from(scale).ok().filter(|s| (-38..=38).contains(s))?))
}

fn modifier(v: Option<&ScalarValue>) -> Option<i32> {
    match v {
        Some(ScalarValue::Int32(Some(n))) => Some(*n),
        Some(ScalarValue::Int64(Some(n))) => Some(*n as i32),
        _ => None,
    }
}

impl ScalarUDFImpl for Cast {
    fn name(&self) -> &str {
        &self.name
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, _args: &[DataType]) -> Result<DataType> {
        Ok(self.to.to_arrow())
    }

    fn return_field_from_args(&self, args: ReturnFieldArgs) -> Result<FieldRef> {
        let modifiers: Vec<i32> =
            args.scalar_arguments.iter().skip(1).filter_map(|a| modifier(*a)).collect();
        Ok(Arc::new(self.target(&modifiers).to_field(self.name())))
    }

    fn is_strict(&self) -> bool {
        true
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let modifiers: Vec<i32> = args.args[1..]
            .iter()
            .filter_map(|a| match a {
                ColumnarValue::Scalar(s) => modifier(Some(s)),
                ColumnarValue::Array(_) => None,
            })
            .collect();
        let to = self.target(&modifiers);
        match &args.args[0] {
            ColumnarValue::Array(a) => Ok(ColumnarValue::Array(convert(a, to).map_err(external)?)),
            ColumnarValue::Scalar(s) => {
                let one = convert(&s.to_array()?, to).map_err(external)?;
                Ok(ColumnarValue::Scalar(ScalarValue::try_from_array(&one, 0)?))
            }
        }
    }
}

/// Casts a whole array.
pub fn convert(array: &ArrayRef, to: SqlType) -> Result<ArrayRef, SqlError> {
    let target = to.to_arrow();
    let from = array.data_type();
    if *from == DataType::Null {
        return Ok(new_null_array(&target, array.len()));
    }
    let source = SqlType::from_arrow(from)?;
    use Kind as K;
    match (kind(source), kind(to)) {
        (K::Text, K::Text) => varchar(&normal(array, &DataType::Utf8)?, to),
        (_, K::Text) => varchar(&to_text(array)?, to),
        (K::Array, K::Array) => {
            let SqlType::Array(element) = to else { return Err(SqlError::internal("no array")) };
            let list = array.as_list::<i32>();
            let values = convert(list.values(), element.scalar())?;
            let item = Arc::new(Field::new_list_field(values.data_type().clone(), true));
            let nulls = list.nulls().cloned();
            Ok(Arc::new(ListArray::new(item, list.offsets().clone(), values, nulls)))
        }
        (K::Jsonb, K::Boolean) => jsonb_to_boolean(array),
        (K::Jsonb, _) if kind(to) != K::Jsonb => jsonb_to_number(array, to),
        (K::Text, _) => from_text(normal(array, &DataType::Utf8)?.as_string::<i32>(), to),
        (K::Integer, K::Integer) => integers(array, to),
        (K::Numeric, K::Integer) => numeric_to_integer(array, to),
        (K::Float, K::Integer) => float_to_integer(array, to),
        (K::Integer, K::Numeric) => {
            let whole = normal(array, &DataType::Decimal128(38, 0))?;
            rescale(&whole, to)
        }
        (K::Numeric, K::Numeric) => rescale(array, to),
        (K::Float, K::Numeric) => float_to_numeric(array, to),
        (K::Float, K::Float) if to == SqlType::Real => double_to_real(array),
        (K::Boolean, K::Integer) | (K::Integer, K::Boolean) => normal(array, &target),
        (K::Timestamp, K::Time) => {
            let us = normal(array, &DataType::Timestamp(TimeUnit::Microsecond, None))?;
            let us = us.as_primitive::<TimestampMicrosecondType>();
            let time: Time64MicrosecondArray = us.unary(|v| v.rem_euclid(DAY_US));
            Ok(Arc::new(time))
        }
        (K::Timestamp, K::Date) => {
            let us = normal(array, &DataType::Timestamp(TimeUnit::Microsecond, None))?;
            let us = us.as_primitive::<TimestampMicrosecondType>();
            let days: Date32Array = us.unary(|v| v.div_euclid(DAY_US) as i32);
            Ok(Arc::new(days))
        }
        (K::Timestamp, K::Timestamp) => Ok(retag(array, &target)),
        (K::Date, K::Timestamp) => {
            let plain = DataType::Timestamp(TimeUnit::Microsecond, None);
            Ok(retag(&normal(array, &plain)?, &target))
        }
        (K::Time, K::Interval) => {
            let us = array.as_primitive::<Time64MicrosecondType>();
            let i: IntervalMonthDayNanoArray =
                us.unary(|v| IntervalMonthDayNano::new(0, 0, v * 1000));
            Ok(Arc::new(i))
        }
        (K::Interval, K::Time) => {
            let i = normal(array, &target_interval())?;
            let i = i.as_primitive::<IntervalMonthDayNanoType>();
            let t: Time64MicrosecondArray = i.unary(|v| (v.nanoseconds / 1000).rem_euclid(DAY_US));
            Ok(Arc::new(t))
        }
        _ => normal(array, &target),
    }
}

fn target_interval() -> DataType {
    DataType::Interval(IntervalUnit::MonthDayNano)
}

/// Arrow's cast, where it does what PostgreSQL does.
fn normal(array: &ArrayRef, to: &DataType) -> Result<ArrayRef, SqlError> {
    if array.data_type() == to {
        return Ok(Arc::clone(array));
    }
    let options = arrow::compute::CastOptions { safe: false, ..Default::default() };
    arrow::compute::cast_with_options(array, to, &options)
        .map_err(|e| sql_error_from_datafusion(e.into()))
}

/// The same instants in microseconds, with or without the zone UTC.
fn retag(array: &ArrayRef, to: &DataType) -> ArrayRef {
    let DataType::Timestamp(_, zone) = to else { return Arc::clone(array) };
    match array.data_type() {
        DataType::Timestamp(TimeUnit::Microsecond, _) => {
            let us = array.as_primitive::<TimestampMicrosecondType>().clone();
            Arc::new(us.with_timezone_opt(zone.clone()))
        }
        _ => arrow::compute::cast(array, to).unwrap_or_else(|_| Arc::clone(array)),
    }
}

fn varchar(array: &ArrayRef, to: SqlType) -> Result<ArrayRef, SqlError> {
    let (n, blanks) = match to {
        SqlType::Varchar(Some(n)) => (n as usize, true),
        SqlType::Char(n) => (n as usize, false),
        _ => return Ok(Arc::clone(array)),
    };
    let strings = array.as_string::<i32>();
    let cut = strings.iter().map(|s| {
        s.map(|s| match s.char_indices().nth(n) {
            Some((end, _)) => &s[..end],
            None => s,
        })
        .map(|s| if blanks { s } else { s.trim_end_matches(' ') })
    });
    Ok(Arc::new(StringArray::from_iter(cut)))
}

/// Any array as PostgreSQL prints it.
pub fn to_text(array: &ArrayRef) -> Result<ArrayRef, SqlError> {
    use DataType as D;
    let a = array;
    Ok(match a.data_type() {
        D::Utf8 => Arc::clone(a),
        D::Boolean => {
            let b = a.as_boolean();
            let words = b.iter().map(|v| v.map(|v| if v { "true" } else { "false" }));
            Arc::new(StringArray::from_iter(words))
        }
        D::Float64 => print(a.as_primitive::<Float64Type>().iter(), text::push_float_text),
        D::Float32 => print(a.as_primitive::<Float32Type>().iter(), text::push_real_text),
        D::Decimal128(p, s) => {
            let (trim, s) = ((*p, *s) == UNCONSTRAINED_NUMERIC, *s);
            print(a.as_primitive::<Decimal128Type>().iter(), |out, v| {
                text::push_numeric_text(out, v, s, trim)
            })
        }
        D::Date32 => print(a.as_primitive::<Date32Type>().iter(), text::push_date_text),
        D::Time64(TimeUnit::Microsecond) => {
            print(a.as_primitive::<Time64MicrosecondType>().iter(), text::push_time_text)
        }
        D::Timestamp(TimeUnit::Microsecond, zone) => {
            let tz = zone.is_some();
            print(a.as_primitive::<TimestampMicrosecondType>().iter(), |out, v| {
                text::push_timestamp_text(out, v, tz)
            })
        }
        D::Interval(IntervalUnit::MonthDayNano) => {
            print(a.as_primitive::<IntervalMonthDayNanoType>().iter(), |out, v| {
                text::push_interval_text(out, v.months, v.days, v.nanoseconds / 1000)
            })
        }
        D::List(_) => {
            let column = Column::new(a)?;
            let mut out = StringBuilder::new();
            let mut buffer = bytes::BytesMut::new();
            for row in 0..a.len() {
                if a.is_null(row) {
                    out.append_null();
                    continue;
                }
                buffer.clear();
                column.put_text(row, &mut buffer)?;
                out.append_value(String::from_utf8_lossy(&buffer));
            }
            Arc::new(out.finish())
        }
        D::FixedSizeBinary(_) => print(a.as_fixed_size_binary().iter(), text::push_uuid_text),
        D::Binary => print(a.as_binary::<i32>().iter(), text::push_bytea_text),
        _ => normal(a, &D::Utf8)?,
    })
}

fn print<T>(values: impl Iterator<Item = Option<T>>, push: impl Fn(&mut String, T)) -> ArrayRef {
    let mut out = StringBuilder::new();
    let mut buffer = String::new();
    for value in values {
        match value {
            None => out.append_null(),
            Some(v) => {
                buffer.clear();
                push(&mut buffer, v);
                out.append_value(&buffer);
            }
        }
    }
    Arc::new(out.finish())
}

fn read<T: ArrowPrimitiveType>(
    strings: &StringArray,
    f: impl Fn(&str) -> Result<T::Native, SqlError>,
) -> Result<PrimitiveArray<T>, SqlError> {
    let mut out = PrimitiveBuilder::<T>::with_capacity(strings.len());
    for s in strings {
        out.append_option(s.map(&f).transpose()?);
    }
    Ok(out.finish())
}

fn from_text(strings: &StringArray, to: SqlType) -> Result<ArrayRef, SqlError> {
    Ok(match to {
        SqlType::Boolean => {
            let values: Result<BooleanArray, SqlError> =
                strings.iter().map(|s| s.map(parse::boolean).transpose()).collect();
            Arc::new(values?)
        }
        SqlType::SmallInt => {
            Arc::new(read::<Int16Type>(strings, |s| parse::integer(s, to).map(|v| v as i16))?)
        }
        SqlType::Int => {
            Arc::new(read::<Int32Type>(strings, |s| parse::integer(s, to).map(|v| v as i32))?)
        }
        SqlType::BigInt => Arc::new(read::<Int64Type>(strings, |s| parse::integer(s, to))?),
        SqlType::Real => {
            Arc::new(read::<Float32Type>(strings, |s| parse::float(s, to).map(|v| v as f32))?)
        }
        SqlType::Double => Arc::new(read::<Float64Type>(strings, |s| parse::float(s, to))?),
        SqlType::Numeric(ps) => {
            let (p, s) = ps.unwrap_or(UNCONSTRAINED_NUMERIC);
            let values = read::<Decimal128Type>(strings, |text| {
                let (value, scale) = parse::numeric(text)?;
                fit(value, scale, p, s)
            })?;
            Arc::new(with_precision(values, p, s)?)
        }
        SqlType::Date => Arc::new(read::<Date32Type>(strings, parse::date)?),
        SqlType::Time => Arc::new(read::<Time64MicrosecondType>(strings, parse::time)?),
        SqlType::Timestamp => {
            Arc::new(read::<TimestampMicrosecondType>(strings, |s| parse::timestamp(s, false))?)
        }
        SqlType::Timestamptz => {
            let us = read::<TimestampMicrosecondType>(strings, |s| parse::timestamp(s, true))?;
            Arc::new(us.with_timezone("UTC"))
        }
        SqlType::Interval => Arc::new(read::<IntervalMonthDayNanoType>(strings, |s| {
            let (months, days, us) = parse::interval(s)?;
            Ok(IntervalMonthDayNano::new(months, days, us * 1000))
        })?),
        SqlType::Bytea => {
            let values = strings.iter().map(|s| s.map(parse::bytea).transpose());
            let values: Vec<Option<Vec<u8>>> = values.collect::<Result<_, SqlError>>()?;
            Arc::new(BinaryArray::from_iter(values))
        }
        SqlType::Text | SqlType::Varchar(_) | SqlType::Char(_) => Arc::new(strings.clone()),
        SqlType::Uuid => Arc::new(uuids_from_text(strings)?),
        SqlType::Jsonb => {
            let mut out = LargeStringBuilder::new();
            for s in strings {
                match s {
                    None => out.append_null(),
                    Some(s) => out.append_value(canonical(s)?),
                }
            }
            Arc::new(out.finish())
        }
        SqlType::Array(element) => Arc::new(lists_from_text(strings, element)?),
    })
}

fn uuids_from_text(strings: &StringArray) -> Result<FixedSizeBinaryArray, SqlError> {
    let mut out = FixedSizeBinaryBuilder::with_capacity(strings.len(), UUID_BYTES);
    for s in strings {
        match s {
            None => out.append_null(),
            Some(s) => {
                out.append_value(parse_uuid(s)?).map_err(|e| SqlError::internal(e.to_string()))?
            }
        }
    }
    Ok(out.finish())
}

fn lists_from_text(strings: &StringArray, element: Element) -> Result<ListArray, SqlError> {
    let mut items = StringBuilder::new();
    let mut lengths = Vec::with_capacity(strings.len());
    for s in strings {
        let Some(s) = s else {
            lengths.push(0);
            continue;
        };
        let malformed = || {
            SqlError::new(
                SqlState::INVALID_TEXT_REPRESENTATION,
                format!("malformed array literal: \"{s}\""),
            )
        };
        let parts = array_items(s).ok_or_else(malformed)?;
        lengths.push(parts.len());
        parts.iter().for_each(|p| items.append_option(p.as_deref()));
    }
    let items: ArrayRef = Arc::new(items.finish());
    let values = convert(&items, element.scalar())?;
    let item = Arc::new(Field::new_list_field(values.data_type().clone(), true));
    let offsets = OffsetBuffer::from_lengths(lengths);
    Ok(ListArray::new(item, offsets, values, strings.nulls().cloned()))
}

fn cannot_cast(doc: Doc<'_>, to: SqlType) -> SqlError {
    let to = parse::base_name(to);
    SqlError::new(
        SqlState::INVALID_PARAMETER_VALUE,
        format!("cannot cast jsonb {} to type {to}", doc.kind()),
    )
}

fn jsonb_to_boolean(array: &ArrayRef) -> Result<ArrayRef, SqlError> {
    let values = array.as_string::<i64>().iter().map(|d| match d {
        None => Ok(None),
        Some("true") => Ok(Some(true)),
        Some("false") => Ok(Some(false)),
        Some(d) => Err(cannot_cast(Doc(d), SqlType::Boolean)),
    });
    let values: Vec<Option<bool>> = values.collect::<Result<_, SqlError>>()?;
    Ok(Arc::new(BooleanArray::from(values)))
}

fn jsonb_to_number(array: &ArrayRef, to: SqlType) -> Result<ArrayRef, SqlError> {
    let digits = array.as_string::<i64>().iter().map(|d| match d {
        None => Ok(None),
        Some(d) if Doc(d).kind() == "number" => Ok(Some(d)),
        Some(d) => Err(cannot_cast(Doc(d), to)),
    });
    let digits: Vec<Option<&str>> = digits.collect::<Result<_, SqlError>>()?;
    let digits = StringArray::from(digits);
    match kind(to) {
        // Rounded, as a numeric is.
        Kind::Integer => {
            let whole = from_text(&digits, SqlType::Numeric(Some((38, 0))))?;
            numeric_to_integer(&whole, to)
        }
        _ => from_text(&digits, to),
    }
}

fn too_large(to: SqlType) -> SqlError {
    SqlError::new(SqlState::NUMERIC_VALUE_OUT_OF_RANGE, format!("{to} out of range"))
}

/// Applies a fallible function to all values.
fn try_map<A: ArrowPrimitiveType, B: ArrowPrimitiveType>(
    array: &PrimitiveArray<A>,
    f: impl Fn(A::Native) -> Result<B::Native, SqlError>,
) -> Result<PrimitiveArray<B>, SqlError> {
    array.try_unary(f)
}

fn integers(array: &ArrayRef, to: SqlType) -> Result<ArrayRef, SqlError> {
    let wide = normal(array, &DataType::Int64)?;
    let wide = wide.as_primitive::<Int64Type>();
    narrow(wide, to)
}

fn narrow(wide: &Int64Array, to: SqlType) -> Result<ArrayRef, SqlError> {
    let error = || too_large(to);
    Ok(match to {
        SqlType::SmallInt => {
            Arc::new(try_map::<_, Int16Type>(wide, |v| i16::try_from(v).map_err(|_| error()))?)
        }
        SqlType::Int => {
            Arc::new(try_map::<_, Int32Type>(wide, |v| i32::try_from(v).map_err(|_| error()))?)
        }
        _ => Arc::new(wide.clone()),
    })
}

fn float_to_integer(array: &ArrayRef, to: SqlType) -> Result<ArrayRef, SqlError> {
    let wide = normal(array, &DataType::Float64)?;
    let whole = try_map::<_, Int64Type>(wide.as_primitive::<Float64Type>(), |v| {
        let rounded = v.round_ties_even();
        // 2^63 itself is out of range; −2^63 is not.
        match (-9_223_372_036_854_775_808.0..9_223_372_036_854_775_808.0).contains(&rounded) {
            true => Ok(rounded as i64),
            false => Err(too_large(to)),
        }
    })?;
    narrow(&whole, to)
}

fn numeric_to_integer(array: &ArrayRef, to: SqlType) -> Result<ArrayRef, SqlError> {
    let whole = rescale(array, SqlType::Numeric(Some((38, 0))))?;
    let wide = try_map::<_, Int64Type>(whole.as_primitive::<Decimal128Type>(), |v| {
        i64::try_from(v).map_err(|_| too_large(to))
    })?;
    narrow(&wide, to)
}

fn double_to_real(array: &ArrayRef) -> Result<ArrayRef, SqlError> {
    let wide = normal(array, &DataType::Float64)?;
    Ok(Arc::new(try_map::<_, Float32Type>(wide.as_primitive::<Float64Type>(), |v| {
        let narrow = v as f32;
        if narrow.is_infinite() && v.is_finite() {
            return Err(SqlError::new(
                SqlState::NUMERIC_VALUE_OUT_OF_RANGE,
                "value out of range: overflow",
            ));
        }
        Ok(narrow)
    })?))
}

/// PostgreSQL takes 15 significant digits of a double, 6 of a real.
fn float_to_numeric(array: &ArrayRef, to: SqlType) -> Result<ArrayRef, SqlError> {
    let SqlType::Numeric(ps) = to else { return Err(SqlError::internal("not a numeric")) };
    let (p, s) = ps.unwrap_or(UNCONSTRAINED_NUMERIC);
    let digits = if *array.data_type() == DataType::Float32 { 6 } else { 15 };
    let wide = normal(array, &DataType::Float64)?;
    let values = try_map::<_, Decimal128Type>(wide.as_primitive::<Float64Type>(), |v| {
        if !v.is_finite() {
            return Err(SqlError::unsupported("numeric NaN or infinity"));
        }
        let (value, scale) = parse::numeric(&format!("{v:.*e}", digits - 1))?;
        fit(value, scale, p, s)
    })?;
    Ok(Arc::new(with_precision(values, p, s)?))
}

fn with_precision(values: Decimal128Array, p: u8, s: i8) -> Result<Decimal128Array, SqlError> {
    values.with_precision_and_scale(p, s).map_err(|e| SqlError::internal(e.to_string()))
}

/// A numeric to other precision and scale: rounded half away from zero, checked.
fn rescale(array: &ArrayRef, to: SqlType) -> Result<ArrayRef, SqlError> {
    let SqlType::Numeric(ps) = to else { return Err(SqlError::internal("not a numeric")) };
    let (p, s) = ps.unwrap_or(UNCONSTRAINED_NUMERIC);
    let narrow;
    let array = match array.data_type() {
        DataType::Decimal128(_, _) => array,
        DataType::Decimal256(_, s) => {
            narrow = normal(array, &DataType::Decimal128(38, *s))?;
            &narrow
        }
        _ => return Err(SqlError::internal("not a numeric array")),
    };
    let DataType::Decimal128(_, from) = *array.data_type() else {
        return Err(SqlError::internal("not a numeric array"));
    };
    if *array.data_type() == DataType::Decimal128(p, s) {
        return Ok(Arc::clone(array));
    }
    let values = try_map::<_, Decimal128Type>(array.as_primitive::<Decimal128Type>(), |v| {
        fit(v, i32::from(from), p, s)
    })?;
    Ok(Arc::new(with_precision(values, p, s)?))
}

/// `value / 10^scale` as a numeric(p, s).
pub fn fit(value: i128, scale: i32, p: u8, s: i8) -> Result<i128, SqlError> {
    let overflow = || numeric_field_overflow(p, s);
    let shift = i32::from(s) - scale;
    let out = if shift >= 0 {
        match 10i128.checked_pow(shift as u32) {
            Some(factor) => value.checked_mul(factor).ok_or_else(overflow)?,
            None if value == 0 => 0,
            None => return Err(overflow()),
        }
    } else {
        match 10i128.checked_pow(shift.unsigned_abs()) {
            Some(divisor) => div_round(value, divisor),
            None => 0,
        }
    };
    match out.unsigned_abs() < 10u128.pow(u32::from(p)) {
        true => Ok(out),
        false => Err(overflow()),
    }
}

fn numeric_field_overflow(p: u8, s: i8) -> SqlError {
    if (p, s) == UNCONSTRAINED_NUMERIC || p == 38 {
        return parse::numeric_overflow();
    }
    let e = SqlError::new(SqlState::NUMERIC_VALUE_OUT_OF_RANGE, "numeric field overflow");
    let power = i32::from(p) - i32::from(s);
    e.with_detail(format!(
        "A field with precision {p}, scale {s} must round to an absolute value less than {}{power}.",
        if power == 0 { "1 = 10^" } else { "10^" }
    ))
}

/// Rounds half away from zero. The divisor is positive.
pub fn div_round(value: i128, divisor: i128) -> i128 {
    let (q, r) = (value / divisor, value % divisor);
    match r.unsigned_abs() >= divisor.unsigned_abs().div_ceil(2) {
        true => q + value.signum(),
        false => q,
    }
}

#[cfg(test)]
mod tests;
