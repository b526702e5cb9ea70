//! Arrow's types and fields ↔ messages.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::datatypes::{
    DataType, Decimal128Type, Decimal256Type, DecimalType, Field, FieldRef, IntervalUnit, TimeUnit,
};

use crate::codec::expr::message;
use crate::codec::names::Numbered;
use crate::codec::{CodecError, Result};

/// Types without parameters. Numbers are never reused.
const PLAIN: [(DataType, u32); 22] = [
    (DataType::Null, 1),
    (DataType::Boolean, 2),
    (DataType::Int8, 3),
    (DataType::Int16, 4),
    (DataType::Int32, 5),
    (DataType::Int64, 6),
    (DataType::UInt8, 7),
    (DataType::UInt16, 8),
    (DataType::UInt32, 9),
    (DataType::UInt64, 10),
    (DataType::Float16, 11),
    (DataType::Float32, 12),
    (DataType::Float64, 13),
    (DataType::Utf8, 14),
    (DataType::LargeUtf8, 15),
    (DataType::Utf8View, 16),
    (DataType::Binary, 17),
    (DataType::LargeBinary, 18),
    (DataType::BinaryView, 19),
    (DataType::Date32, 20),
    (DataType::Date64, 21),
    (DataType::Interval(IntervalUnit::MonthDayNano), 22),
];

const DECIMAL_128: u32 = 40;
const DECIMAL_256: u32 = 41;
const FIXED_SIZE_BINARY: u32 = 42;
const TIME_32: u32 = 43;
const TIME_64: u32 = 44;
const TIMESTAMP: u32 = 45;
const DURATION: u32 = 46;
const LIST: u32 = 60;
const LARGE_LIST: u32 = 61;
const STRUCT: u32 = 62;

pub fn encode_type(t: &DataType) -> Result<message::Type> {
    if let Some((_, kind)) = PLAIN.iter().find(|(plain, _)| plain == t) {
        return Ok(message::Type { kind: *kind, ..Default::default() });
    }
    let decimal = |kind, precision: u8, scale: i8| message::Type {
        kind,
        precision: precision.into(),
        scale: scale.into(),
        ..Default::default()
    };
    let timed = |kind, unit: &TimeUnit, zone: Option<&str>| -> Result<message::Type> {
        let zone = zone.map(str::to_owned);
        Ok(message::Type { kind, unit: unit.number()?, zone, ..Default::default() })
    };
    let nested = |kind, fields: &[FieldRef]| -> Result<message::Type> {
        let fields = fields.iter().map(|f| encode_field(f)).collect::<Result<_>>()?;
        Ok(message::Type { kind, fields, ..Default::default() })
    };
    match t {
        DataType::Decimal128(precision, scale) => Ok(decimal(DECIMAL_128, *precision, *scale)),
        DataType::Decimal256(precision, scale) => Ok(decimal(DECIMAL_256, *precision, *scale)),
        DataType::FixedSizeBinary(width) => {
            let width = u32::try_from(*width).map_err(|_| unstorable(t))?;
            Ok(message::Type { kind: FIXED_SIZE_BINARY, width, ..Default::default() })
        }
        DataType::Time32(unit) => timed(TIME_32, unit, None),
        DataType::Time64(unit) => timed(TIME_64, unit, None),
        DataType::Timestamp(unit, zone) => timed(TIMESTAMP, unit, zone.as_deref()),
        DataType::Duration(unit) => timed(DURATION, unit, None),
        DataType::List(item) => nested(LIST, std::slice::from_ref(item)),
        DataType::LargeList(item) => nested(LARGE_LIST, std::slice::from_ref(item)),
        DataType::Struct(fields) => nested(STRUCT, fields),
        other => Err(unstorable(other)),
    }
}

fn unstorable(t: &DataType) -> CodecError {
    CodecError::Encode(format!("the type {t}"))
}

fn damaged(what: impl Into<String>) -> CodecError {
    CodecError::Damaged(what.into())
}

pub fn decode_type(t: &message::Type) -> Result<DataType> {
    if let Some((plain, _)) = PLAIN.iter().find(|(_, kind)| *kind == t.kind) {
        return Ok(plain.clone());
    }
    let item = || match t.fields.as_slice() {
        [item] => Ok(Arc::new(decode_field(item)?)),
        _ => Err(damaged("a list without one type of its elements")),
    };
    Ok(match t.kind {
        DECIMAL_128 => decimal::<Decimal128Type>(t)?,
        DECIMAL_256 => decimal::<Decimal256Type>(t)?,
        FIXED_SIZE_BINARY => {
            let width = i32::try_from(t.width).map_err(|_| damaged("a type too wide"))?;
            DataType::FixedSizeBinary(width)
        }
        TIME_32 => match TimeUnit::from_number(t.unit)? {
            unit @ (TimeUnit::Second | TimeUnit::Millisecond) => DataType::Time32(unit),
            _ => return Err(damaged("a time of 32 bits in a fine unit")),
        },
        TIME_64 => match TimeUnit::from_number(t.unit)? {
            unit @ (TimeUnit::Microsecond | TimeUnit::Nanosecond) => DataType::Time64(unit),
            _ => return Err(damaged("a time of 64 bits in a coarse unit")),
        },
        TIMESTAMP => {
            let zone = t.zone.as_deref().map(Arc::from);
            DataType::Timestamp(TimeUnit::from_number(t.unit)?, zone)
        }
        DURATION => DataType::Duration(TimeUnit::from_number(t.unit)?),
        LIST => DataType::List(item()?),
        LARGE_LIST => DataType::LargeList(item()?),
        STRUCT => {
            let fields = t.fields.iter().map(decode_field).collect::<Result<Vec<_>>>()?;
            DataType::Struct(fields.into())
        }
        other => return Err(CodecError::Unknown(format!("the type number {other}"))),
    })
}

fn decimal<D: DecimalType>(t: &message::Type) -> Result<DataType> {
    let precision = u8::try_from(t.precision).ok().filter(|p| (1..=D::MAX_PRECISION).contains(p));
    let most = i32::from(D::MAX_SCALE);
    let scale = Some(t.scale).filter(|s| (-most..=most).contains(s));
    match (precision, scale.and_then(|s| i8::try_from(s).ok())) {
        (Some(precision), Some(scale)) if i32::from(scale) <= i32::from(precision) => {
            Ok(D::TYPE_CONSTRUCTOR(precision, scale))
        }
        _ => Err(damaged(format!("a decimal of {} digits, scale {}", t.precision, t.scale))),
    }
}

pub fn encode_field(f: &Field) -> Result<message::Field> {
    Ok(message::Field {
        name: f.name().clone(),
        r#type: Some(encode_type(f.data_type())?),
        nullable: f.is_nullable(),
        metadata: f.metadata().clone().into_iter().collect(),
    })
}

pub fn decode_field(f: &message::Field) -> Result<Field> {
    let t = decode_type(f.r#type.as_ref().ok_or_else(|| damaged("a field without a type"))?)?;
    let metadata: HashMap<String, String> = f.metadata.clone().into_iter().collect();
    Ok(Field::new(&f.name, t, f.nullable).with_metadata(metadata))
}
