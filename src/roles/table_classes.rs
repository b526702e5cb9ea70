//! How state tables are used, by the graphs of their jobs, for a leader that runs none of them.

use std::sync::{Arc, OnceLock, Weak};

use millrace_common::JobId;
use millrace_common::access::AccessClass;
use millrace_common::collections::HashMap;
use millrace_graph::codec::decode_graph;
use millrace_meta::Meta;
use millrace_rpc::services::MetaService;
use parking_lot::Mutex;

/// See the module.
#[derive(Default)]
pub struct TableClasses {
    /// Whose catalog tells; set when it leads.
    pub meta: OnceLock<Weak<Meta>>,
    /// By job; of a job's tables in the order of their ids.
    known: Mutex<HashMap<JobId, Arc<Vec<AccessClass>>>>,
}

impl TableClasses {
    pub fn of(&self, job: JobId, table: u32) -> AccessClass {
        let class = || {
            let meta = self.meta.get()?.upgrade()?;
            let version = meta.version(job)?;
            let first = meta.catalog().relation(job)?.first_table_id;
            let classes = self.classes(&meta, job)?;
            let mut positions = 0..classes.len() as u32;
            let position = positions.find(|p| version.state_table(first, *p) == table)?;
            classes.get(position as usize).copied()
        };
        class().unwrap_or(AccessClass::PointUpdate)
    }

    fn classes(&self, meta: &Meta, job: JobId) -> Option<Arc<Vec<AccessClass>>> {
        if let Some(known) = self.known.lock().get(&job) {
            return Some(Arc::clone(known));
        }
        let graph = decode_graph(&MetaService::graph(meta, job)?).ok()?;
        let classes = Arc::new(graph.tables.iter().map(|t| t.class).collect::<Vec<_>>());
        self.known.lock().insert(job, Arc::clone(&classes));
        Some(classes)
    }
}
