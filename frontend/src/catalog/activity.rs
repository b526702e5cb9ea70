//! `millrace_catalog.tasks`, `compactions`, `caches` and `requests`: what processes are busy with, as each has told
//! last.

use std::collections::BTreeMap;

use arrow::array::RecordBatch;
use millrace_executor::exchange::owned_vnodes;
use millrace_rpc::control::{CompactionReport, CompactionState};

use super::SystemTables;
use super::rows::{Rows, row};

/// A row for each task of each job that is open on its process.
pub fn tasks(t: &SystemTables) -> Option<RecordBatch> {
    let mut rows = Rows::new(
        "relation_id:o schema_name:n relation_name:n fragment:i task:i first_vnode:i last_vnode:i worker:i generation:i state:t",
    );
    let cluster = &t.shared.cluster;
    let placed: BTreeMap<u32, (u64, u64)> = cluster
        .versions()
        .into_iter()
        .map(|p| (p.relation, (p.process, p.version.generation)))
        .collect();
    for j in cluster.jobs() {
        let Some(r) = t.catalog().by_id(j.relation) else { continue };
        let placed = placed.get(&j.relation).filter(|(process, _)| *process > 0);
        for (fragment, of) in j.fragment_tasks.iter().enumerate() {
            for task in 0..*of {
                let vnodes = owned_vnodes(task, *of);
                row!(rows; relation_id: j.relation, schema_name: &r.schema,
                    relation_name: &r.name, fragment: fragment as i64, task: task as i64,
                    first_vnode: i64::from(vnodes.start),
                    last_vnode: i64::from(vnodes.end) - 1,
                    worker: placed.map(|(process, _)| *process as i64),
                    generation: placed.map(|(_, generation)| *generation as i64),
                    state: j.state.as_str());
            }
        }
    }
    rows.finish()
}

/// One word for it.
pub fn compaction_state(compaction: &CompactionReport) -> &'static str {
    match compaction.state() {
        CompactionState::Queued => "queued",
        CompactionState::Running => "running",
        CompactionState::Failed => "failed",
    }
}

/// Merges of runs that are under way, and those that jobs wait for.
pub fn compactions(t: &SystemTables) -> Option<RecordBatch> {
    let mut rows = Rows::new(
        "relation_id:o schema_name:n relation_name:n table_id:i state:t worker:i runs:i bytes:i target_level:i for_ms:i",
    );
    for c in t.shared.cluster.compactions() {
        let relation = t.catalog().by_id(c.relation);
        row!(rows; relation_id: c.relation, schema_name: relation.map(|r| r.schema.as_str()),
            relation_name: relation.map(|r| r.name.as_str()), table_id: c.table,
            state: compaction_state(&c),
            worker: (c.process > 0).then_some(c.process as i64), runs: c.runs as i64,
            bytes: c.bytes as i64, target_level: c.target_level, for_ms: c.for_ms as i64);
    }
    rows.finish()
}

/// What each process has in its caches, and how much each may have.
pub fn caches(t: &SystemTables) -> Option<RecordBatch> {
    let mut rows = Rows::new("worker:i cache:t bytes:i limit_bytes:i hits:i misses:i");
    for usage in t.shared.cluster.usages() {
        for cache in usage.caches {
            row!(rows; worker: usage.incarnation as i64, cache: cache.cache,
                bytes: cache.bytes as i64, limit_bytes: cache.limit_bytes as i64,
                hits: cache.hits.map(|n| n as i64), misses: cache.misses.map(|n| n as i64));
        }
    }
    rows.finish()
}

/// What each process asks of the object store.
pub fn requests(t: &SystemTables) -> Option<RecordBatch> {
    let mut rows = Rows::new("worker:i class:t queued:i in_flight:i retrying:i served:i");
    for usage in t.shared.cluster.usages() {
        for of in usage.requests {
            row!(rows; worker: usage.incarnation as i64, class: of.class,
                queued: of.queued as i64, in_flight: of.in_flight as i64,
                retrying: of.retrying.map(|n| n as i64), served: of.served as i64);
        }
    }
    rows.finish()
}
