//! The operators of a job graph and what is declared of each.

use std::sync::Arc;

use arrow::compute::SortOptions;
use arrow::datatypes::{DataType, Field, FieldRef, Schema};
use arrow::record_batch::RecordBatch;
use millrace_common::RelationId;
use millrace_functions::aggregate_kind::AggFunc;
use millrace_functions::expr::{self, ExprRef};
use millrace_functions::window_call::{RankFunction, WindowCall};
use millrace_rpc::catalog::RowStorage;

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
    /// What an edge from another fragment of this job brings.
    Exchange {
        fragment: usize,
        /// Which of that fragment's outputs.
        output: usize,
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

/// Whether an operator takes rows from elsewhere, makes others of them, or ends the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Reads a relation or holds rows itself: one of the job's inputs.
    Input,
    /// Takes the rows of another fragment.
    Exchange,
    Inner,
    /// Keeps the result or hands it on.
    Root,
}

/// Every operator answers every question: a new one does not compile until it does.
#[deny(clippy::wildcard_enum_match_arm)]
impl Operator {
    /// As metrics and traces call it.
    pub fn name(&self) -> &'static str {
        match self {
            Operator::Subscribe { .. } => "Subscribe",
            Operator::Source { .. } => "Source",
            Operator::Exchange { .. } => "Exchange",
            Operator::Values { .. } => "Values",
            Operator::Filter { .. } => "Filter",
            Operator::Project { .. } => "Project",
            Operator::Union => "Union",
            Operator::Hop { .. } => "Hop",
            Operator::Repeat { .. } => "Repeat",
            Operator::Stamp { .. } => "Stamp",
            Operator::Unnest { .. } => "Unnest",
            Operator::Expand(_) => "Expand",
            Operator::Aggregate(_) => "Aggregate",
            Operator::Join(_) => "Join",
            Operator::Lookup(_) => "Lookup",
            Operator::TopN(_) => "TopN",
            Operator::Window(_) => "Window",
            Operator::WindowClose(_) => "WindowClose",
            Operator::TemporalUpperBound(_) => "Expire",
            Operator::TemporalLowerBound(_) => "Appear",
            Operator::Materialize => "Materialize",
            Operator::Blackhole => "Blackhole",
            Operator::Sink => "Sink",
        }
    }

    pub fn role(&self) -> Role {
        match self {
            Operator::Subscribe { .. } | Operator::Source { .. } | Operator::Values { .. } => {
                Role::Input
            }
            Operator::Exchange { .. } => Role::Exchange,
            Operator::Filter { .. }
            | Operator::Project { .. }
            | Operator::Union
            | Operator::Hop { .. }
            | Operator::Repeat { .. }
            | Operator::Stamp { .. }
            | Operator::Unnest { .. }
            | Operator::Expand(_)
            | Operator::Aggregate(_)
            | Operator::Join(_)
            | Operator::Lookup(_)
            | Operator::TopN(_)
            | Operator::Window(_)
            | Operator::WindowClose(_)
            | Operator::TemporalUpperBound(_)
            | Operator::TemporalLowerBound(_) => Role::Inner,
            Operator::Materialize | Operator::Blackhole | Operator::Sink => Role::Root,
        }
    }

    /// Its state tables that are kept while the watermark allows, by what the cleaning calls tell it.
    pub fn cleaned_tables(&self) -> Vec<usize> {
        match self {
            Operator::Aggregate(a) => vec![a.table],
            Operator::Join(j) => vec![j.left.state.table, j.right.state.table],
            Operator::Lookup(l) => {
                [l.right.state.table].into_iter().chain(l.matches.iter().map(|m| m.table)).collect()
            }
            Operator::TopN(t) => vec![t.state.table],
            Operator::Window(w) => vec![w.state.table],
            // They clean up after themselves: the watermark is what they wait for.
            Operator::WindowClose(_)
            | Operator::TemporalUpperBound(_)
            | Operator::TemporalLowerBound(_) => vec![],
            Operator::Subscribe { .. }
            | Operator::Source { .. }
            | Operator::Exchange { .. }
            | Operator::Values { .. }
            | Operator::Filter { .. }
            | Operator::Project { .. }
            | Operator::Union
            | Operator::Hop { .. }
            | Operator::Repeat { .. }
            | Operator::Stamp { .. }
            | Operator::Unnest { .. }
            | Operator::Expand(_)
            | Operator::Materialize
            | Operator::Blackhole
            | Operator::Sink => vec![],
        }
    }

    /// Whether over a part of its input's snapshot it has rows that it does not have over the whole.
    pub fn has_intermediate_rows(&self) -> bool {
        match self {
            Operator::Aggregate(_) | Operator::TopN(_) | Operator::Window(_) => true,
            Operator::Join(j) => j.kind != JoinKind::Inner,
            // What is looked up is scanned before what it is looked up for.
            Operator::Lookup(_) => false,
            // A closed window is whole; the others let each row pass by itself.
            Operator::WindowClose(_)
            | Operator::TemporalUpperBound(_)
            | Operator::TemporalLowerBound(_)
            | Operator::Subscribe { .. }
            | Operator::Source { .. }
            | Operator::Exchange { .. }
            | Operator::Values { .. }
            | Operator::Filter { .. }
            | Operator::Project { .. }
            | Operator::Union
            | Operator::Hop { .. }
            | Operator::Repeat { .. }
            | Operator::Stamp { .. }
            | Operator::Unnest { .. }
            | Operator::Expand(_)
            | Operator::Materialize
            | Operator::Blackhole
            | Operator::Sink => false,
        }
    }
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
/// With no calls it is DISTINCT. `S` and `T`: the calls' state and the table, as far as they are known.
#[derive(Clone, Debug)]
pub struct Aggregate<S = Option<ValueTable>, T = usize> {
    pub group: Vec<usize>,
    /// Input columns, some or all of `group`, whose hash is the vnode of a group's state.
    pub vnode: Vec<usize>,
    pub calls: Vec<AggCall<S>>,
    /// One row a group: count of input rows, then the calls' accumulators.
    pub table: T,
}

impl<S, T> Aggregate<S, T> {
    /// The input's columns that decide the results.
    pub fn columns_read(&self) -> Vec<usize> {
        let arguments = self.calls.iter().flat_map(|c| c.arg.into_iter().chain(c.filter));
        self.group.iter().copied().chain(arguments).collect()
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct AggCall<S = Option<ValueTable>> {
    pub func: AggFunc,
    /// Input column; `None` for `count(*)`.
    pub arg: Option<usize>,
    pub distinct: bool,
    /// A boolean input column: only rows where it is true count.
    pub filter: Option<usize>,
    pub output_type: DataType,
    pub state: S,
}

/// MIN/MAX that may be retracted, and DISTINCT calls: state table `group | value → count`. Calls over the same
/// (arg, filter) and direction share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValueTable {
    pub table: usize,
    /// The value column is encoded descending (MAX), else ascending.
    pub descending: bool,
}

impl<S> AggCall<S> {
    /// The same call, its values kept otherwise.
    pub fn with_state<T>(self, state: T) -> AggCall<T> {
        let AggCall { func, arg, distinct, filter, output_type, .. } = self;
        AggCall { func, arg, distinct, filter, output_type, state }
    }
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

impl JoinKind {
    /// The fields of the join's full output, before [`Join::output`] selects.
    pub fn output_fields(self, left: &Schema, right: &Schema) -> Vec<FieldRef> {
        let side = |schema: &Schema, nullable: bool| -> Vec<FieldRef> {
            let fields = schema.fields().iter();
            if nullable {
                fields.map(|f| Arc::new(f.as_ref().clone().with_nullable(true))).collect()
            } else {
                fields.cloned().collect()
            }
        };
        let both = |l, r| [side(left, l), side(right, r)].concat();
        match self {
            JoinKind::Inner => both(false, false),
            JoinKind::LeftOuter => both(false, true),
            JoinKind::RightOuter => both(true, false),
            JoinKind::FullOuter => both(true, true),
            JoinKind::LeftSemi | JoinKind::LeftAnti => side(left, false),
            JoinKind::RightSemi | JoinKind::RightAnti => side(right, false),
            JoinKind::LeftMark => {
                let mut fields = side(left, false);
                fields.push(Arc::new(Field::new("mark", DataType::Boolean, true)));
                fields
            }
        }
    }
}

/// One side of a join. `S`: how it keeps its rows, `()` before tables are numbered.
#[derive(Clone, Debug)]
pub struct JoinSide<S = SideState> {
    /// Positions of the join key columns in this side's input.
    pub keys: Vec<usize>,
    /// Input columns, some or all of `keys`, whose hash is the vnode; the other side's list names
    /// the matching keys in the same order. Empty: vnode 0, one task.
    pub vnode: Vec<usize>,
    pub state: S,
}

/// How one side of a join keeps its rows: `join key | row identity → row`; of a null-aware join
/// `row identity → row`, since it compares its keys itself.
#[derive(Clone, Debug)]
pub struct SideState {
    pub table: usize,
    /// Keyed: the identity is `unique_key`; Multiset: the whole row; Append: a sequence.
    pub storage: RowStorage,
    /// Columns of this side's input that make a row unique together with `keys`, for `Keyed`; of a
    /// null-aware join, by themselves. Empty when `unique_per_key`.
    pub unique_key: Vec<usize>,
    /// At most one row a join key: the join key contains a unique key. Of a null-aware join: at most one row.
    pub unique_per_key: bool,
}

impl<S> JoinSide<S> {
    /// The same side, its rows kept otherwise.
    pub fn with_state<T>(self, state: T) -> JoinSide<T> {
        JoinSide { keys: self.keys, vnode: self.vnode, state }
    }
}

/// A hash join on equal keys. No keys: a cross join, singleton. Output: left columns then right
/// columns (outer), left or right columns (semi, anti), left columns then the mark.
#[derive(Clone, Debug)]
pub struct Join<S = SideState> {
    pub kind: JoinKind,
    pub left: JoinSide<S>,
    pub right: JoinSide<S>,
    /// Over left columns then right columns; must be true for a pair to match.
    pub residual: Option<ExprRef>,
    /// `NOT IN`: NULL on either side makes the answer unknown (§12, null-aware anti join).
    pub null_aware: bool,
    /// NULL keys are equal to each other (`IS NOT DISTINCT FROM`, set operations).
    pub null_equals_null: bool,
    /// Positions, in the output described above, of the columns that are kept.
    pub output: Vec<usize>,
}

impl<S> Join<S> {
    /// The (left, right) columns that must be equal.
    pub fn pairs(&self) -> impl Iterator<Item = (usize, usize)> {
        self.left.keys.iter().copied().zip(self.right.keys.iter().copied())
    }
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

/// Rows kept in order of an instant: `column | all other columns → row`. `T`: its state table, `()` before tables are
/// numbered.
#[derive(Clone, Debug)]
pub struct EventTimeBuffer<T = usize> {
    /// A timestamp column of the input.
    pub column: usize,
    /// Input columns whose hash is the vnode. Empty: vnode 0, one task.
    pub vnode: Vec<usize>,
    pub table: T,
}

/// The first rows of every group by an order (ORDER BY … LIMIT, DISTINCT ON, row_number() <= n).
/// Ties are broken by the row's own bytes, so the result is a function of the content. `S`: how its rows are kept,
/// as far as that is known where it stands.
#[derive(Clone, Debug)]
pub struct TopN<S = TopNState> {
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
    pub state: S,
}

#[derive(Clone, Debug)]
pub struct TopNState {
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

impl<S> TopN<S> {
    /// The same rows, kept otherwise.
    pub fn with_state<T>(self, state: T) -> TopN<T> {
        TopN {
            group: self.group,
            vnode: self.vnode,
            order: self.order,
            offset: self.offset,
            limit: self.limit,
            rank: self.rank,
            emit_rank: self.emit_rank,
            state,
        }
    }

    /// The input's columns that decide which rows are put out.
    pub fn columns_read(&self) -> Vec<usize> {
        self.group.iter().copied().chain(self.order.iter().map(|o| o.0)).collect()
    }
}

/// Window functions over the rows of each group in an order. Output: the input's columns, then one
/// column a call. Rows that are level are in the order of their own bytes. `S` as in [`TopN`].
#[derive(Clone, Debug)]
pub struct Window<S = WindowState> {
    pub group: Vec<usize>,
    /// As in [`TopN`].
    pub vnode: Vec<usize>,
    pub order: Vec<(usize, SortOptions)>,
    pub calls: Vec<WindowCall>,
    pub state: S,
}

#[derive(Clone, Debug)]
pub struct WindowState {
    /// `group | order | identity → row`, every row.
    pub table: usize,
    /// `Keyed` or `Multiset`.
    pub storage: RowStorage,
    /// As in [`TopNState`].
    pub unique_key: Vec<usize>,
    /// Of sessions and ASOF joins over a time with a watermark: when their rows go.
    pub closing: Option<Closing>,
}

impl<S> Window<S> {
    /// The same calls, their rows kept otherwise.
    pub fn with_state<T>(self, state: T) -> Window<T> {
        Window { group: self.group, vnode: self.vnode, order: self.order, calls: self.calls, state }
    }

    /// The input's columns that decide the results.
    pub fn columns_read(&self) -> Vec<usize> {
        let arguments = self.calls.iter().flat_map(|c| c.args.iter().chain(&c.filter));
        let order = self.order.iter().map(|o| o.0);
        let own = self.group.iter().copied().chain(order);
        own.chain(arguments.flat_map(expr::columns_of)).collect()
    }
}

/// How rows of sessions and ASOF joins leave the state. A session is closed when the watermark of its time
/// has come to its last time plus the gap, because no row that joins it can come any more. Of an ASOF join
/// all rows below the watermark go but those of each group that rows to come may concern.
#[derive(Clone, Debug)]
pub struct Closing {
    /// The input's timestamp column, the first of the order.
    pub column: usize,
    /// Of sessions, in microseconds; else 0.
    pub gap: i64,
    /// When to look at a group: `time | group`. Times that are over are left where they are; retention takes them.
    pub table: usize,
}
