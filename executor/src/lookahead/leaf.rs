//! The place *leaf*: rows that a task's leaf has read are looked at before they go on, for operators at which they
//! arrive later (docs/design.md §8).
//!
//! Hints travel beside the rows: each task that owns keys has a channel for them, which holds so many, and a hint for
//! which there is no room is lost. No data, barrier or back-pressure holds one up, and a hint holds up none of them.
//! Keys that come often are not hinted: see [`super::sketch`].

use std::sync::Arc;

use arrow::array::RecordBatch;
use millrace_common::Epoch;
use millrace_graph::lookahead::Place;

use super::Due;
use super::route::Route;
use super::sketch::{Sketch, SketchOptions};
use crate::error::ExecError;
use crate::memory::MemoryGovernor;

/// Of one task.
pub struct LeafHints {
    leaves: Vec<LeafRoutes>,
    /// The epoch that brings the rows which have been looked at since the last barrier.
    due: Due,
}

/// See [`LeafHints`].
struct LeafRoutes {
    /// In the task's fragment.
    node: usize,
    routes: Vec<Frequent>,
}

/// A route for keys that are not frequent.
pub struct Frequent {
    route: Route,
    /// While hints are wanted.
    sketch: Option<Sketch>,
    options: SketchOptions,
    governor: Arc<MemoryGovernor>,
}

impl Frequent {
    pub fn new(route: Route, options: SketchOptions, governor: &Arc<MemoryGovernor>) -> Frequent {
        Frequent { route, sketch: None, options, governor: Arc::clone(governor) }
    }

    /// Tells tasks of keys of rows, if hints of rows at the leaf are wanted; if they are not, nothing is kept.
    async fn look(&mut self, rows: &RecordBatch, due: &Due) -> Result<(), ExecError> {
        if !self.route.is_active() {
            self.sketch = None;
            return Ok(());
        }
        self.route.note(Place::Leaf, due);
        if !self.route.looks_at(Place::Leaf) {
            self.sketch = None;
            return Ok(());
        }
        let new = || Sketch::new(self.options, &self.governor);
        let sketch = self.sketch.get_or_insert_with(new);
        self.route.look_beside(rows.clone(), due, Some(sketch)).await
    }
}

impl Default for LeafHints {
    fn default() -> LeafHints {
        LeafHints { leaves: Vec::new(), due: Due::near() }
    }
}

impl LeafHints {
    /// The routes of a leaf of the task.
    pub fn add(&mut self, node: usize, route: Frequent) {
        match self.leaves.iter_mut().find(|leaf| leaf.node == node) {
            Some(leaf) => leaf.routes.push(route),
            None => self.leaves.push(LeafRoutes { node, routes: vec![route] }),
        }
    }

    /// Tells the operators that want to know of rows that a leaf has read.
    pub async fn look(&mut self, node: usize, rows: &RecordBatch) {
        let Some(leaf) = self.leaves.iter_mut().find(|leaf| leaf.node == node) else { return };
        for frequent in &mut leaf.routes {
            if let Err(error) = frequent.look(rows, &self.due).await {
                // The rows themselves will tell, if it is of any importance.
                tracing::debug!(%error, "keys of rows could not be computed ahead");
            }
        }
    }

    /// The barrier of an epoch, behind all its rows.
    pub fn barrier(&mut self, epoch: Epoch) {
        std::mem::replace(&mut self.due, Due::near()).resolve(epoch.0);
    }
}
