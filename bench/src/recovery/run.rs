//! One loss of the view's owner, and one download of the view's state.

use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use millrace::roles::ComputeProcess;
use millrace_rpc::version::{JobVersion, RunMeta, SliceRef};
use millrace_storage::sim::{SimStats, SimStore};
use object_store::ObjectStoreExt;
use object_store::path::Path;
use tokio::time::Instant;

use super::cluster::Cluster;
use super::host::Host;
use super::trace;
use crate::nexmark::execute;
use crate::sums::only_row;

/// How long a job may take to be elsewhere.
const PATIENCE: Duration = Duration::from_secs(120);
/// Between looks at the log.
const LOOK: Duration = Duration::from_millis(1);
/// Between the keys of two runs, a prime: none comes again.
const STRIDE: u64 = 1_000_003;
/// Of a partition of a run's index, and of a block, the most that one read of a key reads.
const PARTITION_BYTES: u64 = 96 << 10;
const BLOCK_BYTES: u64 = 32 << 10;
/// Records of the log that are read from the store, all together.
const LOG_BYTES: u64 = 64 << 10;
/// Bytes of a request of a download, and how many requests are under way.
const RANGE_BYTES: u64 = 8 << 20;
const RANGES: usize = 64;

/// What became of a view whose owner was lost, from the decision on.
#[derive(Clone, Copy, Debug)]
pub struct Recovery {
    /// From the end of its owner until the decision.
    pub lost: Duration,
    /// Until the row was computed, and until it could be read.
    pub row: Duration,
    pub visible: Duration,
    /// Dependent rounds, requests and bytes of the new owner until the row was computed.
    pub rounds: u64,
    pub gets: u64,
    pub bytes: u64,
    /// Bytes of the metadata, and of the blocks that were asked for, at most.
    pub allowed: u64,
}

/// What it costs to read all of the state.
#[derive(Clone, Copy, Debug)]
pub struct Download {
    pub took: Duration,
    pub rounds: u64,
    pub gets: u64,
    pub bytes: u64,
}

/// Of each run the index with its filter, or of a large one a partition of them.
fn index_bytes(version: &JobVersion) -> u64 {
    let of_run = |run: &RunMeta| if run.top.is_empty() { run.meta_length } else { PARTITION_BYTES };
    version.runs.iter().map(of_run).sum()
}

/// Bytes of slices that have objects of their own.
fn tail_bytes(version: &JobVersion) -> u64 {
    let in_objects = |slice: &&SliceRef| !slice.object.is_empty();
    version.tail.iter().filter(in_objects).map(|slice| slice.length).sum()
}

impl Cluster {
    /// Kills the view's owner, inserts a row, and waits until another process has given it out; that one is the owner
    /// then. `traced`: its requests are printed.
    pub async fn lose_owner(&mut self, traced: bool) -> Result<Recovery, String> {
        self.leave_tails().await?;
        let standby = self.start_standby().await?;
        self.settle().await?;
        self.check_tails()?;
        let key = u64::from(self.started) * STRIDE % self.keys;
        let metadata = self.metadata_bytes();
        let blocks = blocks_read(&standby)?;
        if traced {
            standby.sim.record_requests();
        }
        let versions = [self.version(self.view), self.version(self.table)];
        let owner = self.owner.take().ok_or("nobody has the view")?;
        owner.kill().await?;
        let killed = Instant::now();
        execute(&self.client, &format!("INSERT INTO facts VALUES ({key}, {key})")).await?;
        self.log.catch_up().await.map_err(|e| e.to_string())?;
        let epoch = self.version(self.table).epoch;
        if self.version(self.view).epoch >= epoch {
            return Err("the view has a row that nobody has computed".to_owned());
        }
        if self.placed(self.view) == Some(standby.incarnation()?) {
            // The end of the owner, or the row, took longer than the leader waits for heartbeats.
            return Err("the view was placed elsewhere before its row was there".to_owned());
        }
        let Moments { decided, row, visible, before, until_row, blocks_until_row } =
            self.follow(&standby, epoch).await?;
        if traced {
            let jobs = [("the view", &*versions[0]), ("the table", &*versions[1])];
            let requests = standby.sim.take_requests();
            trace::print(&requests, (decided, row), before.rounds, &jobs);
        }
        let read = only_row(&self.client, &format!("SELECT n FROM totals WHERE k = {key}")).await?;
        if read != [Some("2".to_owned())] {
            return Err(format!("the row of {key} has {read:?}, not 2"));
        }
        let blocks = blocks_until_row - blocks;
        self.owner = Some(standby);
        Ok(Recovery {
            lost: decided - killed,
            row: row.saturating_duration_since(decided),
            visible: visible - decided,
            rounds: until_row.rounds - before.rounds,
            gets: until_row.gets - before.gets,
            bytes: until_row.bytes_read - before.bytes_read,
            allowed: metadata + blocks * (PARTITION_BYTES + BLOCK_BYTES),
        })
    }

    /// What opening the view has to read: what is in the tails, and what of the runs' indexes one key needs.
    fn metadata_bytes(&self) -> u64 {
        let (view, table) = (self.version(self.view), self.version(self.table));
        let indexes = index_bytes(&view) + index_bytes(&table);
        indexes + tail_bytes(&view) + tail_bytes(&table) + LOG_BYTES
    }

    /// Until the view's commit of this epoch is in the log.
    async fn follow(&self, standby: &Host<ComputeProcess>, epoch: u64) -> Result<Moments, String> {
        let (begun, incarnation) = (Instant::now(), standby.incarnation()?);
        let (mut decided, mut row) = (None, None);
        loop {
            self.log.catch_up().await.map_err(|e| e.to_string())?;
            let now = Instant::now();
            if decided.is_none() && self.placed(self.view) == Some(incarnation) {
                decided = Some((now, standby.sim.stats()));
            }
            if row.is_none() {
                let times = standby.process()?.worker.epoch_times(self.view).unwrap_or_default();
                let sealed = times.iter().filter(|t| t.epoch.0 >= epoch).find_map(|t| t.sealed);
                if let Some(sealed) = sealed {
                    row = Some((sealed, standby.sim.stats(), blocks_read(standby)?));
                }
            }
            if self.version(self.view).epoch >= epoch {
                let placed = decided.ok_or("the view went on without being placed");
                let (decided, before) = placed?;
                let (row, until_row, blocks_until_row) = match row {
                    Some(row) => row,
                    None => (now, standby.sim.stats(), blocks_read(standby)?),
                };
                let visible = now;
                return Ok(Moments { decided, row, visible, before, until_row, blocks_until_row });
            }
            if begun.elapsed() > PATIENCE {
                return Err("the view does not go on elsewhere".to_owned());
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Reads all runs of the view through a store that behaves as that of a new owner.
    pub async fn download(&self) -> Result<Download, String> {
        let sim = SimStore::new(std::sync::Arc::clone(&self.raw), self.profile, 1);
        let version = self.version(self.view);
        let ranges = version.runs.iter().flat_map(|run| {
            let end = run.offset + run.length;
            let starts = (run.offset..end).step_by(RANGE_BYTES as usize);
            starts.map(move |from| (run.object.as_str(), from..end.min(from + RANGE_BYTES)))
        });
        let begun = Instant::now();
        let reads = futures::stream::iter(ranges).map(|(object, range)| {
            let (sim, path) = (&sim, Path::from(object));
            async move { sim.get_range(&path, range).await.map(|bytes| bytes.len() as u64) }
        });
        let lengths: Vec<u64> =
            reads.buffer_unordered(RANGES).try_collect().await.map_err(|e| e.to_string())?;
        let (took, SimStats { rounds, gets, .. }) = (begun.elapsed(), sim.stats());
        let bytes = lengths.iter().sum();
        if bytes != self.state_bytes() {
            return Err(format!("{bytes} bytes were read of {}", self.state_bytes()));
        }
        Ok(Download { took, rounds, gets, bytes })
    }
}

/// When what was waited for has come.
struct Moments {
    decided: Instant,
    row: Instant,
    visible: Instant,
    /// What the new owner had asked of the store when it was decided, and when the row was computed.
    before: SimStats,
    until_row: SimStats,
    /// Blocks that it had read from the store when the row was computed.
    blocks_until_row: u64,
}

/// Blocks that a process has read from the store.
fn blocks_read(host: &Host<ComputeProcess>) -> Result<u64, String> {
    Ok(host.process()?.worker.store().cache().stats().misses)
}
