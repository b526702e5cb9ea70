//! A statement that has read other rows than those it writes.

use super::*;
use crate::dml::{EntryFlag, Read, ReadRows, ReadSet};
use crate::layout::RowLayout;

/// Writes a row, given that what was read is as it was.
async fn write_if(
    c: &Cluster,
    t: JobId,
    (key, value): (i64, i64),
    epoch: Epoch,
    rows: ReadRows,
) -> bool {
    let read = ReadSet { reads: vec![Read { table: t, epoch, rows }], locks: None };
    let id = StatementId { frontend: 3, number: key as u64 };
    let (change, entered) = (delta(&[(key, value, 1)]), EntryFlag::default());
    let done = c.worker.apply_transaction(id, vec![(t, change, INSERT)], read, &entered).await;
    assert_eq!(entered.is_set(), done.is_ok());
    match done {
        Ok(done) => done.rows_affected == 1,
        Err(DmlError::Conflict) => false,
        Err(e) => panic!("{e}"),
    }
}

/// Rows whose value is at least so much.
fn at_least(least: i64) -> ReadRows {
    ReadRows::Where(Arc::new(move |rows: &RecordBatch| {
        rows.column(1).as_primitive::<Int64Type>().iter().flatten().any(|v| v >= least)
    }))
}

#[tokio::test]
async fn a_read_holds_until_one_of_its_rows_changes() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    c.insert(t, [(1, 10)]).await;
    let then = Epoch(c.version(t).epoch);
    assert!(write_if(&c, t, (2, 20), then, ReadRows::All).await);
    assert!(!write_if(&c, t, (3, 30), then, ReadRows::All).await);
    assert!(!write_if(&c, t, (3, 30), then, at_least(20)).await);
    assert!(write_if(&c, t, (3, 30), then, at_least(21)).await);
    let now = Epoch(c.version(t).epoch);
    assert!(write_if(&c, t, (4, 1), now, ReadRows::All).await);
    // A row that went, and one that came, at their old values and their new ones.
    let now = Epoch(c.version(t).epoch);
    c.dml(t, &[(3, 30, -1), (3, 3, 1)], DmlKind::Change).await.unwrap();
    assert!(!write_if(&c, t, (5, 0), now, at_least(30)).await);
    assert!(write_if(&c, t, (5, 0), now, at_least(31)).await);
}

#[tokio::test]
async fn a_read_by_key_holds_while_others_change() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    c.insert(t, [(1, 10)]).await;
    let layout = RowLayout::of_relation(&Relation {
        key: vec![0],
        distribution: vec![0],
        ..relation(1, RelationKind::Table)
    });
    let layout = layout.unwrap();
    let keys = |ids: &[Row]| {
        let rows = delta(ids).batch;
        let keys = layout.keys(&rows, &layout.vnodes(&rows).unwrap()).unwrap();
        ReadRows::Keys(Arc::new(keys.iter().flatten().map(<[u8]>::to_vec).collect()))
    };
    let then = Epoch(c.version(t).epoch);
    c.insert(t, [(2, 20)]).await;
    assert!(write_if(&c, t, (3, 30), then, keys(&[(1, 0, 1), (7, 0, 1)])).await);
    assert!(!write_if(&c, t, (4, 40), then, keys(&[(1, 0, 1), (2, 0, 1)])).await);
}

#[tokio::test]
async fn what_is_no_longer_kept_counts_as_changed() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    c.insert(t, [(1, 10)]).await;
    let then = Epoch(c.version(t).epoch);
    c.insert(t, [(2, 20)]).await;
    c.start(t).await.unwrap();
    assert!(!write_if(&c, t, (3, 30), then, at_least(1000)).await);
    let now = Epoch(c.version(t).epoch);
    assert!(write_if(&c, t, (3, 30), now, at_least(1000)).await);
}

#[tokio::test]
async fn a_locked_table_takes_the_statement_that_holds_it_first() {
    let c = Arc::new(Cluster::new(ExecOptions::default()).await);
    let t = c.table(1).await;
    c.insert(t, [(1, 10)]).await;
    let locks = c.worker.lock_tables(&[t]).await.unwrap();
    let other = Arc::clone(&c);
    let waiting = tokio::spawn(async move { other.insert(t, [(2, 20)]).await });
    let read = Read { table: t, epoch: Epoch(c.version(t).epoch), rows: ReadRows::All };
    let read = ReadSet { reads: vec![read], locks: Some(locks) };
    let id = StatementId { frontend: 3, number: 1 };
    let change = vec![(t, delta(&[(1, 10, -1), (1, 11, 1)]), DmlKind::Change)];
    c.worker.apply_transaction(id, change, read, &EntryFlag::default()).await.unwrap();
    waiting.await.unwrap();
    assert_eq!(c.rows(t).await, [(1, 11, 1), (2, 20, 1)]);
}
