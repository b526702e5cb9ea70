//! Array parameters: one dimension, text or binary.

use std::sync::Arc;

use crate::zone::Zone;
use crate::{SqlError, SqlState, SqlType};
use arrow::array::{ArrayRef, ListArray, new_null_array};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, FieldRef};
use bytes::Buf;

use super::builder::ColumnBuilder;

/// A parameter of an array type as a list of one row.
pub fn parameter(
    zone: Zone,
    item: &FieldRef,
    format: i16,
    value: Option<&[u8]>,
) -> Result<ArrayRef, SqlError> {
    let Some(bytes) = value else {
        return Ok(new_null_array(&DataType::List(item.clone()), 1));
    };
    let sql = SqlType::from_arrow(item.data_type())?;
    let mut builder =
        ColumnBuilder::new(sql, 16).in_zone(zone).at(chrono::Utc::now().timestamp_micros());
    if format == 1 {
        binary(&mut builder, bytes)?
    } else {
        text(&mut builder, bytes)?
    }
    let items = builder.finish();
    let offsets = OffsetBuffer::from_lengths([items.len()]);
    let list =
        ListArray::try_new(item.clone(), offsets, items, None).map_err(super::arrow_error)?;
    Ok(Arc::new(list))
}

pub(super) fn text(builder: &mut ColumnBuilder, bytes: &[u8]) -> Result<(), SqlError> {
    let text = std::str::from_utf8(bytes).map_err(|_| super::binary::invalid_utf8())?;
    let malformed =
        || SqlError::new(SqlState("22P02"), format!("malformed array literal: \"{text}\""));
    for item in array_items(text).ok_or_else(malformed)? {
        match item {
            Some(item) => builder.append_text(&item)?,
            None => builder.append_null(),
        }
    }
    Ok(())
}

/// Dimensions, a flag for NULLs, the element type; then length and lower bound of the dimension, then
/// the elements, each after its length.
pub(super) fn binary(builder: &mut ColumnBuilder, mut b: &[u8]) -> Result<(), SqlError> {
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

/// Appends an item of an array's text, quoted.
pub fn put_item(item: &str, out: &mut String) {
    out.push('"');
    for c in item.chars() {
        if matches!(c, '"' | '\\') {
            out.push('\\');
        }
        out.push(c);
    }
    out.push('"');
}

/// Items of `{a,"b c",NULL}`; `None`: not a one-dimensional array.
pub fn array_items(text: &str) -> Option<Vec<Option<String>>> {
    let inner = text.trim().strip_prefix('{')?.strip_suffix('}')?;
    if inner.trim().is_empty() {
        return Some(vec![]);
    }
    let (mut items, mut item, mut quoted, mut was_quoted) = (vec![], String::new(), false, false);
    let mut chars = inner.chars();
    let finish = |item: &mut String, was_quoted: &mut bool| {
        let text = std::mem::take(item);
        let text = if *was_quoted { text } else { text.trim().to_owned() };
        let null = !*was_quoted && text.eq_ignore_ascii_case("null");
        *was_quoted = false;
        (!null).then_some(text)
    };
    while let Some(c) = chars.next() {
        match c {
            '\\' => item.push(chars.next()?),
            '"' => {
                quoted = !quoted;
                was_quoted = true;
            }
            ',' if !quoted => items.push(finish(&mut item, &mut was_quoted)),
            '{' | '}' if !quoted => return None,
            c => item.push(c),
        }
    }
    items.push(finish(&mut item, &mut was_quoted));
    Some(items)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn array_literals_are_taken_apart() {
        let some =
            |items: &[&str]| Some(items.iter().map(|i| Some((*i).to_owned())).collect::<Vec<_>>());
        assert_eq!(array_items("{}"), Some(vec![]));
        assert_eq!(array_items("{1, 2}"), some(&["1", "2"]));
        assert_eq!(array_items(r#"{"a,b","c\"d"}"#), some(&["a,b", "c\"d"]));
        assert_eq!(array_items("{NULL}"), Some(vec![None]));
        assert_eq!(array_items("{\"NULL\"}"), some(&["NULL"]));
        assert_eq!(array_items("{{1}}"), None);
        assert_eq!(array_items("1"), None);
    }
}
