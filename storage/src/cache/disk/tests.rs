use std::fs::File;
use std::future::Future;
use std::sync::mpsc;

use tokio::runtime::{Builder, Handle, Runtime};

use millrace_common::task::spawn_on;

use super::*;

const BLOCK_BYTES: usize = 256 << 10;
/// Far longer than anything here takes on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);

fn key(block: u32) -> BlockKey {
    BlockKey { run: 1, block, crc: 7 }
}

fn bytes(block: u32) -> Bytes {
    vec![block as u8; BLOCK_BYTES].into()
}

async fn within<T>(what: &str, operation: impl Future<Output = T>) -> T {
    let result = timeout(PATIENCE, operation).await;
    result.unwrap_or_else(|_| panic!("waited {PATIENCE:?} for {what}"))
}

fn options(directory: &tempfile::TempDir, capacity_bytes: usize) -> DiskCacheOptions {
    DiskCacheOptions::new(directory.path().to_path_buf(), capacity_bytes)
}

async fn open(options: &DiskCacheOptions) -> DiskTier {
    within("the disk tier to open", DiskTier::open(options)).await.unwrap()
}

async fn get(tier: &DiskTier, block: u32) -> Option<Bytes> {
    within("a block to be read", tier.get(&key(block))).await
}

async fn close(tier: &DiskTier) {
    within("the disk tier to close", tier.close()).await.unwrap();
}

async fn insert(tier: &DiskTier, blocks: std::ops::Range<u32>) {
    for block in blocks {
        tier.insert(key(block), bytes(block));
    }
    // More at once than the tier takes is dropped.
    within("inserted blocks to be written", tier.cache.storage().wait()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_read_outlives_much_that_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let options = options(&directory, 128 << 20);
    let tier = open(&options).await;
    let hot = 0..16;
    insert(&tier, hot.clone()).await;
    // Three times as much as the tier holds.
    let mut missed = 0;
    for round in 1..96 {
        for block in hot.clone() {
            if get(&tier, block).await.is_none() {
                missed += 1;
                insert(&tier, block..block + 1).await;
            }
        }
        insert(&tier, round * 16..(round + 1) * 16).await;
    }
    // If reading did nothing, each would be missed twice and more.
    assert!(missed < 16, "{missed} misses, {:?}", tier.stats());
    assert!(tier.stats().kept >= 16, "{:?}", tier.stats());
    close(&tier).await;
    // Only what is on disk.
    let tier = open(&options).await;
    let mut found = 0;
    for block in hot {
        if let Some(bytes) = get(&tier, block).await {
            assert!(bytes.len() == BLOCK_BYTES && bytes.iter().all(|b| *b == block as u8));
            found += 1;
        }
    }
    assert!(found >= 12, "{found} of 16");
    let left = (16..64).filter(|block| tier.may_contain(&key(*block))).count();
    assert_eq!(left, 0, "what was not read is gone");
}

/// Keeps what would block a thread of the runtime from its turn until the result is dropped.
fn stall(runtime: &Handle, threads: usize) -> Vec<mpsc::Sender<()>> {
    let hold = |_| {
        let (release, released) = mpsc::channel();
        spawn_blocking_on(runtime, "stall", move || released.recv().is_err());
        release
    };
    (0..threads).map(hold).collect()
}

/// A directory to which more was written than it holds, closed.
async fn full() -> (tempfile::TempDir, DiskCacheOptions) {
    let directory = tempfile::tempdir().unwrap();
    let options = options(&directory, 64 << 20);
    let tier = open(&options).await;
    for round in 0..24 {
        insert(&tier, round * 16..(round + 1) * 16).await;
    }
    close(&tier).await;
    (directory, options)
}

async fn until(what: &str, is: impl Fn() -> bool) {
    let wait = async {
        while !is() {
            tokio::task::yield_now().await;
        }
    };
    within(what, wait).await;
}

fn runtime() -> Runtime {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(2).max_blocking_threads(1).enable_time().build().unwrap()
}

/// Bounds what cannot be awaited. What hangs is left behind.
fn in_thread(what: &str, act: impl FnOnce() + Send + 'static) {
    let (ended, wait) = mpsc::channel();
    let act = move || {
        act();
        let _ = ended.send(());
    };
    #[expect(clippy::disallowed_methods, reason = "a task would hang the end of its runtime")]
    std::thread::spawn(act);
    if let Err(e) = wait.recv_timeout(PATIENCE) {
        panic!("waited {PATIENCE:?} for {what}: {e}");
    }
}

/// The runtime on which the tier is used may end at any time, without waiting for the tier.
#[test]
fn a_runtime_ends_while_an_area_is_given_up() {
    // Whether another area is wanted by then differs.
    for tier_first in [true, false].repeat(3) {
        in_thread("a runtime to end", move || {
            let runtime = runtime();
            let (_directory, options) = runtime.block_on(full());
            let tier = runtime.block_on(open(&options));
            let stalled = stall(runtime.handle(), 1);
            let disk_stalled = stall(tier.runtime.handle(), runtime::CONCURRENT_IO);
            (0..16).for_each(|block| tier.insert(key(block), bytes(block)));
            let given_up = || tier.areas("reclaiming") > 0;
            runtime.block_on(until("an area to be given up", given_up));
            // Until the runtime drops its tasks.
            spawn_on(runtime.handle(), "stall", async move {
                let _stalled = stalled;
                std::future::pending::<()>().await;
            });
            if tier_first {
                drop(tier);
                drop(runtime);
            } else {
                drop(runtime);
                drop(tier);
            }
            drop(disk_stalled);
        });
    }
}

/// A server that is started again within its process does not wait for the end of its cache.
#[test]
fn a_directory_is_opened_while_its_last_tier_is_closed() {
    let directory = tempfile::tempdir().unwrap();
    let options = options(&directory, 64 << 20);
    for round in 0..20u32 {
        let options = options.clone();
        in_thread("a tier to be opened and written", move || {
            let runtime = runtime();
            let tier = runtime.block_on(open(&options));
            runtime.block_on(insert(&tier, round * 128..round * 128 + 64));
            for block in round * 128 + 64..round * 128 + 128 {
                tier.insert(key(block), bytes(block));
            }
        });
    }
}

/// Copies one written area over all that are free.
fn use_every_area(options: &DiskCacheOptions) {
    let paths = || (0..options.files()).map(|area| areas::path(&options.directory, area));
    let (free, written): (Vec<_>, Vec<_>) =
        paths().partition(|path| areas::is_free(&mut File::open(path).unwrap()).unwrap());
    assert!(!free.is_empty() && !written.is_empty(), "{free:?} {written:?}");
    for path in free {
        std::fs::copy(&written[0], path).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_without_a_free_area_is_written_again() {
    let (_directory, options) = full().await;
    use_every_area(&options);

    let tier = open(&options).await;
    let kept = (0..24 * 16).filter(|block| tier.may_contain(&key(*block))).count();
    assert!(kept > 0, "the other areas are found again");
    for round in 24..48 {
        insert(&tier, round * 16..(round + 1) * 16).await;
    }
    assert_eq!(get(&tier, 48 * 16 - 1).await, Some(bytes(48 * 16 - 1)));
    close(&tier).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_a_directory_without_a_free_area_loses_one() {
    let directory = tempfile::tempdir().unwrap();
    let options = options(&directory, 64 << 20);
    let free_one = || areas::free_one(directory.path(), options.files()).unwrap();
    assert!(!free_one(), "a new directory");
    let tier = open(&options).await;
    insert(&tier, 0..16).await;
    close(&tier).await;
    drop(tier);
    assert!(!free_one(), "a directory that has free areas");
    use_every_area(&options);
    assert!(free_one(), "a directory that has none");
    assert!(!free_one(), "a directory that has got one");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_does_not_answer_counts_as_absent_until_it_does() {
    let directory = tempfile::tempdir().unwrap();
    let mut tier = open(&options(&directory, 64 << 20)).await;
    insert(&tier, 0..4).await;
    tier.bounds = Bounds { read: Duration::from_millis(10), close: Duration::from_millis(10) };

    let stalled = stall(tier.runtime.handle(), runtime::CONCURRENT_IO);
    tier.insert(key(4), bytes(4));
    assert!(tier.may_contain(&key(0)), "nothing has been noticed yet");
    assert_eq!(get(&tier, 0).await, None);
    assert!(!tier.may_contain(&key(0)), "nothing more is read");
    let before = tier.stats();
    tier.offer_built(key(5), &bytes(5));
    assert_eq!(tier.stats().dropped, before.dropped + 1, "nothing more is written");
    let error = within("the bound of a close", tier.close()).await.unwrap_err();
    assert!(error.to_string().contains(&directory.path().display().to_string()), "{error}");

    drop(stalled);
    until("the disk to answer again", || !tier.overdue.any()).await;
    tier.bounds.read = PATIENCE;
    assert_eq!(get(&tier, 0).await, Some(bytes(0)));
    assert_eq!(get(&tier, 4).await, Some(bytes(4)), "what was under way has been written");
    assert_eq!(get(&tier, 5).await, None);
}
