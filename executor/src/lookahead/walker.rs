//! Walkers: each looks at the uncommitted rows of one relation for one job, and tells the job's tasks which keys will be
//! needed (docs/design.md §8).
//!
//! A walker has one leaf of the job and all lookaheads behind it. It sleeps until an operator wants hints, and then
//! follows the relation until none does. It runs on the job's share of the cores and ends with the job's generation;
//! what it does not manage is lost.

use std::sync::Arc;

use millrace_common::{DeltaChunk, RelationId};
use millrace_graph::lookahead::Place;
use tokio::sync::Notify;

use super::route::Route;
use super::uncommitted::{Announcement, Following, Uncommitted};
use crate::memory::MemoryGovernor;

/// Rows that are looked at before others get a turn.
const STEP_ROWS: usize = 8_192;

/// See the module.
pub struct Walker {
    relation: RelationId,
    places: Vec<Place>,
    /// What the leaf reads of the relation.
    columns: Vec<usize>,
    routes: Vec<Route>,
    uncommitted: Arc<Uncommitted>,
    /// Told when an operator begins to want hints, or no longer wants any.
    changed: Arc<Notify>,
    governor: Option<Arc<MemoryGovernor>>,
}

impl Walker {
    pub fn new(
        relation: RelationId,
        places: Vec<Place>,
        columns: Vec<usize>,
        routes: Vec<Route>,
        uncommitted: &Arc<Uncommitted>,
        changed: &Arc<Notify>,
    ) -> Walker {
        let (uncommitted, changed) = (Arc::clone(uncommitted), Arc::clone(changed));
        let governor = None;
        Walker { relation, places, columns, routes, uncommitted, changed, governor }
    }

    /// What waits for it counts as memory.
    pub fn accounted(self, governor: &Arc<MemoryGovernor>) -> Walker {
        Walker { governor: Some(Arc::clone(governor)), ..self }
    }

    /// Until the job ends.
    pub async fn run(mut self) {
        loop {
            self.until_wanted().await;
            let mut following = self.uncommitted.follow(self.relation, self.places.clone());
            if let Some(governor) = &self.governor {
                following = following.accounted(governor);
            }
            while self.is_wanted() {
                self.look_at_next(&mut following).await;
            }
        }
    }

    fn is_wanted(&self) -> bool {
        self.routes.iter().any(Route::is_active)
    }

    async fn until_wanted(&mut self) {
        let changes = Arc::clone(&self.changed);
        loop {
            let mut changed = std::pin::pin!(changes.notified());
            changed.as_mut().enable();
            if self.is_wanted() {
                return;
            }
            changed.await;
        }
    }

    /// Looks at the next announcement, unless the operators' wishes change before.
    async fn look_at_next(&mut self, following: &mut Following) {
        let changes = Arc::clone(&self.changed);
        let mut changed = std::pin::pin!(changes.notified());
        changed.as_mut().enable();
        if !self.is_wanted() {
            return;
        }
        let next = tokio::select! {
            biased;
            next = following.next() => next,
            () = changed => None,
        };
        if let Some(announcement) = next {
            self.look(&announcement).await;
            let missed = following.take_missed();
            self.active_routes().for_each(|route| route.note_dropped(missed));
        }
    }

    fn active_routes(&mut self) -> impl Iterator<Item = &mut Route> {
        self.routes.iter_mut().filter(|route| route.is_active())
    }

    /// Gives keys to the operators that look at rows at their place; for the others it is only noted that they were there.
    async fn look(&mut self, announcement: &Announcement) {
        let place = announcement.place;
        if self.active_routes().any(|route| route.looks_at(place)) {
            self.look_at_rows(announcement).await;
        }
        self.active_routes().for_each(|route| route.note(place, &announcement.due));
    }

    async fn look_at_rows(&mut self, announcement: &Announcement) {
        let place = announcement.place;
        for rows in &announcement.rows {
            let Ok(batch) = rows.batch.project(&self.columns) else { return };
            let rows = DeltaChunk::new(batch, rows.weights.clone());
            for at in (0..rows.num_rows()).step_by(STEP_ROWS) {
                let part = rows.slice(at, STEP_ROWS.min(rows.num_rows() - at));
                for route in self.active_routes().filter(|route| route.looks_at(place)) {
                    if let Err(error) = route.look_beside(part.clone(), &announcement.due, None) {
                        // The job's own rows will tell, if it is of any importance.
                        tracing::debug!(%error, "keys of rows could not be computed ahead");
                    }
                }
                tokio::task::yield_now().await;
            }
        }
    }
}
