//! Places where rows are looked at other than those of the relation that a leaf reads: at the leaf, and in tables behind
//! views.

use millrace_graph::lookahead::Place;

use super::lookahead::{cold, counted, counted_by, counts};
use super::*;
use crate::options::LookaheadMode;
use crate::stats::LookaheadStats;

impl Cluster {
    /// Runs a view with so many tasks from now on.
    async fn restart_with(&self, view: JobId, parallelism: usize) {
        self.meta.jobs.lock().get_mut(&view).unwrap().start.parallelism = parallelism;
        self.start(view).await.unwrap();
    }

    /// What was changed in the table reaches the view, and it is what it should be.
    async fn follow_and_check(&self, view: JobId, table: JobId) {
        self.follow(view, table).await;
        assert_eq!(self.rows(view).await, counts(&self.rows(table).await));
    }
}

/// Keys were hinted to the tasks that own them: an instance that does not own a key drops it.
fn assert_met(told: LookaheadStats, what: &str) {
    assert!(told.hinted > 0 && told.prefetched > 0, "{what}: {told:?}");
    assert!(told.in_time + told.late > 0, "{what}: {told:?}");
    assert_eq!(told.dropped, 0, "{what}: {told:?}");
}

/// Caches that begin knowing nothing, with room for all keys that are hinted.
fn begun_cold(lookahead: LookaheadMode) -> ExecOptions {
    ExecOptions { cache_bytes: 1 << 20, ..cold(lookahead) }
}

#[tokio::test]
async fn rows_at_a_leaf_are_told_to_the_operators_behind_its_exchange_and_change_nothing() {
    for parallelism in [1, 2, 7] {
        let (c, t) = Cluster::with_table(cold(LookaheadMode::Leaf)).await;
        let v = c.view(2, t, counted(t), parallelism).await;
        c.catch_up(v).await;
        for round in 0..20 {
            c.churn(t, round).await;
            c.follow_and_check(v, t).await;
        }
        let told = c.lookahead(v);
        assert!(told.active > 0 && told.hinted > 0, "{told:?}");
        let measures = c.measures(v);
        assert_eq!((measures.candidates(), measures.places()), (vec!["leaf"], vec!["leaf"]));
        assert_eq!(c.following(), 0, "nobody looks at what is not committed");
    }
}

#[tokio::test]
async fn hints_and_rows_meet_in_the_same_task_after_a_restart_with_other_tasks() {
    for lookahead in [LookaheadMode::Entry, LookaheadMode::Root, LookaheadMode::Leaf] {
        let (c, t) = Cluster::with_table(begun_cold(lookahead)).await;
        let v = c.view(2, t, counted(t), 1).await;
        c.catch_up(v).await;
        for (i, parallelism) in (0..).zip([1, 2, 7, 1]) {
            // Nothing is in memory then.
            c.restart_with(v, parallelism).await;
            for round in i * 20..(i + 1) * 20 {
                c.insert(t, (0..30).map(|id| (round * 100 + id, (round * 7 + id) % 100))).await;
                c.follow_and_check(v, t).await;
            }
            let told = c.lookahead(v);
            assert!(told.hinted > 0, "{lookahead:?} {parallelism}: {told:?}");
            if lookahead != LookaheadMode::Leaf {
                assert_met(told, &format!("{lookahead:?} {parallelism}"));
            }
        }
    }
}

#[tokio::test]
async fn an_operator_may_have_a_place_of_its_own() {
    let of = |operator| LookaheadMode::Operator(operator, Place::Root);
    for (mode, expected) in
        [(of("aggregate"), vec!["root"]), (of("join"), vec!["entry", "root", "leaf"])]
    {
        let (c, t) = Cluster::with_table(cold(mode)).await;
        let v = c.view(2, t, counted(t), 2).await;
        c.catch_up(v).await;
        assert_eq!(c.measures(v).candidates(), expected);
    }
}

#[tokio::test]
async fn rows_of_a_table_are_looked_at_by_a_view_on_a_view_before_that_has_them() {
    for lookahead in [LookaheadMode::Auto, LookaheadMode::Entry] {
        let (c, t) = Cluster::with_table(cold(lookahead)).await;
        let v = c.view(2, t, copy_of(t), 1).await;
        c.catch_up(v).await;
        let w = c.view(3, v, counted(v), 2).await;
        c.catch_up(w).await;
        let mut early = 0;
        for round in 0..20 {
            let before = c.lookahead(w).hinted;
            c.churn(t, round).await;
            // The view between has none of it yet.
            early += c.lookahead(w).hinted - before;
            c.follow(v, t).await;
            c.follow(w, v).await;
            assert_eq!(c.rows(w).await, counts(&c.rows(v).await), "round {round}");
        }
        assert!(early > 0, "{lookahead:?}");
        let expected = match lookahead {
            LookaheadMode::Auto => vec!["input entry", "root", "leaf"],
            _ => vec!["input entry"],
        };
        assert_eq!(c.measures(w).candidates(), expected);
    }
}

#[tokio::test]
async fn rows_of_a_table_are_looked_at_behind_a_view_with_state() {
    let (c, t) = Cluster::with_table(cold(LookaheadMode::Entry)).await;
    let v = c.view(2, t, counted(t), 2).await;
    c.catch_up(v).await;
    // How often each value is there, of which there is one row each: the key is the view's group.
    let w = c.view(3, v, counted_by(v, 0), 2).await;
    c.catch_up(w).await;
    let mut early = 0;
    for round in 0..20 {
        let before = c.lookahead(w).hinted;
        c.churn(t, round).await;
        early += c.lookahead(w).hinted - before;
        c.follow(v, t).await;
        c.follow(w, v).await;
        let values: Vec<Row> = c.rows(v).await.iter().map(|(v, _, _)| (*v, 1, 1)).collect();
        assert_eq!(c.rows(w).await, values, "round {round}");
    }
    assert!(early > 0, "the view between has none of it yet");
    assert_eq!(c.measures(w).candidates(), ["input entry"]);
}
