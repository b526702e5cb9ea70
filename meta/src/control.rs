//! What the leader serves the other processes of a cluster ([`MetaControl`]).

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt;
use millrace_common::{Generation, JobId, RelationId, SqlError, SqlState};
use millrace_rpc::call_error::CallError;
use millrace_rpc::control::{
    DefineAnswer, DefineRequest, GiveBackLocksRequest, Heartbeat, JobReports, ListedLock,
    MetaControl, ProcessReport, ReadEpoch, RecordStream, SessionId as ProtoSessionId,
    SessionsAnswer, SessionsTold, SessionsWanted, TakeLockAnswer, TakeLockRequest,
};
use millrace_rpc::log::{ProcessRole, RegisterProcess};
use millrace_rpc::services::MetaService;
use millrace_rpc::stream::{AppliedRecord, StreamMessage};
use millrace_rpc::version::VersionEdit;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::broadcast::{self, Receiver};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::advisory::{self, Listed, Request, Scope, SessionId};
use crate::cluster::{Cluster, has_role};
use crate::meta::Meta;
use crate::processes::ProcessStatus;
use crate::read::{prove_lead, shutting_down};

/// Records of one message to a follower, at most.
const MESSAGE_RECORDS: usize = 64;

impl Meta {
    pub(crate) fn cluster(&self) -> Result<&Arc<Cluster>, CallError> {
        let alone = || SqlError::unsupported("other processes beside a standalone server");
        self.cluster.get().ok_or_else(|| alone().into())
    }

    /// Waits for jobs. In a cluster an error once there have been no compute processes for too long.
    pub(crate) async fn with_computes<T>(
        &self,
        work: impl Future<Output = Result<T, SqlError>>,
    ) -> Result<T, SqlError> {
        match self.cluster.get() {
            Some(cluster) => cluster.with_computes(work).await,
            None => work.await,
        }
    }

    /// The error of a read that was not ready in time: where no compute process is there, it says so.
    pub(crate) fn for_want_of_compute(&self, error: SqlError) -> SqlError {
        let is_missing =
            || self.cluster.get().is_some_and(|c| c.computes.incarnations().is_empty());
        if error.state != SqlState::QUERY_CANCELED || !is_missing() {
            return error;
        }
        SqlError::new(SqlState::CANNOT_CONNECT_NOW, error.message.clone())
            .with_detail("No compute process is there.")
            .with_hint(
                "Start a compute process, or SET read_freshness = 'any' to read older content.",
            )
    }

    /// No advisory lock is given before then: until they know of this leader, frontends count on locks that the one before
    /// has given. Once; a second call changes nothing.
    pub fn give_locks_from(&self, when: Instant) {
        let _ = self.shared.locks_from.set(when);
    }

    /// A session of a frontend that is not fenced.
    fn live_session(&self, session: Option<ProtoSessionId>) -> Result<SessionId, CallError> {
        let ProtoSessionId { process, pid } = session.unwrap_or_default();
        match self.shared.state.read().processes.is_live(process) {
            true => Ok(SessionId { process, pid }),
            false => Err(CallError::Fenced { incarnation: process }),
        }
    }

    /// How a process is that the log has as live.
    pub(crate) fn process_report(&self, status: &ProcessStatus) -> ProcessReport {
        let is_leader = self.shared.incarnation.get() == Some(&status.incarnation);
        let heartbeat = status.heartbeat.filter(|_| !is_leader);
        ProcessReport {
            incarnation: status.incarnation,
            applied: if is_leader { self.record() } else { status.applied },
            heartbeat_ms: heartbeat.map(|age| age.as_millis() as u64),
            load: status.load,
        }
    }
}

fn proto_session(session: SessionId) -> ProtoSessionId {
    ProtoSessionId { process: session.process, pid: session.pid }
}

/// What follows, in messages. Records that a slow follower misses it reads from the bucket.
async fn next_message(
    mut records: Receiver<AppliedRecord>,
) -> Option<(StreamMessage, Receiver<AppliedRecord>)> {
    let first = loop {
        match records.recv().await {
            Ok(record) => break record,
            Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => return None,
        }
    };
    let mut message = StreamMessage { records: vec![first], horizons: Vec::new() };
    while message.records.len() < MESSAGE_RECORDS
        && let Ok(record) = records.try_recv()
    {
        message.records.push(record);
    }
    Some((message, records))
}

#[async_trait]
impl MetaControl for Meta {
    async fn register_process(&self, process: RegisterProcess) -> Result<u64, CallError> {
        self.cluster()?.register(process).await
    }

    async fn beat(&self, heartbeat: Heartbeat) -> Result<u64, CallError> {
        if self.shared.is_alone.get() == Some(&true) && heartbeat.incarnation == self.incarnation()
        {
            // The worker and the frontend of this process, which call through bytes.
            self.shared.members.note(heartbeat, self.shared.env.now());
            return Ok(self.record());
        }
        self.cluster()?.beat(heartbeat).await
    }

    /// Begins with the next record, whatever `from` says: who follows reads what is before it from the bucket.
    async fn follow(&self, _from: u64) -> Result<RecordStream, CallError> {
        let records: broadcast::Receiver<AppliedRecord> = self.shared.followers.subscribe();
        let messages = futures::stream::unfold(records, next_message);
        Ok(messages.map(Ok).boxed())
    }

    async fn request_cut(&self, job: JobId) -> Result<(), CallError> {
        MetaService::request_cut(self, job);
        Ok(())
    }

    async fn request_compaction(&self, job: JobId) -> Result<(), CallError> {
        MetaService::request_compaction(self, job);
        Ok(())
    }

    async fn commit_edit(
        &self,
        job: JobId,
        generation: Generation,
        edit: VersionEdit,
    ) -> Result<bool, CallError> {
        Ok(MetaService::commit_edit(self, job, generation, edit).await?)
    }

    async fn report_failure(
        &self,
        job: JobId,
        generation: Generation,
        error: SqlError,
    ) -> Result<(), CallError> {
        MetaService::report_failure(self, job, generation, error);
        Ok(())
    }

    async fn define(&self, request: DefineRequest) -> Result<DefineAnswer, CallError> {
        self.define_once(request).await
    }

    async fn wait_created(&self, id: RelationId) -> Result<(), CallError> {
        Ok(self.wait_created(id, &CancellationToken::new()).await?)
    }

    async fn wait_rebuilt(&self, id: RelationId) -> Result<(), CallError> {
        Ok(self.wait_rebuilt(id, &CancellationToken::new()).await?)
    }

    async fn read_epoch(
        &self,
        ids: &[RelationId],
        timeout: Option<Duration>,
        fresh: bool,
    ) -> Result<ReadEpoch, CallError> {
        let epoch = self.read_epoch(ids, timeout, fresh).await?;
        let (record, catalog_version) =
            self.read_state(|state| (state.number, state.catalog_version));
        Ok(ReadEpoch { epoch, record, catalog_version })
    }

    async fn flush(&self) -> Result<(), CallError> {
        Ok(self.flush().await?)
    }

    async fn jobs(&self) -> Result<JobReports, CallError> {
        let own = self.shared.members.job_reports(&self.shared.state.read());
        Ok(JobReports {
            jobs: self.told_jobs(),
            sources: self.source_reports(|id| own.get(&id.0)?.feed_error.clone()),
            processes: self.processes().iter().map(|p| self.process_report(p)).collect(),
            usages: self.usages(),
            compactions: self.compactions(),
        })
    }

    async fn take_lock(&self, request: TakeLockRequest) -> Result<TakeLockAnswer, CallError> {
        let term = self.term();
        let (holder, waits) = (self.live_session(request.session)?, request.waits);
        let (key, mode) = advisory::from_proto(&request.lock.unwrap_or_default())?;
        let (scope, number) = (Scope::Session, request.number);
        let request = Request { holder, key, mode, scope, number };
        let locks = &self.shared.advisory;
        locks.enter(holder);
        let taken = match waits {
            true => locks.acquire(&request).await.map(|()| true),
            false => locks.try_acquire(&request),
        };
        if matches!(taken, Ok(true)) {
            if let Some(from) = self.shared.locks_from.get() {
                tokio::time::sleep_until(*from).await;
            }
            // Another leader may have given it to somebody else since this process was last awake.
            let limit = self.shared.settings().read_wait_timeout;
            if let Err(error) = prove_lead(&self.shared, limit).await {
                locks.release_before(holder, number, &[(key, mode)]);
                return Err(error.into());
            }
        }
        // Of a process that was fenced meanwhile nobody takes it back.
        let session = proto_session(holder);
        if let Err(fenced) = self.live_session(Some(session)) {
            locks.release_untold(holder, matches!(taken, Ok(true)).then_some((key, mode)));
            return Err(fenced);
        }
        Ok(TakeLockAnswer { taken: taken?, term })
    }

    async fn give_back_locks(&self, request: GiveBackLocksRequest) -> Result<(), CallError> {
        let holder = self.live_session(request.session)?;
        let held = request.locks.iter().map(advisory::from_proto).collect::<Result<Vec<_>, _>>()?;
        match request.ended {
            true => self.shared.advisory.release_all(holder),
            false => self.shared.advisory.release_before(holder, request.number, &held),
        }
        Ok(())
    }

    async fn locks(&self) -> Result<Vec<ListedLock>, CallError> {
        let listed = |l: Listed| ListedLock {
            session: Some(proto_session(l.holder)),
            lock: Some(advisory::to_proto(l.key, l.mode)),
            granted: l.granted,
        };
        Ok(self.shared.advisory.list().into_iter().map(listed).collect())
    }

    async fn tell_sessions(&self, told: SessionsTold) -> Result<SessionsWanted, CallError> {
        let (term, process) = (self.term(), told.process);
        if !self.shared.state.read().processes.is_live(process) {
            return Err(CallError::Fenced { incarnation: process });
        }
        // What another leader has asked for says nothing here.
        let told = match told.term == term {
            true => told,
            false => SessionsTold { process, ..SessionsTold::default() },
        };
        tokio::select! {
            biased;
            () = self.shared.shutdown.cancelled() => Err(shutting_down().into()),
            number = self.shared.sessions.tell(told) => Ok(SessionsWanted { term, number }),
        }
    }

    async fn sessions(&self, process: u64) -> Result<SessionsAnswer, CallError> {
        let others = {
            let state = self.shared.state.read();
            let live = state.processes.live().iter().filter(|(id, _)| **id != process);
            live.filter(|(_, p)| has_role(&p.registration, ProcessRole::Frontend))
                .map(|(id, _)| *id)
                .collect()
        };
        let (sessions, silent) = self.shared.sessions.ask(&others).await;
        Ok(SessionsAnswer { sessions, silent })
    }
}
