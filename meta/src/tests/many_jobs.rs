//! A commit costs what it changes: counts of the job records that are looked at, so they hold on any machine.

use std::time::Duration;

use millrace_common::{Epoch, RelationId};

use super::fake::{Behaviour, Cluster};
use super::{table, view};
use crate::jobs::visits;

/// Commits that are counted together.
const COMMITS: u64 = 20;

/// One table with one view, `others` views over another table, and what was created long ago behind it.
async fn with_others(others: usize) -> (Cluster, RelationId, RelationId, RelationId) {
    let c = Cluster::new().await;
    let (hot, other) = (c.created(table("hot")).await, c.created(table("other")).await);
    let v = c.created(view("v", &[hot])).await;
    for n in 0..others {
        c.created(view(&format!("other{n}"), &[other])).await;
    }
    // The horizons of what was created have moved behind it, which only a record brings about.
    for _ in 0..2 {
        tokio::time::sleep(Duration::from_secs(24 * 3_600)).await;
        c.insert(hot).await;
    }
    tokio::time::sleep(Duration::from_secs(60)).await;
    (c, hot, v, other)
}

/// Job records looked at for one INSERT into the table and a strict read of its view.
async fn visits_per_commit(c: &Cluster, hot: RelationId, v: RelationId) -> u64 {
    let before = visits::count();
    for _ in 0..COMMITS {
        c.insert(hot).await;
        c.read(&[v]).await;
    }
    (visits::count() - before) / COMMITS
}

#[tokio::test(start_paused = true)]
async fn a_commit_looks_at_no_job_that_it_does_not_concern() {
    let (few, hot, v, _) = with_others(2).await;
    let with_few = visits_per_commit(&few, hot, v).await;
    let (many, hot, v, _) = with_others(300).await;
    let with_many = visits_per_commit(&many, hot, v).await;
    assert!(with_few > 0);
    assert!(
        with_many <= with_few + 2,
        "{with_few} records with 2 other views, {with_many} with 300"
    );
}

#[tokio::test(start_paused = true)]
async fn a_commit_wakes_only_reads_of_what_it_changes() {
    let (c, hot, v, other) = with_others(3).await;
    let stuck = RelationId(other.0 + 2);
    c.fake.behave(stuck, Behaviour { hang: true, ..Behaviour::default() });
    c.insert(other).await;
    let alone = visits_per_commit(&c, hot, v).await;
    let waiting: Vec<_> = (0..100)
        .map(|_| {
            let meta = c.meta.clone();
            tokio::spawn(async move {
                meta.read_epoch(&[stuck], Some(Duration::from_secs(3_600)), true).await
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(10)).await;
    let beside_reads = visits_per_commit(&c, hot, v).await;
    assert!(waiting.iter().all(|w| !w.is_finished()));
    assert!(
        beside_reads <= alone + 2,
        "{alone} records alone, {beside_reads} beside waiting reads"
    );
}

/// `levels` levels of two views each, which both read both views of the level below.
async fn diamonds(levels: u32) -> (Cluster, RelationId, Vec<RelationId>) {
    let c = Cluster::new().await;
    let root = c.created(table("t")).await;
    let mut below = vec![root];
    for level in 0..levels {
        let mut both = Vec::new();
        for side in ["a", "b"] {
            both.push(c.created(view(&format!("{side}{level}"), &below)).await);
        }
        below = both;
    }
    (c, root, below)
}

#[tokio::test(start_paused = true)]
async fn diamonds_of_views_cost_what_they_have_of_views() {
    let mut counts = Vec::new();
    for levels in [6, 12] {
        let (c, root, top) = diamonds(levels).await;
        let before = visits::count();
        c.insert(root).await;
        let paths = 1 << (levels - 1);
        assert_eq!(c.read(&top).await, [paths, paths]);
        counts.push(visits::count() - before);
        let state = c.meta.state_for_tests();
        let asked = visits::of(|| state.exact_at_most(top[0], Epoch::MAX));
        assert!(asked <= 2, "a frontier looks at {asked} records");
    }
    // Twice the levels: at most twice the commits, each with at most twice the views behind it. By way of every path
    // it would be 64 times as much.
    assert!(counts[1] < counts[0] * 8, "{counts:?}");
}
