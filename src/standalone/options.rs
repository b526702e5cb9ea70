//! The options of the roles, as the configuration says, and how they share memory, threads and descriptors.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use millrace_common::access::AccessClass;
use millrace_common::{JobId, TableId};
use millrace_executor::options::ExecOptions;
use millrace_executor::worker::WorkerOptions;
use millrace_frontend::FrontendConfig;
use millrace_meta::{MetaOptions, RewriteOptions};
use millrace_storage::cache::{CacheOptions, DiskCacheOptions, ReadLimits};
use millrace_storage::object::local_directory;
use millrace_storage::read_counts::TableReads;
use millrace_storage::recovery_reads::TailPrefetch;
use millrace_storage::{StateStore, StoreOptions, TailLimits};
use object_store::ObjectStore;

use super::Overrides;
use crate::config::Config;
use crate::descriptors::{self, Shares};
use crate::http;

/// Connections of the HTTP port at a time: consoles, and whoever collects metrics.
const HTTP_CONNECTIONS: usize = 128;
/// How long a request of the HTTP port may take to arrive, at most.
const HTTP_PATIENCE: Duration = Duration::from_secs(30);
/// Rows of a backfill's step, at least.
const MIN_STEP: usize = 4 << 10;
/// Threads that read a local directory, at most.
const LOCAL_READS: usize = 128;

/// Connections that may be open at a time, such that descriptors are left for everything else.
pub(crate) fn share_descriptors(config: &Config) -> Shares {
    let limit = descriptors::raise_limit();
    let cache = || DiskCacheOptions::new(config.data_dir.join("cache"), config.disk_cache).files();
    let files = if config.disk_cache > 0 { cache() } else { 0 };
    let wanted = Shares {
        sessions: config.access.max_connections,
        pending: config.access.max_pending,
        http: HTTP_CONNECTIONS,
    };
    let shares = Shares::of(wanted, limit, files);
    if shares == wanted {
        tracing::info!(limit, max_connections = shares.sessions, "open files");
    } else {
        tracing::warn!(
            limit,
            max_connections = shares.sessions,
            max_pending_connections = shares.pending,
            "the system's limit of open files (ulimit -n) leaves fewer connections than are set"
        );
    }
    shares
}

pub(crate) fn worker_options(
    config: &Config,
    overrides: &Overrides,
    store: &Arc<StateStore>,
) -> WorkerOptions {
    WorkerOptions {
        exec: overrides.exec.clone().unwrap_or_else(|| exec_options(config)),
        memory_limit: config.memory_limit,
        ..WorkerOptions::new(Arc::clone(store))
    }
}

/// What the configuration says of it.
pub(crate) fn frontend_config(config: &Config, shares: Shares) -> FrontendConfig {
    FrontendConfig {
        query_memory: config.memory_limit / 4,
        require_password: config.access.require_password,
        max_connections: shares.sessions,
        max_pending: shares.pending,
        authentication_timeout: config.access.authentication_timeout,
        ..FrontendConfig::default()
    }
}

pub(crate) fn http_limits(config: &Config, shares: Shares) -> http::Limits {
    http::Limits {
        connections: shares.http,
        patience: config.access.authentication_timeout.min(HTTP_PATIENCE),
    }
}

pub(crate) fn meta_options(
    config: &Config,
    overrides: &Overrides,
    store: Arc<dyn ObjectStore>,
    late_store: &Arc<OnceLock<Arc<StateStore>>>,
    tail: &Arc<OnceLock<Arc<TailPrefetch>>>,
) -> MetaOptions {
    let ms = |d: std::time::Duration| format!("{}ms", d.as_millis().max(1));
    let mut settings =
        BTreeMap::from([("barrier_interval".to_string(), ms(config.barrier_interval))]);
    let (classes, readers) = (Arc::clone(late_store), Arc::clone(late_store));
    let counts = Arc::clone(late_store);
    let (tail, object_store) = (Arc::clone(tail), Arc::clone(&store));
    let defaults = MetaOptions::new(store);
    let mut snapshots = defaults.snapshots;
    if let Some(records) = config.tuning.snapshot_records {
        snapshots.min_records = records;
        snapshots.max_records = snapshots.max_records.min(records.saturating_mul(8));
    }
    let mut gc = defaults.gc;
    // What is copied is in memory meanwhile.
    let mut rewrite = RewriteOptions {
        bytes: (config.memory_limit as u64 / 64).clamp(4 << 20, 64 << 20),
        ..defaults.rewrite
    };
    if let Some(period) = config.tuning.gc_interval {
        gc.period = period;
        rewrite.period = period * 6;
        let retention = (period * 6).max(std::time::Duration::from_millis(100));
        settings.insert("object_retention".to_string(), ms(retention));
    }
    MetaOptions {
        parallelism: config.parallelism,
        source_epoch_events: (config.memory_limit / event_memory(config.memory_limit)) as u64,
        step_bytes: config.tuning.step_bytes.unwrap_or((config.memory_limit / 16).max(4 << 20))
            as u64,
        settings,
        table_class: Arc::new(move |job: JobId, table: u32| {
            let table = classes.get().and_then(|s| s.job(job)?.table(TableId(table)));
            table.map_or(AccessClass::PointUpdate, |t| t.class)
        }),
        table_reads: Some(Arc::new(move |job: JobId, table: u32| {
            let job = counts.get().and_then(|s| s.job(job));
            job.map_or(TableReads::MANY, |j| j.reads_since_merge(TableId(table)))
        })),
        pinned: Arc::new(move |object| readers.get().is_some_and(|s| s.holds_object(object))),
        recovering: Some(Box::new(move |slices| {
            let _ = tail.set(Arc::new(TailPrefetch::start(&object_store, slices)));
        })),
        max_clock_skew: config.max_clock_skew,
        snapshots,
        gc,
        rewrite,
        env: overrides.env.clone(),
        ..defaults
    }
}

/// Memory limit for each row that an epoch takes in: it may be wide, written in several state tables,
/// and there in several stages of a commit. Under a small limit, where caches and buffers leave less of
/// it, more.
fn event_memory(limit: usize) -> usize {
    if limit < 1 << 30 { 24 << 10 } else { 8 << 10 }
}

/// Reads of the object store in flight. Each takes a thread (a local directory) or a connection, and so an open file.
fn read_limits(config: &Config) -> ReadLimits {
    let defaults = ReadLimits::default();
    let is_local = !matches!(local_directory(&config.object_store), Ok(None));
    let most = match is_local {
        true => LOCAL_READS,
        false => defaults.most.min((descriptors::raise_limit() / 8).max(2)),
    };
    let (least, most) = match (config.tuning.min_reads, config.tuning.max_reads) {
        (None, None) => (defaults.least.min(most), most),
        (Some(least), None) => (least, most.max(least)),
        (None, Some(most)) => (defaults.least.min(most), most),
        (Some(least), Some(most)) => (least.min(most), most),
    };
    ReadLimits { least, most, start: defaults.start.clamp(least, most) }
}

/// How the memory limit is dealt out: a quarter each for blocks, state caches and queries; the rest
/// for memory runs, channels and what the allocator keeps.
pub(crate) fn store_options(
    config: &Config,
    overrides: &Overrides,
    store: Arc<dyn ObjectStore>,
    incarnation: u64,
) -> StoreOptions {
    let limit = config.memory_limit;
    let disk = (config.disk_cache > 0).then(|| DiskCacheOptions {
        admission: config.tuning.disk_cache_admission.unwrap_or_default(),
        ..DiskCacheOptions::new(config.data_dir.join("cache"), config.disk_cache)
    });
    let defaults = StoreOptions::new(store, incarnation);
    StoreOptions {
        cache: CacheOptions {
            memory_bytes: limit / 4,
            index_bytes: limit / 16,
            disk,
            // Scans and compactions read ahead: all of it together stays a small part.
            max_read_bytes: (limit as u64 / 256).clamp(256 << 10, 4 << 20),
            scan_reads: (limit / (16 << 20)).clamp(4, 24),
            read_bytes: (limit as u64 / 16).clamp(16 << 20, 256 << 20),
            reads: read_limits(config),
            hedge_reads: config.tuning.hedge_reads.unwrap_or(true),
            ..CacheOptions::default()
        },
        flush_bytes: overrides
            .flush_bytes
            .or(config.tuning.flush_bytes)
            .unwrap_or((limit / 16).clamp(4 << 20, 64 << 20)),
        spill_bytes: overrides.spill_bytes.unwrap_or((limit / 8).clamp(8 << 20, 256 << 20)),
        direct_run_bytes: config.tuning.direct_run_bytes.unwrap_or(defaults.direct_run_bytes),
        tail: TailLimits {
            slices: config.tuning.flush_commits.unwrap_or(defaults.tail.slices),
            bytes: config.tuning.tail_bytes.unwrap_or((limit / 16).clamp(4 << 20, 64 << 20)) as u64,
            age: config.tuning.flush_age.unwrap_or(defaults.tail.age),
        },
        overlap_limit: overrides.overlap_limit.unwrap_or(defaults.overlap_limit),
        env: overrides.env.clone(),
        inline_bytes: config.tuning.inline_bytes.unwrap_or(defaults.inline_bytes),
        block_bytes: overrides.block_bytes,
        // A compaction holds a run or two until they are written.
        run_bytes: (limit / 64).clamp(4 << 20, defaults.run_bytes),
        lookup_bytes: overrides.lookup_bytes.unwrap_or(limit / 64),
        scan_bytes: (limit / 16).clamp(4 << 20, defaults.scan_bytes),
        ..defaults
    }
}

/// For tests of the binary: whether it has hints at random.
fn has_random_hints() -> bool {
    cfg!(debug_assertions) && std::env::var_os("MILLRACE_RANDOM_HINTS").is_some()
}

fn exec_options(config: &Config) -> ExecOptions {
    let limit = config.memory_limit;
    let defaults = ExecOptions::default();
    let options = ExecOptions {
        cache_bytes: limit / 16,
        backfill_rows: (limit / event_memory(limit)).clamp(MIN_STEP, defaults.backfill_rows),
        delta_bytes: (limit / 16).min(defaults.delta_bytes),
        group_change_bytes: (limit / 32).min(defaults.group_change_bytes),
        channel_bytes: (limit / 256).clamp(256 << 10, defaults.channel_bytes),
        changelog_bytes: (limit / 16).min(defaults.changelog_bytes),
        statement_bytes: (limit / 8).min(defaults.statement_bytes),
        load_bytes: config.tuning.direct_run_bytes.unwrap_or((limit / 16).clamp(8 << 20, 32 << 20)),
        ..defaults
    };
    if has_random_hints() { options.with_random_hints() } else { options }
}
