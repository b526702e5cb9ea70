//! Promises of the whole crate; those of a single module are tested beside it.

mod apply_lease;
mod backlog;
mod backups;
mod claims;
pub mod clock;
mod cluster;
mod commit_numbers;
mod compaction;
mod definitions;
mod detach;
mod drivers;
mod endings;
mod fake;
mod faults;
mod first_scans;
mod fold;
mod follower;
mod isolation;
mod locks;
mod log;
mod many_jobs;
mod operators;
mod processes;
mod read_lease;
mod reads;
mod rebalance;
mod rebuild;
pub mod simulation;
mod sources;
mod store;
mod store_id;
mod store_waits;
mod stream;
mod takeover;

use std::sync::atomic::{AtomicU64, Ordering};

use millrace_common::{Env, RelationId, SqlType};
use millrace_rpc::catalog::{Column, Relation, RelationKind};
use millrace_rpc::log::AlterRelation;
use tokio::time::Instant;

/// Wall clock from tokio's (paused) clock, numbers from a seed.
pub struct TestEnv {
    start: Instant,
    seed: AtomicU64,
}

/// A whole minute, so that grid points are easy to name.
const EPOCH_MS: u64 = 1_700_000_040_000;

impl TestEnv {
    pub fn new(seed: u64) -> TestEnv {
        TestEnv { start: Instant::now(), seed: AtomicU64::new(seed) }
    }
}

impl Env for TestEnv {
    fn now_ms(&self) -> u64 {
        EPOCH_MS + self.start.elapsed().as_millis() as u64
    }

    fn since_boot(&self) -> std::time::Duration {
        self.start.elapsed()
    }

    /// SplitMix64.
    fn random(&self) -> u64 {
        let step = 0x9e37_79b9_7f4a_7c15;
        let mut z = self.seed.fetch_add(step, Ordering::Relaxed).wrapping_add(step);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// A relation with one column, to be created.
pub fn relation(name: &str, kind: RelationKind, depends_on: &[RelationId]) -> Relation {
    Relation {
        schema: "public".to_owned(),
        name: name.to_owned(),
        kind: kind as i32,
        columns: vec![Column {
            name: "x".to_owned(),
            sql_type: SqlType::BigInt.into(),
            nullable: true,
            default_sql: None,
            hidden: false,
            ..Column::default()
        }],
        depends_on: depends_on.iter().map(|d| d.0).collect(),
        ..Relation::default()
    }
}

/// A change that pauses or resumes a relation.
pub fn paused(id: RelationId, paused: bool) -> AlterRelation {
    AlterRelation { id: id.0, paused: Some(paused), ..AlterRelation::default() }
}

/// A table to be created.
pub fn table(name: &str) -> Relation {
    relation(name, RelationKind::Table, &[])
}

/// A materialized view to be created.
pub fn view(name: &str, depends_on: &[RelationId]) -> Relation {
    relation(name, RelationKind::MaterializedView, depends_on)
}
