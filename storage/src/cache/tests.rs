//! Promises of the cache: few requests, one round, nothing damaged, nothing polluted.

use std::ops::Bound;
use std::sync::atomic::Ordering;
use std::time::Duration;

use arrow::array::{BinaryArray, Int64Array, RecordBatch};
use arrow::datatypes::{DataType, Field, Schema};
use millrace_common::Epoch;
use object_store::ObjectStoreExt;
use object_store::path::Path;

use super::*;
use crate::block::{BlockCodec, Entries, Epochs};
use crate::run::{RunBuilder, RunKind, RunOptions};
use crate::sim::{Faults, Profile, SimStore};

/// Runs of 2,000 rows each, all in one object.
pub(super) async fn runs(store: &SimStore, count: u64) -> Vec<Arc<RunReader>> {
    let schema = Schema::new(vec![Field::new("v", DataType::Int64, true)]);
    let codec = Arc::new(BlockCodec::new(&schema));
    let mut segment = crate::segment::SegmentWriter::new("data/1/1.seg".to_string());
    let mut metas = Vec::new();
    for run in 0..count {
        let keys = BinaryArray::from_iter_values((0..2_000u32).map(|i| i.to_be_bytes()));
        let numbers = Int64Array::from_iter_values((0..2_000).map(|i| i * 7_919 + run as i64));
        let values =
            RecordBatch::try_new(codec.value_schema().clone(), vec![Arc::new(numbers)]).unwrap();
        let mut builder = RunBuilder::new(
            Arc::clone(&codec),
            RunOptions { block_bytes: 2_048, ..RunOptions::new(RunKind::Point) },
        );
        builder
            .push(&Entries { keys, epochs: Epochs::Uniform(Epoch(5)), weights: None, values })
            .unwrap();
        let mut finished = builder.finish().unwrap();
        finished.meta.run_id = run + 1;
        finished.meta.object = segment.name().to_string();
        finished.meta.offset = segment.add(finished.bytes);
        metas.push(finished.meta);
    }
    let store: Arc<dyn ObjectStore> = Arc::new(store.clone());
    segment.finish(&store).await.unwrap();
    metas.into_iter().map(|m| Arc::new(RunReader::new(m, Arc::clone(&codec)))).collect()
}

pub(super) fn open(store: &SimStore, options: CacheOptions) -> Arc<BlockCache> {
    BlockCache::open(Arc::new(store.clone()), options)
}

pub(super) fn request(run: &Arc<RunReader>, index: &Arc<RunIndex>, block: u32) -> BlockRequest {
    BlockRequest { run: Arc::clone(run), index: Arc::clone(index), block }
}

pub(super) fn all(run: &Arc<RunReader>, index: &Arc<RunIndex>) -> Vec<BlockRequest> {
    index.locate_range(Bound::Unbounded, Bound::Unbounded).map(|b| request(run, index, b)).collect()
}

#[tokio::test(start_paused = true)]
async fn a_cold_fetch_is_two_rounds_and_a_warm_one_none() {
    let sim = SimStore::in_memory(Profile::S3, 1);
    let runs = runs(&sim, 4).await;
    let cache = open(&sim, CacheOptions::default());
    let cold = async {
        let indexes = cache.indexes(&runs, Priority::Demand).await.unwrap();
        let wanted: Vec<_> = runs
            .iter()
            .zip(&indexes)
            .flat_map(|(r, i)| [request(r, i, 0), request(r, i, 5), request(r, i, 9)])
            .collect();
        let blocks = cache.fetch(wanted, ReadOptions::DEMAND).await.unwrap();
        assert_eq!(blocks.len(), 12);
        indexes
    };
    let (indexes, rounds) = sim.count_rounds(cold).await;
    assert_eq!(rounds, 2, "indexes, then blocks");
    let before = sim.stats();
    assert!(cache.try_get(&runs[3], &indexes[3], 9).is_some());
    assert!(cache.try_get(&runs[3], &indexes[3], 8).is_none());
    cache.fetch(vec![request(&runs[0], &indexes[0], 5)], ReadOptions::DEMAND).await.unwrap();
    assert_eq!(sim.stats(), before);
    assert_eq!(cache.stats().misses, 12);
}

#[tokio::test(start_paused = true)]
async fn blocks_come_in_the_order_asked_whatever_order_answers_have() {
    let sim = SimStore::in_memory(Profile::S3, 9);
    let runs = runs(&sim, 3).await;
    let cache =
        open(&sim, CacheOptions { join_gap: 0, max_read_bytes: 1, ..CacheOptions::default() });
    let indexes = cache.indexes(&runs, Priority::Demand).await.unwrap();
    let mut wanted = Vec::new();
    for b in [7, 0, 3, 7] {
        for r in [2, 0, 1] {
            wanted.push(request(&runs[r], &indexes[r], b));
        }
    }
    let blocks = cache.fetch(wanted.clone(), ReadOptions::DEMAND).await.unwrap();
    for (block, asked) in blocks.iter().zip(&wanted) {
        assert_eq!(block.entries.keys.value(0), asked.index.first_key(asked.block));
        let column = block.entries.values.column(0);
        let numbers = column.as_any().downcast_ref::<Int64Array>().unwrap();
        let first = u32::from_be_bytes(block.entries.keys.value(0).try_into().unwrap());
        assert_eq!(numbers.value(0), i64::from(first) * 7_919 + asked.run.meta().run_id as i64 - 1);
    }
    assert_eq!(cache.stats().misses, 9, "duplicates are read once");
}

#[tokio::test(start_paused = true)]
async fn neighbours_share_a_request_and_concurrent_readers_a_read() {
    let sim = SimStore::in_memory(Profile::S3, 1);
    let runs = runs(&sim, 1).await;
    let cache = open(&sim, CacheOptions::default());
    let index = cache.indexes(&runs, Priority::Demand).await.unwrap().remove(0);
    let before = sim.stats().gets;
    let readers = (0..8).map(|_| cache.fetch(all(&runs[0], &index), ReadOptions::DEMAND));
    let results = futures::future::join_all(readers).await;
    assert!(results.iter().all(|r| r.as_ref().unwrap().len() == index.blocks() as usize));
    assert_eq!(sim.stats().gets - before, 1);
    assert_eq!(cache.stats().joined, 7 * u64::from(index.blocks()));
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_goes_away_does_not_take_the_read_with_it() {
    let sim = SimStore::in_memory(Profile::S3, 1);
    let runs = runs(&sim, 1).await;
    let cache = open(&sim, CacheOptions::default());
    let index = cache.indexes(&runs, Priority::Demand).await.unwrap().remove(0);
    let fetch = cache.fetch(vec![request(&runs[0], &index, 1)], ReadOptions::DEMAND);
    assert!(tokio::time::timeout(Duration::from_millis(1), fetch).await.is_err());
    let before = sim.stats().gets;
    cache.fetch(vec![request(&runs[0], &index, 1)], ReadOptions::DEMAND).await.unwrap();
    assert_eq!(sim.stats().gets, before);
}

#[tokio::test(start_paused = true)]
async fn scans_leave_no_trace_and_leave_room() {
    let sim = SimStore::in_memory(Profile::S3, 1);
    let runs = runs(&sim, 2).await;
    let options = CacheOptions {
        reads: ReadLimits::fixed(8),
        scan_reads: 2,
        join_gap: 0,
        max_read_bytes: 1,
        ..CacheOptions::default()
    };
    let cache = open(&sim, options);
    let indexes = cache.indexes(&runs, Priority::Demand).await.unwrap();
    sim.hang_reads(None);
    let scan = tokio::spawn({
        let (cache, wanted) = (Arc::clone(&cache), all(&runs[0], &indexes[0]));
        async move { cache.fetch(wanted, ReadOptions::SCAN).await }
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    let scans = cache.read_stats().classes[Priority::Scan as usize];
    assert_eq!(scans.in_flight, 2, "a scan cannot take every slot");
    assert!(scans.queued > 2);
    sim.release_reads();
    cache.fetch(vec![request(&runs[1], &indexes[1], 0)], ReadOptions::DEMAND).await.unwrap();
    scan.await.unwrap().unwrap();
    assert!((0..indexes[0].blocks()).all(|b| cache.try_get(&runs[0], &indexes[0], b).is_none()));
    assert!(cache.try_get(&runs[1], &indexes[1], 0).is_some());
}

#[tokio::test(start_paused = true)]
async fn damaged_and_short_reads_are_errors_that_name_the_object() {
    let sim = SimStore::in_memory(Profile::DFS, 1);
    let runs = runs(&sim, 1).await;
    let cache = open(&sim, CacheOptions::default());
    for faults in [
        Faults { damaged_read: 1.0, ..Faults::default() },
        Faults { short_read: 1.0, ..Faults::default() },
    ] {
        sim.set_faults(faults);
        let error = cache.indexes(&runs, Priority::Demand).await.unwrap_err();
        assert!(
            matches!(&error, StorageError::Corrupt { object, .. } if object == "data/1/1.seg"),
            "{error}"
        );
    }
    sim.set_faults(Faults::default());
    let index = cache.indexes(&runs, Priority::Demand).await.unwrap().remove(0);
    for faults in [
        Faults { damaged_read: 1.0, ..Faults::default() },
        Faults { short_read: 1.0, ..Faults::default() },
    ] {
        sim.set_faults(faults);
        let error =
            cache.fetch(vec![request(&runs[0], &index, 3)], ReadOptions::DEMAND).await.unwrap_err();
        assert!(
            matches!(&error, StorageError::Corrupt { object, .. } if object == "data/1/1.seg"),
            "{error}"
        );
    }
    sim.set_faults(Faults { error: 1.0, ..Faults::default() });
    let error =
        cache.fetch(vec![request(&runs[0], &index, 3)], ReadOptions::DEMAND).await.unwrap_err();
    assert!(matches!(error, StorageError::Io { .. }));
    sim.set_faults(Faults::default());
    cache.fetch(vec![request(&runs[0], &index, 3)], ReadOptions::DEMAND).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn memory_stays_within_its_budget() {
    let sim = SimStore::in_memory(Profile::INSTANT, 1);
    let runs = runs(&sim, 4).await;
    let cache = open(&sim, CacheOptions { memory_bytes: 64 << 10, ..CacheOptions::default() });
    let indexes = cache.indexes(&runs, Priority::Demand).await.unwrap();
    for (run, index) in runs.iter().zip(&indexes) {
        cache.fetch(all(run, index), ReadOptions::DEMAND).await.unwrap();
    }
    assert!(cache.stats().memory_bytes <= 64 << 10, "{:?}", cache.stats());
    cache.set_memory_bytes(16 << 10).unwrap();
    assert!(cache.stats().memory_bytes <= 16 << 10, "{:?}", cache.stats());
}

async fn with_disk(sim: &SimStore, directory: &std::path::Path) -> Arc<BlockCache> {
    with_policy(sim, directory, AdmissionPolicy::All).await
}

async fn with_policy(
    sim: &SimStore,
    directory: &std::path::Path,
    admission: AdmissionPolicy,
) -> Arc<BlockCache> {
    let mut disk = DiskCacheOptions::new(directory.to_path_buf(), 64 << 20);
    disk.buffer_bytes = 16 << 20;
    disk.admission = admission;
    let cache = open(sim, CacheOptions { disk: Some(disk), ..CacheOptions::default() });
    for _ in 0..12_000 {
        if cache.has_disk() {
            return cache;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the disk tier did not open");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn by_history_only_what_is_read_again_goes_to_disk() {
    let directory = tempfile::tempdir().unwrap();
    let sim = SimStore::in_memory(Profile::INSTANT, 1);
    let runs = runs(&sim, 1).await;
    let cache = with_policy(&sim, directory.path(), AdmissionPolicy::History).await;
    let index = cache.indexes(&runs, Priority::Demand).await.unwrap().remove(0);
    let wanted = all(&runs[0], &index);
    let count = wanted.len() as u64;
    cache.fetch(wanted.clone(), ReadOptions::DEMAND).await.unwrap();
    // Areas are filled in the background.
    let disk = || DiskStats { used_bytes: 0, ..cache.stats().disk };
    let first = disk();
    assert_eq!(first, DiskStats { refused: count, limit_bytes: 64 << 20, ..DiskStats::default() });
    cache.clear_memory();
    cache.fetch(wanted[..3].to_vec(), ReadOptions::DEMAND).await.unwrap();
    assert_eq!(disk(), DiskStats { admitted: 3, ..first });
    cache.close().await.unwrap();
    assert_eq!(cache.stats().disk_hits, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_disk_tier_survives_a_restart_and_never_answers_for_another_run() {
    let directory = tempfile::tempdir().unwrap();
    let sim = SimStore::in_memory(Profile::INSTANT, 1);
    let runs = runs(&sim, 1).await;
    let cache = with_disk(&sim, directory.path()).await;
    let index = cache.indexes(&runs, Priority::Demand).await.unwrap().remove(0);
    let wanted = all(&runs[0], &index);
    cache.fetch(wanted.clone(), ReadOptions::DEMAND).await.unwrap();
    cache.close().await.unwrap();
    drop(cache);

    let cache = with_disk(&sim, directory.path()).await;
    let gets = sim.stats().gets;
    let blocks = cache.fetch(wanted.clone(), ReadOptions::DEMAND).await.unwrap();
    assert_eq!(blocks.len(), wanted.len());
    assert_eq!(sim.stats().gets, gets, "{:?}", cache.stats());
    assert_eq!(cache.stats().disk_hits, wanted.len() as u64);
    cache.close().await.unwrap();
    drop(cache);

    // The same names in another store: the checksums differ, so the directory's entries do not match.
    let other = SimStore::in_memory(Profile::INSTANT, 1);
    let mut others = super::tests::runs(&other, 2).await;
    let mut meta = others.remove(1).meta().clone();
    meta.run_id = 1;
    let run = Arc::new(RunReader::new(meta, Arc::clone(runs[0].codec())));
    let cache = with_disk(&other, directory.path()).await;
    let index =
        cache.indexes(std::slice::from_ref(&run), Priority::Demand).await.unwrap().remove(0);
    let blocks = cache.fetch(all(&run, &index), ReadOptions::DEMAND).await.unwrap();
    let column = blocks[0].entries.values.column(0);
    assert_eq!(column.as_any().downcast_ref::<Int64Array>().unwrap().value(0), 1);
    assert_eq!(cache.stats().disk_hits, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_disk_entry_falls_back_to_the_store() {
    let directory = tempfile::tempdir().unwrap();
    let sim = SimStore::in_memory(Profile::INSTANT, 1);
    let runs = runs(&sim, 1).await;
    let cache = with_disk(&sim, directory.path()).await;
    let index = cache.indexes(&runs, Priority::Demand).await.unwrap().remove(0);
    let wanted = request(&runs[0], &index, 2);
    if let Some(disk) = cache.disk.get() {
        disk.insert(read::Unit::key(&wanted), Bytes::from_static(b"not a block"));
    }
    for _ in 0..12_000 {
        if cache.disk.get().is_some_and(|d| d.may_contain(&read::Unit::key(&wanted))) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let blocks = cache.fetch(vec![wanted], ReadOptions::DEMAND).await.unwrap();
    assert_eq!(blocks[0].entries.keys.value(0), index.first_key(2));
    assert_eq!(cache.stats().disk_damaged, 1);
}

#[tokio::test(start_paused = true)]
async fn a_run_just_built_needs_no_reading() {
    let sim = SimStore::in_memory(Profile::INSTANT, 1);
    let runs = runs(&sim, 1).await;
    let cache = open(&sim, CacheOptions::default());
    let meta = runs[0].meta();
    let bytes = sim.get(&Path::from("data/1/1.seg")).await.unwrap().bytes().await.unwrap();
    let index =
        runs[0].parse_index(&bytes.slice((meta.length - meta.meta_length) as usize..)).unwrap();
    let gets = sim.stats().gets;
    cache.admit_run(&runs[0], Arc::new(index), &bytes, |_, _| true).unwrap();
    let index = cache.indexes(&runs, Priority::Demand).await.unwrap().remove(0);
    cache.fetch(all(&runs[0], &index), ReadOptions::DEMAND).await.unwrap();
    assert_eq!(sim.stats().gets, gets);
    cache.forget_run(&runs[0]);
    assert!(cache.try_get(&runs[0], &index, 0).is_none());
}

/// Whatever goes wrong below and however small the tiers: right rows or an error, and a retry helps.
#[tokio::test(start_paused = true)]
async fn under_faults_and_eviction_blocks_are_right_or_an_error() {
    for seed in 0..20u64 {
        let sim = SimStore::in_memory(Profile::S3, seed);
        let runs = runs(&sim, 3).await;
        let options = CacheOptions {
            memory_bytes: 40 << 10,
            index_bytes: 4 << 10,
            join_gap: seed % 3 * 3_000,
            max_read_bytes: 1 + seed % 5 * 4_000,
            ..CacheOptions::default()
        };
        let cache = open(&sim, options);
        let faults =
            Faults { error: 0.05, short_read: 0.03, damaged_read: 0.03, ..Faults::default() };
        let readers = (0..6u32).map(|reader| {
            let (cache, runs, sim) = (Arc::clone(&cache), runs.clone(), sim.clone());
            async move {
                let (mut right, mut wrong) = (0, 0);
                for step in 0..20u32 {
                    sim.set_faults(faults);
                    let Ok(indexes) = cache.indexes(&runs, Priority::Demand).await else {
                        wrong += 1;
                        continue;
                    };
                    let wanted: Vec<BlockRequest> = (0..12u32)
                        .map(|i| {
                            let run = ((reader + i * step) % 3) as usize;
                            let block = (i * 7 + step * 5 + reader) % indexes[run].blocks();
                            request(&runs[run], &indexes[run], block)
                        })
                        .collect();
                    let options =
                        if step % 4 == 0 { ReadOptions::SCAN } else { ReadOptions::DEMAND };
                    match cache.fetch(wanted.clone(), options).await {
                        Ok(blocks) => {
                            right += 1;
                            for (block, asked) in blocks.iter().zip(&wanted) {
                                assert_eq!(
                                    block.entries.keys.value(0),
                                    asked.index.first_key(asked.block)
                                );
                                assert_eq!(
                                    block.entries.len(),
                                    asked.index.block_rows(asked.block) as usize
                                );
                            }
                        }
                        Err(_) => wrong += 1,
                    }
                }
                (right, wrong)
            }
        });
        let results = futures::future::join_all(readers).await;
        assert!(results.iter().map(|r| r.0).sum::<i32>() > 10, "{results:?}");
        sim.set_faults(Faults::default());
        let indexes = cache.indexes(&runs, Priority::Demand).await.unwrap();
        for (run, index) in runs.iter().zip(&indexes) {
            assert_eq!(
                cache.fetch(all(run, index), ReadOptions::DEMAND).await.unwrap().len(),
                index.blocks() as usize
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn requests_count_for_the_reader_for_whom_they_are_made() {
    let sim = SimStore::in_memory(Profile::S3, 1);
    let runs = runs(&sim, 1).await;
    let cache = open(&sim, CacheOptions { join_gap: 0, max_read_bytes: 1, ..Default::default() });
    let index = cache.indexes(&runs, Priority::Demand).await.unwrap().remove(0);
    let before = sim.stats().gets;
    let [first, second, third] = [(); 3].map(|()| Arc::<AtomicU64>::default());
    let fetch = |requests: &Arc<AtomicU64>| {
        let requests = Some(Arc::clone(requests));
        cache.begin_fetch(all(&runs[0], &index), ReadOptions { requests, ..ReadOptions::DEMAND })
    };
    let (reading, joined) = (fetch(&first), fetch(&second));
    Answer::all(reading).await.unwrap();
    Answer::all(joined).await.unwrap();
    Answer::all(fetch(&third)).await.unwrap();
    let counts = [first, second, third].map(|count| count.load(Ordering::Relaxed));
    assert_eq!(counts, [sim.stats().gets - before, 0, 0]);
    assert!(counts[0] > 1);
}

/// A row that needs what a scan has queued does not wait for the scan's turn.
#[tokio::test(start_paused = true)]
async fn a_demand_read_takes_a_queued_scan_read_out_of_its_class() {
    for behind in [ReadOptions::SCAN, ReadOptions::PREFETCH, ReadOptions::COMPACTION] {
        let sim = SimStore::in_memory(Profile::S3, 1);
        let runs = runs(&sim, 1).await;
        let one_by_one = CacheOptions { join_gap: 0, max_read_bytes: 1, ..CacheOptions::default() };
        let options = CacheOptions { reads: ReadLimits::fixed(4), scan_reads: 1, ..one_by_one };
        let cache = open(&sim, options);
        let index = cache.indexes(&runs, Priority::Demand).await.unwrap().remove(0);
        sim.hang_reads(None);
        let wanted = all(&runs[0], &index);
        let last = wanted[wanted.len() - 1].clone();
        let behind_it = cache.begin_fetch(wanted, behind.clone());
        tokio::time::sleep(Duration::from_millis(10)).await;
        let of = |priority: Priority| cache.read_stats().classes[priority as usize];
        assert!(of(behind.priority).queued > 4, "{behind:?}: {:?}", cache.read_stats());
        let demand = cache.begin_fetch(vec![last], ReadOptions::DEMAND);
        assert_eq!(cache.read_stats().raised, 1, "{behind:?}");
        assert_eq!(of(Priority::Demand).in_flight, 1, "it starts at once");
        sim.release_reads();
        assert_eq!(Answer::all(demand).await.unwrap().len(), 1);
        let rest = Answer::all(behind_it).await.unwrap();
        assert_eq!(rest.len(), index.blocks() as usize);
    }
}

/// A run whose index is stored in partitions.
async fn partitioned(sim: &SimStore) -> (Arc<RunReader>, Bytes, Arc<RunIndex>) {
    let schema = Schema::new(vec![Field::new("v", DataType::Int64, true)]);
    let codec = Arc::new(BlockCodec::new(&schema));
    let options = RunOptions {
        block_bytes: 2_048,
        partition_bytes: 1_024,
        ..RunOptions::new(RunKind::Point)
    };
    let mut builder = RunBuilder::new(Arc::clone(&codec), options);
    let keys = BinaryArray::from_iter_values((0..20_000u32).map(|i| i.to_be_bytes()));
    let numbers = Int64Array::from_iter_values(0..20_000);
    let values =
        RecordBatch::try_new(codec.value_schema().clone(), vec![Arc::new(numbers)]).unwrap();
    let all = Entries { keys, epochs: Epochs::Uniform(Epoch(5)), weights: None, values };
    builder.push(&all).unwrap();
    let mut run = builder.finish().unwrap();
    (run.meta.run_id, run.meta.object) = (1, "data/1/1.seg".to_string());
    let payload = run.bytes.clone();
    sim.put(&Path::from("data/1/1.seg"), payload.into()).await.unwrap();
    (Arc::new(RunReader::new(run.meta, codec)), run.bytes, run.index)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitions_of_an_index_are_kept_on_disk_and_forgotten_with_their_run() {
    let directory = tempfile::tempdir().unwrap();
    let sim = SimStore::in_memory(Profile::INSTANT, 1);
    let (run, bytes, index) = partitioned(&sim).await;
    let cache = with_disk(&sim, directory.path()).await;
    cache.admit_run(&run, index, &bytes, |_, _| false).unwrap();
    let top = cache.try_index(&run).unwrap();
    assert!(top.is_top() && top.blocks() > 8);
    assert!(top.block_numbers().all(|p| cache.try_partition(&run, &top, p).is_some()));
    assert_eq!(sim.stats().gets, 0, "what was written is not read");
    cache.close().await.unwrap();
    drop(cache);

    let cache = with_disk(&sim, directory.path()).await;
    let top = cache.indexes(&[Arc::clone(&run)], Priority::Demand).await.unwrap().remove(0);
    let request =
        |partition| PartitionRequest { run: Arc::clone(&run), top: Arc::clone(&top), partition };
    let wanted = top.block_numbers().map(request).collect();
    let parts = cache.partitions(wanted, ReadOptions::DEMAND).await.unwrap();
    assert_eq!(sim.stats().gets, 0, "the run's description has the top index");
    let blocks = parts
        .iter()
        .flat_map(|part| part.block_numbers().map(|b| super::tests::request(&run, part, b)));
    let blocks = cache.fetch(blocks.collect(), ReadOptions::DEMAND).await.unwrap();
    assert_eq!(blocks.iter().map(|b| b.entries.len()).sum::<usize>(), 20_000);
    assert_eq!(sim.stats().gets, 0, "{:?}", cache.stats());
    cache.forget_run(&run);
    assert_eq!((cache.stats().index_bytes, cache.stats().memory_bytes), (0, 0));
    assert!(top.block_numbers().all(|p| cache.try_partition(&run, &top, p).is_none()));
    cache.close().await.unwrap();
}
