//! Background work of a worker: flushes memory runs to the store, closes the state of jobs that are
//! gone, and keeps the governor's account of memtables.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use millrace_common::task::spawn_on;
use millrace_common::{JobId, crash, heap};
use tokio_util::sync::CancellationToken;

use super::Shared;
use super::job::Job;
use crate::error::ExecError;
use crate::memory::{MEMORY_CLASSES, MemoryClass, Reservation, resident_bytes};

const PERIOD: Duration = Duration::from_millis(100);
/// How long a stopped job stays readable: longer than meta's longest pause before a restart.
const CLOSE_AFTER: Duration = Duration::from_secs(60);
/// Under memory pressure, jobs with this much in memory are flushed early.
const WORTH_FLUSHING: usize = 4 << 20;
/// After a flush that failed.
const FLUSH_PAUSE: Duration = Duration::from_secs(1);

pub fn spawn(shared: &Arc<Shared>, stop: CancellationToken) {
    let weak = Arc::downgrade(shared);
    let mut accounts = Accounts {
        memtables: shared.governor.account(MemoryClass::Memtable),
        blocks: shared.governor.account(MemoryClass::Blocks),
        most_blocks: shared.store.cache().memory_budget(),
        blocks_budget: shared.store.cache().memory_budget(),
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
}

impl Accounts {
    /// Brings accounts up to date, and the block cache to the size that the rest leaves it.
    fn update(&mut self, shared: &Shared) {
        let cache = shared.store.cache();
        let held = cache.stats();
        self.memtables.set(shared.store.memory_size());
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

fn round(shared: &Arc<Shared>, accounts: &mut Accounts) {
    accounts.update(shared);
    if let Some(resident) = resident_bytes() {
        let live = heap::live_bytes();
        shared.governor.observe(resident, live);
        let by_class = MEMORY_CLASSES.iter().zip(shared.governor.by_class());
        let text: Vec<String> =
            by_class.map(|(name, bytes)| format!("{name} {}", bytes >> 20)).collect();
        tracing::trace!(
            resident_mb = resident >> 20,
            live_mb = live.map(|bytes| bytes >> 20),
            heap_limit_mb = shared.governor.heap_limit() >> 20,
            accounted_mb = %text.join(", "),
            "memory"
        );
    }
    close_stopped(shared);
    let jobs: Vec<Arc<Job>> = shared.jobs.read().values().cloned().collect();
    let tight = shared.governor.is_tight();
    let largest = jobs.iter().filter_map(|j| Some(j.store.as_ref()?.memory_size())).max();
    for job in jobs {
        let Some(store) = job.store.as_ref().filter(|_| !job.is_stopped()) else { continue };
        let early = tight && Some(store.memory_size()) == largest;
        let due = store.needs_flush() || (early && store.stats().memrun_bytes > WORTH_FLUSHING);
        if due && !job.flushing.swap(true, Ordering::AcqRel) {
            spawn_on(&shared.runtime, "flush", async move {
                if let Err(error) = flush(&job).await {
                    // The rows are safe in the tail; the next round tries again.
                    tracing::warn!(job = job.label, %error, "flush failed");
                    tokio::time::sleep(FLUSH_PAUSE).await;
                }
                job.flushing.store(false, Ordering::Release);
            });
        }
    }
}

/// Writes the job's memory runs to the store, and has the log take note.
async fn flush(job: &Job) -> Result<(), ExecError> {
    let Some(store) = &job.store else { return Ok(()) };
    let edit = store.flush().await?;
    if edit.add_runs.is_empty() && edit.remove_runs.is_empty() && edit.flushed_sequence == 0 {
        return Ok(());
    }
    crash::point("flush-before-commit");
    if job.meta.commit_edit(job.id, job.generation, edit.clone()).await? {
        crash::point("flush-after-commit");
        store.apply_edit(&edit);
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
        }
    }
}
