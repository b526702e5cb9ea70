//! Rewriting of segments with little live data (docs/design.md §9).
//!
//! A segment holds slices and runs of many jobs, and stays while one of them is alive. What is alive in segments of which
//! less than 30 % is alive is copied into a new one, byte for byte, and one record exchanges the references; the old
//! segments are garbage then, which their readers keep as long as they hold them.
//!
//! What is copied is less than 3/7 of what has died since it was last written, so that no data is rewritten for ever. A
//! segment counts only if nothing of it has died since it was last looked at: most of those that die at all die quickly.
//! The log says how large the segments are that were written since it was opened, and the list that the collector makes
//! at each start says it of the older ones: so looking for sparse segments asks nothing of the store. A round copies a
//! bounded number of bytes.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use millrace_common::collections::{HashMap, HashSet};
use millrace_common::{JobId, SqlError, crash};
use millrace_rpc::log::Entry;
use millrace_rpc::services::{LivePart, PartKind};
use millrace_rpc::version::{JobVersion, SliceRef};
use parking_lot::Mutex;
use tracing::{Instrument, debug, info_span, warn};

use crate::objects::{Alive, Objects};
use crate::shared::Shared;

/// Percent of a segment that must be alive, or it is rewritten.
const LIVE_PERCENT: u64 = 30;

/// When segments are rewritten, and how much of them at a time.
#[derive(Clone, Copy, Debug)]
pub struct RewriteOptions {
    /// Between two rounds, while anything changes.
    pub period: Duration,
    /// Live bytes that a round copies at most; one segment's at least. They are in memory meanwhile.
    pub bytes: u64,
    /// Segments of one round.
    pub segments: usize,
}

impl Default for RewriteOptions {
    fn default() -> RewriteOptions {
        RewriteOptions { period: Duration::from_secs(60), bytes: 16 << 20, segments: 256 }
    }
}

/// What has been rewritten since the process started.
#[derive(Debug, Default)]
pub struct RewriteCounters {
    segments: AtomicU64,
    copied: AtomicU64,
    freed: AtomicU64,
}

/// [`RewriteCounters`], read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RewriteStats {
    /// Segments of which the live data was moved.
    pub segments: u64,
    /// Bytes that were copied.
    pub copied_bytes: u64,
    /// Bytes of these segments.
    pub freed_bytes: u64,
}

impl RewriteCounters {
    pub fn read(&self) -> RewriteStats {
        RewriteStats {
            segments: self.segments.load(Ordering::Relaxed),
            copied_bytes: self.copied.load(Ordering::Relaxed),
            freed_bytes: self.freed.load(Ordering::Relaxed),
        }
    }
}

/// A segment with little live data.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sparse {
    name: String,
    size: u64,
    live: u64,
}

/// How large the objects of earlier incarnations are, as the store has listed them.
#[derive(Debug, Default)]
pub struct ListedSizes(Mutex<HashMap<String, u64>>);

impl ListedSizes {
    pub fn set(&self, sizes: impl Iterator<Item = (String, u64)>) {
        *self.0.lock() = sizes.collect();
    }

    /// Those that nothing names any more are forgotten.
    fn keep_alive(&self, objects: &Objects) {
        self.0.lock().retain(|name, _| objects.is_referenced(name));
    }

    fn size(&self, object: Alive<'_>) -> u64 {
        self.0.lock().get(object.name).copied().unwrap_or(0).max(object.named)
    }
}

/// One look at all segments after another.
#[derive(Debug, Default)]
struct Looks {
    /// Live bytes of the sparse segments at the last look.
    seen: HashMap<String, u64>,
    /// Those that are to be rewritten, the one with most dead bytes last.
    waiting: Vec<Sparse>,
}

impl Looks {
    /// Whether another look would see the same: no segment waits for its second look.
    fn look(
        &mut self,
        objects: &Objects,
        listed: &ListedSizes,
        is_held: &dyn Fn(&str) -> bool,
    ) -> bool {
        let before = std::mem::take(&mut self.seen);
        for object in objects.alive() {
            let (live, size) = (object.live, listed.size(object));
            if !is_sparse(live, size) || is_held(object.name) {
                continue;
            }
            if before.get(object.name) == Some(&live) {
                self.waiting.push(Sparse { name: object.name.to_owned(), size, live });
            }
            self.seen.insert(object.name.to_owned(), live);
        }
        self.waiting.sort_by_key(|s| (s.size - s.live, Reverse(s.name.clone())));
        self.seen.iter().all(|(name, live)| before.get(name) == Some(live))
    }

    /// The next segments to rewrite together.
    fn take_batch(&mut self, options: RewriteOptions) -> Vec<Sparse> {
        let mut batch: Vec<Sparse> = Vec::new();
        let mut bytes = 0;
        while let Some(next) = self.waiting.last()
            && batch.len() < options.segments
            && (batch.is_empty() || bytes + next.live <= options.bytes)
        {
            bytes += next.live;
            batch.extend(self.waiting.pop());
        }
        batch
    }
}

/// Without any live data a segment is garbage, or not in the log yet.
fn is_sparse(live: u64, size: u64) -> bool {
    live > 0 && u128::from(live) * 100 < u128::from(size) * u128::from(LIVE_PERCENT)
}

pub struct SegmentRewriter {
    pub shared: Arc<Shared>,
    /// Runs that are being rewritten: a run is either compacted or moved.
    pub busy: Arc<Mutex<HashSet<u64>>>,
    pub options: RewriteOptions,
}

impl SegmentRewriter {
    /// Until the server stops. Nothing is looked at while no record was appended.
    pub async fn run(self) {
        let mut looks = Looks::default();
        // The last record before a look that would not be different today.
        let mut settled = None;
        loop {
            tokio::time::sleep(self.options.period).await;
            if let Err(error) = self.round(&mut looks, &mut settled).await {
                warn!(%error, "segments with little live data were not rewritten this time");
            }
        }
    }

    async fn round(&self, looks: &mut Looks, settled: &mut Option<u64>) -> Result<(), SqlError> {
        if looks.waiting.is_empty() {
            let state = self.shared.state.read();
            if *settled == Some(state.number) {
                return Ok(());
            }
            self.shared.listed_sizes.keep_alive(&state.objects);
            // A segment that a backup holds stays as it is: a copy of what is alive would come on top.
            let is_held = |name: &str| state.backups.hold(name);
            let is_settled = looks.look(&state.objects, &self.shared.listed_sizes, &is_held);
            *settled = is_settled.then_some(state.number);
        }
        let mut batch = looks.take_batch(self.options);
        batch.retain(|s| {
            let live = self.shared.state.read().objects.live_bytes(&s.name);
            is_sparse(live, s.size)
        });
        if batch.is_empty() {
            return Ok(());
        }
        let request = self.shared.new_request();
        let span = info_span!("rewrite", request = request.as_str());
        request.scope(self.rewrite(&batch).instrument(span)).await
    }

    async fn rewrite(&self, batch: &[Sparse]) -> Result<(), SqlError> {
        let Some(services) = self.shared.services.get() else { return Ok(()) };
        let names: HashSet<&str> = batch.iter().map(|s| s.name.as_str()).collect();
        let jobs: Vec<(JobId, Arc<JobVersion>)> = {
            let state = self.shared.state.read();
            state.jobs.iter().map(|(id, job)| (*id, Arc::clone(&job.version))).collect()
        };
        let parts: Vec<LivePart> =
            jobs.iter().flat_map(|(id, version)| parts_in(*id, version, &names)).collect();
        drop(jobs);
        let Some(runs) = BusyRuns::take(self, &parts) else {
            debug!("runs of sparse segments are being compacted");
            return Ok(());
        };
        let copied: u64 = parts.iter().map(|p| p.length).sum();
        let moved = services.compactor.copy_parts(parts).await?;
        let object = moved.object.clone();
        crash::point("segments-before-log");
        let verdict = self.shared.log()?.append(Entry::MoveParts(moved)).await;
        if !matches!(verdict, Ok(Ok(_))) {
            self.shared.give_up([object]);
        }
        match verdict? {
            Ok(applied) => {
                crash::point("segments-after-log");
                // Until then the runs are not compacted.
                self.shared.wait_all_applied(applied.record).await;
                crash::point("segments-after-move");
            }
            Err(void) => {
                debug!(%void, "live data of sparse segments could not be moved");
                return Ok(());
            }
        }
        drop(runs);
        let freed: u64 = batch.iter().map(|s| s.size).sum();
        debug!(segments = batch.len(), copied, freed, "segments with little live data rewritten");
        let counters = &self.shared.rewrites;
        counters.segments.fetch_add(batch.len() as u64, Ordering::Relaxed);
        counters.copied.fetch_add(copied, Ordering::Relaxed);
        counters.freed.fetch_add(freed, Ordering::Relaxed);
        Ok(())
    }
}

/// The parts of these objects that a version names.
fn parts_in<'a>(
    job: JobId,
    version: &'a JobVersion,
    names: &'a HashSet<&str>,
) -> impl Iterator<Item = LivePart> + 'a {
    let runs = version.runs.iter().map(move |r| LivePart {
        job,
        object: r.object.clone(),
        offset: r.offset,
        length: r.length,
        kind: PartKind::Run { run_id: r.run_id, meta_length: r.meta_length },
    });
    let slice = move |s: &SliceRef, kind| LivePart {
        job,
        object: s.object.clone(),
        offset: s.offset,
        length: s.length,
        kind,
    };
    let tail = version.tail.iter().map(move |s| slice(s, PartKind::Slice));
    let staged = version.publish.iter().flat_map(|handle| &handle.parts);
    let staged = staged.map(move |s| slice(s, PartKind::Staged));
    runs.chain(tail).chain(staged).filter(move |part| names.contains(part.object.as_str()))
}

/// The runs of some parts, kept from being compacted.
struct BusyRuns<'a> {
    rewriter: &'a SegmentRewriter,
    runs: Vec<u64>,
    jobs: BTreeSet<JobId>,
}

impl<'a> BusyRuns<'a> {
    /// `None`: one of them is being compacted.
    fn take(rewriter: &'a SegmentRewriter, parts: &[LivePart]) -> Option<BusyRuns<'a>> {
        let run = |part: &LivePart| match part.kind {
            PartKind::Run { run_id, .. } => Some((part.job, run_id)),
            PartKind::Slice | PartKind::Staged => None,
        };
        let (jobs, runs): (BTreeSet<JobId>, Vec<u64>) = parts.iter().filter_map(run).unzip();
        let mut busy = rewriter.busy.lock();
        if runs.iter().any(|run| busy.contains(run)) {
            return None;
        }
        busy.extend(runs.iter().copied());
        Some(BusyRuns { rewriter, runs, jobs })
    }
}

impl Drop for BusyRuns<'_> {
    fn drop(&mut self) {
        let mut busy = self.rewriter.busy.lock();
        for run in &self.runs {
            busy.remove(run);
        }
        drop(busy);
        self.rewriter.shared.compaction.look_at(self.jobs.iter().copied());
    }
}

#[cfg(test)]
mod tests {
    use millrace_common::Epoch;

    use super::*;

    const OPTIONS: RewriteOptions =
        RewriteOptions { period: Duration::from_secs(1), bytes: 100, segments: 10 };

    fn name(n: u64) -> String {
        format!("data/1/{n}.seg")
    }

    /// Objects of 1,000 bytes of which so many are alive.
    fn objects(live: &[u64]) -> Objects {
        let mut objects = Objects::default();
        for (n, live) in (0..).zip(live) {
            objects.add(&name(n), *live);
            objects.add(&name(n), 1_000 - live);
            objects.remove(&name(n), 1_000 - live, Epoch(8));
        }
        objects
    }

    fn names(batch: &[Sparse]) -> Vec<String> {
        batch.iter().map(|s| s.name.clone()).collect()
    }

    #[test]
    fn less_than_thirty_percent_is_little() {
        assert!(is_sparse(299, 1_000) && !is_sparse(300, 1_000));
        assert!(!is_sparse(0, 1_000), "it is garbage, or not in the log yet");
    }

    #[test]
    fn a_segment_is_rewritten_when_it_has_stayed_sparse_the_worst_first() {
        let mut objects = objects(&[80, 299, 300, 1_000, 10, 90]);
        let (mut looks, listed) = (Looks::default(), ListedSizes::default());
        assert!(!looks.look(&objects, &listed, &|_| false), "four wait for their second look");
        assert!(looks.take_batch(OPTIONS).is_empty());
        // It is still dying.
        objects.add(&name(5), 5);
        objects.remove(&name(5), 20, Epoch(9));
        assert!(!looks.look(&objects, &listed, &|_| false));
        assert_eq!(names(&looks.take_batch(OPTIONS)), [name(4), name(0)], "100 bytes fit");
        assert_eq!(names(&looks.take_batch(OPTIONS)), [name(1)], "one goes alone");
        assert!(looks.take_batch(OPTIONS).is_empty());
        assert!(looks.look(&objects, &listed, &|_| false));
        assert_eq!(looks.waiting.len(), 4, "those that are sparse still, and the late one");
    }

    #[test]
    fn nothing_is_looked_at_again_where_nothing_changes() {
        let objects = objects(&[1_000, 400]);
        assert!(Looks::default().look(&objects, &ListedSizes::default(), &|_| false));
    }

    #[test]
    fn the_list_tells_the_size_of_what_was_written_earlier() {
        let mut objects = Objects::default();
        (0..3).for_each(|n| objects.add(&name(n), 100));
        let listed = ListedSizes::default();
        listed.set([(name(0), 1_000), (name(1), 100), (name(7), 1_000)].into_iter());
        listed.keep_alive(&objects);
        assert_eq!(listed.0.lock().len(), 2, "what is gone is forgotten");
        let mut looks = Looks::default();
        assert!(!looks.look(&objects, &listed, &|_| false));
        assert!(looks.look(&objects, &listed, &|_| false));
        assert_eq!(names(&looks.take_batch(OPTIONS)), [name(0)]);
    }
}
