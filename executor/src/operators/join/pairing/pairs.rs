//! Matching pairs in bounded steps: gathered by reference, then built, tested and emitted as whole
//! arrays.

use std::cell::OnceCell;
use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, RecordBatch, UInt32Array};
use arrow::buffer::BooleanBuffer;
use arrow::compute;
use arrow::datatypes::{Schema, SchemaRef};
use datafusion::common::tree_node::Transformed;
use datafusion::physical_expr::expressions::Column;
use datafusion::physical_expr::utils::collect_columns;
use millrace_common::DeltaChunk;
use millrace_functions::expr::ExprRef;
use millrace_functions::tree::Walk;

use super::super::emitter::OutputColumns;
use super::super::policy::ThreeValuedKeys;
use super::side::Side;
use crate::error::ExecError;
use crate::operators::Env;
use crate::operators::expr::{SafeExpr, truth};
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
    /// Matches, and pairs of which it is unknown.
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
    keys: Option<ThreeValuedKeys>,
}

impl Condition {
    /// `None` when equal keys are all there is to it.
    pub fn new(
        residual: Option<&ExprRef>,
        keys: Option<ThreeValuedKeys>,
        both: &Schema,
        env: &Env,
    ) -> Result<Option<Condition>, ExecError> {
        if residual.is_none() && keys.is_none() {
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
        Ok(Some(Condition { residual: compact, schema, columns, keys }))
    }

    fn test(&self, builder: &PairColumns<'_>, rows: usize) -> Result<Matched, ExecError> {
        let mut matches = BooleanBuffer::new_set(rows);
        if let Some(residual) = &self.residual {
            let columns =
                self.columns.iter().map(|&c| builder.column(c)).collect::<Result<Vec<_>, _>>()?;
            let batch = new_batch(&self.schema, columns, rows)?;
            matches = truth(&residual.evaluate_mask(&batch)?);
        }
        let Some(keys) = &self.keys else {
            return Ok(Matched::Some { matches, unknown: None });
        };
        let (equal, unknown) = keys.compare(rows, |c| builder.column(c))?;
        let unknown = Some(&unknown & &matches);
        Ok(Matched::Some { matches: &matches & &equal, unknown })
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
        output: &OutputColumns,
        matched: &Matched,
    ) -> Result<DeltaChunk, ExecError> {
        match matched {
            Matched::Some { matches, .. } if matches.count_set_bits() < matches.len() => {
                let kept = self.pairs.only(matches);
                if kept.len() == 0 {
                    return Ok(DeltaChunk::empty(SchemaRef::clone(&output.schema)));
                }
                PairColumns::new(self.port, self.chunk, self.other, &kept, self.left_width)
                    .rows(output)
            }
            _ => self.rows(output),
        }
    }

    /// All pairs as output rows.
    fn rows(&self, output: &OutputColumns) -> Result<DeltaChunk, ExecError> {
        let mut columns = Vec::with_capacity(output.positions.len());
        for &c in &output.positions {
            columns.push(self.column(c)?);
        }
        let plain = self.pairs.weights.iter().all(|&w| w == 1);
        let weights = (!plain).then(|| Int64Array::from(self.pairs.weights.clone()));
        Ok(DeltaChunk::new(new_batch(&output.schema, columns, self.pairs.len())?, weights))
    }
}
