//! What a process has in its caches and asks of the object store, for `millrace_catalog.caches` and `.requests`.

use std::sync::Arc;

use millrace_executor::Worker;
use millrace_executor::memory::MemoryClass;
use millrace_rpc::control::{CacheUsage, ProcessUsage, RequestUsage};
use millrace_storage::StateStore;
use millrace_storage::cache::Priority;
use millrace_storage::object::{Metered, RequestClass};

/// Where it is read.
#[derive(Clone, Default)]
pub struct UsageSource {
    /// Of a process that reads runs.
    pub store: Option<Arc<StateStore>>,
    /// Of a process that runs jobs.
    pub worker: Option<Arc<Worker>>,
    /// Of a process that has opened the object store itself.
    pub requests: Option<Arc<Metered>>,
}

impl UsageSource {
    /// What is there now. It asks nothing of the object store.
    pub fn read(&self) -> ProcessUsage {
        ProcessUsage { incarnation: 0, caches: self.caches(), requests: self.requests() }
    }

    fn caches(&self) -> Vec<CacheUsage> {
        let mut all = Vec::new();
        if let Some(store) = &self.store {
            let c = store.cache().stats();
            let counted = |cache: &str, bytes, limit_bytes, hits, misses| CacheUsage {
                cache: String::from(cache),
                bytes,
                limit_bytes,
                hits: Some(hits),
                misses: Some(misses),
            };
            all.push(counted("blocks", c.memory_bytes, c.memory_limit, c.hits, c.misses));
            let (hits, misses) = (c.index_hits, c.index_misses);
            all.push(counted("indexes", c.index_bytes, c.index_limit, hits, misses));
            if c.disk.limit_bytes > 0 {
                let (used, limit) = (c.disk.used_bytes, c.disk.limit_bytes);
                let misses = c.misses.saturating_sub(c.disk_hits);
                all.push(counted("disk", used, limit, c.disk_hits, misses));
            }
        }
        if let Some(worker) = &self.worker {
            let governor = worker.governor();
            // They take what is free of the memory of the process.
            let shared = |cache: &str, class| CacheUsage {
                cache: String::from(cache),
                bytes: governor.used_by(class) as u64,
                limit_bytes: governor.limit() as u64,
                ..CacheUsage::default()
            };
            all.push(shared("state", MemoryClass::Cache));
            all.push(shared("changelog", MemoryClass::Changelog));
        }
        all
    }

    fn requests(&self) -> Vec<RequestUsage> {
        let mut all = Vec::new();
        if let Some(store) = &self.store {
            let reads = store.cache().read_stats();
            all.extend(Priority::ALL.iter().zip(&reads.classes).map(|(class, of)| RequestUsage {
                class: class.name().to_owned(),
                queued: of.queued as u64,
                in_flight: of.in_flight as u64,
                // Counted for all classes together.
                retrying: None,
                served: of.served,
            }));
        }
        if let Some(metered) = &self.requests {
            let others = metered.pace_stats();
            all.extend(RequestClass::ALL.iter().zip(&others.classes).map(|(class, of)| {
                RequestUsage {
                    class: class.name().to_owned(),
                    queued: of.waiting as u64,
                    in_flight: of.in_flight as u64,
                    retrying: Some(of.retrying as u64),
                    served: of.served,
                }
            }));
        }
        all
    }
}
