//! What a view promises: its query over its inputs, at every epoch, whatever happens to other jobs.

use std::time::Duration;

use millrace_common::collections::HashSet;

use super::*;

/// Rows redistributed by value, then stored as a multiset or by key.
fn exchanged(input: JobId, storage: RowStorage) -> JobGraph {
    let distribution = if storage == RowStorage::Keyed { vec![0] } else { vec![1] };
    graph(
        vec![
            vec![subscribe(input)],
            vec![
                node(Op::Exchange(Exchange { fragment: 0, output: 0 }), vec![]),
                node(Op::Union(Union), vec![0]),
                node(Op::Materialize(Materialize), vec![1]),
            ],
        ],
        vec![vec![rows(0, 1, distribution.clone())], vec![]],
        layout(storage, distribution),
    )
}

#[tokio::test]
async fn a_view_scans_in_steps_and_then_follows() {
    let exec = ExecOptions { backfill_rows: 100, chunk_rows: 40, ..ExecOptions::default() };
    let (c, t) = Cluster::with_table(exec).await;
    c.insert(t, (0..1_000).map(|i| (i, i * 2))).await;
    let v = c.view(2, t, copy_of(t), 2).await;
    // Rows that come after the snapshot are not the scan's.
    c.insert(t, [(5_000, 1)]).await;
    let mut cuts = 0;
    while let Some(backfill) = c.version(v).backfill {
        c.meta.cut(v, Epoch(backfill.snapshot_epoch)).await.unwrap();
        cuts += 1;
        if cuts == 4 {
            // A restart, also with other parallelism, goes on where the last commit was.
            c.meta.jobs.lock().get_mut(&v).unwrap().start.parallelism = 3;
            c.start(v).await.unwrap();
        }
    }
    assert!((8..30).contains(&cuts), "{cuts} cuts");
    let all: Vec<Row> = (0..1_000).map(|i| (i, i * 2, 1)).collect();
    assert_eq!(c.rows(v).await, all);
    assert_eq!(c.version(v).row_count, 1_000);
    c.dml(t, &[(3, 6, -1), (3, 7, 1), (4, 8, -1)], DmlKind::Change).await.unwrap();
    c.follow(v, t).await;
    assert_eq!(c.rows(v).await, c.rows(t).await);
}

#[tokio::test]
async fn changes_come_from_the_store_when_the_ring_has_them_no_more() {
    let exec = ExecOptions { changelog_bytes: 0, ..ExecOptions::default() };
    let (c, t) = Cluster::with_table(exec).await;
    let v = c.view(2, t, copy_of(t), 2).await;
    c.catch_up(v).await;
    c.insert(t, (0..500).map(|i| (i, i))).await;
    c.dml(t, &[(7, 7, -1), (7, 8, 1), (9, 9, -1)], DmlKind::Change).await.unwrap();
    c.follow(v, t).await;
    assert_eq!(c.rows(v).await, c.rows(t).await);
}

#[tokio::test]
async fn a_view_on_a_view_follows_both_scans_and_changes() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    c.insert(t, (0..300).map(|i| (i, i % 7))).await;
    let v = c.view(2, t, copy_of(t), 2).await;
    c.catch_up(v).await;
    let w = c.view(3, v, exchanged(v, RowStorage::Multiset), 2).await;
    c.catch_up(w).await;
    assert_eq!(c.rows(w).await, c.rows(t).await);
    for round in 0..5 {
        c.dml(t, &[(round, round % 7, -1)], DmlKind::Change).await.unwrap();
        c.insert(t, [(1_000 + round, 3)]).await;
        c.follow(v, t).await;
        c.follow(w, v).await;
        assert_eq!(c.rows(w).await, c.rows(t).await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parallelism_does_not_change_the_result() {
    for storage in [RowStorage::Multiset, RowStorage::Keyed] {
        let exec = ExecOptions {
            coalesce_rows: 32,
            chunk_rows: 64,
            channel_bytes: 512,
            ..ExecOptions::default()
        };
        let (c, t) = Cluster::with_table(exec).await;
        c.insert(t, (0..2_000).map(|i| (i, i % 10))).await;
        let views = [
            c.view(2, t, exchanged(t, storage), 1).await,
            c.view(3, t, exchanged(t, storage), 2).await,
            c.view(4, t, exchanged(t, storage), 3).await,
        ];
        for v in views {
            c.catch_up(v).await;
        }
        let shift: Vec<Row> =
            (0..1_000).flat_map(|i| [(i, i % 10, -1), (i, i % 10 + 1, 1)]).collect();
        c.dml(t, &shift, DmlKind::Change).await.unwrap();
        for v in views {
            c.follow(v, t).await;
            assert_eq!(c.rows(v).await, c.rows(t).await);
            assert_eq!(c.version(v).row_count, 2_000);
        }
    }
}

/// The input's rows three times over: once more through a second way out of the same fragment, from another of its
/// nodes and by another column, and once more from a node that feeds two.
fn three_ways(input: JobId) -> JobGraph {
    let exchange = |output| node(Op::Exchange(Exchange { fragment: 0, output }), vec![]);
    graph(
        vec![
            vec![subscribe(input), node(Op::Union(Union), vec![0])],
            vec![
                exchange(0),
                exchange(1),
                node(Op::Union(Union), vec![0, 1]),
                node(Op::Union(Union), vec![2, 1]),
                node(Op::Materialize(Materialize), vec![3]),
            ],
        ],
        vec![vec![rows(0, 1, vec![1]), rows(1, 1, vec![1])], vec![]],
        layout(RowStorage::Multiset, vec![1]),
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fragment_and_a_node_may_feed_several() {
    let exec = ExecOptions { chunk_rows: 64, channel_bytes: 512, ..ExecOptions::default() };
    let (c, t) = Cluster::with_table(exec).await;
    c.insert(t, (0..2_000).map(|i| (i, i % 10))).await;
    let views = [c.view(2, t, three_ways(t), 1).await, c.view(3, t, three_ways(t), 3).await];
    for v in views {
        c.catch_up(v).await;
    }
    c.dml(t, &[(7, 7, -1), (7, 8, 1), (9, 9, -1)], DmlKind::Change).await.unwrap();
    let thrice: Vec<Row> = c.rows(t).await.into_iter().map(|(i, v, w)| (i, v, 3 * w)).collect();
    for v in views {
        c.follow(v, t).await;
        let mut found: HashMap<(i64, i64), i64> = HashMap::default();
        c.rows(v).await.into_iter().for_each(|(i, v, w)| *found.entry((i, v)).or_default() += w);
        let mut found: Vec<Row> = found.into_iter().map(|((i, v), w)| (i, v, w)).collect();
        found.sort_unstable();
        assert_eq!(found, thrice);
    }
}

#[tokio::test]
async fn a_blackhole_sums_up_to_what_a_view_holds_also_after_a_restart() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    c.insert(t, (0..100).map(|i| (i, i))).await;
    let nodes = vec![subscribe(t), node(Op::Blackhole(Blackhole), vec![0])];
    let g = graph(vec![nodes], vec![vec![]], layout(RowStorage::Multiset, vec![]));
    let v = c.view(2, t, g, 2).await;
    c.catch_up(v).await;
    c.start(v).await.unwrap();
    c.dml(t, &[(3, 3, -1), (3, 4, 1), (5, 5, -1)], DmlKind::Change).await.unwrap();
    c.follow(v, t).await;
    let expected = crate::digest(&delta(&c.rows(t).await)).unwrap();
    assert_eq!(c.worker.blackhole_result(v), Some(expected));
    assert_eq!(expected.rows, 99);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_stops_at_once_while_its_input_hangs_and_others_go_on() {
    let exec = ExecOptions { changelog_bytes: 0, ..ExecOptions::default() };
    let c = Arc::new(Cluster::new(exec).await);
    let (t, other) = (c.table(1).await, c.table(2).await);
    let v = c.view(3, t, copy_of(t), 2).await;
    c.catch_up(v).await;
    c.insert(t, (0..5_000).map(|i| (i, i))).await;
    // The input's state is away: the view's read waits for it.
    c.store.close_job(t);
    let cut = tokio::spawn({
        let (c, epoch) = (Arc::clone(&c), Epoch(c.version(t).epoch));
        async move { c.meta.cut(v, epoch).await }
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    c.insert(other, [(1, 1)]).await;
    assert!(!cut.is_finished(), "{:?}", cut.await);
    // What it waits for comes only afterwards.
    let stopped =
        tokio::time::timeout(Duration::from_secs(60), c.worker.stop_job(v, Generation(1)));
    stopped.await.expect("a stop that waits for the store");
    assert!(cut.await.unwrap().is_err());
    c.start(t).await.unwrap();
    c.start(v).await.unwrap();
    c.follow(v, t).await;
    assert_eq!(c.rows(v).await.len(), 5_000);
}

#[tokio::test]
async fn a_failing_job_says_why_and_fails_alone() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    let v = c.view(2, t, copy_of(t), 2).await;
    // Two rows of one value under a key of the value: a broken promise of the plan.
    let mut broken = exchanged(t, RowStorage::Multiset);
    broken.output = RelationLayout { key: vec![1], ..layout(RowStorage::Keyed, vec![1]) };
    broken.tables[0].storage = RowStorage::Keyed;
    let w = c.view(3, t, broken, 2).await;
    for job in [v, w] {
        c.catch_up(job).await;
    }
    c.insert(t, [(1, 5), (2, 5)]).await;
    let epoch = Epoch(c.version(t).epoch);
    let error = c.meta.cut(w, epoch).await.unwrap_err();
    assert!(error.message.contains("key (v)=(5)"), "{error}");
    assert!(c.meta.cut(w, epoch).await.is_err());
    assert!(c.meta.failures.lock().is_empty(), "reported by the cut");
    c.follow(v, t).await;
    assert_eq!(c.rows(v).await.len(), 2);
}

#[tokio::test]
async fn calls_of_another_generation_are_refused() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    let v = c.view(2, t, copy_of(t), 1).await;
    c.catch_up(v).await;
    c.start(v).await.unwrap();
    c.insert(t, [(1, 1)]).await;
    let epoch = Epoch(c.version(t).epoch);
    assert!(c.worker.cut(v, Generation(1), Cut { epoch, number: 2, record: 0 }).await.is_err());
    c.worker.stop_job(v, Generation(1)).await;
    let number = c.version(v).commits + 1;
    let late = JobCommit { job: v.0, generation: 1, number, ..JobCommit::default() };
    c.meta.append(Entry::Commit(late), EntryOutcome::Void("another generation".to_string()));
    c.meta.send().await;
    c.follow(v, t).await;
    assert_eq!(c.rows(v).await, [(1, 1, 1)]);
}

#[tokio::test]
async fn rows_by_arrival_are_spread_and_never_numbered_twice() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    let nodes = vec![subscribe(t), node(Op::Materialize(Materialize), vec![0])];
    let output = layout(RowStorage::Append, vec![]);
    let v = c.view(2, t, graph(vec![nodes], vec![vec![]], output), 1).await;
    c.catch_up(v).await;
    for parallelism in [1, 3, 2, 1] {
        c.meta.jobs.lock().get_mut(&v).unwrap().start.parallelism = parallelism;
        c.start(v).await.unwrap();
        let first = c.rows(t).await.len() as i64;
        c.insert(t, (first..first + 5_000).map(|i| (i, i))).await;
        c.follow(v, t).await;
        // A row whose number had been given before would have replaced another.
        assert_eq!(c.rows(v).await, c.rows(t).await);
    }
    let snapshot = c.store.job(v).unwrap().snapshot(Epoch::MAX).unwrap();
    let options = ScanOptions { with_keys: true, ..ScanOptions::default() };
    let scan = snapshot.scan(TableId(v.0 * 10), options);
    let batches: Vec<_> = scan.try_collect().await.unwrap();
    let keys =
        batches.iter().filter_map(|b| b.keys.as_ref()).flat_map(|keys| keys.iter().flatten());
    let vnodes: HashSet<[u8; 2]> = keys.map(|key| [key[0], key[1]]).collect();
    assert!(vnodes.len() >= 15, "20,000 rows are in {} vnodes", vnodes.len());
}
