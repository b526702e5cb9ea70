//! Lookup joins: a left row meets the right rows as of the processing time (docs/design.md §4).
//!
//! The right side is an arrangement of the job's own, kept up to date like a join's side; its changes emit
//! nothing. The task takes in the right input of an epoch before the left one (`task::build`), so a left row
//! meets the right rows as they are at its epoch.
//!
//! Left rows that are never retracted need no state: [`HashJoin`] pairs them and forgets them. Where they may
//! be retracted ([`Remembering`]), what each has met is stored, `left key | identity | sequence | ordinal →
//! right row, copies`, and read back as retracted rows arrive, or ahead of them where hints tell of them, to be
//! taken out again at the barrier. A row
//! that comes and goes within an epoch has met nothing: changes are netted first. Equal left rows that
//! came at different times are told apart by the sequence; the last ones go first.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, BinaryArray, BinaryBuilder, Int64Array, RecordBatch, UInt32Array,
    UInt64Array, new_null_array,
};
use arrow::compute::{self, take};
use arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef, UInt32Type, UInt64Type};
use futures::FutureExt;
use futures::future::BoxFuture;
use millrace_common::delta::take_rows;
use millrace_common::identity::RowCodec;
use millrace_common::{DeltaChunk, Epoch, Vnode};
use millrace_graph::{JoinSide, SideState};
use millrace_rpc::catalog::RowStorage;
use millrace_storage::{Found, Lookup, MemRun};

use super::pairing::JoinSpec;
use super::retractions::Retractions;
use super::{HashJoin, policy};
use crate::consolidate::{net_by_identity, row_bytes};
use crate::error::ExecError;
use crate::lookahead::{DELETED_PORT, Hint};
use crate::memory::{MemoryClass, Reservation};
use crate::operator::{Operator, Output};
use crate::operators::{BuildContext, Built, Env, Tables};
use crate::options::StateAccess;
use crate::sequence::ArrivalSequence;
use crate::state::StateTable;
use crate::state::arena::new_batch;
use crate::state::keys::{KeyReader, append_storage_key};

/// The left side's table: nothing is kept there.
const NO_TABLE: usize = usize::MAX;
/// Bytes of the sequence and the ordinal at the end of a key.
const SEQUENCE: usize = 8;
const ORDINAL: usize = 4;

/// Builds the operator of a lookup. Fails where the graph does not fit it.
pub fn build(lookup: &millrace_graph::Lookup, ctx: BuildContext<'_>) -> Built {
    let [left, right] = [ctx.input(0)?, ctx.input(1)?];
    let BuildContext { node, env, tables, .. } = ctx;
    match &lookup.matches {
        None => {
            let (output, schema) = (lookup.output.clone(), &node.schema);
            let inputs = [&left, &right];
            let join = pairing(lookup, inputs, lookup.outer, output, schema, env, tables)?;
            Ok(Box::new(join))
        }
        Some(matches) => {
            let made = Remembering::new(node, lookup, matches, &left, &right, env, tables)?;
            Ok(Box::new(made))
        }
    }
}

/// What pairs left rows and keeps right ones.
fn pairing(
    lookup: &millrace_graph::Lookup,
    inputs: [&SchemaRef; 2],
    outer: bool,
    output: Vec<usize>,
    schema: &SchemaRef,
    env: Env,
    tables: Tables<'_>,
) -> Result<HashJoin, ExecError> {
    let left = JoinSide {
        keys: lookup.left_keys.clone(),
        vnode: lookup.left_vnode.clone(),
        state: SideState {
            table: NO_TABLE,
            storage: RowStorage::Append,
            unique_key: Vec::new(),
            unique_per_key: false,
        },
    };
    let spec = JoinSpec {
        sides: [&left, &lookup.right],
        inputs,
        residual: lookup.residual.as_ref(),
        null_equals_null: false,
        output,
        schema,
    };
    let mut tables = |table: usize| match table {
        NO_TABLE => Ok(Box::new(NoTable(Arc::clone(inputs[0]))) as Box<dyn StateTable>),
        table => tables(table),
    };
    HashJoin::new(Box::new(policy::Lookup { outer }), spec, env, &mut tables)
}

/// A lookup whose left rows may be retracted. See the module.
struct Remembering {
    /// Pairs whole rows, padded: left columns, the sequence, right columns.
    join: HashJoin,
    outer: bool,
    /// Key of a left row.
    keys: KeyReader,
    identity: RowCodec,
    /// At most one copy of a left row.
    unique: bool,
    row: RowCodec,
    left: SchemaRef,
    /// Left columns and the sequence.
    numbered: SchemaRef,
    /// The right column that is NULL only where a row met nothing, by position in the right input.
    met: usize,
    table: Box<dyn StateTable>,
    output: Vec<usize>,
    schema: SchemaRef,
    /// Left changes of the epoch.
    pending: Vec<DeltaChunk>,
    pending_bytes: Reservation,
    /// What its retracted rows have met.
    retractions: Retractions,
    /// The left columns by which that is told, in the order in which hints have them.
    told_by: Vec<usize>,
    /// The epoch that ends at the next barrier.
    ends: Option<Epoch>,
    arrivals: ArrivalSequence,
    env: Env,
}

impl Remembering {
    fn new(
        node: &millrace_graph::Node,
        lookup: &millrace_graph::Lookup,
        matches: &millrace_graph::Matches,
        left: &SchemaRef,
        right: &SchemaRef,
        env: Env,
        tables: Tables<'_>,
    ) -> Result<Remembering, ExecError> {
        let width = left.fields().len();
        let left = crate::operators::nullable(left);
        let sequence = Arc::new(Field::new("sequence", DataType::UInt64, false));
        let numbered = left.fields().iter().cloned().chain([sequence]).collect::<Vec<_>>();
        let numbered: SchemaRef = Arc::new(Schema::new(numbered));
        let pairs = numbered.fields().iter().chain(right.fields()).cloned().collect::<Vec<_>>();
        let pairs = crate::operators::nullable(&Schema::new(pairs));
        let residual = lookup.residual.as_ref().map(|e| behind_sequence(e, width, &pairs));
        let lookup = millrace_graph::Lookup { residual: residual.transpose()?, ..lookup.clone() };
        let all: Vec<usize> = (0..pairs.fields().len()).collect();
        let join =
            pairing(&lookup, [&numbered, right], true, all, &pairs, env.clone(), &mut *tables)?;
        let others: Vec<usize> = (0..width).filter(|c| !lookup.left_keys.contains(c)).collect();
        let identity = match matches.identity {
            RowStorage::Keyed => RowCodec::of_values(&left, &matches.unique_key)?,
            _ => RowCodec::of_rows(&left, &others)?,
        };
        let met = lookup.right.keys.first().copied();
        let arrivals = ArrivalSequence::new(matches.table, env.vnodes.start, env.first_arrival);
        Ok(Remembering {
            join,
            outer: lookup.outer,
            keys: KeyReader::new(&left, &lookup.left_keys, &lookup.left_vnode)?,
            identity,
            unique: matches.identity == RowStorage::Keyed,
            row: RowCodec::whole(&left)?,
            left,
            numbered,
            met: met.ok_or_else(|| ExecError::internal("a lookup without a key"))?,
            table: tables(matches.table)?,
            output: lookup.output.clone(),
            schema: crate::operators::nullable(&node.schema),
            pending: Vec::new(),
            pending_bytes: env.governor.account(MemoryClass::Held),
            retractions: Retractions::new(&env),
            told_by: lookup.told_by(width).unwrap_or_default(),
            ends: None,
            arrivals,
            env,
        })
    }

    /// The epoch's left changes.
    async fn update_match_status(&mut self, out: &mut Output) -> Result<(), ExecError> {
        let pending = std::mem::take(&mut self.pending);
        self.pending_bytes.set(0);
        if pending.is_empty() {
            return Ok(());
        }
        let chunk = DeltaChunk::concat(&self.left, &pending)?;
        let chunk = net_by_identity(&row_bytes(&self.row, &chunk.batch)?, &chunk).apply(&chunk)?;
        let sign = |wanted: i64| -> Result<DeltaChunk, ExecError> {
            let rows = (0..chunk.num_rows()).map(|i| Some(chunk.weight(i).signum() == wanted));
            Ok(chunk.filter(&rows.collect())?)
        };
        let (gone, come) = (sign(-1)?, sign(1)?);
        self.retract(&gone, out).await?;
        self.retractions.clear();
        self.meet(&come, out).await
    }

    /// Keys of the stored entries of left rows: `vnode | left key | identity`.
    fn prefixes(&self, rows: &RecordBatch) -> Result<BinaryArray, ExecError> {
        let keys = self.keys.read(rows)?;
        let identity = match self.identity.is_empty() {
            true => None,
            false => Some(self.identity.rows(rows.columns(), rows.num_rows())?),
        };
        let mut out = BinaryBuilder::with_capacity(rows.num_rows(), rows.num_rows() * 32);
        let mut scratch = Vec::with_capacity(64);
        for row in 0..rows.num_rows() {
            let vnode: Vnode = keys.vnode(row);
            let identity: &[u8] = identity.as_ref().map_or(&[], |i| i.row(row).data());
            append_storage_key(&mut out, &mut scratch, vnode, &[keys.key(row), identity]);
        }
        Ok(out.finish())
    }

    /// The prefixes of the rows of a hint that the task owns. `None`: it is none of rows that are deleted.
    fn hinted(&self, hint: &Hint) -> Result<Option<BinaryArray>, ExecError> {
        let is_of_type = |(column, &c): (&ArrayRef, &usize)| {
            column.data_type() == self.left.field(c).data_type()
        };
        let is_even = hint.columns.len() == self.told_by.len();
        if !is_even || !hint.is_whole() || !hint.columns.iter().zip(&self.told_by).all(is_of_type) {
            return Ok(None);
        }
        // Of the other columns nothing is read.
        let column = |c: usize| match self.told_by.iter().position(|&told| told == c) {
            Some(at) => Arc::clone(&hint.columns[at]),
            None => new_null_array(self.left.field(c).data_type(), hint.count()),
        };
        let columns = (0..self.left.fields().len()).map(column).collect();
        let rows = DeltaChunk::inserts(new_batch(&self.left, columns, hint.count())?);
        let keys = self.keys.read(&rows.batch)?;
        let own = |row: usize| Some(self.env.vnodes.contains(&keys.vnode(row)));
        let rows = rows.filter(&(0..rows.num_rows()).map(own).collect())?;
        Ok(Some(self.prefixes(&rows.batch)?))
    }

    /// Takes back what rows have met.
    async fn retract(&mut self, gone: &DeltaChunk, out: &mut Output) -> Result<(), ExecError> {
        if gone.is_empty() {
            return Ok(());
        }
        let prefixes = self.prefixes(&gone.batch)?;
        self.retractions.ask(&prefixes, self.table.as_ref())?;
        while self.retractions.is_reading() {
            self.retractions.completed().await?;
        }
        let schema = crate::operators::nullable(&self.table.value_schema());
        let found = self.retractions.found(&prefixes, &schema)?;
        let taken = self.last_copies(gone, &prefixes, &found)?;
        if taken.is_empty() {
            return Ok(());
        }
        let taken = UInt32Array::from(taken);
        let keys = compute::take(&found.keys, &taken, None)?;
        let values = take_rows(&found.values, &taken)?;
        let deleted = Int64Array::from_value(0, taken.len());
        self.retractions.written(&prefixes);
        self.table.write(keys.as_binary::<i32>().clone(), Some(deleted), values.clone())?;
        let left = take(&found.input, &taken, None)?;
        let left = take_rows(&gone.batch, left.as_primitive::<UInt32Type>())?;
        let (right, copies) = self.split_copies(&values)?;
        let minus = Int64Array::from_iter_values(copies.values().iter().map(|c| -c));
        self.emit(left.columns(), &right, minus, out)
    }

    /// The entries of the copies of each row that came last, as many as are retracted.
    fn last_copies(
        &self,
        gone: &DeltaChunk,
        prefixes: &BinaryArray,
        found: &Found,
    ) -> Result<Vec<u32>, ExecError> {
        let mut taken = Vec::new();
        let mut end = found.len();
        for row in (0..gone.num_rows()).rev() {
            let mut left = -gone.weight(row);
            let mut copy: Option<&[u8]> = None;
            while end > 0 && found.input.value(end - 1) as usize == row {
                let key = found.keys.value(end - 1);
                // Of an equal row that differs in the sign of a zero: its prefix goes on.
                if key.len() != prefixes.value(row).len() + SEQUENCE + ORDINAL {
                    end -= 1;
                    continue;
                }
                let of = &key[..key.len().saturating_sub(ORDINAL)];
                if copy != Some(of) {
                    copy = Some(of);
                    left -= 1;
                }
                if left >= 0 {
                    taken.push(end as u32 - 1);
                }
                end -= 1;
            }
            if left > 0 && !self.unique {
                return Err(ExecError::internal(
                    "a lookup's row is retracted more often than it came",
                ));
            }
        }
        taken.reverse();
        Ok(taken)
    }

    /// Pairs new rows with what there is, and remembers it.
    async fn meet(&mut self, come: &DeltaChunk, out: &mut Output) -> Result<(), ExecError> {
        let mut rows = Vec::with_capacity(come.num_rows());
        for row in 0..come.num_rows() {
            rows.extend((0..come.weight(row)).map(|_| row as u32));
        }
        let mut ordinal = 0;
        for part in rows.chunks(self.env.options.chunk_rows.max(1)) {
            let numbers = UInt64Array::from_iter_values(self.arrivals.take(part.len() as u64));
            let part = UInt32Array::from(part.to_vec());
            let batch = take_rows(&come.batch, &part)?;
            let mut columns = batch.columns().to_vec();
            columns.push(Arc::new(numbers));
            let batch = new_batch(&self.numbered, columns, part.len())?;
            let mut pairs = Output::default();
            self.join.push(0, DeltaChunk::inserts(batch), &mut pairs)?;
            loop {
                for chunk in pairs.take() {
                    self.remember(&chunk, &mut ordinal, out)?;
                }
                if !self.join.is_pending() {
                    break;
                }
                self.join.progress(&mut pairs).await?;
            }
        }
        Ok(())
    }

    /// Stores and emits pairs.
    fn remember(
        &mut self,
        chunk: &DeltaChunk,
        ordinal: &mut u32,
        out: &mut Output,
    ) -> Result<(), ExecError> {
        let width = self.left.fields().len();
        let met = chunk.batch.column(width + 1 + self.met).logical_nulls();
        let kept = |row: usize| met.as_ref().is_none_or(|nulls| nulls.is_valid(row));
        let chunk = match met.as_ref().filter(|_| self.unique && !self.outer) {
            Some(_) => &chunk.filter(&(0..chunk.num_rows()).map(|r| Some(kept(r))).collect())?,
            None => chunk,
        };
        if chunk.is_empty() {
            return Ok(());
        }
        let columns = chunk.batch.columns();
        let left = new_batch(&self.left, columns[..width].to_vec(), chunk.num_rows())?;
        let prefixes = self.prefixes(&left)?;
        self.retractions.written(&prefixes);
        let numbers = columns[width].as_primitive::<UInt64Type>();
        let mut keys = BinaryBuilder::new();
        for row in 0..chunk.num_rows() {
            let mut key = Vec::with_capacity(prefixes.value(row).len() + SEQUENCE + ORDINAL);
            key.extend_from_slice(prefixes.value(row));
            key.extend_from_slice(&numbers.value(row).to_be_bytes());
            key.extend_from_slice(&ordinal.to_be_bytes());
            *ordinal = ordinal.wrapping_add(1);
            keys.append_value(&key);
        }
        let right = &columns[width + 1..];
        let copies = chunk.weights_array();
        let mut values = right.to_vec();
        values.push(Arc::new(copies.clone()));
        let schema = crate::operators::nullable(&self.table.value_schema());
        self.table.write(keys.finish(), None, new_batch(&schema, values, chunk.num_rows())?)?;
        self.emit(left.columns(), right, copies, out)
    }

    fn split_copies(&self, values: &RecordBatch) -> Result<(Vec<ArrayRef>, Int64Array), ExecError> {
        let mut columns = values.columns().to_vec();
        let copies = columns.pop();
        let copies = copies.as_ref().and_then(|c| c.as_primitive_opt::<Int64Type>()).cloned();
        let copies = copies.ok_or_else(|| ExecError::internal("matches without their number"))?;
        Ok((columns, copies))
    }

    /// Emits pairs; rows that have met nothing only if they are padded.
    fn emit(
        &self,
        left: &[ArrayRef],
        right: &[ArrayRef],
        weights: Int64Array,
        out: &mut Output,
    ) -> Result<(), ExecError> {
        let column = |&c: &usize| match c.checked_sub(left.len()) {
            None => Arc::clone(&left[c]),
            Some(r) => Arc::clone(&right[r]),
        };
        let columns = self.output.iter().map(column).collect();
        let chunk =
            DeltaChunk::new(new_batch(&self.schema, columns, weights.len())?, Some(weights));
        let chunk = match right[self.met].logical_nulls().filter(|_| !self.outer) {
            Some(nulls) => {
                let met = (0..nulls.len()).map(|row| Some(nulls.is_valid(row)));
                chunk.filter(&met.collect())?
            }
            None => chunk,
        };
        crate::operators::emit_sliced(chunk, self.env.options.chunk_rows.max(1), out);
        Ok(())
    }
}

/// A residual over left and right columns, over left columns, the sequence and right columns.
fn behind_sequence(
    e: &millrace_functions::expr::ExprRef,
    width: usize,
    pairs: &Schema,
) -> Result<millrace_functions::expr::ExprRef, ExecError> {
    let map: Vec<Option<usize>> =
        (0..pairs.fields().len() - 1).map(|c| Some(if c < width { c } else { c + 1 })).collect();
    Ok(millrace_functions::expr::remap(e, &map, pairs)?)
}

impl Operator for Remembering {
    fn push(&mut self, port: usize, chunk: DeltaChunk, out: &mut Output) -> Result<(), ExecError> {
        if port == 1 {
            return self.join.push(1, chunk, out);
        }
        self.pending_bytes.grow(chunk.memory_size());
        let chunk = DeltaChunk { batch: chunk.batch.with_schema(Arc::clone(&self.left))?, ..chunk };
        if chunk.weights.is_some() {
            let gone = (0..chunk.num_rows()).map(|row| Some(chunk.weight(row) < 0));
            let prefixes = self.prefixes(&chunk.filter(&gone.collect())?.batch)?;
            self.retractions.ask(&prefixes, self.table.as_ref())?;
        }
        self.pending.push(chunk);
        Ok(())
    }

    fn shed(&mut self, out: &mut Output) -> Result<(), ExecError> {
        self.retractions.shed();
        self.join.shed(out)
    }

    fn is_full(&self) -> bool {
        let waits = self.env.options.state_access == StateAccess::Synchronous;
        self.join.is_full() || (waits && self.retractions.is_reading())
    }

    fn is_pending(&self) -> bool {
        self.join.is_pending() || self.retractions.is_reading()
    }

    fn hint(&mut self, port: usize, hint: &Hint) -> Result<(), ExecError> {
        if port != DELETED_PORT {
            return self.join.hint(port, hint);
        }
        match self.hinted(hint)? {
            Some(prefixes) => self.retractions.hint(&prefixes, &hint.due, self.table.as_ref()),
            None => self.env.metrics.lookahead.dropped.add(hint.count().max(1) as u64),
        }
        Ok(())
    }

    fn is_prefetching(&self) -> bool {
        self.join.is_prefetching() || self.retractions.is_prefetching()
    }

    fn progress<'a>(&'a mut self, out: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        async move {
            let reads = self.retractions.is_reading() || self.retractions.is_prefetching();
            tokio::select! {
                biased;
                done = self.retractions.progress(), if reads => done,
                done = self.join.progress(out), if self.join.is_pending() || self.join.is_prefetching() => done,
                else => Ok(()),
            }
        }
        .boxed()
    }

    fn watermark(&mut self, port: usize, columns: &[(usize, i64)]) {
        self.join.watermark(port, columns);
    }

    /// The left rows of an epoch meet the right ones at its barrier: it has not passed before.
    fn time(&mut self, epoch: Epoch) {
        self.ends = Some(epoch);
    }

    fn barrier<'a>(&'a mut self, out: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        async move {
            self.update_match_status(out).await?;
            if let Some(epoch) = self.ends.take() {
                let (notes, reads) = self.retractions.pass(epoch);
                self.join.core.note_others(&notes, reads);
                self.join.time(epoch);
            }
            self.join.barrier(out).await
        }
        .boxed()
    }

    fn seal(&mut self, sealed: &mut Vec<MemRun>) -> Result<(), ExecError> {
        self.join.seal(sealed)?;
        sealed.extend(self.table.seal()?);
        Ok(())
    }

    fn counters(&self, out: &mut BTreeMap<String, u64>) {
        self.join.counters(out);
        out.extend([self.arrivals.counter()]);
    }

    fn memory_size(&self) -> usize {
        self.join.memory_size() + self.pending_bytes.bytes() + self.retractions.memory_size()
    }
}

/// A table where nothing is.
struct NoTable(SchemaRef);

impl StateTable for NoTable {
    fn write(
        &mut self,
        _: BinaryArray,
        _: Option<Int64Array>,
        _: RecordBatch,
    ) -> Result<(), ExecError> {
        Err(ExecError::internal("a lookup keeps no left rows"))
    }

    fn multi_get(&self, _: BinaryArray) -> Lookup {
        self.nothing()
    }

    fn multi_scan(&self, _: BinaryArray, _: Option<usize>) -> Lookup {
        self.nothing()
    }

    fn multi_range(&self, _: BinaryArray, _: BinaryArray, _: Option<usize>) -> Lookup {
        self.nothing()
    }

    fn seal(&mut self) -> Result<Vec<MemRun>, ExecError> {
        Ok(Vec::new())
    }

    fn value_schema(&self) -> SchemaRef {
        Arc::clone(&self.0)
    }

    fn is_empty(&self) -> bool {
        true
    }
}

impl NoTable {
    fn nothing(&self) -> Lookup {
        Lookup::Ready(Found {
            input: UInt32Array::from(Vec::<u32>::new()),
            keys: BinaryArray::from_iter_values(std::iter::empty::<&[u8]>()),
            weights: Int64Array::from(Vec::<i64>::new()),
            values: RecordBatch::new_empty(Arc::clone(&self.0)),
        })
    }
}
