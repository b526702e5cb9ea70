//! What a row stamps the cache entry of its key with: when the entry was last used (docs/design.md §7).
//!
//! A row brings two stamps: its place in the order of arrival, which LRU goes by, and its time. The time is the
//! row's event time where its input has a column with a watermark. A row without one (another input of
//! the operator, or NULL) happens now, that is at the furthest event time seen; where none has been seen, time is
//! the order of arrival, which lies before every event time.

use arrow::array::{Array, AsArray, TimestampMicrosecondArray};
use arrow::compute;
use arrow::datatypes::TimestampMicrosecondType;
use millrace_common::DeltaChunk;
pub use millrace_graph::event_time_column;

/// Makes the stamps of one operator's rows.
pub struct Stamps {
    /// By input port.
    event_time: Vec<Option<usize>>,
    /// Rows so far.
    arrived: u64,
    /// The furthest event time so far.
    furthest: Option<i64>,
}

/// The stamps of a chunk's rows.
pub struct ChunkStamps {
    /// Of the first row; the others follow.
    arrival: u64,
    times: Option<TimestampMicrosecondArray>,
    /// Of rows without an event time; `None`: their arrival.
    now: Option<u64>,
}

/// An instant as a stamp: in the same order.
pub fn stamp_at(micros: i64) -> u64 {
    micros as u64 ^ 1 << 63
}

impl Stamps {
    /// `event_time`: by input port, the column that tells it. Timestamps in microseconds; a column of
    /// another type tells nothing.
    pub fn new(event_time: &[Option<usize>]) -> Stamps {
        Stamps { event_time: event_time.to_vec(), arrived: 0, furthest: None }
    }

    /// Of a chunk that has just arrived at an input.
    pub fn of(&mut self, port: usize, chunk: &DeltaChunk) -> ChunkStamps {
        let column = self.event_time.get(port).copied().flatten();
        let times = column
            .and_then(|c| chunk.batch.columns().get(c))
            .and_then(|c| c.as_primitive_opt::<TimestampMicrosecondType>())
            .cloned();
        if let Some(times) = &times {
            self.furthest = self.furthest.max(compute::max(times));
        }
        ChunkStamps { times, ..self.untimed(chunk.num_rows()) }
    }

    /// Of keys that are needed at times to come (microseconds), or at some that have passed; without times, and where
    /// one is the least: now.
    pub fn at(&mut self, keys: usize, times: &[i64]) -> ChunkStamps {
        let time = |time: &i64| (*time != i64::MIN).then_some(*time);
        let times = (!times.is_empty()).then(|| times.iter().map(time).collect());
        ChunkStamps { times, ..self.untimed(keys) }
    }

    /// Of keys that no input row brings.
    pub fn untimed(&mut self, rows: usize) -> ChunkStamps {
        let arrival = self.arrived;
        self.arrived += rows as u64;
        ChunkStamps { arrival, times: None, now: self.furthest.map(stamp_at) }
    }
}

impl ChunkStamps {
    /// A row's place in the order of arrival.
    #[inline]
    pub fn arrival(&self, row: usize) -> u64 {
        self.arrival + row as u64
    }

    /// A row's time.
    #[inline]
    pub fn time(&self, row: usize) -> u64 {
        match &self.times {
            Some(times) if row < times.len() && times.is_valid(row) => stamp_at(times.value(row)),
            _ => self.now.unwrap_or_else(|| self.arrival(row)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{Int64Array, RecordBatch};
    use arrow::datatypes::{DataType, Field, Schema, TimeUnit};
    use millrace_common::RelationId;
    use millrace_graph::{DerivedWatermark, MarkStep, WatermarkTerm};

    use super::*;

    fn chunk(times: Vec<Option<i64>>) -> DeltaChunk {
        let fields = vec![
            Field::new("id", DataType::Int64, true),
            Field::new("at", DataType::Timestamp(TimeUnit::Microsecond, None), true),
        ];
        let ids = Int64Array::from_iter_values(0..times.len() as i64);
        let columns: Vec<arrow::array::ArrayRef> =
            vec![Arc::new(ids), Arc::new(TimestampMicrosecondArray::from(times))];
        DeltaChunk::inserts(RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).unwrap())
    }

    fn times(stamps: &ChunkStamps, rows: usize) -> Vec<u64> {
        (0..rows).map(|row| stamps.time(row)).collect()
    }

    #[test]
    fn rows_without_a_time_happen_now() {
        let mut stamps = Stamps::new(&[Some(1), None]);
        // Before any event time: as they arrive, which is before all event times.
        let first = stamps.of(1, &chunk(vec![Some(7); 2]));
        assert_eq!(times(&first, 2), [0, 1]);
        assert!(first.time(1) < stamp_at(-1));
        let timed = stamps.of(0, &chunk(vec![Some(90), None, Some(-5)]));
        assert_eq!(times(&timed, 3), [stamp_at(90), stamp_at(90), stamp_at(-5)]);
        assert!(stamp_at(-5) < stamp_at(90));
        // The other input, and an older row of this one, do not take the present back.
        assert_eq!(times(&stamps.of(0, &chunk(vec![Some(10)])), 1), [stamp_at(10)]);
        assert_eq!(times(&stamps.of(1, &chunk(vec![None])), 1), [stamp_at(90)]);
        let last = stamps.untimed(2);
        assert_eq!((last.arrival(0), last.arrival(1)), (7, 8));
    }

    #[test]
    fn the_event_time_is_the_column_nearest_to_its_origin() {
        let mark = |column, steps: usize| DerivedWatermark {
            column,
            terms: vec![WatermarkTerm {
                relation: RelationId(1),
                column: 0,
                steps: vec![MarkStep::Add(1); steps],
            }],
        };
        assert_eq!(event_time_column(&[mark(0, 1), mark(2, 0), mark(4, 0)]), Some(2));
        assert_eq!(event_time_column(&[mark(3, 2)]), Some(3));
        assert_eq!(event_time_column(&[]), None);
    }
}
