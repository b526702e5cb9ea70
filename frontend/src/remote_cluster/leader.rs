//! Calls of the leader. It may be gone for a while: what changes nothing is asked again until it answers, or another one
//! does.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use millrace_common::{Epoch, RelationId, SqlError, SqlState};
use millrace_rpc::call_error::CallError;
use millrace_rpc::control::MetaControl;
use millrace_rpc::request::carried;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::RemoteCluster;
use crate::session::canceled;

/// Between two attempts.
pub(super) const PAUSE: Duration = Duration::from_millis(100);
/// How long a statement waits for a record that is durable.
const RECORD_WAIT: Duration = Duration::from_secs(10);

impl RemoteCluster {
    /// How long a read waits at most; `timeout`: as the session has set it, 0 where it has not.
    fn read_limit(&self, timeout: Duration) -> Duration {
        match timeout.is_zero() {
            true => self.cluster_settings().read_wait_timeout,
            false => timeout,
        }
    }

    /// Returns when everything is here that is durable by now.
    pub(super) async fn catch_up(&self) -> Result<(), SqlError> {
        let limit = self.read_limit(Duration::ZERO);
        match timeout_at(self.env.now() + limit, self.log.catch_up()).await {
            Ok(number) => Ok(number.map(drop)?),
            Err(_) => Err(SqlError::new(
                SqlState::IO_ERROR,
                format!("the object store did not answer within {} ms", limit.as_millis()),
            )
            .with_hint("The log of the cluster is read from it.")),
        }
    }

    /// Asks the leader something that changes nothing, until it answers or the time of a read is over.
    pub(super) async fn ask<T, F>(
        &self,
        call: impl Fn(Arc<dyn MetaControl>) -> F + Send,
    ) -> Result<T, SqlError>
    where
        F: Future<Output = Result<T, CallError>> + Send,
        T: Send,
    {
        let limit = self.read_limit(Duration::ZERO);
        let mut deadline = self.env.now() + limit;
        loop {
            let began = self.env.now();
            let error = match call(Arc::clone(&self.meta)).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            if !is_gone(&error) {
                return Err(error.into());
            }
            // A call that has waited for long has had its leader until now.
            if self.env.elapsed(began) > limit {
                deadline = self.env.now() + limit;
            }
            self.pause_or_fail(&error, deadline, limit).await?;
        }
    }

    async fn pause_or_fail(
        &self,
        error: &CallError,
        deadline: Instant,
        limit: Duration,
    ) -> Result<(), SqlError> {
        if self.env.now() + PAUSE >= deadline {
            return Err(no_leader(error, limit));
        }
        tokio::time::sleep(PAUSE).await;
        Ok(())
    }

    /// The newest epoch at which all are exact and nothing is missing that was acknowledged before. Of no relations only
    /// the catalog is waited for.
    pub(super) async fn fresh_epoch(
        &self,
        ids: &[RelationId],
        timeout: Duration,
    ) -> Result<Epoch, SqlError> {
        let limit = self.read_limit(timeout);
        let deadline = self.env.now() + limit;
        loop {
            let left = deadline.saturating_duration_since(self.env.now()).max(PAUSE);
            let call = self.meta.read_epoch(ids, Some(left), true);
            let answer = match timeout_at(deadline + PAUSE, call).await {
                Ok(answer) => answer,
                Err(_) => {
                    let cause = "it has not answered in time".to_owned();
                    Err(CallError::Unreachable { peer: "the leader".to_owned(), cause })
                }
            };
            match answer {
                Ok(at) => {
                    let record = match at.catalog_version {
                        catalog if catalog > 0 && ids.is_empty() => catalog,
                        _ => at.record,
                    };
                    self.log.wait_for(record, deadline.max(self.env.now() + PAUSE)).await?;
                    return Ok(at.epoch);
                }
                Err(error) if is_gone(&error) => {
                    self.pause_or_fail(&error, deadline, limit).await?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The newest epoch that is known here at which all are exact. The leader is asked to bring one about only where none
    /// is known.
    pub(super) async fn any_epoch(
        &self,
        ids: &[RelationId],
        timeout: Duration,
    ) -> Result<Epoch, SqlError> {
        let known = || self.log.read(|state| state.readable_common(ids, Epoch::MAX));
        if let Some(epoch) = known() {
            return Ok(epoch);
        }
        self.catch_up().await?;
        match known() {
            Some(epoch) => Ok(epoch),
            None => self.fresh_epoch(ids, timeout).await,
        }
    }

    /// Waits for a record that is durable. The change that it holds has been made, whether it comes or not.
    pub(super) async fn see(&self, record: u64) {
        let deadline = self.env.now() + RECORD_WAIT;
        if let Err(error) = self.log.wait_for(record, deadline).await {
            warn!(record, %error, "a change has been made and cannot be seen yet");
        }
    }
}

/// Whether nobody leads there: the leader is to be asked again, or another one.
pub(super) fn is_gone(error: &CallError) -> bool {
    matches!(
        error,
        CallError::Unreachable { .. }
            | CallError::NotConnected { .. }
            | CallError::NotLeader { .. }
            | CallError::StaleTerm { .. }
            | CallError::StaleIncarnation { .. }
    )
}

fn no_leader(error: &CallError, limit: Duration) -> SqlError {
    let message = format!("the leader does not answer (waited {} ms)", limit.as_millis());
    SqlError::new(SqlState::CANNOT_CONNECT_NOW, message)
        .with_detail(error.to_string())
        .with_hint("SET read_freshness = 'any' reads what is committed without asking it.")
}

/// The outcome of something that a cancel request ends.
pub(super) async fn unless_cancelled<T>(
    cancel: &CancellationToken,
    work: impl Future<Output = Result<T, SqlError>>,
) -> Result<T, SqlError> {
    tokio::select! {
        biased;
        () = cancel.cancelled() => Err(canceled()),
        done = work => done,
    }
}

/// Asks for cuts of jobs for somebody who waits for their changes; one request at a time.
pub(super) struct Cuts {
    meta: Arc<dyn MetaControl>,
    asking: Arc<AtomicBool>,
}

impl Cuts {
    pub(super) fn new(meta: &Arc<dyn MetaControl>) -> Cuts {
        Cuts { meta: Arc::clone(meta), asking: Arc::default() }
    }

    /// Without them the jobs end their epochs by themselves, only later: errors do not matter.
    pub(super) fn ask(&self, jobs: Vec<RelationId>) {
        if self.asking.swap(true, Ordering::AcqRel) {
            return;
        }
        let (meta, asking) = (Arc::clone(&self.meta), Arc::clone(&self.asking));
        tokio::spawn(carried(async move {
            for job in jobs {
                let _ = meta.request_cut(job).await;
            }
            asking.store(false, Ordering::Release);
        }));
    }
}
