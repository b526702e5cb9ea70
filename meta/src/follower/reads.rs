//! Following a relation's changes by the folded state, and why that may have no end: by the leader and its followers
//! alike ([`crate::feed`]).

use std::time::Duration;

use millrace_common::{Epoch, RelationId, SqlError, SqlState};
use millrace_rpc::catalog::RelationKind;
use tokio::time::Instant;

use super::LogFollower;
use crate::feed::Follow;
use crate::read::not_ready;
use crate::state::MetaState;

impl MetaState {
    /// Why no fresh content of the relation will come, or not soon: it is detached or being rebuilt. `progress`: how far
    /// that is, in a sentence.
    pub(crate) fn given_up(
        &self,
        id: RelationId,
        progress: impl FnOnce() -> String,
    ) -> Option<SqlError> {
        let job = self.jobs.get(&id)?;
        let relation = self.relations.get(&id)?;
        if let Some(detached) = &job.version.detached {
            let kind = match relation.kind() {
                RelationKind::Sink => "SINK",
                RelationKind::Index => "INDEX",
                _ => "MATERIALIZED VIEW",
            };
            let (name, rebuild) =
                (&relation.name, format!("ALTER {kind} {} REBUILD", relation.name));
            let hint = match job.timeline.anchor() {
                Some(_) => format!(
                    "{rebuild} brings it up to date. SET read_freshness = 'any' reads its last consistent content."
                ),
                None => format!("{rebuild} fills it."),
            };
            let message = format!("relation \"{name}\" is detached");
            return Some(not_ready(message).with_detail(detached.reason.clone()).with_hint(hint));
        }
        if !job.version.is_rebuilding() {
            return None;
        }
        let name = &relation.name;
        Some(
            not_ready(format!("relation \"{name}\" is not up to date: it is being rebuilt"))
                .with_detail(progress())
                .with_hint(
                    "Watch it in SHOW JOBS. SET read_freshness = 'any' reads its last consistent content.",
                ),
        )
    }

    /// How far a first scan or rebuild is by what is committed, in a sentence.
    fn scan_progress(&self, id: RelationId) -> String {
        let backfill = self.jobs.get(&id).and_then(|job| job.version.backfill.as_ref());
        let Some(backfill) = backfill else { return String::new() };
        match (backfill.rows_read, backfill.rows_total) {
            (read, 0) => format!("{read} rows have been read so far."),
            (read, total) => format!("{read} of about {total} rows have been read."),
        }
    }

    /// What somebody who follows a relation is told now; `None`: nothing yet. With `progress`, (how long without a change
    /// is told, whether that is over). `given_up`: why nothing will come of a relation.
    pub(crate) fn follow_or_fail(
        &self,
        id: RelationId,
        seen: Epoch,
        progress: Option<(Duration, bool)>,
        given_up: impl Fn(RelationId) -> Option<SqlError>,
    ) -> Result<Option<Follow>, SqlError> {
        if !self.relations.contains_key(&id) {
            return Err(SqlError::new(
                SqlState::UNDEFINED_TABLE,
                "the relation was dropped while its changes were being read",
            ));
        }
        match (self.follow(id, seen), progress) {
            (Some(change @ Follow::Change(_)), _) => return Ok(Some(change)),
            (Some(Follow::Unchanged(upto)), Some((step, _)))
                if upto.millis().saturating_sub(seen.millis()) >= step.as_millis() as u64 =>
            {
                return Ok(Some(Follow::Unchanged(upto)));
            }
            (unchanged, Some((_, true))) => {
                let upto = match unchanged {
                    Some(Follow::Unchanged(upto)) => upto,
                    _ => seen,
                };
                return Ok(Some(Follow::Unchanged(upto)));
            }
            _ => {}
        }
        match self.closure(&[id]).into_iter().find_map(given_up) {
            Some(error) => Err(error),
            None => Ok(None),
        }
    }

    /// The jobs that have not taken in all that their inputs have, of those behind a relation and its own.
    pub fn jobs_behind(&self, id: RelationId) -> Vec<RelationId> {
        self.closure(&[id]).into_iter().filter(|id| self.is_behind(*id)).collect()
    }
}

impl LogFollower {
    /// What comes after `seen` of a relation's changes; `None`: nothing yet.
    pub fn follow_now(&self, id: RelationId, seen: Epoch) -> Option<Follow> {
        self.read(|state| state.follow(id, seen))
    }

    /// Waits for it. With `progress`, also returns when nothing has changed for that long. `behind` is told of the jobs
    /// that have something to take in before.
    pub async fn follow(
        &self,
        id: RelationId,
        seen: Epoch,
        progress: Option<Duration>,
        mut behind: impl FnMut(Vec<RelationId>) + Send,
    ) -> Result<Follow, SqlError> {
        let due = progress.map(|step| self.env.now() + step);
        let closure = self.read(|state| state.closure(&[id]));
        let mut changes = self.changes.watch(closure);
        loop {
            changes.mark_seen();
            let is_due = due.is_some_and(|due| due <= self.env.now());
            let progress = progress.map(|step| (step, is_due));
            let (step, jobs) = self.read(|state| {
                let given_up = |id| state.given_up(id, || state.scan_progress(id));
                (state.follow_or_fail(id, seen, progress, given_up), state.jobs_behind(id))
            });
            if let Some(step) = step? {
                return Ok(step);
            }
            if !jobs.is_empty() {
                behind(jobs);
            }
            tokio::select! {
                biased;
                () = silence(due) => {}
                () = changes.changed() => {}
            }
        }
    }
}

async fn silence(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}
