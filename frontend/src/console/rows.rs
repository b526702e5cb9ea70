//! The first rows of a result, as text.

use bytes::BytesMut;
use futures::StreamExt;
use millrace_common::SqlError;

use super::Answer;
use crate::session::cursor::columns_of;
use crate::session::{Outcome, RowSet};

/// Memory of an answer besides what is counted of it.
const ANSWER: usize = 2 * size_of::<Answer>();
/// Memory of a row besides its values, and of a value besides its text.
const ROW: usize = 2 * size_of::<Vec<Option<String>>>();
const CELL: usize = size_of::<Option<String>>();

/// How much of a result is kept.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Of each statement.
    pub rows: usize,
    /// Of memory, not of text alone: a row of nothing but NULL has some as well.
    pub bytes: usize,
    /// Of the text of one value; less where there are so many columns that one row of such values were too large.
    pub value_bytes: usize,
    /// Of all statements of a string together.
    pub all_bytes: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { rows: 1000, bytes: 4 << 20, value_bytes: 64 << 10, all_bytes: 16 << 20 }
    }
}

/// Why rows were left out.
#[derive(Clone, Copy)]
enum Full {
    Rows,
    Bytes,
    All,
}

/// The rows of an outcome as text, as far as the limits go. What it takes of `all_bytes` is taken off there.
pub async fn gather(outcome: Outcome, limits: &mut Limits) -> Result<Answer, SqlError> {
    limits.all_bytes = limits.all_bytes.saturating_sub(ANSWER);
    match outcome {
        Outcome::Empty => Ok(Answer::default()),
        Outcome::Command(tag) => Ok(Answer { tag, ..Answer::default() }),
        Outcome::Rows(rows) => Gathering::new(limits).all(rows).await,
        Outcome::CopyIn(_) | Outcome::CopyOut(_) => {
            Err(SqlError::unsupported("COPY in the console").with_hint("Use psql."))
        }
    }
}

/// Notices, as far as the limits go.
pub fn kept_notices(all: impl Iterator<Item = String>, limits: &mut Limits) -> Vec<String> {
    let (mut kept, mut left_out) = (Vec::new(), 0_usize);
    for notice in all {
        let bytes = CELL + notice.len();
        if left_out > 0 || bytes > limits.all_bytes {
            left_out += 1;
            continue;
        }
        limits.all_bytes -= bytes;
        kept.push(notice);
    }
    if left_out > 0 {
        kept.push(format!("NOTICE: {left_out} more are not shown"));
    }
    kept
}

struct Gathering<'a> {
    limits: &'a mut Limits,
    answer: Answer,
    /// Bytes of the answer.
    taken: usize,
    /// Of the longest value.
    value_bytes: usize,
    full: Option<Full>,
    cut_values: bool,
    text: BytesMut,
}

impl Gathering<'_> {
    fn new(limits: &mut Limits) -> Gathering<'_> {
        let (answer, text) = (Answer::default(), BytesMut::new());
        let value_bytes = limits.value_bytes;
        Gathering { limits, answer, taken: 0, value_bytes, full: None, cut_values: false, text }
    }

    async fn all(mut self, mut rows: RowSet) -> Result<Answer, SqlError> {
        let names: usize = rows.fields.iter().map(|f| CELL + f.name.len()).sum();
        self.taken += names;
        let no_room = names > self.limits.all_bytes;
        if !no_room {
            self.answer.columns = rows.fields.iter().map(|f| f.name.clone()).collect();
        }
        self.value_bytes = self.value_bytes.min(self.limits.bytes / rows.fields.len().max(1));
        while self.full.is_none()
            && let Some(batch) = rows.stream.next().await
        {
            let batch = batch?;
            let columns = columns_of(&batch, &rows.fields)?;
            for row in 0..batch.num_rows() {
                self.full = self.is_full();
                if self.full.is_some() {
                    break;
                }
                self.taken += ROW + CELL * columns.len();
                let mut cells = Vec::with_capacity(columns.len());
                for (i, column) in columns.iter().enumerate() {
                    if batch.column(i).is_null(row) {
                        cells.push(None);
                        continue;
                    }
                    self.text.clear();
                    column.put_text(row, &mut self.text)?;
                    cells.push(Some(self.value()));
                }
                self.answer.rows.push(cells);
            }
        }
        if no_room {
            self.full = Some(Full::All);
        }
        self.limits.all_bytes = self.limits.all_bytes.saturating_sub(self.taken);
        let (shown, more) = (self.answer.rows.len(), if self.full.is_some() { "+" } else { "" });
        self.answer.tag = rows.tag.replace("{n}", &format!("{shown}{more}"));
        self.answer.cut = self.told(shown);
        Ok(self.answer)
    }

    /// Asked when there is another row.
    fn is_full(&self) -> Option<Full> {
        if self.answer.rows.len() >= self.limits.rows {
            Some(Full::Rows)
        } else if self.taken >= self.limits.bytes {
            Some(Full::Bytes)
        } else {
            (self.taken >= self.limits.all_bytes).then_some(Full::All)
        }
    }

    fn value(&mut self) -> String {
        let whole = String::from_utf8_lossy(&self.text);
        let end = whole.floor_char_boundary(self.value_bytes);
        self.taken += end;
        if end == whole.len() {
            return whole.into_owned();
        }
        self.cut_values = true;
        format!("{}…", &whole[..end])
    }

    fn told(&self, shown: usize) -> Option<String> {
        let mib = |bytes: usize| bytes >> 20;
        let Limits { rows, bytes, .. } = *self.limits;
        let rows = self.full.map(|full| match full {
            Full::Rows => format!("There are more rows: the console shows the first {rows}."),
            Full::Bytes => format!(
                "There are more rows: the console shows the first {} MiB of a result, here {shown} rows.",
                mib(bytes)
            ),
            Full::All => format!(
                "The results of one run are too large together: here {shown} rows are shown."
            ),
        });
        let kib = self.value_bytes >> 10;
        let values = self.cut_values.then(|| format!("Values longer than {kib} KiB are cut."));
        match (rows, values) {
            (Some(rows), Some(values)) => Some(format!("{rows} {values}")),
            (rows, values) => rows.or(values),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{ArrayRef, Int32Array, RecordBatch};
    use futures::FutureExt;

    use super::*;
    use crate::wire::backend::Field;

    /// As many rows of nothing but NULL.
    fn nulls(columns: usize, rows: usize) -> Outcome {
        let column: ArrayRef = Arc::new(Int32Array::new_null(rows));
        let batch = (0..columns).map(|i| (format!("c{i}"), column.clone(), true));
        let batch = RecordBatch::try_from_iter_with_nullable(batch).unwrap();
        let field = |i| Field {
            name: format!("c{i}"),
            type_oid: 23,
            type_len: 4,
            typmod: -1,
            told: Default::default(),
        };
        Outcome::Rows(RowSet::ready((0..columns).map(field).collect(), vec![batch], "SELECT {n}"))
    }

    fn gathered(outcome: Outcome, limits: &mut Limits) -> Answer {
        gather(outcome, limits).now_or_never().unwrap().unwrap()
    }

    #[test]
    fn nulls_count_as_well() {
        let mut limits = Limits::default();
        let few = gathered(nulls(3, 10), &mut limits);
        assert_eq!((few.rows.len(), few.columns.len(), few.cut), (10, 3, None));
        let mut cells = 0;
        for _ in 0..20 {
            let wide = gathered(nulls(1000, 1000), &mut limits);
            assert!(wide.rows.len() < 1000 && wide.cut.is_some(), "{} rows", wide.rows.len());
            cells += wide.rows.iter().map(Vec::len).sum::<usize>() + wide.columns.len();
        }
        let most = Limits::default().all_bytes + Limits::default().bytes;
        assert!(cells * CELL <= most, "{cells} values");
        // Not even the names of columns are left then.
        let none = gathered(nulls(1000, 1), &mut limits);
        assert!(none.rows.is_empty() && none.columns.is_empty());
        assert!(none.cut.is_some_and(|cut| cut.contains("too large together")));
    }

    #[test]
    fn notices_are_bounded() {
        let mut limits = Limits { all_bytes: 3 * (CELL + 5), ..Limits::default() };
        let kept = kept_notices((0..9).map(|i| format!("four{i}")), &mut limits);
        assert_eq!(kept, ["four0", "four1", "four2", "NOTICE: 6 more are not shown"]);
        assert_eq!(kept_notices(std::iter::empty(), &mut limits), Vec::<String>::new());
    }
}
