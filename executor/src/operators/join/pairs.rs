//! Matching pairs in bounded steps: gathered by reference, then built, tested and emitted as whole
//! arrays.

use std::cell::OnceCell;
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, BooleanArray, Int64Array, RecordBatch, UInt32Array, new_null_array,
};
use arrow::buffer::BooleanBuffer;
use arrow::compute;
use arrow::compute::kernels::cmp::eq;
use arrow::datatypes::{Schema, SchemaRef};
use datafusion::common::tree_node::Transformed;
use datafusion::physical_expr::expressions::Column;
use datafusion::physical_expr::utils::collect_columns;
use millrace_common::DeltaChunk;
use millrace_functions::expr::ExprRef;
use millrace_functions::tree::Walk;

use super::side::Side;
use crate::error::ExecError;
use crate::operators::Env;
use crate::operators::expr::SafeExpr;
use crate::state::arena::{Located, RowRef, gather_column, new_batch};

/// Pairs of a probing chunk's rows with rows in memory of the other side.
#[derive(Default)]
pub struct Pairs {
    /// Row of the probing chunk.
    pub probe: Vec<u32>,
    pub other: Vec<RowRef>,
    /// Node of the other side.
    pub nodes: Vec<u32>,
    /// Product of the weights.
    pub weights: Vec<i64>,
}

impl Pairs {
    pub fn len(&self) -> usize {
        self.probe.len()
    }

    pub fn clear(&mut self) {
        self.probe.clear();
        self.other.clear();
        self.nodes.clear();
        self.weights.clear();
    }

    /// Those of them whose bit is set.
    fn only(&self, bits: &BooleanBuffer) -> Pairs {
        let mut kept = Pairs::default();
        for i in bits.set_indices() {
            kept.push(self.probe[i], self.other[i], self.nodes[i], self.weights[i]);
        }
        kept
    }

    #[inline]
    pub fn push(&mut self, row: u32, at: RowRef, node: u32, weight: i64) {
        self.probe.push(row);
        self.other.push(at);
        self.nodes.push(node);
        self.weights.push(weight);
    }
}

/// Which pairs match.
pub enum Matched {
    All,
    /// Matches, and pairs for which NOT IN would not know.
    Some {
        matches: BooleanBuffer,
        unknown: Option<BooleanBuffer>,
    },
}

/// The condition beyond the hash key.
pub struct Condition {
    /// Over the compact batch of `columns`.
    residual: Option<SafeExpr>,
    schema: SchemaRef,
    /// Positions (left then right columns) the residual reads.
    columns: Vec<usize>,
    /// Null-aware joins compare their keys here, in three-valued logic: (left, right) positions.
    keys: Vec<(usize, usize)>,
}

impl Condition {
    /// `None` when equal keys are all there is to it.
    pub fn new(
        residual: Option<&ExprRef>,
        null_aware_keys: Vec<(usize, usize)>,
        both: &Schema,
        env: &Env,
    ) -> Result<Option<Condition>, ExecError> {
        if residual.is_none() && null_aware_keys.is_empty() {
            return Ok(None);
        }
        let mut columns = Vec::new();
        let mut compact = None;
        if let Some(expr) = residual {
            columns = collect_columns(expr).iter().map(Column::index).collect();
            columns.sort_unstable();
            columns.dedup();
            let rewritten = Arc::clone(expr).rewrite_up(|node| {
                let Some(column) = node.downcast_ref::<Column>() else {
                    return Ok(Transformed::no(node));
                };
                let at = columns.iter().position(|&c| c == column.index()).unwrap_or_default();
                Ok(Transformed::yes(Arc::new(Column::new(column.name(), at)) as ExprRef))
            })?;
            compact = Some(SafeExpr::new(rewritten.data, "Join", Arc::clone(&env.errors)));
        }
        let fields: Vec<_> =
            columns.iter().map(|&c| both.field(c).clone().with_nullable(true)).collect();
        let schema = Arc::new(Schema::new(fields));
        Ok(Some(Condition { residual: compact, schema, columns, keys: null_aware_keys }))
    }

    fn test(&self, builder: &PairColumns<'_>, rows: usize) -> Result<Matched, ExecError> {
        let mut matches = BooleanBuffer::new_set(rows);
        if let Some(residual) = &self.residual {
            let columns =
                self.columns.iter().map(|&c| builder.column(c)).collect::<Result<Vec<_>, _>>()?;
            let batch = new_batch(&self.schema, columns, rows)?;
            matches = truth(&residual.evaluate_mask(&batch)?);
        }
        if self.keys.is_empty() {
            return Ok(Matched::Some { matches, unknown: None });
        }
        let (mut equal, mut possible) =
            (BooleanBuffer::new_set(rows), BooleanBuffer::new_set(rows));
        for &(left, right) in &self.keys {
            let same = eq(&builder.column(left)?, &builder.column(right)?)?;
            equal = &equal & &truth(&same);
            if let Some(nulls) = same.nulls() {
                possible = &possible & &(same.values() | &!nulls.inner());
            } else {
                possible = &possible & same.values();
            }
        }
        let unknown = &(&possible & &!&equal) & &matches;
        Ok(Matched::Some { matches: &matches & &equal, unknown: Some(unknown) })
    }
}

fn truth(array: &BooleanArray) -> BooleanBuffer {
    match array.nulls() {
        Some(nulls) => array.values() & nulls.inner(),
        None => array.values().clone(),
    }
}

/// Builds columns of pairs on demand.
pub struct PairColumns<'a> {
    pub port: usize,
    pub chunk: &'a RecordBatch,
    pub other: &'a Side,
    pub pairs: &'a Pairs,
    /// Number of columns of the left side.
    pub left_width: usize,
    indices: UInt32Array,
    /// Every row of the chunk once, in order: its columns are used as they are.
    identity: bool,
    /// Where the other side's rows lie; found once for all columns.
    located: OnceCell<Located<'a>>,
}

impl<'a> PairColumns<'a> {
    pub fn new(
        port: usize,
        chunk: &'a RecordBatch,
        other: &'a Side,
        pairs: &'a Pairs,
        left_width: usize,
    ) -> PairColumns<'a> {
        let identity = pairs.len() == chunk.num_rows()
            && pairs.probe.iter().enumerate().all(|(i, &r)| i == r as usize);
        let indices = UInt32Array::from(pairs.probe.clone());
        let located = OnceCell::new();
        PairColumns { port, chunk, other, pairs, left_width, indices, identity, located }
    }

    /// Column `c` of left columns then right columns.
    fn column(&self, c: usize) -> Result<ArrayRef, ExecError> {
        let (side, c) = if c < self.left_width { (0, c) } else { (1, c - self.left_width) };
        if side != self.port {
            let (batches, picks) = match self.located.get() {
                Some(located) => located,
                None => {
                    let located = self.other.arena.locate(&self.pairs.other)?;
                    self.located.get_or_init(|| located)
                }
            };
            return gather_column(batches, picks, c);
        }
        if self.identity {
            return Ok(Arc::clone(self.chunk.column(c)));
        }
        Ok(compute::take(self.chunk.column(c), &self.indices, None)?)
    }

    pub fn test(&self, condition: Option<&Condition>) -> Result<Matched, ExecError> {
        match condition {
            None => Ok(Matched::All),
            Some(condition) => condition.test(self, self.pairs.len()),
        }
    }

    /// The matching pairs as output rows. Only these are gathered.
    pub fn output(
        &self,
        output: &[usize],
        schema: &SchemaRef,
        matched: &Matched,
    ) -> Result<DeltaChunk, ExecError> {
        match matched {
            Matched::Some { matches, .. } if matches.count_set_bits() < matches.len() => {
                let kept = self.pairs.only(matches);
                if kept.len() == 0 {
                    return Ok(DeltaChunk::empty(SchemaRef::clone(schema)));
                }
                PairColumns::new(self.port, self.chunk, self.other, &kept, self.left_width)
                    .rows(output, schema)
            }
            _ => self.rows(output, schema),
        }
    }

    /// All pairs as output rows.
    fn rows(&self, output: &[usize], schema: &SchemaRef) -> Result<DeltaChunk, ExecError> {
        let mut columns = Vec::with_capacity(output.len());
        for &c in output {
            columns.push(self.column(c)?);
        }
        let plain = self.pairs.weights.iter().all(|&w| w == 1);
        let weights = (!plain).then(|| Int64Array::from(self.pairs.weights.clone()));
        Ok(DeltaChunk::new(new_batch(schema, columns, self.pairs.len())?, weights))
    }
}

/// Output columns of rows of one side alone: the other side's are NULL.
pub fn padded(
    side: usize,
    columns: &[ArrayRef],
    left_width: usize,
    output: &[usize],
    schema: &SchemaRef,
    rows: usize,
) -> Vec<ArrayRef> {
    output
        .iter()
        .zip(schema.fields())
        .map(|(&c, field)| {
            let (of, c) = if c < left_width { (0, c) } else { (1, c - left_width) };
            if of == side {
                Arc::clone(&columns[c])
            } else {
                new_null_array(field.data_type(), rows)
            }
        })
        .collect()
}
