//! What a driver does for a sink: brings committed changes to the target, and waits while the sink is paused.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use millrace_common::{Generation, SqlError, crash};
use millrace_rpc::catalog::RelationKind;
use millrace_rpc::log::{Entry, Published};
use millrace_rpc::version::PublishHandle;
use parking_lot::Mutex;
use tracing::warn;

use super::{Driver, ExitReason, backoff};
use crate::epoch_waiters::FollowGuard;
use crate::status::JobState;

/// Of a sink: what its driver and the publication that is under way share.
pub(super) struct Publishing<'g> {
    /// Has the jobs on the way to an eager sink end their epochs for it.
    following: Mutex<Option<FollowGuard<'g>>>,
    /// The target did not take what it was given last.
    stalled: AtomicBool,
}

impl<'g> Publishing<'g> {
    pub(super) fn new(following: Option<FollowGuard<'g>>) -> Publishing<'g> {
        Publishing { following: Mutex::new(following), stalled: AtomicBool::new(false) }
    }

    pub(super) fn is_stalled(&self) -> bool {
        self.stalled.load(Ordering::Relaxed)
    }
}

impl Driver {
    /// What is committed and the target may not have: of the last commit, or left by the last process or
    /// generation. What is held is published with what comes after it.
    pub(super) async fn publish_staged<'g>(
        &'g self,
        generation: Generation,
        publishing: &Publishing<'g>,
    ) {
        let staged = {
            let state = self.shared.state.read();
            state.jobs.get(&self.handle.id).map_or_else(Vec::new, |j| j.version.publish.clone())
        };
        let mut together = Vec::new();
        for handle in staged.into_iter().filter(|h| h.sequence > self.handle.published()) {
            let held = handle.held;
            together.push(handle);
            if !held {
                self.publish(generation, std::mem::take(&mut together), publishing).await;
            }
        }
    }

    /// Brings committed changes to the sink's target as one, however long that takes: nothing else of this
    /// job is logged meanwhile, and no other job notices.
    async fn publish<'g>(
        &'g self,
        generation: Generation,
        handles: Vec<PublishHandle>,
        publishing: &Publishing<'g>,
    ) {
        let Some(sequence) = handles.last().map(|h| h.sequence) else { return };
        let mut failures = 0;
        loop {
            self.await_resumed(publishing).await;
            crash::point("sink-before-publish");
            let handles = self.as_logged(&handles);
            let published = self.compute.publish(self.handle.id, generation, handles).await;
            let Err(error) = published else { break };
            failures += 1;
            publishing.stalled.store(true, Ordering::Relaxed);
            let pause = backoff(failures, &*self.shared.env);
            let pause_ms = pause.as_millis() as u64;
            warn!(job = %self.label(), %error, pause_ms, "sink stalled");
            let retry_at_ms = self.shared.env.now_ms() + pause.as_millis() as u64;
            let reason = with_particulars(&error);
            self.set_state(JobState::Stalled { code: error.state, reason, retry_at_ms });
            // Who alters the sink does not wait for the next attempt.
            let _ = tokio::time::timeout(pause, self.handle.retry.notified()).await;
        }
        crash::point("sink-after-publish");
        self.handle.set_published(sequence);
        if publishing.stalled.swap(false, Ordering::Relaxed) {
            self.publish_state();
        }
    }

    /// The handles as the log has them now: what they staged may lie in another object than before.
    fn as_logged(&self, handles: &[PublishHandle]) -> Vec<PublishHandle> {
        let state = self.shared.state.read();
        let logged = state.jobs.get(&self.handle.id).map_or(&[][..], |j| &j.version.publish);
        let newest = |h: &PublishHandle| {
            logged.iter().find(|l| l.sequence == h.sequence).unwrap_or(h).clone()
        };
        handles.iter().map(newest).collect()
    }

    /// A sink that was told to wait: it reads no further, and what it has staged stays where it is.
    pub(super) fn is_paused(&self) -> bool {
        self.shared.state.read().is_paused_sink(self.handle.id)
    }

    /// Until the sink is resumed, if it is paused. An ALTER wakes the driver. Meanwhile its inputs need not
    /// hurry for it.
    pub(super) async fn await_resumed<'g>(&'g self, publishing: &Publishing<'g>) {
        if !self.is_paused() {
            return;
        }
        drop(publishing.following.lock().take());
        loop {
            // Asked for before looking: an ALTER in between wakes it. The driver itself may wait for its own signal.
            let altered = self.handle.retry.notified();
            if !self.is_paused() {
                break;
            }
            self.set_state(JobState::Paused);
            altered.await;
        }
        *publishing.following.lock() = self.follow();
        self.publish_state();
    }

    /// Of a sink that is to have its changes as soon as they are there: has the jobs on the way to it end their epochs
    /// whenever there is something in them.
    pub(super) fn follow(&self) -> Option<FollowGuard<'_>> {
        self.is_eager_sink().then(|| self.shared.waits.follow(self.shared.path_to(self.handle.id)))
    }

    /// The last sequence that the target has and the log does not know of.
    pub(super) fn unmarked(&self) -> Option<u64> {
        let published = self.handle.published();
        let state = self.shared.state.read();
        let logged = state.jobs.get(&self.handle.id)?.version.published;
        (published > logged).then_some(published)
    }

    pub(super) async fn mark_published(&self, generation: Generation) -> Result<(), ExitReason> {
        let Some(sequence) = self.unmarked() else { return Ok(()) };
        let entry = Published { job: self.handle.id.0, generation: generation.0, sequence };
        let log = self.shared.log().map_err(ExitReason::Closed)?;
        crash::point("sink-before-mark");
        match log.append(Entry::Published(entry)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(void)) => Err(ExitReason::Failed(void.into())),
            // The next one will do.
            Err(refused) if refused.is_refusal() => Ok(()),
            Err(closed) => Err(ExitReason::Closed(closed.into())),
        }
    }

    /// The least time between two commits that a sink asks for.
    pub(super) fn interval(&self) -> Duration {
        let state = self.shared.state.read();
        let asked = state.relations.get(&self.handle.id).and_then(|r| {
            millrace_common::settings::parse_duration(r.option("commit_interval")?).ok()
        });
        asked.unwrap_or_default()
    }

    pub(super) fn is_sink(&self) -> bool {
        let state = self.shared.state.read();
        state.relations.get(&self.handle.id).is_some_and(|r| r.kind == RelationKind::Sink as i32)
    }

    /// A sink that is to have its changes as soon as they are there.
    fn is_eager_sink(&self) -> bool {
        let state = self.shared.state.read();
        state.relations.get(&self.handle.id).is_some_and(|r| {
            r.kind == RelationKind::Sink as i32 && r.option("commit_interval").is_none()
        })
    }
}

/// The reason why a target refuses, with which row it is and what can be done, as far as that is known.
fn with_particulars(error: &SqlError) -> String {
    let more = [error.detail.as_deref(), error.hint.as_deref()].into_iter().flatten();
    let more: Vec<&str> = more.collect();
    if more.is_empty() {
        return error.message.clone();
    }
    format!("{}: {}", error.message, more.join(" "))
}
