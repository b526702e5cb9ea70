//! The job graph: what the planner hands to the executor, and what is stored with a relation.
//!
//! A job is a list of [`Fragment`]s joined by [`Edge`]s; a fragment is a set of [`Node`]s between exchanges, run by
//! one task or by `parallelism` tasks that own disjoint vnodes. Both are acyclic graphs: a node may feed several
//! nodes of its fragment and, by edges, several others ([`check_edges`] says what must hold). All operators
//! refer to columns of their inputs by position; expressions other than columns are computed by
//! [`Operator::Project`] and [`Operator::Filter`], and by the residual of a join.
//!
//! # State tables: keys and values
//!
//! A key is `vnode u16 BE | KeyCodec bytes` (`millrace_common::keys`). The columns of one key are
//! encoded by one codec; arrow-row encodes columns one after the other, so the bytes of the first
//! columns are a prefix of the whole: a prefix scan needs only a codec over these first columns.
//! The vnode is that of the hash of the operator's `vnode` columns, in the order listed (no columns:
//! vnode 0); the planner places exchanges such that the task owns it. Unless said otherwise columns
//! are encoded ascending, nulls first (`KeyCodec::new`).
//!
//! | table | key columns | value columns | storage |
//! |---|---|---|---|
//! | relation rows, `Keyed` | `output.key` | all columns | Keyed |
//! | relation rows, `Multiset` | all columns | all columns | Multiset |
//! | relation rows, `Append` | i64 sequence, 8 bytes BE | all columns | Append |
//! | aggregate | `group` | [`accumulator_schema`](state::accumulator_schema) | Keyed |
//! | aggregate values | `group`, then the value | the value (not nullable: NULLs are not kept) | Multiset |
//! | join side, `Keyed` | `keys`, then `unique_key` | all columns of the side's input | Keyed |
//! | join side, `Multiset` | `keys`, then all other columns in order | all columns of the input | Multiset |
//! | join side, `Append` | `keys`, then an i64 sequence, 8 bytes BE | all columns of the input | Append |
//! | lookup | as a join side | all columns of the right input | as a join side |
//! | matches, `Keyed` | `left_keys`, then `unique_key`, an u64 sequence, 8 bytes BE, an u32 ordinal, 4 bytes
//! BE | all columns of the right input, then `copies` | Keyed |
//! | matches, `Multiset` | `left_keys`, then all other columns of the left input, sequence, ordinal | as
//! above | Keyed |
//! | event-time buffer | `column`, then all other columns in order | all columns of the input | Multiset |
//! | closing times | the time, `group` | the time, the columns of `group` | Keyed |
//! | top-N, window | `group`, `order` (with its sort options), then the identity | all columns of the input
//! | `storage` |
//!
//! The identity of a top-N's or window's row is `unique_key` (`Keyed`) or all columns that are in neither `group`
//! nor `order`, ascending by position (`Multiset`). An aggregate value table encodes its value
//! column ascending or descending ([`ValueTable::descending`]), so that MIN and MAX are the first
//! entry of a group's prefix.

pub mod codec;
mod edges;
pub mod lookahead;
mod operator;
pub mod state;

use arrow::datatypes::{Schema, SchemaRef};
use millrace_common::RelationId;
use millrace_common::access::{AccessClass, RetentionBy};
use millrace_rpc::catalog::RowStorage;

pub use edges::{check_edges, shares};
pub use operator::*;

/// A whole dataflow that maintains one relation.
#[derive(Clone, Debug)]
pub struct JobGraph {
    /// Producers before consumers; the last one holds the root.
    pub fragments: Vec<Fragment>,
    /// State tables; position is the local id. Table 0 is the relation's own rows.
    pub tables: Vec<StateTable>,
    pub output: RelationLayout,
}

/// How the maintained relation lies in table 0.
#[derive(Clone, Debug)]
pub struct RelationLayout {
    /// All stored columns, hidden ones included.
    pub schema: SchemaRef,
    pub storage: RowStorage,
    /// Key columns (storage `Keyed`), in key order. Empty with storage `Keyed`: at most one row.
    pub key: Vec<usize>,
    /// Columns whose hash is the vnode; empty: vnode 0 (for `Append`: the vnode of the task). The
    /// root's tasks own the vnodes of their rows: no exchange follows.
    pub distribution: Vec<usize>,
    pub append_only: bool,
    /// Columns of the relation that have a watermark.
    pub marks: Vec<DerivedWatermark>,
}

/// A column's watermark: the least of its terms. After an epoch no change of the stream, insertion or
/// retraction, has a smaller value in the column than the watermark at that epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DerivedWatermark {
    pub column: usize,
    /// Never empty.
    pub terms: Vec<WatermarkTerm>,
}

/// The watermark of a column of a relation that the job reads, after some steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatermarkTerm {
    pub relation: RelationId,
    /// Position in that relation.
    pub column: usize,
    pub steps: Vec<MarkStep>,
}

/// A function of an instant that never decreases. Microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MarkStep {
    Add(i64),
    /// The largest `offset + k · size` that is not above. `size` is positive.
    Bin {
        size: i64,
        offset: i64,
    },
}

impl WatermarkTerm {
    pub fn apply(&self, value: i64) -> i64 {
        self.steps.iter().fold(value, |v, step| match *step {
            MarkStep::Add(us) => v.saturating_add(us),
            MarkStep::Bin { size, offset } => {
                let since = i128::from(v) - i128::from(offset);
                let start = i128::from(v) - since.rem_euclid(i128::from(size.max(1)));
                start.clamp(i64::MIN.into(), i64::MAX.into()) as i64
            }
        })
    }
}

impl DerivedWatermark {
    /// The column's watermark, given those of the relations; `None`: one of them has none yet.
    pub fn value(&self, of: impl Fn(RelationId, usize) -> Option<i64>) -> Option<i64> {
        let mut least = i64::MAX;
        for term in &self.terms {
            least = least.min(term.apply(of(term.relation, term.column)?));
        }
        Some(least)
    }
}

/// The column that tells the event time of rows: of those with a watermark the one with the fewest steps from its
/// origin (the time itself before the window it falls into), the first of them.
pub fn event_time_column(marks: &[DerivedWatermark]) -> Option<usize> {
    let steps = |m: &DerivedWatermark| m.terms.iter().map(|t| t.steps.len()).sum::<usize>();
    marks.iter().min_by_key(|m| (steps(m), m.column)).map(|m| m.column)
}

/// From when on rows of a state table are never reached again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retention {
    pub by: RetentionBy,
    /// Rows whose time is below the least of these go. Never empty.
    pub terms: Vec<WatermarkTerm>,
}

/// Operators between exchanges.
#[derive(Clone, Debug)]
pub struct Fragment {
    /// Producers before consumers; a node may feed several.
    pub nodes: Vec<Node>,
    /// One task however large the job's parallelism.
    pub singleton: bool,
    /// What leaves it, and where to; empty where the last node is the job's root. An [`Operator::Exchange`] names
    /// an edge by its fragment and its place here.
    pub outputs: Vec<Edge>,
}

/// A way out of a fragment, to one [`Operator::Exchange`] of another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edge {
    /// The node whose output it carries.
    pub from: usize,
    /// The fragment that takes it, behind its own in the job's list.
    pub to: usize,
    pub carries: EdgeKind,
}

/// What an edge carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EdgeKind {
    /// The node's rows and barriers, each row to the task that owns the vnode of the hash of these columns; no
    /// columns: to the only task.
    Rows { hash: Vec<usize> },
}

/// One operator.
#[derive(Clone, Debug)]
pub struct Node {
    pub op: Operator,
    /// Positions of the input nodes in the same fragment, in port order.
    pub inputs: Vec<usize>,
    /// Schema of the output.
    pub schema: SchemaRef,
    /// The output never retracts.
    pub append_only: bool,
    /// Columns of the output that have a watermark.
    pub marks: Vec<DerivedWatermark>,
}

/// A state table of the job.
#[derive(Clone, Debug)]
pub struct StateTable {
    /// What it is for, as EXPLAIN shows it: `join left`, `aggregate`, `rows` …
    pub name: String,
    pub class: AccessClass,
    /// Columns of a stored value.
    pub value_schema: SchemaRef,
    /// Put/delete by key, or weights that add up.
    pub storage: RowStorage,
    /// Users scan it: versions are kept for snapshots and blocks favour scans.
    pub relation: bool,
    /// State cleaning (§5 pass 6).
    pub retention: Option<Retention>,
}

/// Left columns, then right columns: what a residual is over.
pub fn pair_schema(left: &Schema, right: &Schema) -> Schema {
    Schema::new(left.fields().iter().chain(right.fields()).cloned().collect::<Vec<_>>())
}
