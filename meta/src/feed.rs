//! Following a relation's changes: which epochs changed it, and waiting for the next
//! (docs/design.md §4, "a table is a snapshot plus a changelog").
//!
//! A follower holds nothing in meta: it names the epoch it has seen everything through. Versions down to
//! that epoch are kept by `snapshot_retention`, or by a subscription for longer; one that falls behind what
//! is kept learns it from the store when it reads.

use std::time::Duration;

use millrace_common::{Epoch, RelationId, SqlError, SqlState};

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
            if !state.relations.contains_key(&id) {
                return Err(SqlError::new(
                    SqlState::UNDEFINED_TABLE,
                    "the relation was dropped while its changes were being read",
                ));
            }
            match (state.follow(id, seen), progress) {
                (Some(change @ Follow::Change(_)), _) => return Ok(change),
                (Some(Follow::Unchanged(upto)), Some(step))
                    if upto.millis().saturating_sub(seen.millis()) >= step.as_millis() as u64 =>
                {
                    return Ok(Follow::Unchanged(upto));
                }
                (unchanged, Some(_)) if due.is_some_and(|due| due <= shared.env.now()) => {
                    let upto = match unchanged {
                        Some(Follow::Unchanged(upto)) => upto,
                        _ => seen,
                    };
                    return Ok(Follow::Unchanged(upto));
                }
                _ => {}
            }
            let mut behind = state.closure(&[id]).into_iter();
            if let Some(error) = behind.find_map(|id| given_up(shared, &state, id)) {
                return Err(error);
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
