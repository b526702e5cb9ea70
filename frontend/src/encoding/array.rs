//! Array parameters: one dimension, text or binary.

use std::sync::Arc;

use arrow::array::{ArrayRef, ListArray, new_null_array};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, FieldRef};
use bytes::Buf;
use millrace_common::{SqlError, SqlState, SqlType};

use super::builder::ColumnBuilder;

/// A parameter of an array type as a list of one row.
pub fn parameter(item: &FieldRef, format: i16, value: Option<&[u8]>) -> Result<ArrayRef, SqlError> {
    let Some(bytes) = value else {
        return Ok(new_null_array(&DataType::List(item.clone()), 1));
    };
    let sql = SqlType::from_arrow(item.data_type())?;
    let mut builder = ColumnBuilder::new(sql, 16);
    if format == 1 {
        binary(&mut builder, bytes)?
    } else {
        text(&mut builder, bytes)?
    }
    let items = builder.finish();
    let offsets = OffsetBuffer::from_lengths([items.len()]);
    let list = ListArray::try_new(item.clone(), offsets, items, None)
        .map_err(crate::dml::rows::arrow_error)?;
    Ok(Arc::new(list))
}

fn text(builder: &mut ColumnBuilder, bytes: &[u8]) -> Result<(), SqlError> {
    let text = std::str::from_utf8(bytes).map_err(|_| super::binary::invalid_utf8())?;
    let malformed =
        || SqlError::new(SqlState("22P02"), format!("malformed array literal: \"{text}\""));
    for item in crate::catalog::rewrite::array_items(text).ok_or_else(malformed)? {
        match item {
            Some(item) => builder.append_text(&item)?,
            None => builder.append_null(),
        }
    }
    Ok(())
}

/// Dimensions, a flag for NULLs, the element type; then length and lower bound of the dimension, then
/// the elements, each after its length.
fn binary(builder: &mut ColumnBuilder, mut b: &[u8]) -> Result<(), SqlError> {
    let wrong = || {
        SqlError::new(
            SqlState::INVALID_BINARY_REPRESENTATION,
            "incorrect binary data format in bind parameter",
        )
    };
    let int = |b: &mut &[u8]| b.try_get_i32().map_err(|_| wrong());
    let dimensions = int(&mut b)?;
    int(&mut b)?;
    int(&mut b)?;
    match dimensions {
        0 => return Ok(()),
        1 => {}
        _ => return Err(SqlError::unsupported("an array of more than one dimension")),
    }
    let count = int(&mut b)?;
    int(&mut b)?;
    for _ in 0..count {
        match usize::try_from(int(&mut b)?) {
            Err(_) => builder.append_null(),
            Ok(length) => {
                let value = b.get(..length).ok_or_else(wrong)?;
                builder.append_binary(value)?;
                b.advance(length);
            }
        }
    }
    Ok(())
}
