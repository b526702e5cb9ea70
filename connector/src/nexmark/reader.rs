//! Reads a split of the Nexmark stream into Arrow batches of the wanted columns.

use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, StringArray, TimestampMicrosecondArray};
use arrow::buffer::{Buffer, OffsetBuffer, ScalarBuffer};
use arrow::datatypes::SchemaRef;
use arrow::error::ArrowError;
use arrow::record_batch::{RecordBatch, RecordBatchOptions};
use async_trait::async_trait;
use millrace_common::SqlType;

use super::StreamConfig;
use super::events::{self, Kind, Sink};
use crate::{ReadResult, SplitReader};

/// A reader passes at most this many events a call, so that a rare kind does not hold its task.
const MAX_EVENTS_A_READ: u64 = 65_536;

pub struct Reader {
    pub kind: Kind,
    pub config: StreamConfig,
    /// Generated column of each output column; `kind.columns().len()` is the row id.
    pub wanted: Vec<usize>,
    pub schema: SchemaRef,
    pub splits: u64,
    pub split: u64,
    pub offset: u64,
}

#[async_trait]
impl SplitReader for Reader {
    async fn read(&mut self, until: u64, max_rows: usize) -> ReadResult {
        if self.offset >= until {
            return Ok(None);
        }
        let stop = until.min(self.offset + MAX_EVENTS_A_READ);
        let mut columns = Columns::new(self.kind, &self.wanted, max_rows);
        let last = last_drawn(self.kind, &self.wanted);
        let mut number = self.offset * self.splits + self.split;
        while self.offset < stop && columns.rows < max_rows {
            if self.kind.holds(number) {
                columns.begin_row(number);
                match self.kind {
                    Kind::Bid => events::bid(number, &self.config, last, &mut columns),
                    Kind::Auction => events::auction(number, &self.config, last, &mut columns),
                    Kind::Person => events::person(number, &self.config, last, &mut columns),
                }
            }
            self.offset += 1;
            number += self.splits;
        }
        let batch = columns.finish(&self.wanted, &self.schema)?;
        Ok(Some((batch, self.offset)))
    }
}

/// The last wanted column that needs random draws; event time, ids and the row id need none.
fn last_drawn(kind: Kind, wanted: &[usize]) -> usize {
    let free: &[usize] = match kind {
        Kind::Person => &[0, 6, 8],
        Kind::Auction => &[0, 5, 10],
        Kind::Bid => &[5, 7],
    };
    wanted.iter().copied().filter(|c| !free.contains(c)).max().unwrap_or(0)
}

#[derive(Default)]
struct Text {
    offsets: Vec<i32>,
    bytes: Vec<u8>,
}

/// Builders of the wanted columns; a column nobody wants has none.
struct Columns {
    wants: u32,
    ints: Vec<Vec<i64>>,
    texts: Vec<Text>,
    row_id: usize,
    kind: Kind,
    rows: usize,
}

impl Columns {
    fn new(kind: Kind, wanted: &[usize], max_rows: usize) -> Columns {
        let row_id = kind.columns().len();
        let capacity = max_rows.min(MAX_EVENTS_A_READ as usize);
        let mut columns = Columns {
            wants: 0,
            ints: (0..=row_id).map(|_| Vec::new()).collect(),
            texts: (0..=row_id).map(|_| Text::default()).collect(),
            row_id,
            kind,
            rows: 0,
        };
        for &c in wanted {
            columns.wants |= 1 << c;
            if columns.is_text(c) {
                columns.texts[c].offsets.reserve(capacity + 1);
                columns.texts[c].offsets.push(0);
            } else {
                columns.ints[c].reserve(capacity);
            }
        }
        columns
    }

    fn is_text(&self, column: usize) -> bool {
        self.kind.columns().get(column).is_some_and(|(_, t)| *t == SqlType::Text)
    }

    fn begin_row(&mut self, number: u64) {
        if self.wants(self.row_id) {
            self.ints[self.row_id].push(number as i64);
        }
        self.rows += 1;
    }

    fn finish(mut self, wanted: &[usize], schema: &SchemaRef) -> Result<RecordBatch, ArrowError> {
        let mut built: Vec<Option<ArrayRef>> = vec![None; self.row_id + 1];
        let mut arrays = Vec::with_capacity(wanted.len());
        for &c in wanted {
            if built[c].is_none() {
                built[c] = Some(self.build(c)?);
            }
            arrays.extend(built[c].clone());
        }
        let options = RecordBatchOptions::new().with_row_count(Some(self.rows));
        RecordBatch::try_new_with_options(Arc::clone(schema), arrays, &options)
    }

    fn build(&mut self, column: usize) -> Result<ArrayRef, ArrowError> {
        if self.is_text(column) {
            let text = std::mem::take(&mut self.texts[column]);
            let offsets = OffsetBuffer::new(ScalarBuffer::from(text.offsets));
            return Ok(Arc::new(StringArray::try_new(
                offsets,
                Buffer::from_vec(text.bytes),
                None,
            )?));
        }
        let ints = std::mem::take(&mut self.ints[column]);
        let is_time =
            self.kind.columns().get(column).is_some_and(|(_, t)| *t == SqlType::Timestamp);
        Ok(if is_time {
            Arc::new(TimestampMicrosecondArray::from(ints))
        } else {
            Arc::new(Int64Array::from(ints))
        })
    }
}

impl Sink for Columns {
    #[inline]
    fn wants(&self, column: usize) -> bool {
        self.wants & (1 << column) != 0
    }

    #[inline]
    fn int(&mut self, column: usize, value: u64) {
        self.ints[column].push(value as i64);
    }

    #[inline]
    fn text(&mut self, column: usize) -> &mut Vec<u8> {
        &mut self.texts[column].bytes
    }

    #[inline]
    fn end_text(&mut self, column: usize) {
        let text = &mut self.texts[column];
        text.offsets.push(text.bytes.len() as i32);
    }
}
