//! When the advisory locks of a fenced process are free: when nothing more of its sessions can be committed. A frontend
//! that has stood still for longer than its lease does not know, when it goes on, that it holds them no more.
//!
//! The fence by itself does not end what its sessions write. A compute process that has not folded it takes their
//! statements, and what has entered a table comes into the log with the rest of its epoch, maybe long after the fence. To
//! take it back would end the epoch, and with it statements of others. So the locks wait: once a compute process has the
//! fence, none of these statements enters a table there, and what had entered before is settled for each table by its first
//! cut that was decided later, or because another generation of it has begun (`driver::settled`). What runs nowhere commits
//! nothing, and begins with all records. So nobody waits longer than for a commit of each table, or for a lost process
//! until that is fenced, too.
//!
//! What a session defines is refused from the fence on, and ends where it was waiting (`Connect::fenced`): nothing of it
//! comes into the queue of the log's writer after that. What is there by then is in the log when an entry behind it is.

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use millrace_common::task::spawn;
use millrace_rpc::catalog::RelationKind;
use millrace_rpc::log::{Entry, Tick};
use tracing::info;

use super::Cluster;
use crate::job::JobHandle;
use crate::shared::Shared;

/// How often a table is asked for a cut until one has settled what was to be settled: the generation that was asked may
/// have ended, or the cut may have brought what another table had ended before.
const AGAIN: Duration = Duration::from_secs(1);

impl Cluster {
    /// Gives the locks of a process to others, which the log has fenced.
    pub(super) fn free_locks(&self, incarnation: u64) {
        let shared = Arc::clone(&self.shared);
        if !shared.advisory.are_held_by(incarnation) {
            // Its sessions may wait for some.
            return shared.advisory.release_process(incarnation);
        }
        let stop = shared.shutdown.clone();
        let freeing = async move {
            let began = shared.env.now();
            let record = shared.state.read().number;
            settle_tables(&shared, record).await;
            if let Ok(log) = shared.log() {
                // One that is refused has had its turn as well, and a leader that is deposed gives no locks.
                let _ = log.append(Entry::Tick(Tick {})).await;
            }
            shared.advisory.release_process(incarnation);
            let waited_ms = shared.env.elapsed(began).as_millis() as u64;
            info!(incarnation, waited_ms, "advisory locks of a fenced process are free");
        };
        spawn("free advisory locks", stop.run_until_cancelled_owned(freeing));
    }
}

/// Completes when it is settled for all tables what has become of what had entered before this record was known.
async fn settle_tables(shared: &Shared, record: u64) {
    // One that is not there yet begins with this record.
    let tables: Vec<Arc<JobHandle>> = {
        let state = shared.state.read();
        let tables = state.relations.iter().filter(|(_, r)| r.kind() == RelationKind::Table);
        tables.filter_map(|(id, _)| shared.job(*id)).collect()
    };
    join_all(tables.iter().map(|table| settle_table(shared, table, record))).await;
}

/// The same of one table, or it is dropped.
async fn settle_table(shared: &Shared, table: &JobHandle, record: u64) {
    let settled = async {
        loop {
            table.request_cut();
            let settled = tokio::time::timeout(AGAIN, table.wait_settled(record)).await;
            if settled.is_ok() || runs_nowhere(shared, table) {
                return;
            }
        }
    };
    let _ = table.cancel.run_until_cancelled(settled).await;
}

/// Whether the log has placed the job nowhere. Its generation is a new one then, and has not begun.
fn runs_nowhere(shared: &Shared, table: &JobHandle) -> bool {
    let state = shared.state.read();
    state.jobs.get(&table.id).is_none_or(|job| job.process == 0)
}
