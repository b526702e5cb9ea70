//! Rows inside a job that are looked at: keys that an aggregate computes, which no row of a leaf brings.

use std::collections::BTreeMap;

use millrace_functions::aggregate_kind::AggFunc;
use millrace_graph::lookahead::Place;
use millrace_graph::state::accumulator_schema;
use millrace_graph::{AggCall, Aggregate};

use super::lookahead::cold;
use super::*;
use crate::options::LookaheadMode;
use crate::stats::OperatorStats;

/// Where the pairs of a count and its value are made distinct, and where they are counted.
const DISTINCT: usize = 2;
const COUNTED: usize = 3;

/// `SELECT n, count(*) FROM (SELECT DISTINCT n, v FROM (SELECT v, count(*) AS n FROM input GROUP BY v)) GROUP BY n`, with an
/// exchange before each.
fn counted_twice(input: JobId) -> JobGraph {
    let of_input = |group: &[usize], vnode: usize, calls: Vec<AggCall>, table: usize| Aggregate {
        group: group.to_vec(),
        vnode: vec![vnode],
        calls,
        table,
    };
    let aggregates = [
        of_input(&[1], 1, vec![count()], 1),
        of_input(&[1, 0], 0, vec![], DISTINCT),
        of_input(&[0], 0, vec![count()], COUNTED),
    ];
    let state = aggregates.clone().map(|a| StateTable {
        name: "aggregate".to_string(),
        class: AccessClass::PointUpdate,
        value_schema: accumulator_schema(&a.group, &a.calls, &schema()),
        storage: RowStorage::Keyed,
        relation: false,
        retention: None,
    });
    let (mut fragments, mut edges) = (vec![vec![subscribe(input)]], vec![]);
    for (i, aggregate) in aggregates.into_iter().enumerate() {
        edges.push(vec![rows(i.min(1), i + 1, aggregate.vnode.clone())]);
        let exchange = node(Op::Exchange(Exchange { fragment: i, output: 0 }), vec![]);
        fragments.push(vec![exchange, node(Op::Aggregate(aggregate), vec![0])]);
    }
    edges.push(vec![]);
    fragments[COUNTED].push(node(Op::Materialize(Materialize), vec![1]));
    let mut graph = graph(fragments, edges, layout(RowStorage::Keyed, vec![0]));
    graph.tables.extend(state);
    graph
}

fn count() -> AggCall {
    AggCall {
        func: AggFunc::Count,
        arg: None,
        distinct: false,
        filter: None,
        output_type: DataType::Int64,
        state: None,
    }
}

/// How many values are there so often.
fn counts_of_counts(rows: &[Row]) -> Vec<Row> {
    let (mut counts, mut of_counts) = (BTreeMap::new(), BTreeMap::new());
    rows.iter().for_each(|(_, v, weight)| *counts.entry(*v).or_insert(0) += weight);
    counts.into_values().for_each(|n: i64| *of_counts.entry(n).or_insert(0) += 1);
    of_counts.into_iter().map(|(n, count)| (n, count, 1)).collect()
}

impl Cluster {
    /// The operator of a fragment.
    fn aggregate_of(&self, view: JobId, fragment: usize) -> OperatorStats {
        let stats = self.worker.stats(view).unwrap();
        let is_it = |o: &OperatorStats| o.fragment == fragment && o.name == "Aggregate";
        stats.operators.into_iter().find(is_it).unwrap()
    }

    async fn check_counts(&self, view: JobId, table: JobId, what: &str) {
        self.follow(view, table).await;
        assert_eq!(self.rows(view).await, counts_of_counts(&self.rows(table).await), "{what}");
    }
}

#[tokio::test]
async fn keys_that_an_aggregate_computes_are_told_to_the_operators_behind_it_and_change_nothing() {
    for lookahead in [LookaheadMode::Auto, LookaheadMode::Input] {
        for parallelism in [1, 2, 7] {
            let options = ExecOptions { cache_bytes: 1 << 20, ..cold(lookahead) };
            let (c, t) = Cluster::with_table(options).await;
            let v = c.view(2, t, counted_twice(t), parallelism).await;
            c.catch_up(v).await;
            for round in 0..20 {
                c.churn(t, round).await;
                c.check_counts(v, t, &format!("{lookahead:?} {parallelism} {round}")).await;
            }
            for fragment in [DISTINCT, COUNTED] {
                let o = c.aggregate_of(v, fragment);
                let what = format!("{lookahead:?} {parallelism}: {fragment}: {o:?}");
                assert_eq!(o.measures.candidates(), ["input"], "{what}");
                assert!(o.lookahead.active > 0 && o.lookahead.hinted > 0, "{what}");
            }
            // Its rows come when those before it are distinct, which takes reads.
            let o = c.aggregate_of(v, COUNTED);
            assert!(o.lookahead.in_time + o.lookahead.late > 0, "{o:?}");
            assert!(o.measures.slack()[0].is_some_and(|slack| slack >= 0), "{o:?}");
            let first = c.aggregate_of(v, 1).measures.candidates().len();
            assert_eq!(first, if lookahead == LookaheadMode::Auto { 3 } else { 0 });
        }
    }
}

#[tokio::test]
async fn hints_of_rows_inside_a_job_are_advice_only() {
    for parallelism in [1, 3] {
        let options = ExecOptions { lookahead: LookaheadMode::Input, ..ExecOptions::default() };
        let (c, t) = Cluster::with_table(options.with_random_hints()).await;
        let v = c.view(2, t, counted_twice(t), parallelism).await;
        c.catch_up(v).await;
        for round in 0..30 {
            c.churn(t, round).await;
            c.check_counts(v, t, &format!("{parallelism} {round}")).await;
        }
        assert!(c.aggregate_of(v, COUNTED).lookahead.hinted > 0);
    }
}

#[tokio::test]
async fn the_place_inside_a_job_may_be_forced_for_one_kind_of_operator() {
    for (operator, expected) in [("aggregate", vec!["input"]), ("join", vec!["input"])] {
        let mode = LookaheadMode::Operator(operator, Place::Input);
        let (c, t) = Cluster::with_table(cold(mode)).await;
        let v = c.view(2, t, counted_twice(t), 2).await;
        c.catch_up(v).await;
        assert_eq!(c.aggregate_of(v, COUNTED).measures.candidates(), expected);
        let of_leaf = c.aggregate_of(v, 1).measures.candidates();
        assert_eq!(of_leaf.is_empty(), operator == "aggregate", "{of_leaf:?}");
    }
}
