//! Two epochs of a table on their way into the log.

use futures::FutureExt;
use millrace_common::SqlError;

use super::*;

/// Rows whose change needs an upload of its own.
const LARGE: i64 = 20_000;

/// The table's epochs end only when the test says so.
async fn by_hand(c: &Cluster, table: JobId) -> tokio::sync::OwnedMutexGuard<()> {
    let turn = Arc::clone(&c.meta.jobs.lock()[&table].turn);
    turn.lock_owned().await
}

fn rows(ids: std::ops::Range<i64>) -> Vec<Row> {
    ids.map(|id| (id, id, 1)).collect()
}

fn generation(c: &Cluster, table: JobId) -> Generation {
    c.meta.jobs.lock()[&table].start.generation
}

async fn cut(c: &Cluster, table: JobId) -> JobCommit {
    c.meta.cut_only(table, generation(c, table), Epoch::ZERO).await.unwrap()
}

async fn conclude(c: &Cluster, table: JobId, commit: &JobCommit) {
    c.meta.fold(table, commit);
    c.meta.send().await;
}

/// Polls a statement until it has entered, which it must before it is answered.
async fn entered<T>(statement: &mut (impl Future<Output = T> + Unpin)) {
    for _ in 0..1_000 {
        assert!(statement.now_or_never().is_none(), "answered before it was committed");
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_large_epoch_is_uploaded_while_the_last_is_logged_and_a_small_one_waits() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    let turn = by_hand(&c, t).await;
    let first = rows(0..LARGE);
    let mut first = Box::pin(c.dml(t, &first, INSERT));
    entered(&mut first).await;
    let first_commit = cut(&c, t).await;
    let second = rows(LARGE..2 * LARGE);
    let mut second = Box::pin(c.dml(t, &second, INSERT));
    entered(&mut second).await;
    let second_commit = cut(&c, t).await;
    assert_eq!((first_commit.number, second_commit.number), (1, 2));
    // Checked against rows of both: one changes a row of the second, the other meets one of the first.
    let (change, taken) = ([(LARGE, LARGE, -1), (LARGE, 7, 1)], [(5, 0, 1)]);
    let mut change = Box::pin(c.dml(t, &change, DmlKind::Change));
    let mut duplicate = Box::pin(c.dml(t, &taken, INSERT));
    entered(&mut change).await;
    entered(&mut duplicate).await;
    let mut third = Box::pin(cut(&c, t));
    for _ in 0..1_000 {
        assert!((&mut third).now_or_never().is_none(), "a small epoch gains nothing by itself");
        tokio::task::yield_now().await;
    }
    conclude(&c, t, &first_commit).await;
    assert_eq!(first.await.unwrap().rows_affected, LARGE as u64);
    assert!((&mut third).now_or_never().is_none() && (&mut second).now_or_never().is_none());
    assert_eq!(c.rows(t).await.len() as i64, LARGE);
    conclude(&c, t, &second_commit).await;
    assert_eq!(second.await.unwrap().rows_affected, LARGE as u64);
    let third_commit = third.await;
    conclude(&c, t, &third_commit).await;
    assert_eq!(change.await.unwrap().rows_affected, 1);
    let duplicate = SqlError::from(duplicate.await.unwrap_err());
    assert_eq!(duplicate.detail.as_deref(), Some("Key (id)=(5) already exists."));
    let stored = c.rows(t).await;
    assert_eq!(stored.len() as i64, 2 * LARGE);
    assert_eq!(stored[LARGE as usize], (LARGE, 7, 1));
    // What a restart finds is what was committed.
    drop(turn);
    c.start(t).await.unwrap();
    assert_eq!(c.rows(t).await, stored);
}

#[tokio::test]
async fn a_void_epoch_voids_the_one_behind_it() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    let _turn = by_hand(&c, t).await;
    let (first, second) = (rows(0..LARGE), rows(LARGE..2 * LARGE));
    let mut first = Box::pin(c.dml(t, &first, INSERT));
    entered(&mut first).await;
    let commit = cut(&c, t).await;
    let mut second = Box::pin(c.dml(t, &second, INSERT));
    entered(&mut second).await;
    cut(&c, t).await;
    c.meta.append(Entry::Commit(commit), EntryOutcome::Void("planted".to_string()));
    c.meta.send().await;
    assert!(matches!(first.await, Err(DmlError::Conflict)));
    assert!(matches!(second.await, Err(DmlError::Conflict)));
    c.start(t).await.unwrap();
    assert!(c.rows(t).await.is_empty());
}
