//! Where a cursor goes: PostgreSQL's directions, and cursors that go back.
//!
//! A SCROLL cursor keeps the rows that it has read in the memory of queries, and so does a FETCH its rows.
//! The positions are PostgreSQL's: 0 is before the first row, one past the number of rows is after the last.

use arrow::array::{Array, ArrayRef, RecordBatch, UInt32Array};
use datafusion::execution::memory_pool::MemoryReservation;
use futures::StreamExt;
use millrace_common::{SqlError, SqlState};
use millrace_functions::error::sql_error_from_datafusion;
use sqlparser::ast::{FetchDirection, ValueWithSpan};

use super::RowSet;
use super::prepare::{Current, Running};
use crate::cluster::BatchStream;
use crate::dml::rows;
use crate::wire::Field;

/// A direction, with counts as numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Movement {
    /// That many rows on; `usize::MAX`: all.
    Forward(usize),
    Backward(usize),
    /// The row of a number, counted from 1, or from the last backwards.
    Absolute(i64),
    Relative(i64),
}

impl Movement {
    pub fn of(direction: &FetchDirection) -> Result<Movement, SqlError> {
        let either = |n: i64| match usize::try_from(n) {
            Ok(0) => Movement::Relative(0),
            Ok(n) => Movement::Forward(n),
            Err(_) => Movement::Backward(usize::try_from(n.unsigned_abs()).unwrap_or(usize::MAX)),
        };
        Ok(match direction {
            FetchDirection::Next | FetchDirection::Forward { limit: None } => Movement::Forward(1),
            FetchDirection::Prior | FetchDirection::Backward { limit: None } => {
                Movement::Backward(1)
            }
            FetchDirection::Count { limit } | FetchDirection::Forward { limit: Some(limit) } => {
                either(count(limit)?)
            }
            FetchDirection::Backward { limit: Some(limit) } => match count(limit)? {
                0 => Movement::Backward(0),
                n => either(n.saturating_neg()),
            },
            FetchDirection::All | FetchDirection::ForwardAll => Movement::Forward(usize::MAX),
            FetchDirection::BackwardAll => Movement::Backward(usize::MAX),
            FetchDirection::First => Movement::Absolute(1),
            FetchDirection::Last => Movement::Absolute(-1),
            FetchDirection::Absolute { limit } => Movement::Absolute(count(limit)?),
            FetchDirection::Relative { limit } => Movement::Relative(count(limit)?),
        })
    }
}

fn count(value: &ValueWithSpan) -> Result<i64, SqlError> {
    let text = value.value.to_string();
    text.parse().map_err(|_| {
        SqlError::new(SqlState::SYNTAX_ERROR, format!("syntax error at or near \"{text}\""))
    })
}

/// PostgreSQL's error for a cursor that was not declared with SCROLL.
pub fn backward() -> SqlError {
    SqlError::new(SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE, "cursor can only scan forward")
        .with_hint("Declare it with SCROLL option to enable backward scan.")
}

/// The rows of one FETCH, which wait in memory for the client, or only their number.
pub struct Fetched {
    /// `None`: they are only counted.
    batches: Option<Vec<RecordBatch>>,
    rows: usize,
    memory: MemoryReservation,
}

impl Fetched {
    /// `memory`: of queries; `keep`: whether more than the number of rows is wanted.
    pub fn new(memory: MemoryReservation, keep: bool) -> Fetched {
        Fetched { batches: keep.then(Vec::new), rows: 0, memory }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Takes rows; `bytes`: what they hold that nobody else has counted.
    fn take(&mut self, batch: RecordBatch, bytes: usize) -> Result<(), SqlError> {
        self.rows += batch.num_rows();
        if let Some(batches) = &mut self.batches {
            grow(&self.memory, bytes, "Fetch fewer rows at a time.")?;
            batches.push(batch);
        }
        Ok(())
    }

    /// The rows on their way to the client; their memory is free when they are gone.
    pub fn into_rows(self, fields: Vec<Field>) -> RowSet {
        let memory = self.memory;
        let given = move |batch: RecordBatch| -> Result<RecordBatch, SqlError> {
            let _counted = &memory;
            Ok(batch)
        };
        let stream = futures::stream::iter(self.batches.unwrap_or_default()).map(given).boxed();
        RowSet { fields, stream, tag: "FETCH {n}".to_owned() }
    }
}

/// What the rows of a batch take, which may be a part of a larger one.
fn size_of(batch: &RecordBatch) -> usize {
    let size = |column: &ArrayRef| {
        let part = column.to_data().get_slice_memory_size();
        part.unwrap_or_else(|_| column.get_array_memory_size())
    };
    batch.columns().iter().map(size).sum()
}

fn grow(memory: &MemoryReservation, bytes: usize, hint: &str) -> Result<(), SqlError> {
    memory.try_grow(bytes).map_err(|e| sql_error_from_datafusion(e).with_hint(hint))
}

/// Rows that a cursor which goes forward only passes over, and those it gives, from where it stands.
fn steps(running: &Running, movement: Movement) -> Result<(usize, usize), SqlError> {
    let sent = i64::try_from(running.sent).unwrap_or(i64::MAX);
    let at = sent.saturating_add(i64::from(running.ended));
    let (skipped, wanted) = match movement {
        Movement::Forward(n) => (0, n),
        // It is there already, and nothing is there.
        Movement::Absolute(0) if at == 0 => (0, 0),
        Movement::Relative(0) if !on_row(running) => (0, 0),
        Movement::Relative(n) if n > 0 => (n - 1, 1),
        Movement::Absolute(n) if n > at => (n - 1 - at, 1),
        _ => return Err(backward()),
    };
    Ok((usize::try_from(skipped).unwrap_or(usize::MAX), wanted))
}

/// Neither before the first row nor after the last.
fn on_row(running: &Running) -> bool {
    running.sent > 0 && !running.ended
}

/// Fetches from a cursor that goes forward only. As in PostgreSQL, who only counts may ask for the row where it stands,
/// or to go back to where it already is.
pub async fn forward_only(
    running: &mut Running,
    movement: Movement,
    fetched: &mut Fetched,
) -> Result<(), SqlError> {
    let counts = fetched.batches.is_none();
    match movement {
        Movement::Relative(0) | Movement::Backward(0) if counts => {
            fetched.rows = usize::from(on_row(running));
            return Ok(());
        }
        Movement::Backward(usize::MAX) if counts && running.sent == 0 && !running.ended => {
            return Ok(());
        }
        _ => {}
    }
    let (skipped, wanted) = steps(running, movement)?;
    read_on(running, skipped, None).await?;
    read_on(running, wanted, Some(fetched)).await
}

/// Reads the next rows, as many as there are of those wanted; begins with what others have left of a batch.
async fn read_on(
    running: &mut Running,
    wanted: usize,
    mut fetched: Option<&mut Fetched>,
) -> Result<(), SqlError> {
    let mut left = wanted;
    while left > 0 {
        let mut current = match running.current.take() {
            Some(current) => current,
            None => match running.rows.stream.next().await {
                Some(batch) => Current::new(batch?),
                None => {
                    // What has ended may be asked again.
                    running.rows.stream = futures::stream::empty().boxed();
                    running.ended = true;
                    break;
                }
            },
        };
        let n = current.left().min(left);
        let part = current.batch.slice(current.at, n);
        current.at += n;
        left -= n;
        running.sent += n as u64;
        if current.left() > 0 {
            running.current = Some(current);
        }
        if n > 0
            && let Some(fetched) = fetched.as_deref_mut()
        {
            let bytes = size_of(&part);
            fetched.take(part, bytes)?;
        }
    }
    Ok(())
}

/// Reads all rows that are left; they wait in memory, which is free when they are gone.
pub async fn store(running: &mut Running, memory: MemoryReservation) -> Result<(), SqlError> {
    let mut kept = Vec::new();
    let mut left = running.current.take().map(|c| c.batch.slice(c.at, c.left()));
    loop {
        let batch = match left.take() {
            Some(batch) => batch,
            None => match running.rows.stream.next().await {
                Some(batch) => batch?,
                None => break,
            },
        };
        let hint = "A cursor in a transaction block, without HOLD and SCROLL, may have any number of rows.";
        grow(&memory, size_of(&batch), hint)?;
        kept.push(batch);
    }
    let given = move |batch: RecordBatch| -> Result<RecordBatch, SqlError> {
        let _counted = &memory;
        Ok(batch)
    };
    running.rows.stream = futures::stream::iter(kept).map(given).boxed();
    Ok(())
}

/// The rows of a SCROLL cursor.
pub struct Scroll {
    stream: BatchStream,
    ended: bool,
    kept: Vec<RecordBatch>,
    /// Rows up to the end of each kept batch.
    ends: Vec<usize>,
    /// Of queries, for what is kept.
    memory: MemoryReservation,
    /// Where the cursor stands.
    at: usize,
}

impl Scroll {
    pub fn new(stream: BatchStream, memory: MemoryReservation) -> Scroll {
        Scroll { stream, ended: false, kept: Vec::new(), ends: Vec::new(), memory, at: 0 }
    }

    fn rows(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Reads and keeps all rows.
    pub async fn read_all(&mut self) -> Result<(), SqlError> {
        self.read_to(usize::MAX).await
    }

    /// Reads until a row is there, or all are.
    async fn read_to(&mut self, row: usize) -> Result<(), SqlError> {
        while !self.ended && self.rows() < row {
            let Some(batch) = self.stream.next().await else {
                self.ended = true;
                self.stream = futures::stream::empty().boxed();
                break;
            };
            let batch = batch?;
            if batch.num_rows() > 0 {
                let hint = "A cursor without SCROLL may have any number of rows.";
                grow(&self.memory, size_of(&batch), hint)?;
                let end = self.rows() + batch.num_rows();
                self.ends.push(end);
                self.kept.push(batch);
            }
        }
        Ok(())
    }

    /// The rows of a direction, in its order. After an error the cursor is not where it should be.
    pub async fn fetch(
        &mut self,
        movement: Movement,
        fetched: &mut Fetched,
    ) -> Result<(), SqlError> {
        match movement {
            Movement::Forward(n) => {
                let wanted = self.at.saturating_add(n);
                self.read_to(wanted).await?;
                let (from, to) = (self.at + 1, wanted.min(self.rows()));
                // Only who asks for more than there is comes to stand behind the last row.
                self.at = if wanted > self.rows() { self.rows() + 1 } else { wanted };
                self.pick(from, to, false, fetched)
            }
            Movement::Backward(0) => self.go_to(self.at, fetched).await,
            Movement::Backward(n) => {
                let to = self.at.saturating_sub(1);
                let from = self.at.saturating_sub(n).max(1);
                self.at = self.at.saturating_sub(n);
                self.pick(from, to, true, fetched)
            }
            Movement::Absolute(n) => {
                let row = match usize::try_from(n) {
                    Ok(row) => row,
                    Err(_) => {
                        self.read_to(usize::MAX).await?;
                        let back = usize::try_from(n.unsigned_abs()).unwrap_or(usize::MAX);
                        (self.rows() + 1).saturating_sub(back)
                    }
                };
                self.go_to(row, fetched).await
            }
            Movement::Relative(n) => {
                let by = usize::try_from(n.unsigned_abs()).unwrap_or(usize::MAX);
                let row = match n < 0 {
                    true => self.at.saturating_sub(by),
                    false => self.at.saturating_add(by),
                };
                self.go_to(row, fetched).await
            }
        }
    }

    async fn go_to(&mut self, row: usize, fetched: &mut Fetched) -> Result<(), SqlError> {
        self.read_to(row).await?;
        self.at = row.min(self.rows() + 1);
        self.pick(row, row.min(self.rows()), false, fetched)
    }

    /// The rows of these numbers, from 1; none before the first.
    fn pick(
        &self,
        from: usize,
        to: usize,
        backward: bool,
        fetched: &mut Fetched,
    ) -> Result<(), SqlError> {
        if from == 0 || from > to {
            return Ok(());
        }
        if fetched.batches.is_none() {
            fetched.rows += to + 1 - from;
            return Ok(());
        }
        let batch_of = |row: usize| self.ends.partition_point(|end| *end < row);
        let mut batches: Vec<usize> = (batch_of(from)..=batch_of(to)).collect();
        if backward {
            batches.reverse();
        }
        for i in batches {
            let before = if i == 0 { 0 } else { self.ends[i - 1] };
            let (first, last) = (from.max(before + 1), to.min(self.ends[i]));
            let part = self.kept[i].slice(first - before - 1, last + 1 - first);
            match backward {
                true => {
                    let turned = reversed(&part)?;
                    let bytes = size_of(&turned);
                    fetched.take(turned, bytes)?;
                }
                // These are the kept ones.
                false => fetched.take(part, 0)?,
            }
        }
        Ok(())
    }
}

fn reversed(batch: &RecordBatch) -> Result<RecordBatch, SqlError> {
    rows::take(batch, &UInt32Array::from_iter_values((0..batch.num_rows() as u32).rev()))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{AsArray, Int32Array};
    use arrow::datatypes::Int32Type;
    use datafusion::execution::memory_pool::{MemoryConsumer, MemoryPool};

    use super::*;
    use crate::query::pool::SharedPool;

    fn stream() -> BatchStream {
        let batch = |values: Vec<i32>| {
            let column: ArrayRef = Arc::new(Int32Array::from(values));
            RecordBatch::try_from_iter([("a", column)]).map_err(rows::arrow_error)
        };
        futures::stream::iter([batch(vec![1, 2]), batch(vec![]), batch(vec![3, 4, 5])]).boxed()
    }

    fn memory(bytes: usize) -> MemoryReservation {
        let pool: Arc<dyn MemoryPool> = SharedPool::new(bytes);
        MemoryConsumer::new("a cursor").register(&pool)
    }

    fn values(fetched: Fetched) -> Vec<i32> {
        let column = |b: &RecordBatch| b.column(0).as_primitive::<Int32Type>().values().to_vec();
        let values: Vec<i32> = fetched.batches.iter().flatten().flat_map(column).collect();
        assert_eq!(values.len(), fetched.rows);
        values
    }

    fn running() -> Running {
        let rows = RowSet { fields: Vec::new(), stream: stream(), tag: String::new() };
        Running::new(rows)
    }

    async fn forward(running: &mut Running, movement: Movement) -> Vec<i32> {
        let mut fetched = Fetched::new(memory(1 << 20), true);
        forward_only(running, movement, &mut fetched).await.unwrap();
        values(fetched)
    }

    #[tokio::test]
    async fn a_scroll_cursor_goes_as_in_postgres() {
        let mut cursor = Scroll::new(stream(), memory(1 << 20));
        use Movement::{Absolute, Backward, Forward, Relative};
        for (movement, expected) in [
            (Backward(1), vec![]),
            (Relative(0), vec![]),
            (Forward(1), vec![1]),
            (Absolute(-1), vec![5]),
            (Forward(1), vec![]),
            (Backward(1), vec![5]),
            (Backward(1), vec![4]),
            (Absolute(2), vec![2]),
            (Absolute(-2), vec![4]),
            (Relative(-2), vec![2]),
            (Relative(0), vec![2]),
            (Backward(5), vec![1]),
            (Relative(0), vec![]),
            (Absolute(1), vec![1]),
            (Forward(usize::MAX), vec![2, 3, 4, 5]),
            (Backward(usize::MAX), vec![5, 4, 3, 2, 1]),
            (Absolute(9), vec![]),
            (Backward(1), vec![5]),
            (Backward(2), vec![4, 3]),
            (Absolute(0), vec![]),
            (Forward(1), vec![1]),
            (Absolute(-9), vec![]),
            (Forward(5), vec![1, 2, 3, 4, 5]),
            (Relative(0), vec![5]),
        ] {
            let mut fetched = Fetched::new(memory(1 << 20), true);
            cursor.fetch(movement, &mut fetched).await.unwrap();
            assert_eq!(values(fetched), expected, "{movement:?}");
        }
        let mut counted = Fetched::new(memory(0), false);
        cursor.fetch(Movement::Backward(usize::MAX), &mut counted).await.unwrap();
        assert_eq!((counted.rows(), counted.batches.is_none()), (4, true));
    }

    #[tokio::test]
    async fn what_is_left_of_a_batch_comes_first() {
        let mut running = running();
        assert_eq!(forward(&mut running, Movement::Forward(1)).await, [1]);
        assert_eq!(running.current.as_ref().map(Current::left), Some(1));
        // As the protocol leaves one.
        if let Some(current) = &mut running.current {
            (current.at, running.sent) = (2, 2);
        }
        assert_eq!(forward(&mut running, Movement::Relative(2)).await, [4]);
        assert_eq!(forward(&mut running, Movement::Absolute(5)).await, [5]);
        assert!(forward(&mut running, Movement::Forward(usize::MAX)).await.is_empty());
        assert_eq!(steps(&running, Movement::Backward(1)).unwrap_err().state.0, "55000");
    }

    /// What PostgreSQL 15 says of NO SCROLL cursors of so many rows, before, among, at the last of and after them: for
    /// FETCH and for MOVE the number of rows, or -1 for an error.
    #[tokio::test]
    async fn a_forward_cursor_stays_where_it_is_as_in_postgres() {
        use Movement::{Absolute, Backward, Forward, Relative};
        let cases = [
            (Relative(0), [(0, 0), (-1, 1), (-1, 1), (0, 0)]),
            (Backward(0), [(-1, 0), (-1, 1), (-1, 1), (-1, 0)]),
            (Backward(usize::MAX), [(-1, 0), (-1, -1), (-1, -1), (-1, -1)]),
            (Absolute(0), [(0, 0), (-1, -1), (-1, -1), (-1, -1)]),
            (Absolute(1), [(1, 1), (-1, -1), (-1, -1), (-1, -1)]),
            (Absolute(5), [(1, 1), (1, 1), (-1, -1), (-1, -1)]),
            (Absolute(6), [(0, 0), (0, 0), (0, 0), (-1, -1)]),
            (Absolute(9), [(0, 0), (0, 0), (0, 0), (0, 0)]),
            (Relative(1), [(1, 1), (1, 1), (0, 0), (0, 0)]),
        ];
        for (movement, expected) in cases {
            for (before, (fetch, moved)) in [0, 1, 5, usize::MAX].into_iter().zip(expected) {
                for (keep, expected) in [(true, fetch), (false, moved)] {
                    let mut running = running();
                    forward(&mut running, Forward(before)).await;
                    let mut fetched = Fetched::new(memory(1 << 20), keep);
                    let went = forward_only(&mut running, movement, &mut fetched).await;
                    let rows = went.map_or(-1, |()| fetched.rows() as i64);
                    assert_eq!(rows, expected, "{movement:?} after {before}, rows kept: {keep}");
                }
            }
        }
    }

    #[tokio::test]
    async fn rows_that_are_stored_are_those_that_are_left() {
        let mut running = running();
        assert_eq!(forward(&mut running, Movement::Forward(1)).await, [1]);
        store(&mut running, memory(1 << 20)).await.unwrap();
        assert_eq!(forward(&mut running, Movement::Forward(2)).await, [2, 3]);
        assert_eq!(forward(&mut running, Movement::Absolute(5)).await, [5]);
        let e = store(&mut self::running(), memory(1)).await.unwrap_err();
        assert_eq!((e.state.0, e.hint.is_some()), ("53200", true));
    }

    #[tokio::test]
    async fn what_does_not_fit_is_refused() {
        let mut cursor = Scroll::new(stream(), memory(1));
        let mut fetched = Fetched::new(memory(1 << 20), true);
        let e = cursor.fetch(Movement::Forward(1), &mut fetched).await.unwrap_err();
        assert_eq!((e.state.0, e.hint.is_some()), ("53200", true));
        let mut fetched = Fetched::new(memory(1), true);
        let all = Movement::Forward(usize::MAX);
        let e = forward_only(&mut running(), all, &mut fetched).await.unwrap_err();
        assert_eq!((e.state.0, e.hint.as_deref()), ("53200", Some("Fetch fewer rows at a time.")));
        // Who only counts needs no memory.
        let mut counted = Fetched::new(memory(1), false);
        forward_only(&mut running(), all, &mut counted).await.unwrap();
        assert_eq!(counted.rows(), 5);
    }
}
