//! Following a relation's changes: which epochs changed it, and waiting for the next
//! (docs/design.md §4, "a table is a snapshot plus a changelog").
//!
//! A follower holds nothing in meta: it names the epoch it has seen everything through. Versions down to
//! that epoch are kept by `snapshot_retention`, or by a subscription for longer; one that falls behind what
//! is kept learns it from the store when it reads.

use std::time::Duration;

use millrace_common::{Epoch, RelationId, SqlError};

use crate::read::{given_up, shutting_down};
use crate::shared::Shared;
use crate::state::MetaState;

/// What a follower is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Follow {
    /// The relation changed at this epoch, and not between the follower's and this one; or, when that is
    /// long ago, its changes up to here come as one.
    Change(Epoch),
    /// Nothing has changed up to here.
    Unchanged(Epoch),
}

impl MetaState {
    /// What comes after `seen`; `None`: the relation cannot be read beyond it yet.
    pub fn follow(&self, id: RelationId, seen: Epoch) -> Option<Follow> {
        let frontier = self.readable_frontier(id)?;
        if frontier <= seen {
            return None;
        }
        let change = self.next_change(id, seen).filter(|e| *e <= frontier);
        Some(change.map_or(Follow::Unchanged(frontier), Follow::Change))
    }
}

/// Waits until there is something after `seen`: a change or, with `progress`, that there was none for that
/// long. Where nothing at all happens, the log's head stands still: then it is `seen` itself once more.
pub async fn follow(
    shared: &Shared,
    id: RelationId,
    seen: Epoch,
    progress: Option<Duration>,
) -> Result<Follow, SqlError> {
    let mut changes = shared.changes.watch([id]);
    // Whoever waits asks all jobs on the way to end their epochs at once.
    let path = shared.path_to(id);
    let _following = shared.waits.follow(path.clone());
    shared.wake(path);
    let due = progress.map(|step| shared.env.now() + step);
    loop {
        changes.mark_seen();
        {
            let state = shared.state.read();
            let is_due = due.is_some_and(|due| due <= shared.env.now());
            let progress = progress.map(|step| (step, is_due));
            let given_up = |id| given_up(shared, &state, id);
            if let Some(step) = state.follow_or_fail(id, seen, progress, given_up)? {
                return Ok(step);
            }
        }
        let silence = async {
            match due {
                Some(due) => tokio::time::sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        // In a fixed order, so that a seed repeats a run. Changes may follow each other without end; the others end it.
        tokio::select! {
            biased;
            () = shared.shutdown.cancelled() => return Err(shutting_down()),
            () = silence => {}
            () = changes.changed() => {}
        }
    }
}
