//! Rows as COPY TO writes them.

use bytes::{BufMut, BytesMut};
use millrace_common::SqlError;

use super::Format;
use crate::encoding::Column;
use crate::wire::Field;

/// The header line.
pub fn header(fields: &[Field], format: &Format, out: &mut BytesMut) {
    for (i, field) in fields.iter().enumerate() {
        if i > 0 {
            out.put_u8(format.delimiter);
        }
        put_value(field.name.as_bytes(), format, false, fields.len() == 1, out);
    }
    out.put_u8(b'\n');
}

/// One row, with its newline.
pub fn row(
    columns: &[Column],
    row: usize,
    format: &Format,
    text: &mut BytesMut,
    out: &mut BytesMut,
) -> Result<(), SqlError> {
    for (i, column) in columns.iter().enumerate() {
        if i > 0 {
            out.put_u8(format.delimiter);
        }
        if column.is_null(row) {
            out.put_slice(format.null.as_bytes());
            continue;
        }
        text.clear();
        column.put_text(row, text)?;
        let quoted = format.force_quote.get(i).copied().unwrap_or(false);
        put_value(text, format, quoted, columns.len() == 1, out);
    }
    out.put_u8(b'\n');
    Ok(())
}

/// `alone`: the value is all of its line.
fn put_value(value: &[u8], format: &Format, quoted: bool, alone: bool, out: &mut BytesMut) {
    match format.csv {
        true => put_csv(value, format, quoted, alone, out),
        false => put_escaped(value, format, out),
    }
}

fn put_csv(value: &[u8], format: &Format, quoted: bool, alone: bool, out: &mut BytesMut) {
    let special =
        |b: &u8| *b == format.delimiter || *b == format.quote || *b == b'\n' || *b == b'\r';
    // Alone it would be read as the end of the data.
    let end = alone && value == b"\\.";
    let plain = value != format.null.as_bytes() && !end;
    if !quoted && plain && !value.iter().any(special) {
        out.put_slice(value);
        return;
    }
    out.put_u8(format.quote);
    for b in value {
        if *b == format.quote || *b == format.escape {
            out.put_u8(format.escape);
        }
        out.put_u8(*b);
    }
    out.put_u8(format.quote);
}

fn put_escaped(value: &[u8], format: &Format, out: &mut BytesMut) {
    for b in value {
        let letter = match b {
            8 => b'b',
            12 => b'f',
            b'\n' => b'n',
            b'\r' => b'r',
            b'\t' => b't',
            11 => b'v',
            b'\\' => b'\\',
            b if *b == format.delimiter => *b,
            b => {
                out.put_u8(*b);
                continue;
            }
        };
        out.put_slice(&[b'\\', letter]);
    }
}
