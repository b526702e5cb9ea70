//! Walkers of running jobs: what they announce reaches the operators, and changes no view.

use std::collections::BTreeMap;

use millrace_functions::aggregate_kind::AggFunc;
use millrace_graph::state::accumulator_schema;
use millrace_graph::{AggCall, Aggregate};

use super::*;
use crate::options::LookaheadMode;
use crate::stats::{LookaheadMeasures, LookaheadStats, OperatorStats};

/// `SELECT v, count(*) FROM input GROUP BY v`
pub(super) fn counted(input: JobId) -> JobGraph {
    counted_by(input, 1)
}

/// The same by one of the two columns.
pub(super) fn counted_by(input: JobId, group: usize) -> JobGraph {
    let calls = vec![AggCall {
        func: AggFunc::Count,
        arg: None,
        distinct: false,
        filter: None,
        output_type: DataType::Int64,
        state: None,
    }];
    let accumulators = StateTable {
        name: "aggregate".to_string(),
        class: AccessClass::PointUpdate,
        value_schema: accumulator_schema(&[group], &calls, &schema()),
        storage: RowStorage::Keyed,
        relation: false,
        retention: None,
    };
    let counts = Aggregate { group: vec![group], vnode: vec![group], calls, table: 1 };
    let nodes = vec![
        node(Op::Exchange(Exchange { fragment: 0, output: 0 }), vec![]),
        node(Op::Aggregate(counts), vec![0]),
        node(Op::Materialize(Materialize), vec![1]),
    ];
    let mut graph = graph(
        vec![vec![subscribe(input)], nodes],
        vec![vec![rows(0, 1, vec![group])], vec![]],
        layout(RowStorage::Keyed, vec![0]),
    );
    graph.tables.push(accumulators);
    graph
}

/// How often each value is there.
pub(super) fn counts(rows: &[Row]) -> Vec<Row> {
    let mut counts = BTreeMap::new();
    for (_, v, weight) in rows {
        *counts.entry(*v).or_insert(0) += weight;
    }
    counts.into_iter().map(|(v, count)| (v, count, 1)).collect()
}

/// Caches that hold a few keys, and reads that come late.
pub(super) fn cold(lookahead: LookaheadMode) -> ExecOptions {
    ExecOptions { cache_bytes: 2 << 10, delay_reads: true, lookahead, ..ExecOptions::default() }
}

impl Cluster {
    pub(super) fn following(&self) -> usize {
        self.worker.shared.changelogs.uncommitted().following()
    }

    pub(super) fn lookahead(&self, view: JobId) -> LookaheadStats {
        self.aggregate(view).lookahead
    }

    pub(super) fn measures(&self, view: JobId) -> LookaheadMeasures {
        self.aggregate(view).measures
    }

    /// As if too much had been read ahead in vain.
    fn leave_places(&self, view: JobId) {
        let job = self.worker.shared.job(view).unwrap();
        let walked = job.metrics.operators.iter().filter_map(|o| o.lookahead.walked.get());
        let sides: Vec<_> = walked.flat_map(|walked| &walked.sides).collect();
        assert!(!sides.is_empty() && sides.iter().all(|side| side.leave()));
    }

    fn aggregate(&self, view: JobId) -> OperatorStats {
        let stats = self.worker.stats(view).unwrap();
        stats.operators.into_iter().find(|o| o.name == "Aggregate").unwrap()
    }

    /// Inserts, updates, deletes and a statement that fails.
    pub(super) async fn churn(&self, t: JobId, round: i64) {
        self.insert(t, (0..30).map(|i| (round * 100 + i, (round * 7 + i) % 100))).await;
        let (id, v) = (round * 100, round * 7 % 100);
        self.dml(t, &[(id, v, -1), (id, v + 1, 1)], DmlKind::Change).await.unwrap();
        self.dml(t, &[(id + 1, (v + 1) % 100, -1)], DmlKind::Change).await.unwrap();
        // Announced, and it never comes.
        assert!(self.dml(t, &[(id, 1_000 + round, 1)], INSERT).await.is_err());
    }
}

#[tokio::test]
async fn keys_of_statements_and_of_sealed_epochs_reach_the_operator_and_change_nothing() {
    for lookahead in [LookaheadMode::Auto, LookaheadMode::Entry, LookaheadMode::Root] {
        for parallelism in [1, 2, 7] {
            let (c, t) = Cluster::with_table(cold(lookahead)).await;
            let v = c.view(2, t, counted(t), parallelism).await;
            c.catch_up(v).await;
            for round in 0..20 {
                c.churn(t, round).await;
                c.follow(v, t).await;
                assert_eq!(c.rows(v).await, counts(&c.rows(t).await), "round {round}");
            }
            let told = c.lookahead(v);
            let candidates: &[&str] = match lookahead {
                LookaheadMode::Auto => &["entry", "root", "leaf"],
                LookaheadMode::Entry => &["entry"],
                _ => &["root"],
            };
            let measures = c.measures(v);
            assert_eq!(measures.candidates(), candidates);
            assert!(measures.places().iter().all(|p| candidates.contains(p)), "{measures:?}");
            assert_eq!(measures.places().len(), 1);
            assert!(told.active > 0 && c.following() == 1, "{told:?}");
            assert!(told.hinted > 0 && told.prefetched > 0, "{lookahead:?}: {told:?}");
            c.worker.stop_job(v, Generation(1)).await;
            assert_eq!(c.following(), 0, "it ends with its generation");
        }
    }
}

#[tokio::test]
async fn a_view_on_a_view_is_told_of_what_is_sealed() {
    let (c, t) = Cluster::with_table(cold(LookaheadMode::Auto)).await;
    let v = c.view(2, t, counted(t), 2).await;
    c.catch_up(v).await;
    let w = c.view(3, v, counted(v), 2).await;
    c.catch_up(w).await;
    for round in 0..20 {
        c.churn(t, round).await;
        c.follow(v, t).await;
        c.follow(w, v).await;
        assert_eq!(c.rows(w).await, counts(&c.rows(v).await), "round {round}");
    }
    let told = c.lookahead(w);
    assert!(told.hinted > 0, "{told:?}");
    let measures = c.measures(w);
    assert_eq!((measures.candidates(), measures.places()), (vec!["root", "leaf"], vec!["root"]));
}

#[tokio::test]
async fn the_place_where_rows_are_looked_at_changes_while_the_view_runs() {
    for parallelism in [1, 2] {
        let (c, t) = Cluster::with_table(cold(LookaheadMode::Auto)).await;
        let v = c.view(2, t, counted(t), parallelism).await;
        c.catch_up(v).await;
        let mut hinted = 0;
        for round in 0..20 {
            if round == 10 {
                assert_eq!(c.measures(v).places(), ["entry"]);
                hinted = c.lookahead(v).hinted;
                c.leave_places(v);
                assert_eq!(c.measures(v).places(), ["root"]);
            }
            c.churn(t, round).await;
            c.follow(v, t).await;
            assert_eq!(c.rows(v).await, counts(&c.rows(t).await), "round {round}");
        }
        let told = c.lookahead(v);
        assert_eq!(c.measures(v).places(), ["root"]);
        assert!(hinted > 0 && told.hinted > hinted, "{told:?}");
        assert_eq!(c.following(), 1, "by the same walker");
    }
}

#[tokio::test]
async fn lookahead_that_is_off_announces_nothing() {
    let (c, t) = Cluster::with_table(cold(LookaheadMode::Off)).await;
    let v = c.view(2, t, counted(t), 2).await;
    c.catch_up(v).await;
    for round in 0..10 {
        c.churn(t, round).await;
        c.follow(v, t).await;
    }
    let told = c.lookahead(v);
    assert!(told.missed > 0 && told.hinted == 0 && told.active == 0, "{told:?}");
    assert_eq!(c.following(), 0);
}

#[tokio::test]
async fn no_walker_runs_for_views_whose_state_is_in_memory() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    let mut views = Vec::new();
    for id in 2..1_002 {
        let view = c.view(id, t, counted(t), 1).await;
        c.catch_up(view).await;
        views.push(view);
    }
    for round in 0..3 {
        c.churn(t, round).await;
        for &view in views.iter().step_by(50) {
            c.follow(view, t).await;
            let told = c.lookahead(view);
            assert!(told.active == 0, "{told:?}");
            assert_eq!((told.missed, told.hinted, told.resident), (0, 0, 0));
            let measures = c.measures(view);
            assert_eq!(measures.places(), ["entry"]);
            assert_eq!(
                (measures.ahead_requests, measures.reads.epochs),
                (0, 0),
                "nothing is measured"
            );
        }
        assert_eq!(c.following(), 0);
    }
}
