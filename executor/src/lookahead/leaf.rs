//! The places *leaf* and *input*: rows that a task's leaf has read, or that one of its operators puts out, are looked at
//! before they go on, for operators at which they arrive later (docs/design.md §8).
//!
//! Hints travel beside the rows: see [`super::edge`]. Keys that come often are not hinted: see [`super::sketch`].

use std::sync::Arc;

use millrace_common::{DeltaChunk, Epoch};
use millrace_graph::lookahead::Place;

use super::Due;
use super::route::Route;
use super::sketch::{Sketch, SketchOptions};
use crate::error::ExecError;
use crate::memory::MemoryGovernor;

/// Of one task.
pub struct LeafHints {
    nodes: Vec<NodeRoutes>,
    /// The epoch that brings the rows which have been looked at since the last barrier.
    due: Due,
}

/// See [`LeafHints`].
struct NodeRoutes {
    /// In the task's fragment.
    node: usize,
    routes: Vec<Frequent>,
}

/// A route for keys that are not frequent.
pub struct Frequent {
    route: Route,
    /// Where its rows are.
    place: Place,
    /// While hints are wanted.
    sketch: Option<Sketch>,
    options: SketchOptions,
    governor: Arc<MemoryGovernor>,
}

impl Frequent {
    pub fn new(
        route: Route,
        place: Place,
        options: SketchOptions,
        governor: &Arc<MemoryGovernor>,
    ) -> Frequent {
        Frequent { route, place, sketch: None, options, governor: Arc::clone(governor) }
    }

    /// Tells tasks of keys of rows, if hints of rows at the place are wanted; if they are not, nothing is kept.
    fn look(&mut self, rows: &DeltaChunk, due: &Due) -> Result<(), ExecError> {
        if !self.route.is_active() {
            self.sketch = None;
            return Ok(());
        }
        self.route.note(self.place, due);
        if !self.route.looks_at(self.place) {
            self.sketch = None;
            return Ok(());
        }
        let new = || Sketch::new(self.options, &self.governor);
        let sketch = self.sketch.get_or_insert_with(new);
        self.route.look_beside(rows.clone(), due, Some(sketch))
    }
}

impl Default for LeafHints {
    fn default() -> LeafHints {
        LeafHints { nodes: Vec::new(), due: Due::near() }
    }
}

impl LeafHints {
    /// A route of a leaf of the task, or of an operator.
    pub fn add(&mut self, node: usize, route: Frequent) {
        match self.nodes.iter_mut().find(|known| known.node == node) {
            Some(known) => known.routes.push(route),
            None => self.nodes.push(NodeRoutes { node, routes: vec![route] }),
        }
    }

    /// Tells the operators that want to know of rows that a leaf has read, or that an operator puts out.
    pub fn look(&mut self, place: Place, node: usize, rows: &DeltaChunk) {
        let Some(known) = self.nodes.iter_mut().find(|known| known.node == node) else { return };
        for frequent in known.routes.iter_mut().filter(|f| f.place == place) {
            if let Err(error) = frequent.look(rows, &self.due) {
                // The rows themselves will tell, if it is of any importance.
                tracing::debug!(%error, "keys of rows could not be computed ahead");
            }
        }
    }

    /// The number of the epoch is known. More of its rows may come: those that operators put out at its barrier.
    pub fn begin_barrier(&mut self, epoch: Epoch) {
        self.due.resolve(epoch.0);
    }

    /// The barrier of an epoch, behind all its rows.
    pub fn barrier(&mut self, epoch: Epoch) {
        std::mem::replace(&mut self.due, Due::near()).resolve(epoch.0);
    }
}
