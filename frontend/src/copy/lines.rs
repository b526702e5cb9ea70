//! Which line of the input each row came from, for errors that are found when rows are complete.

use arrow::array::ArrayRef;
use millrace_common::SqlError;

use crate::encoding::ColumnBuilder;

/// Characters of a value that an error message shows: as many as PostgreSQL's.
const SHOWN: usize = 100;

/// The text of rows' lines: as much as is shown of each.
#[derive(Default)]
struct Texts {
    /// Which of the rows that go on the first of them is.
    first: u64,
    text: Vec<u8>,
    ends: Vec<usize>,
}

impl Texts {
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

/// The lines of a COPY's rows.
pub struct Lines {
    table: String,
    /// The input is text, of which errors show the line.
    shown: bool,
    /// Of the rows being read, and of those taken last.
    reading: Texts,
    taken: Texts,
    /// Rows whose line does not follow the one of the row before, and their lines.
    jumps: Vec<(u64, u64)>,
}

impl Lines {
    pub fn new(table: &str, shown: bool) -> Lines {
        Lines {
            table: table.to_owned(),
            shown,
            reading: Texts::default(),
            taken: Texts::default(),
            jumps: Vec::new(),
        }
    }

    /// Notes the line of the row after the `rows` that are being read.
    pub fn note(&mut self, rows: usize, line: u64, text: &[u8]) {
        let row = self.reading.first + rows as u64;
        if self.line_of(row) != Some(line) {
            self.jumps.push((row, line));
        }
        self.reading.push(text);
    }

    /// Takes the rows that a reader has read so far: their columns, and how many there are.
    pub fn take_columns(
        &mut self,
        builders: &mut [ColumnBuilder],
        rows: &mut usize,
    ) -> (Vec<ArrayRef>, usize) {
        let columns = builders.iter_mut().map(ColumnBuilder::finish).collect();
        let rows = std::mem::take(rows);
        self.take(rows);
        (columns, rows)
    }

    /// The rows read so far are taken.
    fn take(&mut self, rows: usize) {
        std::mem::swap(&mut self.reading, &mut self.taken);
        self.reading.first = self.taken.first + rows as u64;
        self.reading.text.clear();
        self.reading.ends.clear();
    }

    /// Of the rows taken last only these go on (ascending): the others do not count as rows.
    pub fn keep(&mut self, kept: &[usize]) {
        let first = self.taken.first;
        let lines: Vec<Option<u64>> =
            kept.iter().map(|row| self.line_of(first + *row as u64)).collect();
        let mut texts = Texts { first, ..Texts::default() };
        for row in kept {
            texts.push(self.taken.get(*row).unwrap_or_default());
        }
        self.taken = texts;
        let before = self.jumps.partition_point(|(row, _)| *row < first);
        self.jumps.truncate(before);
        for (row, line) in (first..).zip(lines) {
            if let Some(line) = line
                && self.line_of(row) != Some(line)
            {
                self.jumps.push((row, line));
            }
        }
        self.reading.first = first + kept.len() as u64;
    }

    /// The error with the line of a row of those that were taken last.
    pub fn at_row(&self, row: usize, e: SqlError) -> SqlError {
        match self.line_of(self.taken.first + row as u64) {
            Some(line) => e.with_context(self.place(line, self.taken.get(row))),
            None => e,
        }
    }

    /// The error with the number of the line of a row, counted from the first that went on.
    pub fn at_input_row(&self, row: usize, e: SqlError) -> SqlError {
        match self.line_of(row as u64) {
            Some(line) => e.with_context(self.place(line, None)),
            None => e,
        }
    }

    /// Nobody asks any more for the lines of rows that have been taken.
    pub fn forget(&mut self) {
        let next = self.reading.first;
        let past = self.jumps.partition_point(|(row, _)| *row <= next).saturating_sub(1);
        self.jumps.drain(..past);
    }

    fn line_of(&self, row: u64) -> Option<u64> {
        let after = self.jumps.partition_point(|(from, _)| *from <= row);
        let (from, line) = *self.jumps.get(after.checked_sub(1)?)?;
        Some(line + (row - from))
    }

    /// The place of a line, as an error's context.
    pub fn place(&self, number: u64, line: Option<&[u8]>) -> String {
        let line = line.filter(|_| self.shown);
        let text = line.map(|l| format!(": \"{}\"", shorten(l))).unwrap_or_default();
        format!("COPY {}, line {number}{text}", self.table)
    }

    /// The place of a value, as an error's context.
    pub fn place_of_value(&self, number: u64, column: &str, value: Option<&[u8]>) -> String {
        let text = value.map(|v| format!(": \"{}\"", shorten(v))).unwrap_or_default();
        format!("COPY {}, line {number}, column {column}{text}", self.table)
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

#[cfg(test)]
mod tests {
    use millrace_common::{SqlError, SqlState};

    use super::*;

    #[test]
    fn rows_that_were_left_out_do_not_count() {
        let error = || SqlError::new(SqlState::NOT_NULL_VIOLATION, "no");
        let at = |e: SqlError| e.into_parts().context.unwrap_or_default();
        let mut lines = Lines::new("t", true);
        for (row, text) in ["a", "b", "c", "d"].iter().enumerate() {
            lines.note(row, row as u64 + 1, text.as_bytes());
        }
        lines.take(4);
        lines.keep(&[1, 3]);
        assert_eq!(at(lines.at_row(0, error())), "COPY t, line 2: \"b\"");
        assert_eq!(at(lines.at_row(1, error())), "COPY t, line 4: \"d\"");
        lines.note(0, 5, b"e");
        lines.take(1);
        assert_eq!(at(lines.at_row(0, error())), "COPY t, line 5: \"e\"");
        assert_eq!(at(lines.at_input_row(1, error())), "COPY t, line 4");
        assert_eq!(at(lines.at_input_row(2, error())), "COPY t, line 5");
        lines.note(0, 6, b"f");
        lines.take(1);
        lines.keep(&[]);
        lines.note(0, 7, b"g");
        assert_eq!(at(lines.at_input_row(3, error())), "COPY t, line 7");
    }
}
