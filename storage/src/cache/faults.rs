//! Promises of reads from a store that misbehaves: nothing is lost, every answer is right, what is delayed is told,
//! and no reader has to ask again.

use std::time::Duration;

use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use tokio::time::{sleep, timeout};

use super::tests::{all, open, request, runs};
use super::*;
use crate::object::{MeterOptions, Metered};
use crate::sim::{Faults, Profile, RequestKind, SimStore};

const GETS: Faults = Faults {
    error: 0.0,
    lost_answer: 0.0,
    hang: 0.0,
    torn_write: 0.0,
    disk_full: 0.0,
    short_read: 0.0,
    damaged_read: 0.0,
    slow_down: 0.0,
    slow_down_above: 0,
    reset: 0.0,
    only: Some(RequestKind::Get),
};

/// Every block by a read of its own.
fn single_blocks() -> CacheOptions {
    CacheOptions { join_gap: 0, max_read_bytes: 1, ..CacheOptions::default() }
}

async fn right_blocks(
    cache: &Arc<BlockCache>,
    run: &Arc<RunReader>,
    index: &Arc<RunIndex>,
    options: ReadOptions,
) {
    let wanted = all(run, index);
    let blocks = cache.fetch(wanted.clone(), options).await.unwrap();
    for (block, asked) in blocks.iter().zip(&wanted) {
        assert_eq!(block.entries.keys.value(0), index.first_key(asked.block));
        assert_eq!(block.entries.len(), index.block_rows(asked.block) as usize);
    }
}

#[tokio::test(start_paused = true)]
async fn every_kind_of_read_outlives_every_fault_that_passes() {
    let faults = [
        Faults { slow_down: 0.4, ..GETS },
        Faults { reset: 0.4, ..GETS },
        Faults { hang: 0.3, ..GETS },
        Faults { slow_down: 0.2, reset: 0.2, hang: 0.2, ..GETS },
        Faults { slow_down_above: 20, ..GETS },
    ];
    for (n, faults) in faults.into_iter().enumerate() {
        for options in [ReadOptions::DEMAND, ReadOptions::SCAN, ReadOptions::COMPACTION] {
            let sim = SimStore::in_memory(Profile::S3, n as u64 + 1);
            let runs = runs(&sim, 2).await;
            let cache = open(&sim, single_blocks());
            sim.set_faults(faults);
            let indexes = cache.indexes(&runs, options.priority).await.unwrap();
            for (run, index) in runs.iter().zip(&indexes) {
                right_blocks(&cache, run, index, options.clone()).await;
            }
            let stats = cache.read_stats();
            assert!(stats.retries > 0, "{faults:?}: {stats:?}");
            assert_eq!((stats.retrying, stats.last_error), (0, None), "all were answered");
            let is_idle = |c: &ClassStats| (c.queued, c.in_flight) == (0, 0);
            assert!(stats.classes.iter().all(is_idle), "no slot is lost");
            let slow = faults.slow_down > 0.0 || faults.slow_down_above > 0;
            assert_eq!(stats.slow_downs > 0, slow);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_read_waits_out_an_outage_of_any_length_and_says_so() {
    for outage in [Faults { reset: 1.0, ..GETS }, Faults { hang: 1.0, ..GETS }] {
        let sim = SimStore::in_memory(Profile::S3, 1);
        let runs = runs(&sim, 1).await;
        // As a server wraps its store: what the wrapper repeats must not hide failures from the scheduler.
        let store = Metered::wrap(Arc::new(sim.clone()), MeterOptions::default());
        let cache = BlockCache::open(Arc::clone(&store) as Arc<dyn ObjectStore>, single_blocks());
        cache.set_owner(JobId::default(), [TableId(runs[0].meta().table_id)]);
        sim.set_faults(outage);
        let read = cache.indexes(&runs, Priority::Demand);
        let released = async {
            sleep(Duration::from_secs(3_600)).await;
            let stats = cache.read_stats();
            assert_eq!(stats.retrying, 1);
            let error = cache.retrying(JobId::default()).expect("the job waits").error;
            assert!(error.starts_with("object data/1/1.seg: "), "{error}");
            assert_eq!(stats.last_error, Some(error));
            sim.set_faults(Faults::default());
        };
        let (indexes, ()) = tokio::join!(read, released);
        assert_eq!(indexes.unwrap().len(), 1);
        assert_eq!(cache.retrying(JobId::default()), None);
        assert_eq!(store.stats().retries, cache.read_stats().retries);
        assert_eq!(store.stats().errors, 0, "no request failed for good");
    }
}

#[tokio::test(start_paused = true)]
async fn a_read_that_nobody_waits_for_ends() {
    let sim = SimStore::in_memory(Profile::S3, 1);
    let runs = runs(&sim, 1).await;
    let cache = open(&sim, single_blocks());
    sim.set_faults(Faults { reset: 1.0, ..GETS });
    let read = cache.indexes(&runs, Priority::Demand);
    assert!(timeout(Duration::from_secs(60), read).await.is_err());
    sleep(Duration::from_secs(60)).await;
    let gets = sim.stats().gets;
    sleep(Duration::from_secs(3_600)).await;
    assert_eq!(sim.stats().gets, gets, "no more requests");
    assert_eq!(cache.read_stats().retrying, 0);
    sim.set_faults(Faults::default());
    cache.indexes(&runs, Priority::Demand).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn what_another_attempt_cannot_change_is_an_error_at_once() {
    let sim = SimStore::in_memory(Profile::S3, 1);
    let runs = runs(&sim, 1).await;
    sim.delete(&Path::from("data/1/1.seg")).await.unwrap();
    let cache = open(&sim, single_blocks());
    let before = sim.stats().gets;
    let error = cache.indexes(&runs, Priority::Demand).await.unwrap_err();
    assert!(matches!(error, StorageError::NotFound { .. }), "{error}");
    assert_eq!(sim.stats().gets - before, 1);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_refuses_above_a_rate_is_not_flooded() {
    /// Reads a second that the limit must leave.
    const LEAST: f64 = 50.0;
    let sim = SimStore::in_memory(Profile::S3, 1);
    let runs = runs(&sim, 20).await;
    let cache = open(&sim, single_blocks());
    let indexes = cache.indexes(&runs, Priority::Demand).await.unwrap();
    sim.set_faults(Faults { slow_down_above: 100, ..GETS });
    let read_all = || {
        let reads = runs.iter().zip(&indexes);
        let reads = reads.map(|(run, index)| right_blocks(&cache, run, index, ReadOptions::DEMAND));
        futures::future::join_all(reads)
    };
    // Finds out the rate, at the cost of a second.
    read_all().await;
    let found = cache.read_stats();
    assert!((LEAST..150.0).contains(&found.rate.unwrap()), "{found:?}");
    cache.clear_memory();
    sim.reset_stats();
    read_all().await;
    let (asked, refused) = (sim.stats().gets, cache.read_stats().slow_downs - found.slow_downs);
    assert!(refused * 4 < asked, "{refused} of {asked} were refused");
    assert!(cache.read_stats().rate.is_some());
}

#[tokio::test(start_paused = true)]
async fn a_second_request_answers_for_a_slow_one() {
    for hedge_reads in [true, false] {
        let sim = SimStore::in_memory(Profile::S3, 3);
        let runs = runs(&sim, 8).await;
        let cache = open(&sim, CacheOptions { hedge_reads, ..single_blocks() });
        let indexes = cache.indexes(&runs, Priority::Demand).await.unwrap();
        for (run, index) in runs.iter().zip(&indexes).take(7) {
            right_blocks(&cache, run, index, ReadOptions::DEMAND).await;
        }
        sim.set_faults(Faults { hang: 1.0, ..GETS });
        let wanted = vec![request(&runs[7], &indexes[7], 0)];
        let read = cache.fetch(wanted, ReadOptions::DEMAND);
        let well_again = async {
            sleep(Duration::from_millis(1)).await;
            sim.set_faults(Faults::default());
        };
        let before = cache.options.env.now();
        let (blocks, ()) = tokio::join!(read, well_again);
        assert_eq!(blocks.unwrap().len(), 1);
        let took = cache.options.env.elapsed(before);
        let stats = cache.read_stats();
        if hedge_reads {
            assert!(took < Duration::from_secs(1), "{took:?}");
            assert!(stats.hedges_won >= 1 && stats.timeouts == 0, "{stats:?}");
            assert!(stats.hedges_sent <= cache.stats().gets / 20 + 1, "{stats:?}");
        } else {
            assert!(took >= Duration::from_secs(10), "{took:?}");
            assert_eq!((stats.hedges_sent, stats.timeouts), (0, 1));
        }
    }
}

/// Nobody waits for a prefetch, so it is not asked for again. When a row needs what it reads it has been slow already.
#[tokio::test(start_paused = true)]
async fn a_slow_prefetch_is_asked_for_again_as_soon_as_somebody_waits_for_it() {
    let sim = SimStore::in_memory(Profile::S3, 3);
    let runs = runs(&sim, 8).await;
    let cache = open(&sim, single_blocks());
    let indexes = cache.indexes(&runs, Priority::Demand).await.unwrap();
    for (run, index) in runs.iter().zip(&indexes).take(7) {
        right_blocks(&cache, run, index, ReadOptions::DEMAND).await;
    }
    let earlier = cache.read_stats();
    sim.set_faults(Faults { hang: 1.0, ..GETS });
    let wanted = || vec![request(&runs[7], &indexes[7], 0)];
    let ahead = cache.begin_fetch(wanted(), ReadOptions::PREFETCH);
    sleep(Duration::from_secs(2)).await;
    sim.set_faults(Faults::default());
    assert_eq!(cache.read_stats().hedges_sent, earlier.hedges_sent);
    let before = cache.options.env.now();
    let blocks = cache.fetch(wanted(), ReadOptions::DEMAND).await.unwrap();
    let took = cache.options.env.elapsed(before);
    assert_eq!((blocks.len(), Answer::all(ahead).await.unwrap().len()), (1, 1));
    assert!(took < Duration::from_millis(300), "one request of the store: {took:?}");
    assert_eq!(cache.read_stats().hedges_won, earlier.hedges_won + 1);
}

/// What is needed at a deadline, and hangs, is asked for again long before it. Of reads that are in time few are.
#[tokio::test(start_paused = true)]
async fn what_is_needed_at_a_deadline_is_asked_for_again_if_it_is_likely_to_be_late() {
    let sim = SimStore::in_memory(Profile::S3, 3);
    let runs = runs(&sim, 20).await;
    let cache = open(&sim, single_blocks());
    let indexes = cache.indexes(&runs, Priority::Demand).await.unwrap();
    for (run, index) in runs.iter().zip(&indexes).take(10) {
        right_blocks(&cache, run, index, ReadOptions::DEMAND).await;
    }
    let by = |after: Duration| {
        let deadline = Some(cache.options.env.now() + after);
        ReadOptions { deadline, ..ReadOptions::keeping(Priority::Barrier) }
    };
    let learned = cache.read_stats();
    let before = cache.stats().gets;
    for (run, index) in runs.iter().zip(&indexes).skip(10).take(9) {
        right_blocks(&cache, run, index, by(Duration::from_secs(5))).await;
    }
    let in_time = cache.read_stats().hedges_sent - learned.hedges_sent;
    let reads = cache.stats().gets - before;
    assert!(in_time <= 1 + reads / 50, "{in_time} second requests of {reads}");
    let earlier = cache.read_stats();
    sim.set_faults(Faults { hang: 1.0, ..GETS });
    let began = cache.options.env.now();
    let wanted = vec![request(&runs[19], &indexes[19], 0)];
    let ahead = cache.begin_fetch(wanted, by(Duration::from_secs(5)));
    sleep(Duration::from_millis(1)).await;
    sim.set_faults(Faults::default());
    assert_eq!(Answer::all(ahead).await.unwrap().len(), 1);
    let took = cache.options.env.elapsed(began);
    assert!(took < Duration::from_secs(2), "{took:?}");
    assert_eq!(cache.read_stats().hedges_won, earlier.hedges_won + 1);
}

/// One job's cold reads fill what the store takes, and the limit grows while the store keeps its pace.
#[tokio::test(start_paused = true)]
async fn many_cold_reads_of_one_job_take_few_rounds_of_the_store() {
    let sim = SimStore::in_memory(Profile::S3, 1);
    let runs = runs(&sim, 100).await;
    let cache = open(&sim, single_blocks());
    let indexes = cache.indexes(&runs, Priority::Demand).await.unwrap();
    let wanted: Vec<BlockRequest> =
        runs.iter().zip(&indexes).flat_map(|(run, index)| all(run, index)).collect();
    let count = wanted.len() as u32;
    let before = cache.options.env.now();
    cache.fetch(wanted, ReadOptions::DEMAND).await.unwrap();
    let took = cache.options.env.elapsed(before);
    // With 64 reads in flight, and all of the median latency, it would take half as long again.
    assert!(took * 3 < Profile::S3.p50 * (count / 64) * 2, "{count} blocks took {took:?}");
    assert!(cache.read_stats().limit > ReadLimits::default().start);
}
