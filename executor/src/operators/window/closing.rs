//! Rows of sessions that are over, and of ASOF joins, leave the state (docs/design.md §5, pass 6).
//!
//! A row may belong to a session of any length, so no bound on its time says whether it is still needed.
//! Whenever a session changes, the time at which it would close is written down, `time | group`. When the
//! watermark has come to such a time the group is looked at, and the rows of its sessions that are over go.
//! A session that has grown since has a later time of its own. Times that the watermark is likely to come to are read
//! ahead, and then the groups that they name.
//!
//! Rows of an ASOF join go when the watermark has passed them, all but those that rows to come may concern. In
//! ascending order (`>=`, `>`) that is the group's last right row, which left rows may meet; in descending order
//! (`<=`, `<`), the left rows that no right row below the watermark comes before: they still wait for theirs.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, BinaryArray, TimestampMicrosecondArray};
use arrow::compute::cast;
use arrow::datatypes::{SchemaRef, TimestampMicrosecondType};
use millrace_common::Vnode;
use millrace_functions::asof::Place;
use millrace_functions::session::continues;
use millrace_functions::window_call::Reach;
use millrace_storage::{Found, MemRun};

use super::affected::Interval;
use super::asof_lookup;
use super::rows::Rows;
use super::sessions::time_of;
use crate::error::ExecError;
use crate::lookahead::{Due, HINT_KEYS, Hint, HintTimes};
use crate::operators::Env;
use crate::operators::event_time_buffer::{position, read_range};
use crate::operators::ordered::Ranked;
use crate::state::arena::new_batch;
use crate::state::keys::{ChunkKeys, KeyReader, append_storage_key};
use crate::state::range_ahead::MOST_ROWS;
use crate::state::{KeyTable, RangeAhead, Slot, StateTable};

/// See the module.
pub struct Closing {
    /// The input's time column.
    column: usize,
    gap: i64,
    /// Of an ASOF join.
    place: Option<Place>,
    /// The order of an ASOF join is by descending time.
    descending: bool,
    table: Box<dyn StateTable>,
    schema: SchemaRef,
    /// Of the table's entries: time and group; the group alone.
    entries: KeyReader,
    groups: KeyReader,
    vnodes: Range<Vnode>,
    /// Times below have been looked at.
    done: i64,
    /// The watermark.
    bound: i64,
    /// Sessions of this epoch: group, and when they close.
    pending: Vec<(Slot, i64)>,
    /// Of times that the watermark is about to come to.
    ahead: RangeAhead,
    /// Groups that were announced, up to a time.
    announced: Vec<(i64, Due)>,
}

/// An epoch that has passed.
const PASSED: u64 = 1;
/// Times of a vnode that are read ahead at once.
const AHEAD: usize = 4_096;

impl Closing {
    pub fn new(
        closing: &millrace_graph::Closing,
        window: &millrace_graph::Window,
        env: &Env,
        table: Box<dyn StateTable>,
    ) -> Result<Closing, ExecError> {
        let schema = crate::operators::nullable(&table.value_schema());
        let all: Vec<usize> = (0..schema.fields().len()).collect();
        let place = |c: &usize| window.group.iter().position(|g| g == c).map(|g| g + 1);
        let vnode = window.vnode.iter().map(place).collect::<Option<Vec<usize>>>();
        let vnode = vnode.ok_or_else(|| ExecError::internal("a vnode that is not of the group"))?;
        Ok(Closing {
            column: closing.column,
            gap: closing.gap,
            place: match window.calls.first().map(Reach::of) {
                Some(Reach::Carry { place }) => Some(place),
                _ => None,
            },
            descending: window.order.first().is_some_and(|(_, order)| order.descending),
            entries: KeyReader::new(&schema, &all, &vnode)?,
            groups: KeyReader::new(&schema, &all[1..], &vnode)?,
            vnodes: if vnode.is_empty() { 0..1 } else { env.vnodes.clone() },
            // What was over before a restart has gone.
            done: table.bound().unwrap_or(i64::MIN),
            schema,
            table,
            bound: i64::MIN,
            pending: Vec::new(),
            ahead: RangeAhead::new(env),
            announced: Vec::new(),
        })
    }

    pub fn foresight(&self) -> Option<u32> {
        self.ahead.foresight()
    }

    /// Reads the times ahead that the watermark is likely to come to; those that memory has.
    pub fn expect(&mut self, columns: &[(usize, i64)]) -> Option<Found> {
        let Closing { table, vnodes, done, ahead, .. } = self;
        let (_, value) = columns.iter().find(|(c, _)| *c == self.column)?;
        let ask = |from, to| read_range(table.as_ref(), vnodes, (from, to), AHEAD);
        ahead.expect(*done, value.saturating_add(1), ask)
    }

    /// The groups of times that were read ahead, as hints of rows that come when the watermark does; of so many at most.
    pub fn hints(&mut self, found: &Found) -> Vec<Hint> {
        let rows = found.values.num_rows().min(MOST_ROWS);
        let values = found.values.slice(0, rows);
        let groups = &values.columns()[1..];
        let times = values.column(0).as_primitive_opt::<TimestampMicrosecondType>();
        let Some(last) = times.and_then(arrow::compute::max) else { return Vec::new() };
        let due = Due::default();
        let hint = |at: usize| {
            let count = HINT_KEYS.min(rows - at);
            let columns = groups.iter().map(|column| column.slice(at, count)).collect();
            let (times, due) = (HintTimes::None, due.clone());
            Hint { node: 0, port: 0, columns, times, due, carried: None }
        };
        let starts = (0..rows).step_by(HINT_KEYS);
        let hints = starts.filter(|_| !groups.is_empty()).map(hint).collect();
        self.announced.push((last, due));
        hints
    }

    /// The watermark has passed a time: what was announced of it is not expected any more.
    fn pass(&mut self, to: i64) {
        self.announced.retain(|(last, due)| {
            if *last < to {
                due.resolve(PASSED);
            }
            *last >= to
        });
    }

    /// What is read ahead, to be waited for beside other reads.
    pub fn ahead(&mut self) -> &mut RangeAhead {
        &mut self.ahead
    }

    pub fn is_reading(&self) -> bool {
        self.ahead.is_reading()
    }

    pub fn raise(&mut self, columns: &[(usize, i64)]) {
        if let Some((_, value)) = columns.iter().find(|(c, _)| *c == self.column) {
            self.bound = self.bound.max(*value);
        }
    }

    fn time(row: &Ranked) -> i64 {
        time_of(row.order_bytes()).unwrap_or(i64::MAX)
    }

    /// The time that order bytes begin with, of an ASOF join; `None`: NULL.
    fn time_in_order(&self, order: &[u8]) -> Option<i64> {
        // Every bit of a descending value is turned.
        time_of(order).map(|time| if self.descending { !time } else { time })
    }

    /// When a group that has changed is to be looked at: its sessions in intervals that hold whole ones; of an ASOF
    /// join, when the latest change is below the watermark. `orders` are the changes' order bytes, in order.
    pub fn note<'a>(
        &mut self,
        slot: Slot,
        rows: &Rows,
        intervals: &[Interval],
        orders: impl Iterator<Item = &'a [u8]>,
    ) {
        if self.place.is_some() {
            let latest = orders.filter_map(|order| self.time_in_order(order)).max();
            self.pending.extend(latest.map(|time| (slot, time.saturating_add(1))));
            return;
        }
        for interval in intervals {
            let start = rows.partition_point(|r| r.key[..] < interval.low[..]);
            let end = match &interval.high {
                Some(high) => rows.partition_point(|r| r.key[..] <= high[..]),
                None => rows.len(),
            };
            let mut last: Option<i64> = None;
            for time in rows.range(start..end).map(Self::time) {
                if let Some(last) = last.filter(|l| !continues(*l, time, self.gap)) {
                    self.pending.push((slot, last.saturating_add(self.gap)));
                }
                last = Some(time);
            }
            self.pending.extend(last.map(|last| (slot, last.saturating_add(self.gap))));
        }
    }

    /// Writes down when the epoch's sessions close.
    pub fn write(&mut self, keys: &KeyTable, reader: &KeyReader) -> Result<(), ExecError> {
        let pending = std::mem::take(&mut self.pending);
        if pending.is_empty() {
            return Ok(());
        }
        let times = TimestampMicrosecondArray::from_iter_values(pending.iter().map(|p| p.1));
        let mut columns: Vec<ArrayRef> = vec![cast(&times, self.schema.field(0).data_type())?];
        if self.schema.fields().len() > 1 {
            columns.extend(reader.codec().decode(pending.iter().map(|p| keys.key(p.0)))?);
        }
        let batch = new_batch(&self.schema, columns, pending.len())?;
        let read = self.entries.read(&batch)?;
        let mut out = arrow::array::BinaryBuilder::new();
        let mut scratch = Vec::with_capacity(64);
        for row in 0..pending.len() {
            append_storage_key(&mut out, &mut scratch, read.vnode(row), &[read.key(row)]);
        }
        self.table.write(out.finish(), None, batch)
    }

    /// The groups to look at, some of them more than once; `None`: none.
    pub async fn due(&mut self) -> Result<Option<ChunkKeys>, ExecError> {
        let to = self.bound.saturating_add(1);
        if to <= self.done || self.bound == i64::MIN {
            return Ok(None);
        }
        let edge =
            |time| BinaryArray::from_iter_values(self.vnodes.clone().map(|v| position(v, time)));
        let lookup = self.table.multi_range(edge(self.done), edge(to), None);
        let found = self.ahead.wait(lookup).await?;
        self.ahead.close(to);
        self.pass(to);
        self.done = to;
        if found.is_empty() {
            return Ok(None);
        }
        let batch = found.values.with_schema(Arc::clone(&self.schema))?;
        Ok(Some(self.groups.read(&batch)?))
    }

    /// The rows of a group that are not needed any more.
    pub fn closed(&self, rows: &Rows) -> Vec<Ranked> {
        match self.place {
            Some(place) if self.descending => self.met(rows, place),
            Some(place) => self.passed(rows, place),
            None => self.over(rows),
        }
    }

    /// Rows below the watermark without the last right one. Rows without a time stay: nothing is promised of them.
    fn passed(&self, rows: &Rows, place: Place) -> Vec<Ranked> {
        let end = rows.partition_point(|r| time_of(r.order_bytes()).is_none_or(|t| t < self.bound));
        let last = asof_lookup::right_before(rows, end, place);
        let passed = rows.range(0..end).enumerate();
        let goes = |(i, row): &(usize, &Ranked)| *i != last && time_of(row.order_bytes()).is_some();
        passed.filter(goes).map(|(_, row)| row.clone()).collect()
    }

    /// In descending order: rows below the watermark from the first right one on. What left rows among them meet is
    /// among them too.
    fn met(&self, rows: &Rows, place: Place) -> Vec<Ranked> {
        let time = |r: &Ranked| self.time_in_order(r.order_bytes());
        let start = rows.partition_point(|r| time(r).is_none_or(|t| t >= self.bound));
        let waits = |r: &&Ranked| !place.is_right(r.order_bytes());
        rows.after(start).skip_while(waits).cloned().collect()
    }

    /// The rows of sessions that are over: the first ones.
    fn over(&self, rows: &Rows) -> Vec<Ranked> {
        let (mut closed, mut session): (Vec<Ranked>, Vec<&Ranked>) = (Vec::new(), Vec::new());
        for row in rows.iter() {
            let time = Self::time(row);
            if session.last().is_some_and(|l| !continues(Self::time(l), time, self.gap)) {
                closed.extend(session.drain(..).cloned());
            }
            if time.saturating_add(self.gap) > self.bound {
                return closed;
            }
            session.push(row);
        }
        closed.extend(session.into_iter().cloned());
        closed
    }

    pub fn seal(&mut self) -> Result<Vec<MemRun>, ExecError> {
        self.table.seal()
    }
}
