//! Aggregates, joins and top-N against a naive evaluation.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use arrow::compute::SortOptions;
use arrow::datatypes::{DataType, Field, Schema};
use datafusion::logical_expr::Operator as BinaryOp;
use datafusion::physical_expr::expressions::{BinaryExpr, Column};
use millrace_functions::aggregate_kind::AggFunc;
use millrace_functions::window_call::RankFunction;
use millrace_graph::state::accumulator_schema;
use millrace_graph::{
    AggCall, Aggregate, Join, JoinKind, JoinSide, Node, Operator as Op, SideState, TopN, TopNState,
    ValueTable,
};
use millrace_rpc::catalog::RowStorage;
use rand::Rng;
use rand::rngs::StdRng;

use super::fake::FakeTable;
use super::history::{History, Kind, Row, ZSet, accumulate, add, chunk, schema, text};
use super::model::PLANTED;
use super::seeded;
pub(super) use super::subject::{Subject, random_options};
use crate::operator::{Operator, Output};
use crate::options::ExecOptions;

fn take(out: &mut Output, into: &mut ZSet<Vec<String>>) {
    for chunk in out.take() {
        accumulate(into, &chunk);
    }
}

/// Runs histories through the subject; compares with `expected` at every barrier.
fn check(
    seed: u64,
    subject: &Subject,
    rng: &mut StdRng,
    histories: &mut [History],
    expected: impl Fn(&[History]) -> ZSet<Vec<String>>,
) {
    let _unplanted = PLANTED.read();
    let mut actual = ZSet::new();
    let mut op = subject.build();
    for epoch in 0..rng.random_range(1..8) {
        let mut deltas: Vec<(usize, (Row, i64))> = Vec::new();
        for (port, history) in histories.iter_mut().enumerate() {
            deltas.extend(history.epoch(rng).into_iter().map(|d| (port, d)));
        }
        futures::executor::block_on(run_epoch(op.as_mut(), deltas, rng, &mut actual, subject));
        let expected = expected(histories);
        assert_eq!(
            actual, expected,
            "seed {seed} epoch {epoch} {:?} {:?}",
            subject.node.op, subject.options
        );
        if rng.random_bool(0.3) {
            op = subject.restart(Some(op.as_ref()));
        }
    }
}

pub(super) async fn run_epoch(
    op: &mut dyn Operator,
    mut deltas: Vec<(usize, (Row, i64))>,
    rng: &mut StdRng,
    actual: &mut ZSet<Vec<String>>,
    subject: &Subject,
) {
    let mut out = Output::default();
    while !deltas.is_empty() {
        let port = deltas[0].0;
        let size = rng.random_range(1..8);
        let mut rows = Vec::new();
        deltas.retain(|d| {
            let taken = d.0 == port && rows.len() < size;
            if taken {
                rows.push(d.1);
            }
            !taken
        });
        while op.is_full() {
            assert!(op.is_pending(), "full and nothing under way");
            op.progress(&mut out).await.unwrap();
        }
        op.push(port, chunk(&rows), &mut out).unwrap();
        if op.is_pending() && rng.random_bool(0.3) {
            op.progress(&mut out).await.unwrap();
        }
        if op.is_over() || rng.random_bool(0.05) {
            while op.is_pending() {
                op.progress(&mut out).await.unwrap();
            }
            op.settle(&mut out).await.unwrap();
            while op.is_settling() {
                take(&mut out, actual);
                op.settle(&mut out).await.unwrap();
            }
        }
        take(&mut out, actual);
    }
    while op.is_pending() {
        op.progress(&mut out).await.unwrap();
    }
    assert!(!op.is_full());
    op.barrier(&mut out).await.unwrap();
    op.seal(&mut Vec::new()).unwrap();
    for chunk in out.take() {
        let most = subject.options.chunk_rows.max(8);
        assert!(chunk.num_rows() <= most, "{} of {most}: {:?}", chunk.num_rows(), chunk);
        accumulate(actual, &chunk);
    }
}

pub(super) fn kind(rng: &mut StdRng) -> Kind {
    [Kind::Append, Kind::Multiset, Kind::Keyed][rng.random_range(0..3)]
}

pub(super) fn storage(kind: Kind) -> RowStorage {
    match kind {
        Kind::Append => RowStorage::Append,
        Kind::Multiset => RowStorage::Multiset,
        Kind::Keyed => RowStorage::Keyed,
    }
}

pub(super) fn delay(rng: &mut StdRng) -> Option<u64> {
    rng.random_bool(0.7).then(|| rng.random())
}

pub(super) fn show(v: Option<i64>) -> String {
    v.map_or("NULL".into(), |v| v.to_string())
}

#[test]
fn aggregates_equal_a_naive_evaluation() {
    for (seed, ref mut rng) in seeded(300, 3000) {
        let kind = kind(rng);
        let group = if rng.random_bool(0.2) { vec![] } else { vec![0] };
        let calls = aggregate_calls(kind);
        let mut fields: Vec<Field> = group.iter().map(|&g| schema().field(g).clone()).collect();
        fields.extend(
            calls
                .iter()
                .enumerate()
                .map(|(i, c)| Field::new(format!("c{i}"), c.output_type.clone(), true)),
        );
        let state = accumulator_schema(&group, &calls, &schema());
        let delay = delay(rng);
        let values = |c: usize| {
            let value = Schema::new(vec![schema().field(c).clone()]);
            FakeTable::new(Arc::new(value), RowStorage::Multiset, delay)
        };
        let subject = Subject {
            node: Node {
                op: Op::Aggregate(Aggregate {
                    vnode: group.clone(),
                    group: group.clone(),
                    calls,
                    table: 0,
                }),
                inputs: vec![0],
                schema: Arc::new(Schema::new(fields)),
                append_only: false,
                marks: vec![],
            },
            inputs: vec![schema()],
            tables: vec![
                FakeTable::new(state, RowStorage::Keyed, delay),
                values(1),
                values(1),
                values(2),
                values(2),
                values(3),
            ],
            options: random_options(rng),
            event_time: vec![],
        };
        let mut history = [History::new(kind, 4)];
        check(seed, &subject, rng, &mut history, |h| {
            naive_aggregate(&h[0].content, !group.is_empty())
        });
    }
}

/// With the tables of values that they need where rows can be taken back.
fn aggregate_calls(kind: Kind) -> Vec<AggCall> {
    let value = |func, distinct: bool, c: usize| match func {
        AggFunc::Min | AggFunc::Max if kind == Kind::Append => None,
        AggFunc::Min => Some(2 * c - 1),
        AggFunc::Max => Some(2 * c),
        _ => distinct.then_some(2 * c - 1),
    };
    let call = |func, arg: Option<usize>, distinct, output_type| AggCall {
        func,
        arg,
        distinct,
        filter: None,
        output_type,
        state: value(func, distinct, arg.unwrap_or(1))
            .map(|table| ValueTable { table, descending: func == AggFunc::Max }),
    };
    vec![
        call(AggFunc::Count, None, false, DataType::Int64),
        call(AggFunc::Count, Some(1), false, DataType::Int64),
        call(AggFunc::Sum, Some(1), false, DataType::Int64),
        call(AggFunc::Min, Some(1), false, DataType::Int64),
        call(AggFunc::Max, Some(1), false, DataType::Int64),
        call(AggFunc::Min, Some(2), false, DataType::Utf8),
        call(AggFunc::Max, Some(2), false, DataType::Utf8),
        call(AggFunc::Count, Some(1), true, DataType::Int64),
        call(AggFunc::Sum, Some(1), true, DataType::Int64),
        call(AggFunc::Avg, Some(1), false, DataType::Decimal128(38, 6)),
        call(AggFunc::Count, Some(2), true, DataType::Int64),
        call(AggFunc::Count, Some(3), true, DataType::Int64),
    ]
}

fn naive_aggregate(content: &ZSet<Row>, grouped: bool) -> ZSet<Vec<String>> {
    let mut groups: BTreeMap<Option<i64>, Vec<(Row, i64)>> = BTreeMap::new();
    if !grouped {
        groups.insert(None, Vec::new());
    }
    for (&row, &weight) in content {
        groups.entry(if grouped { row.0 } else { None }).or_default().push((row, weight));
    }
    let mut result = ZSet::new();
    for (key, rows) in groups {
        let values: Vec<(i64, i64)> = rows.iter().filter_map(|(r, w)| Some((r.1?, *w))).collect();
        let texts: BTreeSet<String> = rows.iter().filter_map(|(r, _)| text(r.2)).collect();
        let distinct: BTreeSet<i64> = values.iter().map(|v| v.0).collect();
        let count: i64 = values.iter().map(|v| v.1).sum();
        let sum: i64 = values.iter().map(|v| v.0 * v.1).sum();
        let some = |v: i64| (count > 0).then_some(v);
        let avg = some(0).map_or("NULL".into(), |_| {
            let micro = (sum * 2_000_000 + count) / (2 * count);
            format!("{}.{:06}", micro / 1_000_000, micro % 1_000_000)
        });
        let mut line = if grouped { vec![show(key)] } else { vec![] };
        let null = || "NULL".to_string();
        line.extend([
            rows.iter().map(|r| r.1).sum::<i64>().to_string(),
            count.to_string(),
            show(some(sum)),
            show(distinct.first().copied()),
            show(distinct.last().copied()),
            texts.first().cloned().unwrap_or_else(null),
            texts.last().cloned().unwrap_or_else(null),
            distinct.len().to_string(),
            show(some(distinct.iter().sum())),
            avg,
            texts.len().to_string(),
            rows.iter().map(|(r, _)| r.3).collect::<BTreeSet<i64>>().len().to_string(),
        ]);
        add(&mut result, line, 1);
    }
    result
}

/// A row may be taken back before it comes. In between its group has as many retractions as rows, and holds sums
/// all the same: neither a full cache nor a large epoch may lose them, and nothing stays when they are gone.
#[test]
fn a_group_with_as_many_retractions_as_rows_keeps_what_it_holds() {
    let call = |func, arg, output_type| AggCall {
        func,
        arg,
        distinct: false,
        filter: None,
        output_type,
        state: None,
    };
    let calls = vec![
        call(AggFunc::Count, None, DataType::Int64),
        call(AggFunc::Sum, Some(1), DataType::Int64),
    ];
    let outputs = calls.iter().map(|c| Field::new("c", c.output_type.clone(), true));
    let fields: Vec<Field> = [schema().field(0).clone()].into_iter().chain(outputs).collect();
    let state = accumulator_schema(&[0], &calls, &schema());
    let subject = Subject {
        node: Node {
            op: Op::Aggregate(Aggregate { vnode: vec![0], group: vec![0], calls, table: 0 }),
            inputs: vec![0],
            schema: Arc::new(Schema::new(fields)),
            append_only: false,
            marks: vec![],
        },
        inputs: vec![schema()],
        tables: vec![FakeTable::new(state, RowStorage::Keyed, None)],
        options: ExecOptions { cache_bytes: 1, group_change_bytes: 1, ..ExecOptions::default() },
        event_time: vec![],
    };
    let mut op = subject.build();
    let mut actual = ZSet::new();
    let mut epoch = |parts: &[&[(i64, i64)]]| {
        let mut out = Output::default();
        for part in parts {
            let rows: Vec<(Row, i64)> =
                part.iter().map(|&(v, weight)| ((Some(1), Some(v), None, 0), weight)).collect();
            op.push(0, chunk(&rows), &mut out).unwrap();
        }
        futures::executor::block_on(op.barrier(&mut out)).unwrap();
        op.seal(&mut Vec::new()).unwrap();
        take(&mut out, &mut actual);
        actual.clone()
    };
    let expected = BTreeMap::from([(["1", "1", "5"].map(String::from).to_vec(), 1)]);
    assert_eq!(epoch(&[&[(5, 1), (3, -1)], &[(3, 1)]]), expected);
    assert!(epoch(&[&[(5, -1)]]).is_empty());
    assert_eq!(subject.tables[0].len(), 0);
}

const JOINS: [JoinKind; 9] = [
    JoinKind::Inner,
    JoinKind::LeftOuter,
    JoinKind::RightOuter,
    JoinKind::FullOuter,
    JoinKind::LeftSemi,
    JoinKind::RightSemi,
    JoinKind::LeftAnti,
    JoinKind::RightAnti,
    JoinKind::LeftMark,
];

#[test]
fn joins_equal_a_naive_evaluation() {
    for (seed, ref mut rng) in seeded(400, 4000) {
        let kinds = [kind(rng), kind(rng)];
        let join = JOINS[rng.random_range(0..JOINS.len())];
        let nulls = rng.random_bool(0.3);
        let residual = rng.random_bool(0.5);
        let null_aware =
            rng.random_bool(0.3) && matches!(join, JoinKind::LeftAnti | JoinKind::LeftMark);
        // Joined by the unique id instead.
        let unique = kinds == [Kind::Keyed; 2] && rng.random_bool(0.5);
        let per_key = unique && !null_aware;
        let side = |table: usize| JoinSide {
            keys: vec![if unique { 3 } else { 0 }],
            vnode: vec![if unique { 3 } else { 0 }],
            state: SideState {
                table,
                storage: storage(kinds[table]),
                unique_key: if kinds[table] == Kind::Keyed && !per_key { vec![3] } else { vec![] },
                unique_per_key: per_key,
            },
        };
        let column = |name, c| Arc::new(Column::new(name, c));
        let expr = BinaryExpr::new(column("v", 1), BinaryOp::Lt, column("v", 5));
        let one = schema();
        let fields: Vec<Field> = match join {
            JoinKind::LeftSemi | JoinKind::RightSemi | JoinKind::LeftAnti | JoinKind::RightAnti => {
                one.fields().iter().map(|f| f.as_ref().clone()).collect()
            }
            JoinKind::LeftMark => {
                let mark = Field::new("mark", DataType::Boolean, true);
                one.fields().iter().map(|f| f.as_ref().clone()).chain([mark]).collect()
            }
            _ => one.fields().iter().chain(one.fields()).map(|f| f.as_ref().clone()).collect(),
        };
        let delay = delay(rng);
        let table = |t: usize| FakeTable::new(schema(), storage(kinds[t]), delay).finding_some();
        let subject = Subject {
            node: Node {
                op: Op::Join(Join {
                    kind: join,
                    left: side(0),
                    right: side(1),
                    residual: residual.then(|| Arc::new(expr) as _),
                    null_aware,
                    null_equals_null: nulls,
                    output: (0..fields.len()).collect(),
                }),
                inputs: vec![0, 1],
                schema: Arc::new(Schema::new(fields)),
                append_only: join == JoinKind::Inner && kinds == [Kind::Append; 2],
                marks: vec![],
            },
            inputs: vec![schema(), schema()],
            tables: (0..2).map(table).collect(),
            options: random_options(rng),
            event_time: vec![],
        };
        let mut histories = kinds.map(|k| History::new(k, 4));
        let case = Naive { join, nulls: nulls && !null_aware, residual, null_aware, unique };
        check(seed, &subject, rng, &mut histories, |h| case.evaluate(&h[0].content, &h[1].content));
    }
}

struct Naive {
    join: JoinKind,
    nulls: bool,
    residual: bool,
    null_aware: bool,
    unique: bool,
}

impl Naive {
    /// SQL's three values for a pair.
    fn matches(&self, l: &Row, r: &Row) -> Option<bool> {
        if self.residual && !matches!((l.1, r.1), (Some(a), Some(b)) if a < b) {
            return Some(false);
        }
        if self.unique {
            return Some(l.3 == r.3);
        }
        match (l.0, r.0) {
            (Some(a), Some(b)) => Some(a == b),
            (None, None) if self.nulls => Some(true),
            _ if self.null_aware => None,
            _ => Some(false),
        }
    }

    fn evaluate(&self, left: &ZSet<Row>, right: &ZSet<Row>) -> ZSet<Vec<String>> {
        let mut result = ZSet::new();
        let line = |r: &Row| {
            vec![show(r.0), show(r.1), text(r.2).unwrap_or("NULL".into()), r.3.to_string()]
        };
        let none = || vec!["NULL".to_string(); 4];
        let pairs = matches!(
            self.join,
            JoinKind::Inner | JoinKind::LeftOuter | JoinKind::RightOuter | JoinKind::FullOuter
        );
        for (l, lw) in left {
            let truth: Vec<Option<bool>> = right.keys().map(|r| self.matches(l, r)).collect();
            let (any, unknown) = (truth.contains(&Some(true)), truth.contains(&None));
            for ((r, rw), m) in right.iter().zip(&truth) {
                if pairs && *m == Some(true) {
                    add(&mut result, [line(l), line(r)].concat(), lw * rw);
                }
            }
            match self.join {
                JoinKind::LeftOuter | JoinKind::FullOuter if !any => {
                    add(&mut result, [line(l), none()].concat(), *lw);
                }
                JoinKind::LeftSemi if any => add(&mut result, line(l), *lw),
                JoinKind::LeftAnti if !any && !unknown => add(&mut result, line(l), *lw),
                JoinKind::LeftMark => {
                    let mark = if any {
                        "true"
                    } else if unknown {
                        "NULL"
                    } else {
                        "false"
                    };
                    add(&mut result, [line(l), vec![mark.to_string()]].concat(), *lw);
                }
                _ => {}
            }
        }
        for (r, rw) in right {
            let any = left.keys().any(|l| self.matches(l, r) == Some(true));
            match self.join {
                JoinKind::RightOuter | JoinKind::FullOuter if !any => {
                    add(&mut result, [none(), line(r)].concat(), *rw);
                }
                JoinKind::RightSemi if any => add(&mut result, line(r), *rw),
                JoinKind::RightAnti if !any => add(&mut result, line(r), *rw),
                _ => {}
            }
        }
        result
    }
}

#[test]
fn top_n_equals_a_naive_evaluation() {
    for (seed, ref mut rng) in seeded(400, 4000) {
        let kind = kind(rng);
        let group = if rng.random_bool(0.3) { vec![] } else { vec![0] };
        let rank = [RankFunction::RowNumber, RankFunction::Rank, RankFunction::DenseRank]
            [rng.random_range(0..3)];
        let top = TopN {
            group: group.clone(),
            vnode: group.clone(),
            order: vec![(
                1,
                SortOptions { descending: rng.random_bool(0.5), nulls_first: rng.random_bool(0.5) },
            )],
            offset: if rank == RankFunction::RowNumber { rng.random_range(0..3) } else { 0 },
            limit: rng.random_bool(0.9).then(|| rng.random_range(0..5)),
            rank,
            emit_rank: rank != RankFunction::RowNumber || rng.random_bool(0.5),
            state: TopNState {
                table: 0,
                storage: if kind == Kind::Keyed { RowStorage::Keyed } else { RowStorage::Multiset },
                unique_key: if kind == Kind::Keyed { vec![3] } else { vec![] },
                append_only_input: kind == Kind::Append,
            },
        };
        let mut fields: Vec<Field> = schema().fields().iter().map(|f| f.as_ref().clone()).collect();
        if top.emit_rank {
            fields.push(Field::new("rank", DataType::Int64, false));
        }
        let table_storage =
            if kind == Kind::Keyed { RowStorage::Keyed } else { RowStorage::Multiset };
        let subject = Subject {
            node: Node {
                op: Op::TopN(top.clone()),
                inputs: vec![0],
                schema: Arc::new(Schema::new(fields)),
                append_only: false,
                marks: vec![],
            },
            inputs: vec![schema()],
            tables: vec![FakeTable::new(schema(), table_storage, delay(rng))],
            options: random_options(rng),
            event_time: vec![],
        };
        let mut history = [History::new(kind, 3)];
        check(seed, &subject, rng, &mut history, |h| naive_top_n(&h[0].content, &top));
    }
}

pub(super) fn naive_top_n(content: &ZSet<Row>, top: &TopN) -> ZSet<Vec<String>> {
    let options = top.order[0].1;
    let order = |v: Option<i64>| match v {
        None => (if options.nulls_first { 0 } else { 2 }, 0),
        Some(v) => (1, if options.descending { -v } else { v }),
    };
    let mut groups: BTreeMap<Option<i64>, Vec<(Row, i64)>> = BTreeMap::new();
    for (&row, &weight) in content {
        groups
            .entry(if top.group.is_empty() { None } else { row.0 })
            .or_default()
            .push((row, weight));
    }
    let mut result = ZSet::new();
    for rows in groups.values_mut() {
        // Ties: by the unique key, else by the row's bytes; NULLs first, as in the encoding.
        let keyed = !top.state.unique_key.is_empty();
        rows.sort_by_key(|(r, _)| (order(r.1), if keyed { (None, None, None, r.3) } else { *r }));
        let (mut count, mut dense, mut rank) = (0i64, 0i64, 0i64);
        let mut last = None;
        for (row, weight) in rows.iter() {
            for copy in 0..*weight {
                if last != Some(order(row.1)) {
                    dense += 1;
                    rank = count + 1;
                    last = Some(order(row.1));
                }
                let _ = copy;
                count += 1;
                let n = match top.rank {
                    RankFunction::RowNumber => count,
                    RankFunction::Rank => rank,
                    RankFunction::DenseRank => dense,
                };
                let offset = top.offset as i64;
                if n > offset && top.limit.is_none_or(|l| n <= offset + l as i64) {
                    let mut line = vec![
                        show(row.0),
                        show(row.1),
                        text(row.2).unwrap_or("NULL".into()),
                        row.3.to_string(),
                    ];
                    if top.emit_rank {
                        line.push(n.to_string());
                    }
                    add(&mut result, line, 1);
                }
            }
        }
    }
    result
}
