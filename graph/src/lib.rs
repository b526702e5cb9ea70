//! The job graph: what the planner hands to the executor, and what is stored with a relation.
//!
//! A job is a list of [`Fragment`]s; a fragment is a tree of [`Node`]s between exchanges, run by one
//! task or by `parallelism` tasks that own disjoint vnodes. All operators refer to columns of their
//! inputs by position; expressions other than columns are computed by [`Operator::Project`] and
//! [`Operator::Filter`], and by the residual of a join.
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
//! | matches, `Keyed` | `left_keys`, then `unique_key`, an u64 sequence, 8 bytes BE, an u32 ordinal, 4 bytes BE | all columns of the right input, then `copies` | Keyed |
//! | matches, `Multiset` | `left_keys`, then all other columns of the left input, sequence, ordinal | as above | Keyed |
//! | window close, expire | `column`, then all other columns in order | all columns of the input | Multiset |
//! | closing times | the time, `group` | the time, the columns of `group` | Keyed |
//! | top-N, window | `group`, `order` (with its sort options), then the identity | all columns of the input | `storage` |
//!
//! The identity of a top-N's or window's row is `unique_key` (`Keyed`) or all columns that are in neither `group`
//! nor `order`, ascending by position (`Multiset`). An aggregate value table encodes its value
//! column ascending or descending ([`AggCall::value_descending`]), so that MIN and MAX are the first
//! entry of a group's prefix.

pub mod codec;
pub mod state;

use arrow::compute::SortOptions;
use arrow::datatypes::{DataType, Schema, SchemaRef};
use arrow::record_batch::RecordBatch;
use millrace_common::RelationId;
use millrace_common::access::{AccessClass, RetentionBy};
use millrace_functions::aggregate_kind::AggFunc;
use millrace_functions::expr::ExprRef;
use millrace_functions::window_call::{RankFunction, WindowCall};
use millrace_rpc::catalog::RowStorage;

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

/// From when on rows of a state table are never reached again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retention {
    pub by: RetentionBy,
    /// Rows whose time is below the least of these go. Never empty.
    pub terms: Vec<WatermarkTerm>,
}

/// A pipeline of operators between exchanges.
#[derive(Clone, Debug)]
pub struct Fragment {
    /// Children before parents; the last node is the fragment's root.
    pub nodes: Vec<Node>,
    /// One task however large the job's parallelism.
    pub singleton: bool,
    pub output: FragmentOutput,
}

/// Where a fragment's rows go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FragmentOutput {
    /// To another fragment's [`Operator::Exchange`], to the task that owns the vnode of the hash of
    /// these columns; no columns: to its only task.
    Exchange { to: usize, hash: Vec<usize> },
    /// The root is [`Operator::Materialize`] or a sink.
    Relation,
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

#[derive(Clone, Debug)]
pub enum Operator {
    /// The snapshot, then the changes of another relation. `columns`: positions in that relation.
    Subscribe {
        relation: RelationId,
        columns: Vec<usize>,
    },
    /// Reads a source's splits directly. `columns` as above.
    Source {
        relation: RelationId,
        columns: Vec<usize>,
    },
    /// Rows from another fragment of this job.
    Exchange {
        fragment: usize,
    },
    /// Constant rows, emitted once, in the job's first epoch. Singleton.
    Values {
        batch: RecordBatch,
    },
    Filter {
        predicate: ExprRef,
    },
    Project {
        exprs: Vec<ExprRef>,
    },
    /// Bag union: one port an input, same schema.
    Union,
    /// Appends `window_start` and `window_end` columns; a row goes into `size / slide` windows
    /// (TUMBLE: slide = size). Microseconds. Rows with a NULL time vanish.
    Hop {
        time_column: usize,
        size_us: i64,
        slide_us: i64,
        offset_us: i64,
    },
    /// A row as many times as a BIGINT column of it says; not at all where that is NULL or below one.
    /// Passes all columns on.
    Repeat {
        times_column: usize,
    },
    /// A row once for each element of its lists, which are read side by side, the shorter ones filled up with
    /// NULLs: the elements take the lists' places. A row without elements vanishes, or has NULLs.
    Unnest {
        lists: Vec<usize>,
        keep_empty: bool,
    },
    /// Every row once for each grouping set.
    Expand(Expand),
    Aggregate(Aggregate),
    Join(Join),
    Lookup(Lookup),
    TopN(TopN),
    Window(Window),
    /// EMIT ON WINDOW CLOSE: holds rows back until the watermark of a column passes their value in it,
    /// then emits what they net to, once.
    WindowClose(EventTimeBuffer),
    /// Appends the processing time plus so many microseconds, a TIMESTAMP: when a row is too old for a job with a
    /// TTL.
    Stamp {
        add_us: i64,
    },
    /// A temporal filter: rows pass, and are retracted when the epoch's wall-clock time reaches the
    /// instant in a column. Rows whose time has come already, or that have none, vanish.
    TemporalUpperBound(EventTimeBuffer),
    /// A temporal filter: rows wait until the epoch's wall-clock time reaches the instant in a column. Rows that
    /// have none vanish.
    TemporalLowerBound(EventTimeBuffer),
    /// Writes the relation's rows to table 0 and its change to subscribers. The root.
    Materialize,
    /// Computes all and stores nothing but counts: rows and an order-independent hash. The root.
    Blackhole,
    /// Nets each epoch's change and hands it on to a target; stores no rows. The root.
    Sink,
}

/// GROUPING SETS: a row leaves once for each set, with the input's columns, then a copy of each of
/// `columns` that is NULL where the set does not group by it, then the set's id (BIGINT NOT NULL).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expand {
    /// Input columns that some set groups by.
    pub columns: Vec<usize>,
    pub sets: Vec<GroupingSet>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupingSet {
    /// Parallel to [`Expand::columns`]: whether the set groups by it.
    pub keep: Vec<bool>,
    pub id: i64,
}

/// Grouped aggregation. Output: the group columns, then one column a call. With no group columns
/// there is exactly one output row, also over empty input, and the fragment is a singleton.
/// With no calls it is DISTINCT.
#[derive(Clone, Debug)]
pub struct Aggregate {
    pub group: Vec<usize>,
    /// Input columns, some or all of `group`, whose hash is the vnode of a group's state.
    pub vnode: Vec<usize>,
    pub calls: Vec<AggCall>,
    /// One row a group: count of input rows, then the calls' accumulators.
    pub table: usize,
}

#[derive(Clone, Debug)]
pub struct AggCall {
    pub func: AggFunc,
    /// Input column; `None` for `count(*)`.
    pub arg: Option<usize>,
    pub distinct: bool,
    /// A boolean input column: only rows where it is true count.
    pub filter: Option<usize>,
    pub output_type: DataType,
    /// MIN/MAX that may be retracted, and DISTINCT calls: state table `group | value → count`.
    /// Calls over the same (arg, filter) and direction share one.
    pub value_table: Option<usize>,
    /// The value table's value column is encoded descending (MAX), else ascending.
    pub value_descending: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum JoinKind {
    Inner,
    LeftOuter,
    RightOuter,
    FullOuter,
    LeftSemi,
    RightSemi,
    LeftAnti,
    RightAnti,
    /// Left rows plus a boolean column: whether a match exists (NULL where NOT IN would not know).
    LeftMark,
}

/// How one side of a join keeps its rows: `join key | row identity → row`; of a null-aware join
/// `row identity → row`, since it compares its keys itself.
#[derive(Clone, Debug)]
pub struct JoinSide {
    /// Positions of the join key columns in this side's input.
    pub keys: Vec<usize>,
    /// Input columns, some or all of `keys`, whose hash is the vnode; the other side's list names
    /// the matching keys in the same order. Empty: vnode 0, one task.
    pub vnode: Vec<usize>,
    pub table: usize,
    /// Keyed: the identity is `unique_key`; Multiset: the whole row; Append: a sequence.
    pub storage: RowStorage,
    /// Columns of this side's input that make a row unique together with `keys`, for `Keyed`; of a
    /// null-aware join, by themselves. Empty when `unique_per_key`.
    pub unique_key: Vec<usize>,
    /// At most one row a join key: the join key contains a unique key. Of a null-aware join: at most one row.
    pub unique_per_key: bool,
}

/// A hash join on equal keys. No keys: a cross join, singleton. Output: left columns then right
/// columns (outer), left or right columns (semi, anti), left columns then the mark.
#[derive(Clone, Debug)]
pub struct Join {
    pub kind: JoinKind,
    pub left: JoinSide,
    pub right: JoinSide,
    /// Over left columns then right columns; must be true for a pair to match.
    pub residual: Option<ExprRef>,
    /// `NOT IN`: NULL on either side makes the answer unknown (§12, null-aware anti join).
    pub null_aware: bool,
    /// NULL keys are equal to each other (`IS NOT DISTINCT FROM`, set operations).
    pub null_equals_null: bool,
    /// Positions, in the output described above, of the columns that are kept.
    pub output: Vec<usize>,
}

/// A join with a relation as of the processing time: a left row meets the right rows as they are at the
/// epoch that it comes with, and what it has met stays, whatever becomes of the right side. Right changes of
/// an epoch are taken in before the epoch's left rows; they emit nothing. Output as a join's; left rows with a
/// NULL key meet nothing.
#[derive(Clone, Debug)]
pub struct Lookup {
    /// Left rows that meet nothing are padded with NULLs (LEFT JOIN), else dropped.
    pub outer: bool,
    /// Positions of the join key columns in the left input; never empty.
    pub left_keys: Vec<usize>,
    /// Left columns, some or all of `left_keys`, whose hash is the vnode.
    pub left_vnode: Vec<usize>,
    pub right: JoinSide,
    /// Over left columns then right columns; must be true for a pair to match.
    pub residual: Option<ExprRef>,
    /// Positions in left columns then right columns.
    pub output: Vec<usize>,
    /// Present where left rows may be retracted: what each has met.
    pub matches: Option<Matches>,
}

/// What left rows of a lookup have met: an entry a pair, one with NULLs for a row that met nothing (none if the
/// rows are told apart by a unique key and not padded).
#[derive(Clone, Debug)]
pub struct Matches {
    pub table: usize,
    /// How left rows are told apart beside their key: `Keyed` by `unique_key`, `Multiset` by the whole row.
    pub identity: RowStorage,
    pub unique_key: Vec<usize>,
}

/// Rows kept in order of an instant: `column | all other columns → row`.
#[derive(Clone, Debug)]
pub struct EventTimeBuffer {
    /// A timestamp column of the input.
    pub column: usize,
    /// Input columns whose hash is the vnode. Empty: vnode 0, one task.
    pub vnode: Vec<usize>,
    pub table: usize,
}

/// The first rows of every group by an order (ORDER BY … LIMIT, DISTINCT ON, row_number() <= n).
/// Ties are broken by the row's own bytes, so the result is a function of the content.
#[derive(Clone, Debug)]
pub struct TopN {
    pub group: Vec<usize>,
    /// Input columns, some or all of `group`, whose hash is the vnode of a group's state. Empty:
    /// vnode 0, one task.
    pub vnode: Vec<usize>,
    pub order: Vec<(usize, SortOptions)>,
    pub offset: u64,
    /// `None`: all rows from `offset` (an OFFSET without LIMIT).
    pub limit: Option<u64>,
    /// What counts toward offset and limit: a row is kept when its rank by this function is in
    /// `offset + 1 ..= offset + limit`.
    pub rank: RankFunction,
    /// Appends the rank (from 1, counted from the group's first row) as a BIGINT NOT NULL column.
    pub emit_rank: bool,
    /// `group | order | identity → row`.
    pub table: usize,
    /// `Keyed` or `Multiset`.
    pub storage: RowStorage,
    /// Columns, beyond `group` and `order`, that together with them make a row unique, for `Keyed`.
    pub unique_key: Vec<usize>,
    /// The input never retracts: a row that has left the window never comes back, so only the
    /// window's rows are kept. Fixed for the life of the job: it decides what the table holds.
    pub append_only_input: bool,
}

/// Window functions over the rows of each group in an order. Output: the input's columns, then one
/// column a call. Rows that are level are in the order of their own bytes.
#[derive(Clone, Debug)]
pub struct Window {
    pub group: Vec<usize>,
    /// As in [`TopN`].
    pub vnode: Vec<usize>,
    pub order: Vec<(usize, SortOptions)>,
    pub calls: Vec<WindowCall>,
    /// `group | order | identity → row`, every row.
    pub table: usize,
    /// `Keyed` or `Multiset`.
    pub storage: RowStorage,
    /// As in [`TopN`].
    pub unique_key: Vec<usize>,
    /// Of sessions and ASOF joins over a time with a watermark: when their rows go.
    pub closing: Option<Closing>,
}

/// How rows of sessions and ASOF joins leave the state. A session is closed when the watermark of its time has come to its
/// last time plus the gap, because no row that joins it can come any more. Of an ASOF join all rows below the watermark
/// go but those of each group that rows to come may concern.
#[derive(Clone, Debug)]
pub struct Closing {
    /// The input's timestamp column, the first of the order.
    pub column: usize,
    /// Of sessions, in microseconds; else 0.
    pub gap: i64,
    /// When to look at a group: `time | group`. Times that are over are left where they are; retention takes them.
    pub table: usize,
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
