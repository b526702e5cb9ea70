//! Lines of COPY FROM into columns.
//!
//! Bytes arrive in pieces of any size; what is left of an unfinished line waits for the next piece.
//! A field without escapes goes from the received bytes into its builder without a copy.

use arrow::array::ArrayRef;
use bytes::{Buf, BytesMut};
use millrace_common::{SqlError, SqlState};
use millrace_rpc::catalog::Relation;

use super::Format;
use crate::encoding::ColumnBuilder;

/// A line longer than this is no line but a missing quote.
const MAX_LINE: usize = 64 << 20;
/// Characters of a value that an error message shows: as many as PostgreSQL's.
const SHOWN: usize = 100;

/// The lines of rows, for errors that are found when the rows are complete: as much as is shown of each.
#[derive(Default)]
struct Lines {
    /// Which of the input's rows the first of them is.
    first: u64,
    text: Vec<u8>,
    ends: Vec<usize>,
}

impl Lines {
    fn push(&mut self, line: &[u8]) {
        // One character more than is shown, however wide they are: so it is seen that there is more.
        self.text.extend_from_slice(&line[..line.len().min(4 * (SHOWN + 1))]);
        self.ends.push(self.text.len());
    }

    fn get(&self, row: usize) -> Option<&[u8]> {
        let end = *self.ends.get(row)?;
        let start = row.checked_sub(1).map_or(0, |before| self.ends[before]);
        self.text.get(start..end)
    }
}

pub struct Reader {
    table: String,
    names: Vec<String>,
    builders: Vec<ColumnBuilder>,
    format: Format,
    pending: BytesMut,
    /// Where the search for the end of the pending line goes on, and whether inside quotes.
    scanned: usize,
    quoted: bool,
    line: u64,
    rows: usize,
    /// Of the rows being read, and of those taken last.
    lines: Lines,
    taken: Lines,
    /// Rows of the input whose line does not follow the one of the row before, and their lines.
    jumps: Vec<(u64, u64)>,
    ended: bool,
    scratch: Vec<u8>,
}

impl Reader {
    pub fn new(table: &Relation, targets: &[usize], format: Format) -> Result<Reader, SqlError> {
        let builders = targets
            .iter()
            .map(|t| Ok(ColumnBuilder::new(table.columns[*t].sql_type()?, 1024)))
            .collect::<Result<_, SqlError>>()?;
        Ok(Reader {
            table: table.name.clone(),
            names: targets.iter().map(|t| table.columns[*t].name.clone()).collect(),
            builders,
            format,
            pending: BytesMut::new(),
            scanned: 0,
            quoted: false,
            line: 0,
            rows: 0,
            lines: Lines::default(),
            taken: Lines::default(),
            jumps: Vec::new(),
            ended: false,
            scratch: Vec::new(),
        })
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
            self.take_line(line.strip_suffix(b"\r").unwrap_or(&line))?;
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
        let columns = self.builders.iter_mut().map(ColumnBuilder::finish).collect();
        let rows = std::mem::take(&mut self.rows);
        std::mem::swap(&mut self.lines, &mut self.taken);
        self.lines.first = self.taken.first + rows as u64;
        self.lines.text.clear();
        self.lines.ends.clear();
        (columns, rows)
    }

    /// The error with the line of a row of those that were taken last.
    pub fn at_row(&self, row: usize, e: SqlError) -> SqlError {
        match self.line_of(self.taken.first + row as u64) {
            Some(line) => e.with_context(self.place(line, self.taken.get(row))),
            None => e,
        }
    }

    /// The error with the number of the line of a row, counted from the first of the input.
    pub fn at_input_row(&self, row: usize, e: SqlError) -> SqlError {
        match self.line_of(row as u64) {
            Some(line) => e.with_context(self.place(line, None)),
            None => e,
        }
    }

    /// Nobody asks any more for the lines of rows that have been taken.
    pub fn forget_lines(&mut self) {
        let next = self.lines.first;
        let past = self.jumps.partition_point(|(row, _)| *row <= next).saturating_sub(1);
        self.jumps.drain(..past);
    }

    fn note_line(&mut self, line: &[u8]) {
        let row = self.lines.first + self.rows as u64;
        if self.line_of(row) != Some(self.line) {
            self.jumps.push((row, self.line));
        }
        self.lines.push(line);
    }

    fn line_of(&self, row: u64) -> Option<u64> {
        let after = self.jumps.partition_point(|(from, _)| *from <= row);
        let (from, line) = *self.jumps.get(after.checked_sub(1)?)?;
        Some(line + (row - from))
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
            self.take_line(rest.strip_suffix(b"\r").unwrap_or(&rest))?;
        }
        Ok(self.take())
    }

    /// The newline that ends the line at the buffer's start: in CSV not one inside quotes.
    fn find_line_end(&mut self, buffer: &[u8]) -> Option<usize> {
        let start = self.scanned;
        if !self.format.csv {
            let found = buffer[start..].iter().position(|b| *b == b'\n').map(|i| start + i);
            self.scanned = buffer.len();
            return found;
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

    fn take_line(&mut self, line: &[u8]) -> Result<(), SqlError> {
        self.line += 1;
        if line == b"\\." {
            self.ended = true;
            return Ok(());
        }
        if self.format.header && self.line == 1 {
            return Ok(());
        }
        if std::str::from_utf8(line).is_err() {
            return Err(self.at_line(crate::encoding::binary::invalid_utf8(), None));
        }
        let result = if self.format.csv { self.csv_line(line) } else { self.text_line(line) };
        self.note_line(line);
        self.rows += 1;
        // CSV lines may hold newlines, and errors count lines of the file.
        self.line += line.iter().filter(|b| **b == b'\n').count() as u64;
        result
    }

    fn text_line(&mut self, line: &[u8]) -> Result<(), SqlError> {
        let delimiter = self.format.delimiter;
        let mut column = 0;
        let mut start = 0;
        let mut i = 0;
        let mut escaped = false;
        if self.builders.is_empty() {
            return if line.is_empty() { Ok(()) } else { Err(self.extra(line)) };
        }
        loop {
            match line.get(i) {
                Some(b'\\') => {
                    escaped = true;
                    i += 2;
                }
                Some(b) if *b != delimiter => i += 1,
                end => {
                    let field = &line[start..i.min(line.len())];
                    self.text_field(column, field, escaped, line)?;
                    column += 1;
                    if end.is_none() {
                        break;
                    }
                    i += 1;
                    (start, escaped) = (i, false);
                }
            }
        }
        self.check_complete(column, line)
    }

    fn text_field(
        &mut self,
        column: usize,
        field: &[u8],
        escaped: bool,
        line: &[u8],
    ) -> Result<(), SqlError> {
        if column >= self.builders.len() {
            return Err(self.extra(line));
        }
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
        let Format { delimiter, quote, escape, .. } = self.format;
        let mut column = 0;
        let mut i = 0;
        loop {
            let start = i;
            let mut scratch = std::mem::take(&mut self.scratch);
            scratch.clear();
            let mut quoted = false;
            // A field may change between quoted and plain parts.
            while i < line.len() && line[i] != delimiter {
                if line[i] != quote {
                    scratch.push(line[i]);
                    i += 1;
                    continue;
                }
                quoted = true;
                i += 1;
                while i < line.len() {
                    if line[i] == escape
                        && line.get(i + 1).is_some_and(|n| *n == quote || *n == escape)
                    {
                        scratch.push(line[i + 1]);
                        i += 2;
                    } else if line[i] == quote {
                        break;
                    } else {
                        scratch.push(line[i]);
                        i += 1;
                    }
                }
                i += 1;
            }
            let plain = &line[start..i.min(line.len())];
            let result = if column >= self.builders.len() {
                Err(self.extra(line))
            } else if !quoted && plain == self.format.null.as_bytes() {
                self.builders[column].append_null();
                Ok(())
            } else if quoted {
                self.append(column, &scratch)
            } else {
                self.append(column, plain)
            };
            self.scratch = scratch;
            result?;
            column += 1;
            if i >= line.len() {
                break;
            }
            i += 1;
        }
        self.check_complete(column, line)
    }

    fn append(&mut self, column: usize, field: &[u8]) -> Result<(), SqlError> {
        let result = match std::str::from_utf8(field) {
            // No text holds one.
            Ok(text) if text.contains('\0') => Err(crate::encoding::binary::invalid_utf8()),
            Ok(text) => self.builders[column].append_text(text),
            Err(_) => Err(crate::encoding::binary::invalid_utf8()),
        };
        result.map_err(|e| {
            let context = format!(
                "COPY {}, line {}, column {}: \"{}\"",
                self.table,
                self.line,
                self.names[column],
                shorten(field)
            );
            e.with_context(context)
        })
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
        e.with_context(self.place(self.line, line))
    }

    fn place(&self, number: u64, line: Option<&[u8]>) -> String {
        let text = line.map(|l| format!(": \"{}\"", shorten(l))).unwrap_or_default();
        format!("COPY {}, line {number}{text}", self.table)
    }
}

/// As much of a value as an error message shows.
fn shorten(field: &[u8]) -> String {
    let text = String::from_utf8_lossy(field);
    match text.char_indices().nth(SHOWN) {
        Some((cut, _)) => format!("{}...", &text[..cut]),
        None => text.into_owned(),
    }
}

/// Resolves the backslashes of the text format.
fn unescape(field: &[u8], out: &mut Vec<u8>) {
    let mut i = 0;
    while i < field.len() {
        if field[i] != b'\\' || i + 1 == field.len() {
            out.push(field[i]);
            i += 1;
            continue;
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
        let rows = read(&text(), "1\tx\n\\N\ta\\tb\\\\\\x41\\101\n3\t\r\n\\.\n").unwrap();
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
        let at = |e: SqlError| e.context.unwrap_or_default();
        let mut reader = Reader::new(&table(), &[0, 1], csv()).unwrap();
        reader.push(b"a,b\n1,x\n2,\"y\nz\"\n3,w\n").unwrap();
        assert_eq!(reader.take().1, 3);
        assert_eq!(at(reader.at_row(1, error())), "COPY t, line 3: \"2,\"y\nz\"\"");
        let long = "é".repeat(200);
        reader.push(format!("4,\n5,{long}\n").as_bytes()).unwrap();
        assert_eq!(reader.finish().unwrap().1, 2);
        assert_eq!(at(reader.at_row(0, error())), "COPY t, line 6: \"4,\"");
        let shown = format!("COPY t, line 7: \"5,{}...\"", "é".repeat(98));
        assert_eq!(at(reader.at_row(1, error())), shown);
        assert_eq!(at(reader.at_input_row(0, error())), "COPY t, line 2");
        assert_eq!(at(reader.at_input_row(2, error())), "COPY t, line 5");
        reader.forget_lines();
        assert_eq!(at(reader.at_input_row(4, error())), "COPY t, line 7");
    }
}
