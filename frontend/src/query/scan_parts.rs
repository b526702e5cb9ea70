//! Scans that use several cores: a large relation is read in parts, which are ranges of vnodes, beside each other.
//!
//! The rows come in the order of one scan: part by part, each read ahead by a task of its own into a bounded channel. Only
//! a few parts beyond the one whose rows are handed out are begun, so what is held is bounded, and a LIMIT that is
//! reached ends all of them.

use std::ops::Range;

use arrow::array::RecordBatch;
use datafusion::common::runtime::SpawnedTask;
use futures::stream::BoxStream;
use futures::{Stream, StreamExt, stream};
use millrace_common::{SqlError, VNODE_COUNT, Vnode};
use millrace_rpc::request::carried;
use tokio::sync::mpsc;

use crate::cluster::BatchStream;

/// Rows of a part, about: enough to be worth a task.
const PART_ROWS: u64 = 32 << 10;
/// Stored bytes of a part, about: what is read ahead is held in memory.
const PART_BYTES: u64 = 4 << 20;
/// Batches of a part that wait to be taken.
const PART_BATCHES: usize = 3;

/// The parts of a relation with so many stored rows, in so many bytes: ranges of vnodes, in order.
pub fn parts(rows: u64, bytes: u64) -> Vec<Range<Vnode>> {
    let count = (rows / PART_ROWS).max(bytes / PART_BYTES).clamp(1, VNODE_COUNT as u64);
    let bound = |part: u64| (part * VNODE_COUNT as u64 / count) as Vnode;
    (0..count).map(|part| bound(part)..bound(part + 1)).collect()
}

/// The rows of the parts, one part after the other; `ahead` parts are read while one is handed out. Several parts must be
/// read on a runtime.
pub fn in_order(mut parts: Vec<BatchStream>, ahead: usize) -> BatchStream {
    if parts.len() == 1
        && let Some(only) = parts.pop()
    {
        return only;
    }
    let started = stream::iter(parts).map(|part| std::future::ready(read_ahead(part)));
    started.buffered(ahead + 1).flatten().boxed()
}

/// Reads a part in a task, which ends with the stream.
fn read_ahead(mut part: BatchStream) -> BoxStream<'static, Result<RecordBatch, SqlError>> {
    let (sender, receiver) = mpsc::channel(PART_BATCHES);
    // As DataFusion starts its own: it belongs to the statement.
    let task = SpawnedTask::spawn(carried(async move {
        while let Some(batch) = part.next().await {
            if sender.send(batch).await.is_err() {
                return;
            }
        }
    }));
    received(receiver, task).boxed()
}

/// What a task sends, and its failure: a part that died must not look like one that ended.
fn received(
    receiver: mpsc::Receiver<Result<RecordBatch, SqlError>>,
    task: SpawnedTask<()>,
) -> impl Stream<Item = Result<RecordBatch, SqlError>> {
    stream::unfold((receiver, Some(task)), |(mut receiver, mut task)| async move {
        if let Some(batch) = receiver.recv().await {
            return Some((batch, (receiver, task)));
        }
        let failed = task.take()?.join().await.is_err();
        failed.then(|| (Err(SqlError::internal("a part of a scan failed")), (receiver, None)))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use arrow::array::{AsArray, Int64Array};
    use arrow::datatypes::Int64Type;

    use super::*;

    #[test]
    fn parts_cover_every_vnode_once_in_order() {
        for (rows, bytes, count) in [
            (0, 0, 1),
            (PART_ROWS * 2 - 1, 0, 1),
            (PART_ROWS * 3, 0, 3),
            (10, PART_BYTES * 7, 7),
            (u64::MAX, u64::MAX, VNODE_COUNT),
        ] {
            let parts = parts(rows, bytes);
            assert_eq!(parts.len(), count, "{rows} rows, {bytes} bytes");
            assert!(parts.iter().all(|p| p.start < p.end));
            assert_eq!((parts[0].start, parts[count - 1].end), (0, VNODE_COUNT as Vnode));
            assert!(parts.windows(2).all(|p| p[0].end == p[1].start));
        }
    }

    fn batch(value: i64) -> RecordBatch {
        let values = Arc::new(Int64Array::from_iter_values([value]));
        RecordBatch::try_from_iter([("x", values as _)]).unwrap()
    }

    /// Parts of ten batches with a row each: 0 to 9, 10 to 19, ...; counts the batches that were read.
    fn numbers(parts: i64, read: &Arc<AtomicUsize>) -> Vec<BatchStream> {
        let part = |part: i64| {
            let read = Arc::clone(read);
            stream::iter(0..10)
                .map(move |at| {
                    read.fetch_add(1, Ordering::Relaxed);
                    Ok(batch(part * 10 + at))
                })
                .boxed()
        };
        (0..parts).map(part).collect()
    }

    #[tokio::test]
    async fn parts_come_in_order() {
        let rows: Vec<i64> = in_order(numbers(7, &Arc::default()), 2)
            .map(|batch| batch.unwrap().column(0).as_primitive::<Int64Type>().value(0))
            .collect()
            .await;
        assert_eq!(rows, (0..70).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn few_batches_are_read_ahead_and_none_after_the_end() {
        let read = Arc::new(AtomicUsize::new(0));
        let mut rows = in_order(numbers(100, &read), 2);
        rows.next().await.unwrap().unwrap();
        // Everything that is ready to run runs before the test goes on.
        for _ in 0..1_000 {
            tokio::task::yield_now().await;
        }
        // Of three parts what waits in their channels, one batch each that has no room, and the one taken.
        let most = 3 * (PART_BATCHES + 1) + 1;
        let ahead = read.load(Ordering::Relaxed);
        assert!((2..=most).contains(&ahead), "{ahead} batches");
        drop(rows);
        for _ in 0..1_000 {
            tokio::task::yield_now().await;
        }
        assert_eq!(read.load(Ordering::Relaxed), ahead);
    }

    #[tokio::test]
    async fn a_failure_comes_after_the_rows_before_it() {
        let broken = || Err(SqlError::internal("broken"));
        let failing = stream::iter([Ok(batch(10)), broken()]).boxed();
        let mut parts = numbers(1, &Arc::default());
        parts.push(failing);
        let rows: Vec<_> = in_order(parts, 2).collect().await;
        assert_eq!(rows.iter().filter(|row| row.is_ok()).count(), 11);
        assert!(rows.last().is_some_and(Result::is_err));
    }

    #[tokio::test]
    async fn a_part_that_panics_does_not_look_complete() {
        let bad = stream::once(async { panic!("bad") }).boxed();
        let mut parts = numbers(1, &Arc::default());
        parts.push(bad);
        let rows: Vec<_> = in_order(parts, 2).collect().await;
        assert!(rows.last().is_some_and(Result::is_err));
    }
}
