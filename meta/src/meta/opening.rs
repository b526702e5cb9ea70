//! How a process takes the lead: it probes the store, reads the log and writes its first record.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use millrace_common::{SqlError, SqlState};
use millrace_rpc::log::RegisterProcess;
use parking_lot::Mutex;

use super::Meta;
use crate::backup::files::BackupFiles;
use crate::clock::ClockGuard;
use crate::cluster;
use crate::first_record::{alone, leaders_before};
use crate::log::{LogStore, LogWriter, Retention, WriterOptions};
use crate::lookups;
use crate::options::MetaOptions;
use crate::settings::Settings;
use crate::shared::{Follower, Shared};
use crate::state::MetaState;

/// How long a start that is refused waits until nothing is left of its probe.
const PROBE_LEFT: Duration = Duration::from_secs(3);

impl Meta {
    /// Probes the store, reads the log and takes the lead. Alone: one record raises the term, registers this process,
    /// places all jobs on it, which raises their generations, and fences every earlier process. In a cluster it fences
    /// earlier leaders only, and jobs stay where they run.
    pub async fn open(options: MetaOptions) -> Result<Arc<Meta>, SqlError> {
        let store = LogStore::new(options.store);
        let clock = Arc::new(ClockGuard::new(options.env.clone(), options.max_clock_skew));
        let set_to = clock.set_to();
        // At the same time: a start takes few rounds. Whoever is refused leaves nothing behind, if the store answers.
        let (opened, (offset, deleted)) = futures::join!(store.open(), store.probe(&options.env));
        let opened = match opened {
            Ok(opened) => opened,
            Err(error) => {
                let _ = tokio::time::timeout(PROBE_LEFT, deleted).await;
                return Err(error.into());
            }
        };
        if let Some(recovering) = options.recovering {
            let jobs = opened.state.jobs.values();
            recovering(jobs.flat_map(|j| j.version.tail.iter().cloned()).collect());
        }
        let may_lead = options.may_claim.is_some().then(|| leaders_before(&opened.state));
        if let Some(may_claim) = options.may_claim
            && let Err(refused) = may_claim(&opened.state).await
        {
            let _ = tokio::time::timeout(PROBE_LEFT, deleted).await;
            return Err(refused);
        }
        clock.note_store(offset?, opened.state.number, set_to);
        clock.check()?;
        let shared = Shared::new(
            options.env.clone(),
            options.parallelism,
            options.settings,
            Arc::clone(&clock),
        );
        // Set once, here.
        let _ = shared.source_epoch_events.set(options.source_epoch_events);
        let _ = shared.step_bytes.set(options.step_bytes.max(1));
        let setting = |of: fn(&Settings) -> Duration| -> Retention {
            let shared = Arc::downgrade(&shared);
            Arc::new(move || shared.upgrade().map_or(Duration::MAX, |s| of(&s.settings())))
        };
        let writer = WriterOptions {
            env: options.env,
            policy: options.snapshots,
            log_retention: setting(|s| s.log_retention),
            object_retention: setting(|s| s.object_retention),
            observer: Arc::new(Follower(Arc::downgrade(&shared))),
            clock,
        };
        let process = RegisterProcess {
            nonce: options.nonce.unwrap_or_else(|| shared.env.random().max(1)),
            roles: options.roles.iter().map(|role| *role as i32).collect(),
            address: options.address,
        };
        let _ = shared.is_alone.set(options.alone);
        let predecessors = Mutex::new(Vec::new());
        let first = |state: &MetaState, term| {
            if options.only_after.is_some_and(|last| last != state.number) {
                return None;
            }
            let leaders = leaders_before(state);
            if may_lead.as_ref().is_some_and(|asked| *asked != leaders) {
                return None;
            }
            *predecessors.lock() = leaders;
            Some(match options.alone {
                true => alone(state, term, &process),
                false => cluster::leading(state, &process),
            })
        };
        let state = Arc::clone(&shared.state);
        let (log, _) = LogWriter::lead(store.clone(), opened, state, &first, writer).await?;
        shared.set_log(log);
        let incarnation = shared.state.read().processes.by_nonce(process.nonce);
        let incarnation =
            incarnation.ok_or_else(|| SqlError::internal("this process was not registered"))?;
        let _ = shared.incarnation.set(incarnation);
        let given_up = options.given_up;
        let _ = shared.given_up.set(Arc::clone(&given_up));
        // No worker runs yet; each begins with everything committed.
        shared.forget_unpublished();
        shared.refresh();
        let (table_class, pinned) = (options.table_class, options.pinned);
        let told = Arc::clone(&shared);
        let as_told = move |job, table| lookups::since_merge(&told, job, table);
        let table_reads = options.table_reads.unwrap_or_else(|| Arc::new(as_told));
        let (gc, rewrite) = (options.gc, options.rewrite);
        let backup_files = Arc::new(BackupFiles::new(Arc::clone(&shared), store.clone()));
        let meta = Arc::new(Meta {
            shared,
            store,
            incarnation,
            nonce: process.nonce,
            predecessors: predecessors.into_inner(),
            table_class,
            table_reads,
            pinned,
            given_up,
            backup_files,
            gc,
            rewrite,
            cluster: OnceLock::new(),
            usage: OnceLock::new(),
        });
        if let Some(opened) = options.opened {
            opened(&meta);
        }
        Ok(meta)
    }
}

/// Whether a process did not take the lead because the log had gone on.
pub fn is_overtaken(error: &SqlError) -> bool {
    error.state == SqlState::SERIALIZATION_FAILURE
}
