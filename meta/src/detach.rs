//! Bounded history (docs/design.md §4, "Retention"): a job that has left the changes of its inputs unread for longer
//! than `changelog_retention`, or more of them than `changelog_retention_bytes`, is detached. Whether it failed, is
//! paused or is slow does not matter: what is kept for it must not grow without bounds.
//!
//! The time counts from the oldest change that the job does not have. What a server that was down has kept from its
//! jobs is not held against them at once: they have a while to catch up first.

use std::time::Duration;

use millrace_common::{Epoch, RelationId, crash};
use millrace_rpc::catalog::RelationKind;
use millrace_rpc::log::{Detach, Entry, Rebuild};
use tracing::warn;

use crate::error::MetaError;
use crate::fold::position;
use crate::settings::Settings;
use crate::shared::Shared;
use crate::state::MetaState;
use crate::status::JobState;

/// How long jobs have, after a start, to take what they missed; a shorter one where their retention is shorter.
const GRACE: Duration = Duration::from_secs(600);

/// Detaches the jobs that are too late and, if the settings say so, rebuilds the detached ones.
pub async fn enforce(shared: &Shared) -> Result<(), MetaError> {
    let settings = shared.settings();
    // One after the other, inputs first: what a job reads may be why it is late.
    while let Some(detach) = late(shared, &settings) {
        let job = shared.label(RelationId(detach.job));
        warn!(job, reason = detach.reason, "a job is detached");
        if !append(shared, Entry::Detach(detach)).await? {
            break;
        }
    }
    if settings.rebuild_detached {
        let detached = to_rebuild(&shared.state.read());
        for rebuild in detached {
            append(shared, Entry::Rebuild(rebuild)).await?;
        }
    }
    Ok(())
}

/// False: void, because the job is in another generation by now, or gone. It is looked at again.
async fn append(shared: &Shared, entry: Entry) -> Result<bool, MetaError> {
    let Ok(log) = shared.log() else { return Err(MetaError::Closed) };
    crash::point("detach-before-log");
    let verdict = log.append(entry).await?;
    crash::point("detach-after-log");
    Ok(verdict.is_ok())
}

/// The first job that is too late.
fn late(shared: &Shared, settings: &Settings) -> Option<Detach> {
    let state = shared.state.read();
    let (now_ms, up) = (shared.env.now_ms(), shared.env.elapsed(shared.opened));
    let is_late = |id: &RelationId| {
        let job = state.jobs.get(id)?;
        // A sink with a longer interval is not late before its next commit is.
        let own =
            option(&state, *id, "changelog_retention").unwrap_or(settings.changelog_retention);
        let interval = option(&state, *id, "commit_interval").unwrap_or_default();
        let retention = own.max(interval.saturating_mul(2));
        if up < retention.min(GRACE) {
            return None;
        }
        let held = held(&state, *id, retention, settings.changelog_retention_bytes, now_ms)?;
        let cause = cause(shared, &state, *id);
        let reason = format!("{held}: {cause}");
        Some(Detach { job: id.0, generation: job.version.generation, reason })
    };
    state.jobs.keys().find_map(is_late)
}

/// What is kept for the job, where that is too much.
fn held(
    state: &MetaState,
    id: RelationId,
    retention: Duration,
    retention_bytes: u64,
    now_ms: u64,
) -> Option<String> {
    let job = state.jobs.get(&id)?;
    let at = position(job);
    if at == Epoch::MAX {
        return None;
    }
    let oldest = job.inputs.iter().filter_map(|i| state.oldest_change(*i, at)).min()?;
    let age = Duration::from_millis(now_ms.saturating_sub(oldest.millis()));
    if age > retention {
        let (seconds, limit) = (age.as_secs(), retention.as_secs());
        return Some(format!(
            "it had not taken changes that are {seconds} s old, and changelog_retention keeps them for {limit} s"
        ));
    }
    let bytes = state.changed_bytes(&job.inputs, at)?;
    (retention_bytes > 0 && bytes > retention_bytes).then(|| {
        format!(
            "it had not taken {bytes} bytes of changes, and changelog_retention_bytes keeps {retention_bytes}"
        )
    })
}

/// A time that a sink was given.
fn option(state: &MetaState, id: RelationId, name: &str) -> Option<Duration> {
    millrace_common::settings::parse_duration(state.relations.get(&id)?.option(name)?).ok()
}

/// Why the job did not get on.
fn cause(shared: &Shared, state: &MetaState, id: RelationId) -> String {
    if let Some(input) = state.detached_behind(state.inputs(id)) {
        let name =
            state.relations.get(&input).map_or_else(|| input.to_string(), |r| r.name.clone());
        return format!("it reads \"{name}\", which is detached");
    }
    let handle = shared.job(id);
    match handle.as_ref().map(|handle| handle.state()) {
        Some(JobState::Stalled { reason, .. }) => {
            format!("its target did not take its changes ({reason})")
        }
        Some(JobState::Paused) => "it was paused".to_owned(),
        Some(JobState::Creating { .. }) => "its first scan took too long".to_owned(),
        Some(JobState::Rebuilding { .. }) => "its rebuild took too long".to_owned(),
        _ => match handle.and_then(|handle| handle.unrecovered()) {
            Some(reason) => format!("its job failed ({reason})"),
            None => "it was too slow".to_owned(),
        },
    }
}

/// Detached views and indexes whose inputs all follow theirs. Sinks wait for a statement: what their targets have is
/// not known here.
fn to_rebuild(state: &MetaState) -> Vec<Rebuild> {
    let ready = |id: &RelationId| {
        let kind = state.relations.get(id).map(|r| r.kind());
        state.is_detached(*id)
            && kind != Some(RelationKind::Sink)
            && state.detached_behind(state.inputs(*id)).is_none()
    };
    state.jobs.keys().copied().filter(ready).map(|id| Rebuild { job: id.0 }).collect()
}
