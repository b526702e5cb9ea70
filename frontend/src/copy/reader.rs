//! Lines of COPY FROM into columns.
//!
//! Bytes arrive in pieces of any size; what is left of an unfinished line waits for the next piece.
//! A field without escapes goes from the received bytes into its builder without a copy.

use arrow::array::ArrayRef;
use bytes::{Buf, BytesMut};
use millrace_common::zone::Zone;
use millrace_common::{SqlError, SqlState};
use millrace_rpc::catalog::Relation;

use super::Format;
use super::lines::Lines;
use crate::encoding::ColumnBuilder;

/// A line longer than this is no line but a missing quote.
const MAX_LINE: usize = 64 << 20;

/// Reads the text and CSV formats.
pub struct Reader {
    names: Vec<String>,
    builders: Vec<ColumnBuilder>,
    format: Format,
    pending: BytesMut,
    /// Where the search for the end of the pending line goes on, and whether inside quotes.
    scanned: usize,
    quoted: bool,
    /// Whether lines end with a carriage return and a newline, once the first has ended.
    carriage: Option<bool>,
    line: u64,
    rows: usize,
    pub lines: Lines,
    ended: bool,
    scratch: Vec<u8>,
}

impl Reader {
    pub fn new(table: &Relation, targets: &[usize], format: Format) -> Result<Reader, SqlError> {
        let now = chrono::Utc::now().timestamp_micros();
        let builders = targets
            .iter()
            .map(|t| Ok(ColumnBuilder::new(table.columns[*t].sql_type()?, 1024).at(now)))
            .collect::<Result<_, SqlError>>()?;
        Ok(Reader {
            names: targets.iter().map(|t| table.columns[*t].name.clone()).collect(),
            builders,
            format,
            pending: BytesMut::new(),
            scanned: 0,
            quoted: false,
            carriage: None,
            line: 0,
            rows: 0,
            lines: Lines::new(&table.name, true),
            ended: false,
            scratch: Vec::new(),
        })
    }

    /// Reads instants that name no zone as times of this one.
    pub fn in_zone(mut self, zone: Zone) -> Reader {
        self.builders = self.builders.into_iter().map(|b| b.in_zone(zone)).collect();
        self
    }

    pub fn columns(&self) -> usize {
        self.builders.len()
    }

    /// Takes the next bytes of the input.
    pub fn push(&mut self, data: &[u8]) -> Result<(), SqlError> {
        if self.ended {
            return Ok(());
        }
        self.pending.extend_from_slice(data);
        let mut buffer = std::mem::take(&mut self.pending);
        while let Some(end) = self.find_line_end(&buffer) {
            let line = buffer.split_to(end);
            buffer.advance(1);
            (self.scanned, self.quoted) = (0, false);
            let body = self.without_carriage(&line);
            self.check_end(body, body.len() < line.len())?;
            self.take_line(body)?;
            if self.ended {
                return Ok(());
            }
        }
        if buffer.len() > MAX_LINE {
            let e = SqlError::new(SqlState::BAD_COPY_FILE_FORMAT, "line too long");
            return Err(self.at_line(e, None));
        }
        self.pending = buffer;
        Ok(())
    }

    /// Lines read and not taken yet.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The columns of the lines read so far; reading goes on.
    pub fn take(&mut self) -> (Vec<ArrayRef>, usize) {
        self.lines.take_columns(&mut self.builders, &mut self.rows)
    }

    /// The columns, when all input has come.
    pub fn finish(&mut self) -> Result<(Vec<ArrayRef>, usize), SqlError> {
        if !self.ended && !self.pending.is_empty() {
            let rest = std::mem::take(&mut self.pending);
            if self.quoted {
                self.line += 1;
                let e =
                    SqlError::new(SqlState::BAD_COPY_FILE_FORMAT, "unterminated CSV quoted field");
                return Err(self.at_line(e, Some(&rest)));
            }
            let body = self.without_carriage(&rest);
            // No newline has to follow the last line.
            let carriage = body.len() < rest.len() || self.carriage.unwrap_or(false);
            self.check_end(body, carriage)?;
            self.take_line(body)?;
        }
        Ok(self.take())
    }

    /// The line without a carriage return that belongs to its end: one behind a backslash is of the value.
    fn without_carriage<'a>(&self, line: &'a [u8]) -> &'a [u8] {
        let Some(body) = line.strip_suffix(b"\r") else { return line };
        let backslashes = body.iter().rev().take_while(|b| **b == b'\\').count();
        if !self.format.csv && backslashes % 2 == 1 { line } else { body }
    }

    /// The newline that ends the line at the buffer's start: in CSV not one inside quotes, in text not one behind a
    /// backslash.
    fn find_line_end(&mut self, buffer: &[u8]) -> Option<usize> {
        let start = self.scanned;
        if !self.format.csv {
            let mut i = start;
            while let Some(found) = buffer[i..].iter().position(|b| matches!(b, b'\n' | b'\\')) {
                i += found;
                if buffer[i] == b'\n' {
                    return Some(i);
                }
                if i + 1 == buffer.len() {
                    self.scanned = i;
                    return None;
                }
                i += 2;
            }
            self.scanned = buffer.len();
            return None;
        }
        let (quote, escape) = (self.format.quote, self.format.escape);
        let mut i = start;
        while i < buffer.len() {
            let b = buffer[i];
            if self.quoted && b == escape && escape != quote {
                if i + 1 >= buffer.len() {
                    break;
                }
                i += 1;
            } else if b == quote {
                self.quoted = !self.quoted;
            } else if b == b'\n' && !self.quoted {
                return Some(i);
            }
            i += 1;
        }
        self.scanned = i;
        None
    }

    /// All lines end alike, and have no other end in them.
    fn check_end(&mut self, line: &[u8], carriage: bool) -> Result<(), SqlError> {
        let first = self.carriage.is_none();
        let expected = *self.carriage.get_or_insert(carriage);
        let inside = line.contains(&b'\r') && self.has_carriage_return(line);
        let (what, escape) = match (inside, carriage) {
            (true, _) if first => {
                let what = "COPY of lines that end with a carriage return alone";
                self.line += 1;
                return Err(self.at_line(SqlError::unsupported(what), None));
            }
            (false, carriage) if carriage == expected => return Ok(()),
            (false, false) => ("newline", "\\n"),
            _ => ("carriage return", "\\r"),
        };
        self.line += 1;
        let (kind, hint) = match self.format.csv {
            true => ("unquoted", format!("Use quoted CSV field to represent {what}.")),
            false => ("literal", format!("Use \"{escape}\" to represent {what}.")),
        };
        let message = format!("{kind} {what} found in data");
        let e = SqlError::new(SqlState::BAD_COPY_FILE_FORMAT, message).with_hint(hint);
        Err(self.at_line(e, None))
    }

    /// Whether a carriage return stands in a line as it is: neither escaped nor in quotes.
    fn has_carriage_return(&self, line: &[u8]) -> bool {
        let Format { csv, quote, escape, .. } = self.format;
        let (mut quoted, mut i) = (false, 0);
        while let Some(b) = line.get(i) {
            match *b {
                b'\\' if !csv => i += 1,
                b if csv && quoted && b == escape && escape != quote => i += 1,
                b if csv && b == quote => quoted = !quoted,
                b'\r' if !quoted => return true,
                _ => {}
            }
            i += 1;
        }
        false
    }

    fn take_line(&mut self, line: &[u8]) -> Result<(), SqlError> {
        self.line += 1;
        if line == b"\\." {
            self.ended = true;
            return Ok(());
        }
        if self.format.header && self.line == 1 {
            if self.format.header_match {
                self.check_header(line)?;
            }
            // A name may hold a newline, as any value.
            self.line += newlines(line);
            return Ok(());
        }
        if std::str::from_utf8(line).is_err() {
            return Err(self.at_line(crate::encoding::binary::invalid_utf8(), None));
        }
        let result = if self.format.csv { self.csv_line(line) } else { self.text_line(line) };
        self.lines.note(self.rows, self.line, line);
        self.rows += 1;
        // CSV lines may hold newlines, and errors count lines of the file. PostgreSQL does not count those of text.
        if self.format.csv {
            self.line += newlines(line);
        }
        result
    }

    fn text_line(&mut self, line: &[u8]) -> Result<(), SqlError> {
        let delimiter = self.format.delimiter;
        if self.builders.is_empty() {
            return if line.is_empty() { Ok(()) } else { Err(self.extra(line)) };
        }
        self.fields(line, |reader, column, start| {
            let (end, escaped) = text_end(delimiter, line, start);
            reader.text_field(column, &line[start..end], escaped)?;
            Ok(end)
        })
    }

    /// Takes the fields of a line: `take` is told a field's column and where it begins, and says where it ends.
    fn fields(
        &mut self,
        line: &[u8],
        take: impl Fn(&mut Self, usize, usize) -> Result<usize, SqlError>,
    ) -> Result<(), SqlError> {
        let (mut column, mut start) = (0, 0);
        loop {
            if column >= self.builders.len() {
                return Err(self.extra(line));
            }
            let end = take(self, column, start)?;
            column += 1;
            if end >= line.len() {
                return self.check_complete(column, line);
            }
            start = end + 1;
        }
    }

    fn text_field(&mut self, column: usize, field: &[u8], escaped: bool) -> Result<(), SqlError> {
        if field == self.format.null.as_bytes() {
            self.builders[column].append_null();
            return Ok(());
        }
        if !escaped {
            return self.append(column, field);
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.clear();
        unescape(field, &mut scratch);
        let result = self.append(column, &scratch);
        self.scratch = scratch;
        result
    }

    fn csv_line(&mut self, line: &[u8]) -> Result<(), SqlError> {
        self.fields(line, |reader, column, start| {
            let mut scratch = std::mem::take(&mut reader.scratch);
            let (end, quoted) = csv_field(&reader.format, line, start, &mut scratch);
            let value = if quoted { scratch.as_slice() } else { &line[start..end] };
            let result = reader.csv_value(column, value, quoted);
            reader.scratch = scratch;
            result.map(|()| end)
        })
    }

    /// A value without quotes that reads as NULL is NULL, unless the column is of FORCE_NOT_NULL; one in
    /// quotes is, if the column is of FORCE_NULL.
    fn csv_value(&mut self, column: usize, value: &[u8], quoted: bool) -> Result<(), SqlError> {
        let flag = |flags: &[bool]| flags.get(column).copied().unwrap_or(false);
        let null = value == self.format.null.as_bytes()
            && match quoted {
                true => flag(&self.format.force_null),
                false => !flag(&self.format.force_not_null),
            };
        if null {
            self.builders[column].append_null();
            return Ok(());
        }
        self.append(column, value)
    }

    /// HEADER MATCH: the first line names the columns, in their order.
    fn check_header(&self, line: &[u8]) -> Result<(), SqlError> {
        let wrong = |message: String| {
            let e = SqlError::new(SqlState::BAD_COPY_FILE_FORMAT, message);
            self.at_line(e, Some(line))
        };
        let fields = self.header_fields(line);
        let expected = self.names.len();
        if fields.len() != expected {
            let got = fields.len();
            return Err(wrong(format!(
                "wrong number of fields in header line: got {got}, expected {expected}"
            )));
        }
        for ((field, name), number) in fields.iter().zip(&self.names).zip(1..) {
            let got = match field {
                Some(field) if field == name => continue,
                Some(field) => format!("\"{field}\""),
                None => format!("null value (\"{}\")", self.format.null),
            };
            return Err(wrong(format!(
                "column name mismatch in header line field {number}: got {got}, expected \"{name}\""
            )));
        }
        Ok(())
    }

    /// The fields of a line as text; `None` is NULL.
    fn header_fields(&self, line: &[u8]) -> Vec<Option<String>> {
        let (mut fields, mut scratch, mut start) = (Vec::new(), Vec::new(), 0);
        loop {
            let (end, changed) = match self.format.csv {
                true => csv_field(&self.format, line, start, &mut scratch),
                false => text_end(self.format.delimiter, line, start),
            };
            let plain = &line[start..end];
            let null = plain == self.format.null.as_bytes() && !(self.format.csv && changed);
            if !self.format.csv {
                scratch.clear();
                unescape(plain, &mut scratch);
            }
            let value = if changed { scratch.as_slice() } else { plain };
            fields.push((!null).then(|| String::from_utf8_lossy(value).into_owned()));
            if end >= line.len() {
                return fields;
            }
            start = end + 1;
        }
    }

    fn append(&mut self, column: usize, field: &[u8]) -> Result<(), SqlError> {
        let result = match std::str::from_utf8(field) {
            // No text holds one.
            Ok(text) if text.contains('\0') => Err(crate::encoding::binary::invalid_utf8()),
            Ok(text) => self.builders[column].append_text(text),
            Err(_) => Err(crate::encoding::binary::invalid_utf8()),
        };
        let name = &self.names[column];
        result.map_err(|e| e.with_context(self.lines.place_of_value(self.line, name, Some(field))))
    }

    fn check_complete(&self, columns: usize, line: &[u8]) -> Result<(), SqlError> {
        match self.names.get(columns) {
            None => Ok(()),
            Some(missing) => {
                let e = SqlError::new(
                    SqlState::BAD_COPY_FILE_FORMAT,
                    format!("missing data for column \"{missing}\""),
                );
                Err(self.at_line(e, Some(line)))
            }
        }
    }

    fn extra(&self, line: &[u8]) -> SqlError {
        let e =
            SqlError::new(SqlState::BAD_COPY_FILE_FORMAT, "extra data after last expected column");
        self.at_line(e, Some(line))
    }

    fn at_line(&self, e: SqlError, line: Option<&[u8]>) -> SqlError {
        e.with_context(self.lines.place(self.line, line))
    }
}

fn newlines(line: &[u8]) -> u64 {
    line.iter().filter(|b| **b == b'\n').count() as u64
}

/// Where the field of the text format that begins at `start` ends, and whether it has backslashes.
fn text_end(delimiter: u8, line: &[u8], start: usize) -> (usize, bool) {
    let (mut i, mut escaped) = (start, false);
    while let Some(b) = line.get(i) {
        if *b == b'\\' {
            escaped = true;
            i += 2;
        } else if *b == delimiter {
            break;
        } else {
            i += 1;
        }
    }
    (i.min(line.len()), escaped)
}

/// Reads the CSV field that begins at `start` into `out`, without its quotes; where it ends, and whether
/// it had any. A field may change between quoted and plain parts.
fn csv_field(format: &Format, line: &[u8], start: usize, out: &mut Vec<u8>) -> (usize, bool) {
    let Format { delimiter, quote, escape, .. } = *format;
    out.clear();
    let (mut i, mut quoted) = (start, false);
    while i < line.len() && line[i] != delimiter {
        if line[i] != quote {
            out.push(line[i]);
            i += 1;
            continue;
        }
        quoted = true;
        i += 1;
        while i < line.len() {
            if line[i] == escape && line.get(i + 1).is_some_and(|n| *n == quote || *n == escape) {
                out.push(line[i + 1]);
                i += 2;
            } else if line[i] == quote {
                break;
            } else {
                out.push(line[i]);
                i += 1;
            }
        }
        i += 1;
    }
    (i.min(line.len()), quoted)
}

/// Resolves the backslashes of the text format. The last one of the input may have nothing behind it: it is none.
fn unescape(field: &[u8], out: &mut Vec<u8>) {
    let mut i = 0;
    while i < field.len() {
        if field[i] != b'\\' {
            out.push(field[i]);
            i += 1;
            continue;
        }
        if i + 1 == field.len() {
            return;
        }
        i += 2;
        let digits = |from: usize, max: usize, radix: u32| {
            field[from..].iter().take(max).take_while(|b| char::from(**b).is_digit(radix)).count()
        };
        let number = |range: std::ops::Range<usize>, radix: u32| {
            let text = std::str::from_utf8(&field[range]).unwrap_or("0");
            u32::from_str_radix(text, radix).unwrap_or(0) as u8
        };
        match field[i - 1] {
            b'b' => out.push(8),
            b'f' => out.push(12),
            b'n' => out.push(b'\n'),
            b'r' => out.push(b'\r'),
            b't' => out.push(b'\t'),
            b'v' => out.push(11),
            b'x' if digits(i, 2, 16) > 0 => {
                let n = digits(i, 2, 16);
                out.push(number(i..i + n, 16));
                i += n;
            }
            b'0'..=b'7' => {
                let n = digits(i - 1, 3, 8);
                out.push(number(i - 1..i - 1 + n, 8));
                i += n - 1;
            }
            other => out.push(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{Array, AsArray, Int32Array};
    use millrace_common::SqlType;
    use millrace_rpc::catalog::Column;

    use super::*;

    fn table() -> Relation {
        let column = |name: &str, t: SqlType| Column {
            name: name.into(),
            sql_type: t.into(),
            nullable: true,
            default_sql: None,
            hidden: false,
            ..Column::default()
        };
        Relation {
            name: "t".into(),
            columns: vec![column("a", SqlType::Int), column("b", SqlType::Text)],
            ..Relation::default()
        }
    }

    fn text() -> Format {
        Format::new(false)
    }

    fn csv() -> Format {
        Format { header: true, ..Format::new(true) }
    }

    /// Feeds the input in pieces of every size: the result must not depend on them.
    fn read(format: &Format, input: &str) -> Result<Vec<(Option<i32>, Option<String>)>, SqlError> {
        let mut results = Vec::new();
        for size in 1..=input.len().max(1) {
            let mut reader = Reader::new(&table(), &[0, 1], format.clone())?;
            let fed = input.as_bytes().chunks(size).try_for_each(|c| reader.push(c));
            results.push(
                fed.and_then(|()| reader.finish())
                    .map(|(columns, n)| {
                        let a: &Int32Array = columns[0].as_primitive();
                        let b = columns[1].as_string::<i32>();
                        (0..n)
                            .map(|i| {
                                (
                                    a.is_valid(i).then(|| a.value(i)),
                                    b.is_valid(i).then(|| b.value(i).to_owned()),
                                )
                            })
                            .collect::<Vec<_>>()
                    })
                    .map_err(|e| (e.message.clone(), e)),
            );
        }
        let first = results.remove(0);
        for other in results {
            match (&first, &other) {
                (Ok(a), Ok(b)) => assert_eq!(a, b),
                (Err((a, _)), Err((b, _))) => assert_eq!(a, b),
                _ => panic!("depends on pieces"),
            }
        }
        first.map_err(|(_, e)| e)
    }

    #[test]
    fn text_lines() {
        let rows = read(&text(), "1\tx\n\\N\ta\\tb\\\\\\x41\\101\n3\t\n\\.\n").unwrap();
        assert_eq!(
            rows,
            vec![
                (Some(1), Some("x".into())),
                (None, Some("a\tb\\AA".into())),
                (Some(3), Some(String::new()))
            ]
        );
    }

    #[test]
    fn a_newline_behind_a_backslash_is_of_the_value() {
        let of = |input: &str| -> Vec<String> {
            let rows = read(&text(), input).unwrap();
            rows.into_iter().filter_map(|(_, b)| b).collect()
        };
        assert_eq!(of("1\ta\\\nb\n2\tc\n"), ["a\nb", "c"]);
        assert_eq!(of("1\ta\\\nb\\\n"), ["a\nb\n"]);
        assert_eq!(of("1\ta\\\\\n2\tb\\\r\n"), ["a\\", "b\r"]);
        assert_eq!(of("1\ta\\"), ["a"]);
        let e = read(&text(), "1\ta\\\nb\nx\tc\n").unwrap_err();
        assert_eq!(e.context.as_deref(), Some("COPY t, line 2, column a: \"x\""));
    }

    /// What PostgreSQL 15 says of the same files.
    #[test]
    fn lines_end_alike() {
        let refused = |format: &Format, input: &str| {
            let e = read(format, input).unwrap_err();
            assert_eq!((e.state.0, e.context.as_deref()), ("22P04", Some("COPY t, line 2")));
            e.into_parts().message
        };
        assert_eq!(read(&text(), "1\tx\r\n2\ty\r\n").unwrap().len(), 2);
        assert_eq!(read(&text(), "1\tx\r\n2\ty").unwrap().len(), 2);
        assert_eq!(read(&text(), "1\tx\n2\t\\\ry\n").unwrap().len(), 2);
        assert_eq!(refused(&text(), "1\tx\r\n2\ty\n"), "literal newline found in data");
        let carriage_return = "literal carriage return found in data";
        assert_eq!(refused(&text(), "1\tx\n2\ty\r\n"), carriage_return);
        assert_eq!(refused(&text(), "1\tx\n2\ty\rz\n"), carriage_return);
        assert_eq!(refused(&text(), "1\tx\n2\ty\r"), carriage_return);
        let csv = Format::new(true);
        assert_eq!(read(&csv, "1,x\r\n2,\"y\nz\r\"\r\n").unwrap().len(), 2);
        assert_eq!(refused(&csv, "1,x\r\n2,y\n"), "unquoted newline found in data");
        assert_eq!(refused(&csv, "1,x\n2,y\r\n"), "unquoted carriage return found in data");
    }

    #[test]
    fn csv_lines() {
        let rows = read(&csv(), "a,b\n1,\"x \"\"y\"\"\nz\"\n,\n3,\"\"\n4,é").unwrap();
        assert_eq!(
            rows,
            vec![
                (Some(1), Some("x \"y\"\nz".into())),
                (None, None),
                (Some(3), Some(String::new())),
                (Some(4), Some("é".into()))
            ]
        );
    }

    #[test]
    fn a_bad_line_is_named() {
        let e = read(&text(), "1\tx\nabc\ty\n").unwrap_err();
        assert_eq!(e.state.0, "22P02");
        assert_eq!(e.context.as_deref(), Some("COPY t, line 2, column a: \"abc\""));
        let e = read(&text(), "1\n").unwrap_err();
        assert_eq!((e.state.0, e.message.as_str()), ("22P04", "missing data for column \"b\""));
        assert_eq!(e.context.as_deref(), Some("COPY t, line 1: \"1\""));
        assert_eq!(read(&text(), "1\t2\t3\n").unwrap_err().state.0, "22P04");
        assert_eq!(
            read(&csv(), "a,b\n1,\"open\n").unwrap_err().message,
            "unterminated CSV quoted field"
        );
    }

    #[test]
    fn rows_that_were_taken_still_have_their_lines() {
        let error = || SqlError::new(SqlState::NOT_NULL_VIOLATION, "no");
        let at = |e: SqlError| e.into_parts().context.unwrap_or_default();
        let mut reader = Reader::new(&table(), &[0, 1], csv()).unwrap();
        reader.push(b"a,b\n1,x\n2,\"y\nz\"\n3,w\n").unwrap();
        assert_eq!(reader.take().1, 3);
        assert_eq!(at(reader.lines.at_row(1, error())), "COPY t, line 3: \"2,\"y\nz\"\"");
        let long = "é".repeat(200);
        reader.push(format!("4,\n5,{long}\n").as_bytes()).unwrap();
        assert_eq!(reader.finish().unwrap().1, 2);
        assert_eq!(at(reader.lines.at_row(0, error())), "COPY t, line 6: \"4,\"");
        let shown = format!("COPY t, line 7: \"5,{}...\"", "é".repeat(98));
        assert_eq!(at(reader.lines.at_row(1, error())), shown);
        assert_eq!(at(reader.lines.at_input_row(0, error())), "COPY t, line 2");
        assert_eq!(at(reader.lines.at_input_row(2, error())), "COPY t, line 5");
        reader.lines.forget();
        assert_eq!(at(reader.lines.at_input_row(4, error())), "COPY t, line 7");
    }
}
