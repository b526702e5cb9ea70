//! The binary format of COPY: a header, rows of counted fields as they are in binary results, a trailer.
//!
//! Source: PostgreSQL 15 documentation, COPY, "Binary Format".

use arrow::array::ArrayRef;
use bytes::{Buf, BufMut, BytesMut};
use millrace_common::{SqlError, SqlState, SqlType};
use millrace_rpc::catalog::Relation;

use super::lines::Lines;
use crate::encoding::{Column, ColumnBuilder};

const SIGNATURE: &[u8; 11] = b"PGCOPY\n\xff\r\n\0";
/// Signature, flags, length of the header's extension.
const HEADER: usize = SIGNATURE.len() + 8;
/// Flags whose meaning must be known to read the file.
const CRITICAL_FLAGS: u32 = 0xffff_0000;
const HAS_OIDS: u32 = 1 << 16;
/// A longer value is no value but a broken file.
const MAX_FIELD: usize = 64 << 20;
/// The same of a row, which is kept until all of it has come: as much as a line of text may have.
const MAX_ROW: usize = 64 << 20;

/// Writes what comes before the first row.
pub fn put_header(out: &mut BytesMut) {
    out.put_slice(SIGNATURE);
    out.put_u32(0);
    out.put_u32(0);
}

/// Writes one row.
pub fn put_row(columns: &[Column], row: usize, out: &mut BytesMut) -> Result<(), SqlError> {
    out.put_i16(columns.len() as i16);
    columns.iter().try_for_each(|column| column.put_field(row, 1, out))
}

/// Writes what comes after the last row.
pub fn put_trailer(out: &mut BytesMut) {
    out.put_i16(-1);
}

/// How much of the input has been understood.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Header,
    /// Bytes of the header's extension that are still to be passed over.
    Extension(usize),
    Rows,
    Ended,
}

/// Reads the binary format.
pub struct BinaryReader {
    names: Vec<String>,
    types: Vec<SqlType>,
    builders: Vec<ColumnBuilder>,
    pending: BytesMut,
    stage: Stage,
    /// The row being read, from 1.
    line: u64,
    rows: usize,
    pub lines: Lines,
}

impl BinaryReader {
    pub fn new(table: &Relation, targets: &[usize]) -> Result<BinaryReader, SqlError> {
        let types = targets
            .iter()
            .map(|t| table.columns[*t].sql_type())
            .collect::<Result<Vec<_>, SqlError>>()?;
        Ok(BinaryReader {
            names: targets.iter().map(|t| table.columns[*t].name.clone()).collect(),
            builders: types.iter().map(|t| ColumnBuilder::new(*t, 1024)).collect(),
            types,
            pending: BytesMut::new(),
            stage: Stage::Header,
            line: 0,
            rows: 0,
            lines: Lines::new(&table.name, false),
        })
    }

    pub fn columns(&self) -> usize {
        self.builders.len()
    }

    /// Takes the next bytes of the input.
    pub fn push(&mut self, data: &[u8]) -> Result<(), SqlError> {
        self.pending.extend_from_slice(data);
        let mut input = std::mem::take(&mut self.pending);
        while self.step(&mut input)? {}
        self.pending = input;
        Ok(())
    }

    /// Reads the next part, if it is there in full.
    fn step(&mut self, input: &mut BytesMut) -> Result<bool, SqlError> {
        match self.stage {
            Stage::Header => self.header(input),
            Stage::Extension(0) => {
                self.stage = Stage::Rows;
                Ok(true)
            }
            Stage::Extension(left) => {
                let passed = left.min(input.len());
                input.advance(passed);
                self.stage = Stage::Extension(left - passed);
                Ok(passed > 0)
            }
            Stage::Rows => self.row(input),
            Stage::Ended if input.is_empty() => Ok(false),
            Stage::Ended => Err(self.bad("received copy data after EOF marker")),
        }
    }

    fn header(&mut self, input: &mut BytesMut) -> Result<bool, SqlError> {
        let begun = input.len().min(SIGNATURE.len());
        if input[..begun] != SIGNATURE[..begun] {
            return Err(unrecognized());
        }
        if input.len() < HEADER {
            return Ok(false);
        }
        input.advance(SIGNATURE.len());
        let flags = input.get_u32();
        if flags & HAS_OIDS != 0 {
            return Err(malformed("invalid COPY file header (WITH OIDS)"));
        }
        if flags & CRITICAL_FLAGS != 0 {
            return Err(malformed("unrecognized critical flags in COPY file header"));
        }
        let Ok(extension) = usize::try_from(input.get_i32()) else {
            return Err(malformed("invalid COPY file header (wrong length)"));
        };
        self.stage = Stage::Extension(extension);
        Ok(true)
    }

    fn row(&mut self, input: &mut BytesMut) -> Result<bool, SqlError> {
        let Some(count) = input.first_chunk::<2>().map(|b| i16::from_be_bytes(*b)) else {
            return Ok(false);
        };
        // As PostgreSQL counts: the trailer is a line too.
        let line = self.line + 1;
        if count == -1 {
            input.advance(2);
            (self.line, self.stage) = (line, Stage::Ended);
            return Ok(true);
        }
        let expected = self.builders.len();
        if usize::try_from(count) != Ok(expected) {
            self.line = line;
            return Err(self.bad(format!("row field count is {count}, expected {expected}")));
        }
        if !self.is_whole(input, line)? {
            return Ok(false);
        }
        self.line = line;
        input.advance(2);
        for column in 0..expected {
            // That is -1, NULL.
            let Ok(length) = usize::try_from(input.get_i32()) else {
                self.builders[column].append_null();
                continue;
            };
            let value = input.split_to(length);
            self.append(column, &value)?;
        }
        self.lines.note(self.rows, line, &[]);
        self.rows += 1;
        Ok(true)
    }

    /// Whether all fields of the row at the input's start have arrived.
    fn is_whole(&mut self, input: &[u8], line: u64) -> Result<bool, SqlError> {
        let mut at = 2;
        for column in 0..self.builders.len() {
            let Some(length) = input.get(at..).and_then(<[u8]>::first_chunk::<4>) else {
                return Ok(false);
            };
            at += 4;
            match i32::from_be_bytes(*length) {
                -1 => {}
                length => match usize::try_from(length) {
                    Ok(length) if length <= MAX_FIELD => at += length,
                    _ => {
                        self.line = line;
                        return Err(self.at_column(column, malformed("invalid field size")));
                    }
                },
            }
            if at > MAX_ROW {
                self.line = line;
                let message = format!("a row is longer than {} MB", MAX_ROW >> 20);
                return Err(self.bad(message));
            }
        }
        Ok(at <= input.len())
    }

    fn append(&mut self, column: usize, value: &[u8]) -> Result<(), SqlError> {
        let t = self.types[column];
        let text =
            matches!(t, SqlType::Text | SqlType::Varchar(_) | SqlType::Char(_) | SqlType::Jsonb);
        let appended = match usize::try_from(t.typlen()) {
            Ok(length) if value.len() < length => Err(SqlError::new(
                SqlState::PROTOCOL_VIOLATION,
                "insufficient data left in message",
            )),
            Ok(length) if value.len() > length => Err(wrong_value()),
            // No text holds one.
            _ if text && value.contains(&0) => Err(crate::encoding::binary::invalid_utf8()),
            _ => self.builders[column].append_binary(value).map_err(|e| match e.state {
                // Said in the words of parameters.
                SqlState::INVALID_BINARY_REPRESENTATION if e.message.starts_with(WRONG) => {
                    wrong_value()
                }
                _ => e,
            }),
        };
        appended.map_err(|e| self.at_column(column, e))
    }

    /// Rows read and not taken yet.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The columns of the rows read so far; reading goes on.
    pub fn take(&mut self) -> (Vec<ArrayRef>, usize) {
        self.lines.take_columns(&mut self.builders, &mut self.rows)
    }

    /// The columns, when all input has come. The trailer may be missing.
    pub fn finish(&mut self) -> Result<(Vec<ArrayRef>, usize), SqlError> {
        match (self.stage, self.pending.len()) {
            (Stage::Header, n) if n < SIGNATURE.len() => Err(unrecognized()),
            (Stage::Header, n) if n < SIGNATURE.len() + 4 => {
                Err(malformed("invalid COPY file header (missing flags)"))
            }
            (Stage::Header, _) => Err(malformed("invalid COPY file header (missing length)")),
            (Stage::Extension(1..), _) => Err(malformed("invalid COPY file header (wrong length)")),
            (Stage::Rows, 2..) => {
                self.line += 1;
                Err(self.bad("unexpected EOF in COPY data"))
            }
            _ => Ok(self.take()),
        }
    }

    fn bad(&self, message: impl Into<String>) -> SqlError {
        malformed(message).with_context(self.lines.place(self.line, None))
    }

    fn at_column(&self, column: usize, e: SqlError) -> SqlError {
        e.with_context(self.lines.place_of_value(self.line, &self.names[column], None))
    }
}

fn malformed(message: impl Into<String>) -> SqlError {
    SqlError::new(SqlState::BAD_COPY_FILE_FORMAT, message)
}

fn unrecognized() -> SqlError {
    malformed("COPY file signature not recognized")
}

const WRONG: &str = "incorrect binary data format";

fn wrong_value() -> SqlError {
    SqlError::new(SqlState::INVALID_BINARY_REPRESENTATION, WRONG)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{Array, AsArray, Int32Array, StringArray};
    use arrow::datatypes::Int32Type;

    use super::*;

    fn table() -> Relation {
        let column = |name: &str, t: SqlType| millrace_rpc::catalog::Column {
            name: name.into(),
            sql_type: t.into(),
            nullable: true,
            ..millrace_rpc::catalog::Column::default()
        };
        Relation {
            name: "t".into(),
            columns: vec![column("a", SqlType::Int), column("b", SqlType::Text)],
            ..Relation::default()
        }
    }

    fn written() -> BytesMut {
        let a: ArrayRef = Arc::new(Int32Array::from(vec![Some(1), None]));
        let b: ArrayRef = Arc::new(StringArray::from(vec![None, Some("é")]));
        let columns = [Column::new(&a).unwrap(), Column::new(&b).unwrap()];
        let mut out = BytesMut::new();
        put_header(&mut out);
        (0..2).for_each(|row| put_row(&columns, row, &mut out).unwrap());
        put_trailer(&mut out);
        out
    }

    fn read(input: &[u8], size: usize) -> Result<Vec<ArrayRef>, SqlError> {
        let mut reader = BinaryReader::new(&table(), &[0, 1])?;
        input.chunks(size).try_for_each(|piece| reader.push(piece))?;
        Ok(reader.finish()?.0)
    }

    #[test]
    fn what_is_written_is_read_in_pieces_of_any_size() {
        let bytes = written();
        for size in 1..=bytes.len() {
            let columns = read(&bytes, size).unwrap();
            let a = columns[0].as_primitive::<Int32Type>();
            assert_eq!((a.value(0), a.is_null(1)), (1, true));
            let b = columns[1].as_string::<i32>();
            assert_eq!((b.is_null(0), b.value(1)), (true, "é"));
        }
    }

    #[test]
    fn broken_files_are_errors() {
        let whole = written();
        let case = |input: &[u8], message: &str| {
            let e = read(input, 7).unwrap_err();
            assert_eq!((e.state.0, e.message.as_str()), ("22P04", message));
        };
        case(b"", "COPY file signature not recognized");
        case(b"1\t2\n", "COPY file signature not recognized");
        case(&whole[..13], "invalid COPY file header (missing flags)");
        case(&whole[..17], "invalid COPY file header (missing length)");
        case(&whole[..23], "unexpected EOF in COPY data");
        let mut other = whole.clone();
        other.put_u8(0);
        case(&other, "received copy data after EOF marker");
        let mut other = whole.clone();
        other[HEADER + 1] = 3;
        case(&other, "row field count is 3, expected 2");
        let mut other = whole.clone();
        other[HEADER + 2] = 0x80;
        case(&other, "invalid field size");
        let mut other = whole.clone();
        other.truncate(HEADER);
        other.put_i16(2);
        other.put_i32((MAX_FIELD - 8) as i32);
        other.resize(HEADER + 2 + 4 + MAX_FIELD - 8, 0);
        other.put_i32(8);
        let mut reader = BinaryReader::new(&table(), &[0, 1]).unwrap();
        let e = reader.push(&other).unwrap_err();
        assert_eq!((e.state.0, e.message.as_str()), ("22P04", "a row is longer than 64 MB"));
        let mut other = whole;
        other[SIGNATURE.len() + 1] = 1;
        case(&other, "invalid COPY file header (WITH OIDS)");
    }

    #[test]
    fn a_value_of_another_width_is_refused() {
        let mut input = BytesMut::new();
        put_header(&mut input);
        input.put_i16(2);
        input.put_i32(8);
        input.put_i64(1);
        input.put_i32(-1);
        let e = read(&input, 1000).unwrap_err();
        assert_eq!((e.state.0, e.message.as_str()), ("22P03", "incorrect binary data format"));
        assert_eq!(e.context.as_deref(), Some("COPY t, line 1, column a"));
    }
}
