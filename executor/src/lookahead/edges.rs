//! The edges of the graph of jobs, as a job that starts sees them: what stands behind the relations that it reads.

use std::cell::RefCell;
use std::sync::Arc;

use millrace_common::RelationId;
use millrace_common::collections::HashMap;
use millrace_graph::JobGraph;
use millrace_graph::codec::decode_graph;
use millrace_rpc::services::MetaService;

/// The graphs of other jobs, read when they are asked for.
pub struct JobGraphs<'a> {
    meta: &'a dyn MetaService,
    known: RefCell<HashMap<RelationId, Option<Arc<JobGraph>>>>,
}

impl<'a> JobGraphs<'a> {
    pub fn new(meta: &'a dyn MetaService) -> JobGraphs<'a> {
        JobGraphs { meta, known: RefCell::default() }
    }

    /// Of the job that computes a relation; `None`: none does, or it cannot be read.
    pub fn of(&self, relation: RelationId) -> Option<Arc<JobGraph>> {
        let mut known = self.known.borrow_mut();
        known.entry(relation).or_insert_with(|| self.read(relation)).clone()
    }

    fn read(&self, relation: RelationId) -> Option<Arc<JobGraph>> {
        let stored = self.meta.graph(relation).filter(|graph| !graph.is_empty())?;
        match decode_graph(&stored) {
            Ok(graph) => Some(Arc::new(graph)),
            Err(error) => {
                tracing::debug!(%relation, %error, "keys are not looked at behind a relation");
                None
            }
        }
    }
}
