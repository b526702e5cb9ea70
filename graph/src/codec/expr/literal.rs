//! Literals ↔ messages.

use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, GenericListArray, OffsetSizeTrait, StructArray, new_empty_array,
};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, FieldRef, Fields, IntervalMonthDayNano, TimeUnit, i256};
use datafusion::common::ScalarValue;
use datafusion::common::metadata::FieldMetadata;
use datafusion::physical_expr::expressions::Literal;

use crate::codec::expr::message::{self, Value, ValueKind, Values};
use crate::codec::expr::types::{decode_type, encode_type};
use crate::codec::proto::Nothing;
use crate::codec::{CodecError, Result};

fn damaged(what: impl ToString) -> CodecError {
    CodecError::Damaged(what.to_string())
}

/// `metadata`: of the literal's field.
pub fn encode_literal(
    value: &ScalarValue,
    metadata: impl IntoIterator<Item = (String, String)>,
) -> Result<message::Literal> {
    Ok(message::Literal {
        r#type: Some(encode_type(&value.data_type())?),
        value: Some(encode_value(value)?),
        metadata: metadata.into_iter().collect(),
    })
}

pub fn decode_literal(l: &message::Literal) -> Result<Literal> {
    let t = decode_type(l.r#type.as_ref().ok_or_else(|| damaged("a literal without a type"))?)?;
    let value = l.value.as_ref().ok_or_else(|| damaged("a literal without a value"))?;
    let metadata = Some(&l.metadata).filter(|m| !m.is_empty());
    let metadata = metadata.map(|m| FieldMetadata::new(m.clone()));
    Ok(Literal::new_with_metadata(decode_value(value, &t)?, metadata))
}

fn encode_value(value: &ScalarValue) -> Result<Value> {
    use ScalarValue as S;
    use ValueKind as K;
    let kind = match value {
        value if value.is_null() => K::Null(Nothing {}),
        S::Boolean(Some(v)) => K::Boolean(*v),
        S::Int8(Some(v)) => K::Integer((*v).into()),
        S::Int16(Some(v)) => K::Integer((*v).into()),
        S::Int32(Some(v)) | S::Date32(Some(v)) => K::Integer((*v).into()),
        S::Time32Second(Some(v)) | S::Time32Millisecond(Some(v)) => K::Integer((*v).into()),
        S::Int64(Some(v)) | S::Date64(Some(v)) => K::Integer(*v),
        S::Time64Microsecond(Some(v)) | S::Time64Nanosecond(Some(v)) => K::Integer(*v),
        S::TimestampSecond(Some(v), _)
        | S::TimestampMillisecond(Some(v), _)
        | S::TimestampMicrosecond(Some(v), _)
        | S::TimestampNanosecond(Some(v), _) => K::Integer(*v),
        S::DurationSecond(Some(v))
        | S::DurationMillisecond(Some(v))
        | S::DurationMicrosecond(Some(v))
        | S::DurationNanosecond(Some(v)) => K::Integer(*v),
        S::UInt8(Some(v)) => K::Unsigned((*v).into()),
        S::UInt16(Some(v)) => K::Unsigned((*v).into()),
        S::UInt32(Some(v)) => K::Unsigned((*v).into()),
        S::UInt64(Some(v)) => K::Unsigned(*v),
        S::Float32(Some(v)) => K::Float(*v),
        S::Float64(Some(v)) => K::Double(*v),
        S::Decimal128(Some(v), ..) => K::Bytes(v.to_le_bytes().to_vec()),
        S::Decimal256(Some(v), ..) => K::Bytes(v.to_le_bytes().to_vec()),
        S::Utf8(Some(v)) | S::LargeUtf8(Some(v)) | S::Utf8View(Some(v)) => K::Text(v.clone()),
        S::Binary(Some(v)) | S::LargeBinary(Some(v)) | S::BinaryView(Some(v)) => {
            K::Bytes(v.clone())
        }
        S::FixedSizeBinary(_, Some(v)) => K::Bytes(v.clone()),
        S::IntervalMonthDayNano(Some(v)) => K::Interval(message::Interval {
            months: v.months,
            days: v.days,
            nanoseconds: v.nanoseconds,
        }),
        S::List(list) => K::Values(encode_elements(&list.value(0))?),
        S::LargeList(list) => K::Values(encode_elements(&list.value(0))?),
        S::Struct(row) => {
            let values = row.columns().iter().map(|column| element(column, 0));
            K::Values(Values { values: values.collect::<Result<_>>()? })
        }
        other => {
            let t = other.data_type();
            return Err(CodecError::Encode(format!("a literal of the type {t}")));
        }
    };
    Ok(Value { kind: Some(kind) })
}

fn encode_elements(elements: &ArrayRef) -> Result<Values> {
    let values = (0..elements.len()).map(|i| element(elements, i));
    Ok(Values { values: values.collect::<Result<_>>()? })
}

fn element(array: &ArrayRef, i: usize) -> Result<Value> {
    let value = ScalarValue::try_from_array(array, i);
    encode_value(&value.map_err(|e| CodecError::Encode(format!("a literal ({e})")))?)
}

fn decode_value(value: &Value, t: &DataType) -> Result<ScalarValue> {
    use DataType as D;
    use ScalarValue as S;
    use ValueKind as K;
    let Some(kind) = &value.kind else {
        return Err(CodecError::Unknown("the kind of a literal".into()));
    };
    Ok(match (t, kind) {
        (t, K::Null(_)) => S::try_new_null(t).map_err(damaged)?,
        (D::Boolean, K::Boolean(v)) => S::Boolean(Some(*v)),
        (t, K::Integer(v)) => integer(*v, t)?,
        (D::UInt8, K::Unsigned(v)) => S::UInt8(Some(narrow(*v)?)),
        (D::UInt16, K::Unsigned(v)) => S::UInt16(Some(narrow(*v)?)),
        (D::UInt32, K::Unsigned(v)) => S::UInt32(Some(narrow(*v)?)),
        (D::UInt64, K::Unsigned(v)) => S::UInt64(Some(*v)),
        (D::Float32, K::Float(v)) => S::Float32(Some(*v)),
        (D::Float64, K::Double(v)) => S::Float64(Some(*v)),
        (D::Decimal128(precision, scale), K::Bytes(v)) => {
            S::Decimal128(Some(i128::from_le_bytes(exactly(v)?)), *precision, *scale)
        }
        (D::Decimal256(precision, scale), K::Bytes(v)) => {
            S::Decimal256(Some(i256::from_le_bytes(exactly(v)?)), *precision, *scale)
        }
        (D::Utf8, K::Text(v)) => S::Utf8(Some(v.clone())),
        (D::LargeUtf8, K::Text(v)) => S::LargeUtf8(Some(v.clone())),
        (D::Utf8View, K::Text(v)) => S::Utf8View(Some(v.clone())),
        (D::Binary, K::Bytes(v)) => S::Binary(Some(v.clone())),
        (D::LargeBinary, K::Bytes(v)) => S::LargeBinary(Some(v.clone())),
        (D::BinaryView, K::Bytes(v)) => S::BinaryView(Some(v.clone())),
        (D::FixedSizeBinary(width), K::Bytes(v)) if usize::try_from(*width) == Ok(v.len()) => {
            S::FixedSizeBinary(*width, Some(v.clone()))
        }
        (D::Interval(_), K::Interval(v)) => {
            let v = IntervalMonthDayNano::new(v.months, v.days, v.nanoseconds);
            S::IntervalMonthDayNano(Some(v))
        }
        (D::List(item), K::Values(v)) => S::List(Arc::new(list(v, item)?)),
        (D::LargeList(item), K::Values(v)) => S::LargeList(Arc::new(list(v, item)?)),
        (D::Struct(fields), K::Values(v)) => S::Struct(Arc::new(row(v, fields)?)),
        (t, _) => return Err(damaged(format!("a literal that is no {t}"))),
    })
}

fn integer(v: i64, t: &DataType) -> Result<ScalarValue> {
    use DataType as D;
    use ScalarValue as S;
    use TimeUnit as U;
    Ok(match t {
        D::Int8 => S::Int8(Some(narrow(v)?)),
        D::Int16 => S::Int16(Some(narrow(v)?)),
        D::Int32 => S::Int32(Some(narrow(v)?)),
        D::Int64 => S::Int64(Some(v)),
        D::Date32 => S::Date32(Some(narrow(v)?)),
        D::Date64 => S::Date64(Some(v)),
        D::Time32(U::Second) => S::Time32Second(Some(narrow(v)?)),
        D::Time32(U::Millisecond) => S::Time32Millisecond(Some(narrow(v)?)),
        D::Time64(U::Microsecond) => S::Time64Microsecond(Some(v)),
        D::Time64(U::Nanosecond) => S::Time64Nanosecond(Some(v)),
        D::Timestamp(U::Second, zone) => S::TimestampSecond(Some(v), zone.clone()),
        D::Timestamp(U::Millisecond, zone) => S::TimestampMillisecond(Some(v), zone.clone()),
        D::Timestamp(U::Microsecond, zone) => S::TimestampMicrosecond(Some(v), zone.clone()),
        D::Timestamp(U::Nanosecond, zone) => S::TimestampNanosecond(Some(v), zone.clone()),
        D::Duration(U::Second) => S::DurationSecond(Some(v)),
        D::Duration(U::Millisecond) => S::DurationMillisecond(Some(v)),
        D::Duration(U::Microsecond) => S::DurationMicrosecond(Some(v)),
        D::Duration(U::Nanosecond) => S::DurationNanosecond(Some(v)),
        t => return Err(damaged(format!("a literal that is no {t}"))),
    })
}

fn narrow<W, N: TryFrom<W>>(v: W) -> Result<N> {
    N::try_from(v).map_err(|_| damaged("a literal out of its type's range"))
}

fn exactly<const N: usize>(bytes: &[u8]) -> Result<[u8; N]> {
    bytes.try_into().map_err(|_| damaged("a decimal of another width"))
}

/// The elements as one array of the type.
fn elements(values: &Values, t: &DataType) -> Result<ArrayRef> {
    let values = values.values.iter().map(|v| decode_value(v, t)).collect::<Result<Vec<_>>>()?;
    match values.is_empty() {
        true => Ok(new_empty_array(t)),
        false => ScalarValue::iter_to_array(values).map_err(damaged),
    }
}

/// A list array of one row.
fn list<O: OffsetSizeTrait>(values: &Values, item: &FieldRef) -> Result<GenericListArray<O>> {
    let elements = elements(values, item.data_type())?;
    let offsets = OffsetBuffer::from_lengths([elements.len()]);
    GenericListArray::try_new(Arc::clone(item), offsets, elements, None).map_err(damaged)
}

/// A struct array of one row.
fn row(values: &Values, fields: &Fields) -> Result<StructArray> {
    if values.values.len() != fields.len() {
        return Err(damaged("a struct of other fields"));
    }
    let column =
        |(v, f): (&Value, &FieldRef)| decode_value(v, f.data_type())?.to_array().map_err(damaged);
    let columns = values.values.iter().zip(fields).map(column).collect::<Result<Vec<_>>>()?;
    StructArray::try_new_with_length(fields.clone(), columns, None, 1).map_err(damaged)
}
