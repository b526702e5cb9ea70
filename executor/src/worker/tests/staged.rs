//! Rows that are announced before they enter a table: while a load or a transaction stages them.

use futures::FutureExt;
use millrace_graph::lookahead::Place;

use super::*;
use crate::dml::{LoadKind, OnRepeat};
use crate::lookahead::uncommitted::{Announcement, Following};

const NEW_ROWS: LoadKind = LoadKind::Insert { on_conflict: InsertConflict::Error };

impl Cluster {
    fn follow_entries(&self, table: JobId) -> Following {
        self.worker.shared.changelogs.uncommitted().follow(table, vec![Place::Entry])
    }
}

fn id(number: u64) -> StatementId {
    StatementId { frontend: 9, number }
}

/// What has been announced and not been taken, which is something.
fn next(following: &mut Following) -> Announcement {
    following.next().now_or_never().flatten().expect("nothing is announced")
}

fn has_next(following: &mut Following) -> bool {
    following.next().now_or_never().is_some()
}

/// Whether the rows are due at this epoch and not before; `None`: they will never come.
fn assert_due(announcement: &Announcement, epoch: Option<Epoch>) {
    match epoch {
        Some(epoch) => {
            assert!(!announcement.due.has_passed(epoch.0 - 1));
            assert!(announcement.due.has_passed(epoch.0));
        }
        None => assert!(announcement.due.has_passed(1)),
    }
}

#[tokio::test]
async fn rows_of_a_load_are_announced_while_they_are_staged_and_not_again() {
    // In memory, and staged beside the table.
    let first = || delta(&[(1, 1, 1), (2, 2, 1)]);
    for load_bytes in [1 << 20, 2 * first().memory_size()] {
        let (c, t) =
            Cluster::with_table(ExecOptions { load_bytes, ..ExecOptions::default() }).await;
        let mut following = c.follow_entries(t);
        let mut load = c.worker.begin_load(t, id(1), NEW_ROWS).await.unwrap();
        load.append(first()).await.unwrap();
        let mut announced = vec![next(&mut following)];
        assert_eq!(announced[0].num_rows(), 2);
        assert!(!announced[0].due.has_passed(u64::MAX), "not committed yet");
        for from in [10, 20, 30] {
            let rows: Vec<Row> = (from..from + 10).map(|i| (i, i, 1)).collect();
            load.append(delta(&rows)).await.unwrap();
        }
        let spilled = load.has_spilled();
        assert_eq!(spilled, load_bytes < 1 << 20);
        while let Some(more) = following.next().now_or_never() {
            announced.extend(more);
        }
        assert_eq!(announced.len() < 4, spilled, "of a large load the first rows");
        let epoch = load.finish(&EntryFlag::default()).await.unwrap().epoch;
        announced.iter().for_each(|a| assert_due(a, Some(epoch)));
        assert!(!has_next(&mut following), "the rows are announced once");
        c.insert(t, [(100, 0)]).await;
        assert_eq!(next(&mut following).num_rows(), 1, "others still are");
    }
}

#[tokio::test]
async fn a_load_that_nobody_has_followed_from_its_beginning_is_announced_when_it_enters() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    let mut load = c.worker.begin_load(t, id(1), NEW_ROWS).await.unwrap();
    load.append(delta(&[(1, 1, 1)])).await.unwrap();
    let mut following = c.follow_entries(t);
    load.append(delta(&[(2, 2, 1)])).await.unwrap();
    let early = next(&mut following);
    let epoch = load.finish(&EntryFlag::default()).await.unwrap().epoch;
    let whole = next(&mut following);
    assert_eq!((early.num_rows(), whole.num_rows()), (1, 2));
    [early, whole].iter().for_each(|a| assert_due(a, Some(epoch)));
}

#[tokio::test]
async fn rows_of_a_load_that_fails_or_is_given_up_are_never_due() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    c.insert(t, [(1, 1)]).await;
    let mut following = c.follow_entries(t);
    let mut given_up = c.worker.begin_load(t, id(1), NEW_ROWS).await.unwrap();
    given_up.append(delta(&[(2, 2, 1)])).await.unwrap();
    let of_given_up = next(&mut following);
    assert!(!of_given_up.due.has_passed(u64::MAX));
    given_up.abort();
    assert_due(&of_given_up, None);
    let mut failing = c.worker.begin_load(t, id(2), NEW_ROWS).await.unwrap();
    failing.append(delta(&[(1, 2, 1)])).await.unwrap();
    let of_failing = next(&mut following);
    failing.finish(&EntryFlag::default()).await.unwrap_err();
    assert_due(&of_failing, None);
}

#[tokio::test]
async fn rows_that_a_large_statement_changes_are_announced_too() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    c.insert(t, [(1, 1), (2, 2)]).await;
    let mut following = c.follow_entries(t);
    let kind =
        LoadKind::Change { read_at: Epoch(c.version(t).epoch), on_repeat: OnRepeat::Duplicate };
    let mut load = c.worker.begin_load(t, id(1), kind).await.unwrap();
    load.append(delta(&[(1, 1, -1), (3, 1, 1)])).await.unwrap();
    let announced = next(&mut following);
    assert_eq!(announced.num_rows(), 2);
    let epoch = load.finish(&EntryFlag::default()).await.unwrap().epoch;
    assert_due(&announced, Some(epoch));
    assert_eq!(c.rows(t).await, [(2, 2, 1), (3, 1, 1)]);
}

#[tokio::test]
async fn staged_rows_are_told_their_epoch_by_who_stages_them() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    let rows = delta(&[(1, 1, 1)]);
    assert!(c.worker.announce_staged(t, &rows).is_none(), "nobody wants to know");
    let mut following = c.follow_entries(t);
    let staged = c.worker.announce_staged(t, &rows).unwrap();
    let announced = next(&mut following);
    assert_eq!(announced.num_rows(), 1);
    assert!(!announced.due.has_passed(u64::MAX));
    staged.committed(Epoch(30));
    assert_due(&announced, Some(Epoch(30)));
    let rolled_back = c.worker.announce_staged(t, &rows).unwrap();
    let announced = next(&mut following);
    drop(rolled_back);
    assert_due(&announced, None);
}
