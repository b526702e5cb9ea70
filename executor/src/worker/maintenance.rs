//! Background work of a worker: flushes memory runs to the store, closes the state of jobs that are
//! gone, and keeps the governor's account of memtables.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use millrace_common::collections::HashMap;
use millrace_common::resident::Resident;
use millrace_common::task::spawn_on;
use millrace_common::{JobId, code_pages, crash, heap};
use millrace_storage::tail_limits::{TailSize, largest_tails};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Shared;
use super::job::Job;
use crate::error::ExecError;
use crate::memory::{MEMORY_CLASSES, MemoryClass, Reservation};

const PERIOD: Duration = Duration::from_millis(100);
/// How long a stopped job stays readable: longer than meta's longest pause before a restart.
const CLOSE_AFTER: Duration = Duration::from_secs(60);
/// Memory runs of all jobs may take this part of the memory limit.
const MEMORY_RUNS_PART: usize = 8;
/// Jobs with so much in memory are flushed before their time; under memory pressure, or where jobs are many, with less,
/// down to a sixteenth of it.
const WORTH_FLUSHING: usize = 4 << 20;
/// Until the program's code is given back again, while the process is above its limit.
const CODE_PERIOD: Duration = Duration::from_secs(1);
/// After a flush that failed.
const FLUSH_PAUSE: Duration = Duration::from_secs(1);

pub fn spawn(shared: &Arc<Shared>, stop: CancellationToken) {
    let weak = Arc::downgrade(shared);
    let mut accounts = Accounts {
        memtables: shared.governor.account(MemoryClass::Memtable),
        blocks: shared.governor.account(MemoryClass::Blocks),
        most_blocks: shared.store.cache().memory_budget(),
        blocks_budget: shared.store.cache().memory_budget(),
        sizes: HashMap::default(),
        in_memory: 0,
        tails: BTreeMap::new(),
        code_released: None,
    };
    let work = stop.run_until_cancelled_owned(async move {
        let mut ticks = tokio::time::interval(PERIOD);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let Some(shared) = weak.upgrade() else { return };
            round(&shared, &mut accounts);
        }
    });
    spawn_on(&shared.runtime, "maintain the worker", work);
}

/// What the worker as a whole reports, rather than one holder.
struct Accounts {
    memtables: Reservation,
    blocks: Reservation,
    /// Decoded blocks that the cache may hold, as configured, and at present.
    most_blocks: usize,
    blocks_budget: usize,
    /// Of each job with anything in memory, and their sum.
    sizes: HashMap<JobId, usize>,
    in_memory: usize,
    /// Of each job with slices that are not flushed.
    tails: BTreeMap<JobId, TailSize>,
    /// When the program's code was given back last.
    code_released: Option<Instant>,
}

impl Accounts {
    /// What the job holds in memory now.
    fn set_size(&mut self, id: JobId, bytes: usize) {
        let before = match bytes {
            0 => self.sizes.remove(&id),
            _ => self.sizes.insert(id, bytes),
        };
        self.in_memory = (self.in_memory + bytes).saturating_sub(before.unwrap_or(0));
    }

    fn set_tail(&mut self, id: JobId, tail: TailSize) {
        match tail.slices {
            0 => self.tails.remove(&id),
            _ => self.tails.insert(id, tail),
        };
    }

    /// Brings accounts up to date, and the block cache to the size that the rest leaves it.
    fn update(&mut self, shared: &Shared) {
        let cache = shared.store.cache();
        let held = cache.stats();
        // What is committed is held a second time, encoded, until it is written.
        let followed = shared.elsewhere.as_ref().map_or(0, |elsewhere| elsewhere.memory_bytes());
        self.memtables.set(self.in_memory + shared.store.unwritten_tail_bytes() + followed);
        self.blocks.set((held.memory_bytes + held.index_bytes) as usize);
        let share = shared.governor.block_share(self.most_blocks);
        // Small corrections are not worth an eviction round.
        if share.abs_diff(self.blocks_budget) > self.most_blocks / 16 {
            match cache.set_memory_bytes(share) {
                Ok(()) => self.blocks_budget = share,
                Err(error) => tracing::warn!(%error, "the block cache keeps its size"),
            }
        }
    }
}

/// Looks at the jobs in which something has changed since the last round. Under memory pressure also at the largest.
fn round(shared: &Arc<Shared>, accounts: &mut Accounts) {
    let touched = shared.store.take_touched();
    for (id, store) in &touched {
        accounts.set_size(*id, store.as_ref().map_or(0, |s| s.memory_size()));
        accounts.set_tail(*id, store.as_ref().map_or_else(TailSize::default, |s| s.tail_size()));
    }
    accounts.update(shared);
    observe_memory(shared, &mut accounts.code_released);
    shared.governor.rebalance();
    shared.changelogs.shed();
    close_stopped(shared);
    shared.sources.close_unasked(shared.store.env().now());
    for job in touched.iter().filter_map(|(id, _)| shared.job(*id)) {
        if needs_flush(&job) {
            start_flush(shared, job);
        }
    }
    flush_largest(shared, accounts);
    flush_tails(shared, &accounts.tails);
    if let Some(meta) = shared.meta.get() {
        for job in shared.store.take_read_bursts() {
            meta.request_compaction(job);
        }
    }
}

/// Flushes the jobs with the most in memory until what is left is within the budget of all jobs, or within half
/// of it where memory is short. What is being flushed counts as gone.
fn flush_largest(shared: &Arc<Shared>, accounts: &Accounts) {
    let is_tight = shared.governor.is_tight();
    let budget = shared.governor.limit() / MEMORY_RUNS_PART;
    let most = if is_tight { budget / 2 } else { budget };
    if accounts.in_memory <= most {
        return;
    }
    // Jobs that have stopped keep their state for a while. What is open cannot be flushed.
    let committed = |id: &JobId| {
        let job = shared.job(*id)?;
        let bytes = job.store.as_ref()?.committed_bytes();
        (bytes > 0).then_some((bytes, job))
    };
    let (sizes, jobs): (Vec<usize>, Vec<Arc<Job>>) =
        accounts.sizes.keys().filter_map(committed).unzip();
    for at in largest_runs(&sizes, most, is_tight) {
        start_flush(shared, Arc::clone(&jobs[at]));
    }
}

/// Which of jobs with so much in memory runs to flush so that all the others together have at most `most` bytes: the
/// largest. A run of a few bytes is not worth its request, but where jobs are many and all of them small, none has more
/// than its part of the budget in the end.
fn largest_runs(sizes: &[usize], most: usize, is_tight: bool) -> Vec<usize> {
    let least = WORTH_FLUSHING / 16;
    let part = most / sizes.len().max(1);
    let worth = if is_tight { least } else { part.clamp(least, WORTH_FLUSHING) };
    let mut order: Vec<usize> = (0..sizes.len()).filter(|&at| sizes[at] > worth).collect();
    order.sort_by_key(|&at| (Reverse(sizes[at]), at));
    let mut left: usize = sizes.iter().sum();
    let is_needed = |at: &usize| {
        let is = left > most;
        left -= sizes[*at];
        is
    };
    order.into_iter().take_while(is_needed).collect()
}

fn observe_memory(shared: &Shared, code_released: &mut Option<Instant>) {
    let Some(mut resident) = Resident::now() else { return };
    let (now, limit) = (shared.store.env().now(), shared.governor.limit());
    let is_due = code_released.is_none_or(|at| now - at >= CODE_PERIOD);
    if is_due && resident.all > limit {
        code_pages::release();
        *code_released = Some(now);
        resident = Resident::now().unwrap_or(resident);
    }
    heap::correct(resident.anonymous);
    let live = heap::live_bytes();
    shared.governor.observe(resident.all, live);
    if !tracing::enabled!(tracing::Level::TRACE) {
        return;
    }
    let by_class = MEMORY_CLASSES.iter().zip(shared.governor.by_class());
    let text: Vec<String> =
        by_class.map(|(name, bytes)| format!("{name} {}", bytes >> 20)).collect();
    tracing::trace!(
        resident_mb = resident.all >> 20,
        live_mb = live.map(|bytes| bytes >> 20),
        heap_limit_mb = shared.governor.heap_limit() >> 20,
        accounted_mb = %text.join(", "),
        "memory"
    );
}

/// Flushes a job in the background, unless that is under way.
fn start_flush(shared: &Arc<Shared>, job: Arc<Job>) {
    if job.is_stopped() || job.flushing.swap(true, Ordering::AcqRel) {
        return;
    }
    spawn_on(&shared.runtime, "flush", async move {
        // The rows are safe in the tail. What is written already is not written again.
        while let Err(error) = flush(&job).await {
            tracing::warn!(job = job.label, %error, "flush failed");
            tokio::time::sleep(FLUSH_PAUSE).await;
            if job.is_stopped() {
                break;
            }
        }
        job.flushing.store(false, Ordering::Release);
        // There may be more by now, and a flush that was due meanwhile was not begun.
        if let Some(store) = &job.store {
            store.touch();
        }
    });
}

fn needs_flush(job: &Job) -> bool {
    job.store.as_ref().is_some_and(|s| s.needs_flush())
}

/// Flushes the jobs whose tail has become old, and the largest tails where all together are too large. What is being
/// flushed counts as gone.
fn flush_tails(shared: &Arc<Shared>, tails: &BTreeMap<JobId, TailSize>) {
    let (limits, now) = (shared.store.tail_limits(), shared.store.env().now());
    let exceeded = tails.iter().filter(|(_, tail)| limits.exceeded_by(**tail, now));
    for job in exceeded.filter_map(|(id, _)| shared.job(*id)) {
        if needs_flush(&job) {
            start_flush(shared, job);
        }
    }
    let held: u64 = tails.values().map(|tail| tail.bytes).sum();
    if held <= limits.bytes {
        return;
    }
    let waits = |job: &Arc<Job>| !job.flushing.load(Ordering::Acquire);
    let waiting =
        tails.iter().filter_map(|(id, tail)| Some((shared.job(*id).filter(waits)?, *tail)));
    let (jobs, tails): (Vec<Arc<Job>>, Vec<TailSize>) = waiting.unzip();
    for at in largest_tails(&tails, limits.bytes) {
        start_flush(shared, Arc::clone(&jobs[at]));
    }
}

/// Writes the job's memory runs to the store, and has the log take note.
async fn flush(job: &Job) -> Result<(), ExecError> {
    let Some(store) = &job.store else { return Ok(()) };
    let edit = store.flush().await?;
    if edit.add_runs.is_empty() && edit.remove_runs.is_empty() && edit.flushed.is_none() {
        return Ok(());
    }
    crash::point("flush-before-commit");
    if job.meta.commit_edit(job.id, job.generation, edit).await? {
        crash::point("flush-after-apply");
    }
    Ok(())
}

fn close_stopped(shared: &Shared) {
    let due: Vec<JobId> = {
        let stopped = shared.stopped.read();
        let gone =
            stopped.iter().filter(|(_, job)| shared.store.env().elapsed(job.since) > CLOSE_AFTER);
        gone.map(|(id, _)| *id).collect()
    };
    for id in due {
        shared.stopped.write().remove(&id);
        if shared.job(id).is_none() {
            shared.store.close_job(id);
            shared.changelogs.close(id);
            shared.stream.forget(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: usize = 1 << 20;

    #[test]
    fn the_largest_are_flushed_until_the_rest_is_within_the_budget() {
        assert!(largest_runs(&[10 * MB, 20 * MB], 30 * MB, false).is_empty());
        assert_eq!(largest_runs(&[10 * MB, 20 * MB, 5 * MB], 30 * MB, false), [1]);
        assert_eq!(largest_runs(&[10 * MB, 20 * MB, 5 * MB], 8 * MB, false), [1, 0]);
        assert!(largest_runs(&[MB / 8; 20], MB, false).is_empty(), "not worth their requests");
        assert!(largest_runs(&[2 * MB, 3 * MB], 4 * MB, false) == [1], "each has less than 4 MB");
    }

    /// Many jobs of which each has little are too much together.
    #[test]
    fn many_small_jobs_stay_within_the_budget_of_all() {
        let sizes: Vec<usize> = (0..300).map(|job| (job % 10) * (MB / 4)).collect();
        let flushed = largest_runs(&sizes, 100 * MB, false);
        let gone: usize = flushed.iter().map(|&at| sizes[at]).sum();
        assert!(sizes.iter().sum::<usize>() - gone <= 100 * MB);
        assert!(flushed.iter().all(|&at| sizes[at] >= MB), "the largest");
    }
}
