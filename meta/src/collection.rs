//! What an operator is told of garbage collection, and how he has it run now.

use millrace_common::Epoch;
use millrace_rpc::operator::{CollectionHolder, CollectionReport};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::cluster::SILENT;
use crate::meta::Meta;

/// Rounds of the collector that are asked for, and those that it has ended: both only rise.
#[derive(Debug, Default)]
pub struct Rounds {
    asked: watch::Sender<u64>,
    ended: watch::Sender<u64>,
    /// What went wrong in the last round.
    troubles: Mutex<Vec<String>>,
}

impl Rounds {
    /// Has the collector begin a round soon, and returns when one has ended that began after this call.
    pub async fn run(&self) {
        let mut wanted = 0;
        self.asked.send_modify(|asked| {
            *asked += 1;
            wanted = *asked;
        });
        // The sender is in `self`.
        let _ = self.ended.subscribe().wait_for(|ended| *ended >= wanted).await;
    }

    /// The round that was asked for last.
    pub fn asked(&self) -> u64 {
        *self.asked.borrow()
    }

    /// Completes when another round than this one is asked for.
    pub async fn asked_beyond(&self, round: u64) {
        let _ = self.asked.subscribe().wait_for(|asked| *asked > round).await;
    }

    /// A round has ended that began when this one was asked for; what went wrong in it.
    pub fn end(&self, round: u64, troubles: Vec<String>) {
        *self.troubles.lock() = troubles;
        self.ended.send_if_modified(|ended| {
            let rises = round > *ended;
            *ended = round.max(*ended);
            rises
        });
    }
}

impl Meta {
    /// What is garbage now, and for whom it is kept.
    pub(crate) fn collection_report(&self) -> CollectionReport {
        let shared = &self.shared;
        let (now, retention) = (shared.env.now_ms(), shared.settings().object_retention);
        let millis = |d: std::time::Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        let age = |epoch: Epoch| now.saturating_sub(epoch.millis());
        let is_leader = |id: u64| shared.incarnation.get() == Some(&id);
        let heartbeat = |id: u64| {
            let age = shared.members.heartbeat_age(id, shared.env.now());
            age.filter(|_| !is_leader(id))
        };
        let state = shared.state.read();
        let garbage = || state.objects.garbage();
        let is_retained = |since: Epoch| age(since) < millis(retention);
        let holders = state.processes.live().iter().map(|(id, process)| {
            let known = shared.applied.last_applied(*id).unwrap_or(process.number);
            let behind = if is_leader(*id) { 0 } else { state.number.saturating_sub(known) };
            let pinned = shared.members.pinned_by(*id);
            CollectionHolder {
                worker: *id,
                objects: garbage().filter(|(name, _)| pinned.contains(*name)).count() as u64,
                records_behind: behind,
                reads_from_ms: shared.members.reads_from_of(*id).map(age),
                heartbeat_ms: heartbeat(*id).map(millis),
            }
        });
        let silent = state.processes.live().keys().filter_map(|id| {
            let silence = heartbeat(*id).filter(|age| *age > SILENT)?;
            Some(format!(
                "process {id} has told nothing for {} ms: what it may read is kept until it is heard of or fenced",
                millis(silence)
            ))
        });
        let troubles = shared.collection.troubles.lock().iter().cloned().chain(silent).collect();
        CollectionReport {
            garbage: garbage().count() as u64,
            retained: garbage().filter(|(_, since)| is_retained(*since)).count() as u64,
            retention_ms: millis(retention),
            oldest_ms: garbage().map(|(_, since)| age(since)).max(),
            live_bytes: state.objects.all_live_bytes(),
            holders: holders.collect(),
            troubles,
        }
    }
}
