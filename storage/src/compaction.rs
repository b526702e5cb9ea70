//! Compaction: which runs to rewrite ([`pick`], pure) and rewriting them ([`compact`]).
//!
//! Operator state and keyed relations are *levelled*: level 0 holds flushed runs that overlap; from
//! level 1 on a level is sorted, each ten times the one above, so that a key has at most one run a
//! level. What arrives in order (`Append`) is *tiered*: runs of one level hardly overlap, so they are
//! only joined into larger ones and never rewritten because of what lies below.
//!
//! What decides is overlap per key: the number of runs that a read of one key may have to ask. Ten
//! disjoint runs are no reason to do anything, unless they are many and small: jobs that commit little are flushed by
//! the number of their commits, and every run is part of the log.
//!
//! And it decides for who reads: a table whose runs nobody has read since they were merged is rewritten only for the
//! sake of space and of the number of its runs, until a burst of lookups comes.
//!
//! Order is sacred: of entries with equal key and epoch the larger sequence wins, and a run's
//! sequence is that of its newest commit. So inputs are always the oldest runs of a level, by
//! sequence, and outputs take the newest sequence of the inputs. Nor may a commit that is still in the
//! tail lie between them: only runs older than every tail slice take part.

use std::sync::Arc;

use millrace_common::Epoch;
use millrace_common::access::AccessClass;
use millrace_rpc::version::{RunMeta, SliceRef, VersionEdit};

use crate::block::BlockCodec;
use crate::cache::Priority;
use crate::disk;
use crate::error::{Result, StorageError};
use crate::given_up;
use crate::hot_keys::HotKeys;
use crate::merge::{Merger, Mode};
use crate::read_counts::TableReads;
use crate::run::RunReader;
use crate::run_writer::{Admit, Place, RunWriter, on_blocking_thread};
use crate::state_store::StateStore;
use crate::table::TableDesc;
use crate::ttl_filter::Retain;

/// Runs of level 0 that may hold one key before they are merged.
const L0_OVERLAP: usize = 4;
/// As many of them may, while they are small against what a merge would rewrite below.
const L0_OVERLAP_LIMIT: usize = 12;
/// A key that is read from the disk tier or the store reads about so much of each run that may hold it. When reads have
/// cost as much as a merge, it is worth its price.
const COLD_READ_BYTES: u64 = 16 << 10;
/// Level 0 runs of a table that nobody reads that may hold one key, at most: what a first burst of lookups meets.
const UNREAD_OVERLAP: usize = 40;
/// Level 0 runs that one task takes at most: bounds its memory (one open block a run) and duration.
const MAX_INPUT_RUNS: usize = 32;
/// How much larger each level is than the one above.
const LEVEL_RATIO: u64 = 10;
/// Bytes of level 1, at which a part of it moves to level 2.
const LEVEL1_BYTES: u64 = 512 << 20;
/// Level 0 runs of a table that is cleaned, however little they overlap, that are merged for what has left it.
const SWEEP_RUNS: usize = 8;
/// Level 0 runs below this are small …
const SMALL_RUN_BYTES: u64 = 1 << 20;
/// … and joined when there are so many, however little they overlap, …
const MANY_SMALL_RUNS: usize = 16;
/// … while this many times their bytes are rewritten for them, or when there are twice as many.
const SMALL_RUNS_REWRITE: u64 = 8;
/// Neighbouring runs of a tier that are joined.
const TIER_FAN_IN: usize = 8;
/// Runs that are large enough never to be joined again.
const TIER_DONE_BYTES: u64 = 256 << 20;
const MAX_LEVEL: u32 = 6;

/// A rewriting of runs of one table.
#[derive(Clone, Debug, PartialEq)]
pub struct Pick {
    pub table_id: u32,
    pub inputs: Vec<RunMeta>,
    pub target_level: u32,
    /// Nothing older lies outside the inputs where their keys are.
    pub bottom: bool,
    /// How urgent it is, in per mille of what makes it worth while.
    pub score: u64,
}

/// The most useful rewriting of a job's runs, if any is worth it. `tail`: the job's slices that no
/// flush has retired yet. `class` tells a table's class, `reads` how often its runs have been read since they were
/// merged, `cleaned` whether entries leave it by a bound on their time. Tables with a run in `busy` are left alone.
pub fn pick(
    runs: &[RunMeta],
    tail: &[SliceRef],
    class: impl Fn(u32) -> AccessClass,
    reads: impl Fn(u32) -> TableReads,
    cleaned: impl Fn(u32) -> bool,
    busy: impl Fn(u64) -> bool,
) -> Option<Pick> {
    let mut tables: Vec<u32> = runs.iter().map(|r| r.table_id).collect();
    tables.sort_unstable();
    tables.dedup();
    let oldest_slice = tail.iter().map(|s| s.sequence).min().unwrap_or(u64::MAX);
    let candidates = tables.into_iter().filter_map(|id| {
        let of_table: Vec<&RunMeta> =
            runs.iter().filter(|r| r.table_id == id && r.sequence < oldest_slice).collect();
        if of_table.iter().any(|r| busy(r.run_id)) {
            return None;
        }
        let picked = pick_of_table(id, &of_table, class(id), reads(id));
        // Joining runs would leave in them what expires later.
        let picked = picked.filter(|p| p.target_level > 0 || !cleaned(id));
        picked.or_else(|| if cleaned(id) { pick_sweep(id, &of_table) } else { None })
    });
    candidates.max_by_key(|pick| pick.score)
}

fn pick_of_table(
    id: u32,
    runs: &[&RunMeta],
    class: AccessClass,
    reads: TableReads,
) -> Option<Pick> {
    match class {
        AccessClass::Append => pick_tier(id, runs),
        _ if reads.are_many() => pick_level0(id, runs, reads)
            .or_else(|| pick_level(id, runs))
            .or_else(|| pick_small(id, runs)),
        _ => pick_unread(id, runs),
    }
}

/// The largest number of runs that hold one key, by sweeping over their ends.
pub fn overlap<'a>(runs: impl IntoIterator<Item = &'a RunMeta>) -> usize {
    // Starts sort before ends of the same key: both bounds are inclusive.
    let ends = runs.into_iter().flat_map(|r| [(&r.min_key[..], 0), (&r.max_key[..], 1)]);
    let mut ends: Vec<(&[u8], i32)> = ends.collect();
    ends.sort_unstable();
    let mut open = 0usize;
    let mut most = 0;
    for (_, end) in ends {
        if end == 0 {
            open += 1
        } else {
            open -= 1
        }
        most = most.max(open);
    }
    most
}

fn overlaps(a: &RunMeta, b: &RunMeta) -> bool {
    a.min_key <= b.max_key && b.min_key <= a.max_key
}

fn at_level<'a>(runs: &[&'a RunMeta], level: u32) -> Vec<&'a RunMeta> {
    let mut of_level: Vec<&RunMeta> = runs.iter().copied().filter(|r| r.level == level).collect();
    of_level.sort_by_key(|r| (r.sequence, r.run_id));
    of_level
}

/// The oldest runs of level 0 with all of level 1 that they touch.
fn pick_level0(id: u32, runs: &[&RunMeta], reads: TableReads) -> Option<Pick> {
    let level0 = at_level(runs, 0);
    let depth = overlap(level0.iter().copied());
    if depth < L0_OVERLAP {
        return None;
    }
    let mut inputs: Vec<&RunMeta> = level0.into_iter().take(MAX_INPUT_RUNS).collect();
    let below = at_level(runs, 1).into_iter().filter(|r| inputs.iter().any(|i| overlaps(i, r)));
    let below: Vec<&RunMeta> = below.collect();
    // What reads of these runs have cost since the last merge.
    let read = reads.cold.saturating_mul(depth as u64 * COLD_READ_BYTES);
    let is_small = bytes(&inputs) * 2 < bytes(&below) && read < bytes(&inputs) + bytes(&below);
    if depth < L0_OVERLAP_LIMIT && is_small {
        return None;
    }
    inputs.extend(below);
    Some(task(id, runs, inputs, 1, depth as u64 * 1000 / L0_OVERLAP as u64))
}

/// The oldest runs of level 0 where many are small, with the small ones of level 1 and what lies between: otherwise
/// keys that ascend would leave a run a flush for ever.
fn pick_small(id: u32, runs: &[&RunMeta]) -> Option<Pick> {
    let small = |r: &&&RunMeta| r.length < SMALL_RUN_BYTES;
    let (level0, level1) = (at_level(runs, 0), at_level(runs, 1));
    let many = level0.iter().filter(small).count();
    if many < MANY_SMALL_RUNS {
        return None;
    }
    let mut inputs: Vec<&RunMeta> = level0.into_iter().take(MAX_INPUT_RUNS).collect();
    let joined = inputs.iter().chain(level1.iter().filter(small));
    let first = joined.clone().map(|r| &r.min_key).min()?;
    let last = joined.map(|r| &r.max_key).max()?;
    let between = |r: &&&RunMeta| r.min_key <= *last && *first <= r.max_key;
    let below: Vec<&RunMeta> = level1.iter().filter(between).copied().collect();
    if many < 2 * MANY_SMALL_RUNS && bytes(&below) > bytes(&inputs) * SMALL_RUNS_REWRITE {
        return None;
    }
    inputs.extend(below);
    // Less urgent than anything that makes reads cheaper.
    Some(task(id, runs, inputs, 1, 2))
}

/// Level 0 runs of a table whose entries leave it, with all of level 1 unless that is far larger: where keys
/// ascend with the time nothing overlaps, and what is gone would stay for ever.
fn pick_sweep(id: u32, runs: &[&RunMeta]) -> Option<Pick> {
    let mut inputs: Vec<&RunMeta> = at_level(runs, 0).into_iter().take(MAX_INPUT_RUNS).collect();
    if inputs.len() < SWEEP_RUNS {
        return None;
    }
    let level1 = at_level(runs, 1);
    let all = bytes(&level1) <= bytes(&inputs) * 4;
    let touched = |r: &&RunMeta| all || inputs.iter().any(|i| overlaps(i, r));
    let below: Vec<&RunMeta> = level1.into_iter().filter(touched).collect();
    inputs.extend(below);
    // Less urgent than anything that makes reads cheaper.
    Some(task(id, runs, inputs, 1, 1))
}

/// One run of a level that has outgrown its size, with what it touches below.
fn pick_level(id: u32, runs: &[&RunMeta]) -> Option<Pick> {
    let mut limit = LEVEL1_BYTES;
    for level in 1..MAX_LEVEL {
        let of_level = at_level(runs, level);
        let bytes: u64 = of_level.iter().map(|r| r.length).sum();
        if bytes > limit {
            let below = at_level(runs, level + 1);
            let touched = |r: &RunMeta| -> u64 {
                below.iter().filter(|b| overlaps(r, b)).map(|b| b.length).sum()
            };
            // The one that rewrites least for what it moves.
            let best = of_level
                .into_iter()
                .min_by_key(|r| (touched(r) * 1000 / r.length.max(1), r.run_id))?;
            let mut inputs = vec![best];
            inputs.extend(below.iter().filter(|b| overlaps(best, b)));
            return Some(task(id, runs, inputs, level + 1, bytes * 1000 / limit));
        }
        limit = limit.saturating_mul(LEVEL_RATIO);
    }
    None
}

/// Neighbours, by sequence, of one size.
fn pick_tier(id: u32, runs: &[&RunMeta]) -> Option<Pick> {
    let inputs = joinable(runs)?;
    let level = inputs.iter().map(|r| r.level).max()?.clamp(1, MAX_LEVEL);
    let score = sequences(&inputs) as u64 * 1000 / TIER_FAN_IN as u64;
    Some(task(id, runs, inputs, level, score))
}

/// Level 0 of a table that nobody reads: nothing below is rewritten for the sake of reads. Runs that flushes have left
/// are joined with each other, so that there are few of them; they are merged into level 1 when they hold half as much
/// as lies below, because then much of both may be dead, or when too many of them hold one key.
fn pick_unread(id: u32, runs: &[&RunMeta]) -> Option<Pick> {
    let level0 = at_level(runs, 0);
    let depth = overlap(level0.iter().copied());
    let below: u64 = runs.iter().filter(|r| r.level > 0).map(|r| r.length).sum();
    let large = depth >= L0_OVERLAP && bytes(&level0) * 2 >= below;
    // Less urgent than what makes reads cheaper.
    let score = depth as u64 * 1000 / UNREAD_OVERLAP as u64;
    if large || depth >= UNREAD_OVERLAP {
        let mut inputs: Vec<&RunMeta> = level0.into_iter().take(MAX_INPUT_RUNS).collect();
        let touched = |r: &&RunMeta| inputs.iter().any(|i| overlaps(i, r));
        let below: Vec<&RunMeta> = at_level(runs, 1).into_iter().filter(touched).collect();
        inputs.extend(below);
        return Some(task(id, runs, inputs, 1, score));
    }
    let join = || {
        let inputs = joinable(&level0)?;
        Some(task(id, runs, inputs, 0, score.clamp(1, 999)))
    };
    pick_level(id, runs).or_else(join)
}

/// Runs that follow each other, by sequence, and are of one size; or the oldest, where there are many of changing sizes.
/// Runs of one sequence were cut from one merge: they count as one, and stay together, because what is older than one
/// of them must not get the rank of another.
fn joinable<'a>(runs: &[&'a RunMeta]) -> Option<Vec<&'a RunMeta>> {
    let mut sorted = runs.to_vec();
    sorted.sort_by_key(|r| (r.sequence, r.run_id));
    let whole: Vec<(&[&RunMeta], u64)> = sorted
        .chunk_by(|a, b| a.sequence == b.sequence)
        .map(|of_one| (of_one, bytes(of_one)))
        .collect();
    // What is large divides what may be joined.
    let parts = whole.split(|(_, bytes)| *bytes >= TIER_DONE_BYTES);
    let class = |bytes: u64| bytes.max(1 << 16).ilog(LEVEL_RATIO);
    let groups = parts.clone().flat_map(|part| part.chunk_by(|a, b| class(a.1) == class(b.1)));
    let group = groups
        .filter(|g| g.len() >= TIER_FAN_IN)
        .max_by_key(|g| g.len())
        .or_else(|| parts.filter(|p| p.len() >= MAX_INPUT_RUNS).max_by_key(|p| p.len()))?;
    Some(group.iter().take(MAX_INPUT_RUNS).flat_map(|(runs, _)| runs.iter().copied()).collect())
}

fn sequences(runs: &[&RunMeta]) -> usize {
    runs.chunk_by(|a, b| a.sequence == b.sequence).count()
}

fn bytes(runs: &[&RunMeta]) -> u64 {
    runs.iter().map(|r| r.length).sum()
}

fn task(id: u32, runs: &[&RunMeta], inputs: Vec<&RunMeta>, target_level: u32, score: u64) -> Pick {
    let newest = inputs.iter().map(|r| r.sequence).max().unwrap_or(0);
    let is_input = |r: &RunMeta| inputs.iter().any(|i| i.run_id == r.run_id);
    let older = |r: &&&RunMeta| !is_input(r) && (r.level > target_level || r.sequence <= newest);
    let bottom = !runs.iter().filter(older).any(|r| inputs.iter().any(|i| overlaps(i, r)));
    let inputs = inputs.into_iter().cloned().collect();
    Pick { table_id: id, inputs, target_level, bottom, score }
}

/// Merges runs of one table into new ones at `target_level`, in bounded memory. Nothing changes until
/// the edit is committed and applied; if it never is, the caller gives its objects up. `horizon`: as for relations; operator state keeps no versions.
/// `bound`: from when on entries of a table that is cleaned are kept.
#[allow(clippy::too_many_arguments)]
pub async fn compact(
    store: &StateStore,
    desc: &TableDesc,
    bound: Option<i64>,
    inputs: &[RunMeta],
    target_level: u32,
    horizon: Epoch,
    bottom: bool,
) -> Result<VersionEdit> {
    let shared = Arc::clone(store.shared());
    let closed = |_| StorageError::internal("the state store is closed");
    let _turn = shared.compacting.acquire().await.map_err(closed)?;
    let codec = Arc::new(BlockCodec::new(&desc.value_schema));
    let horizon = if desc.relation { horizon } else { Epoch::MAX };
    let mode = Mode::Compact { horizon, bottom };
    let everything = (std::ops::Bound::Unbounded, std::ops::Bound::Unbounded);
    let readers: Vec<Arc<RunReader>> = inputs
        .iter()
        .map(|m| Arc::new(RunReader::pinned(m.clone(), Arc::clone(&codec), &shared.pins)))
        .collect();
    let hot = HotKeys::of(&shared.cache, readers.iter());
    let sources = disk::scan_all(&shared, readers, mode, &everything, None, Priority::Compaction);
    let schema = Arc::clone(codec.value_schema());
    let retain = desc.retention.zip(bound).map(|(by, bound)| Retain { by, bound });
    let merger = Merger::new(desc.storage, mode, schema, 8192, sources).retaining(retain);
    let sequence = inputs.iter().map(|r| r.sequence).max().unwrap_or(0);
    let place = Place { level: target_level, sequence };
    let mut sink = RunWriter::new(Arc::clone(&shared), Admit::Disk).keeping_hot(hot);
    let desc = desc.clone();
    // Who is waited for no longer does not go on: the turn ends with the wait.
    let (_awaited, abandoned) = tokio::sync::oneshot::channel::<()>();
    let merge = async move {
        sink.write(&desc, &codec, place, merger).await?;
        sink.finish().await
    };
    let written = on_blocking_thread(async move {
        tokio::select! {
            biased;
            _ = abandoned => Err(StorageError::internal("nobody waits for the compaction")),
            written = merge => written,
        }
    })
    .await?;
    // Who is given the edit answers for its objects.
    given_up::settle(written.claims);
    let add_runs = written.runs;
    let remove_runs = inputs.iter().map(|r| r.run_id).collect();
    Ok(VersionEdit { add_runs, remove_runs, ..VersionEdit::default() })
}

#[cfg(test)]
#[path = "compaction_tests.rs"]
mod tests;
