//! The compactor: it merges the runs that a task names.

use std::sync::Arc;

use millrace_common::SqlError;
use millrace_rpc::log::ProcessRole;
use millrace_rpc::services::CompactionTask;
use millrace_rpc::version::{RunMeta, VersionEdit};

use super::content::{self, Entry};
use super::members::Member;
use super::store::ProcessStore;
use super::workers::put;
use super::world::{Process, World};

pub async fn run(world: Arc<World>, process: Arc<Process>) {
    let Some(member) = Member::register(&world, &process, ProcessRole::Compactor).await else {
        return world.restart(&process, "was fenced before it knew of its registration");
    };
    let told = Arc::clone(&member);
    // What a task reads stays until the task is done: the leader starts no other on it.
    member.beat(move || *told.told.lock()).await;
}

/// Names of a process's objects; they count up.
pub fn object_name(process: &Process) -> (String, u64) {
    let (incarnation, random) = (process.incarnation(), process.env.random());
    let counter = random % 1_000_000_000;
    (format!("data/{incarnation}/{counter}.seg"), incarnation << 32 | counter)
}

/// A run of these entries.
pub fn run_of(entries: &[Entry], table_id: u32, level: u32, sequence: u64) -> RunMeta {
    let keys = || entries.iter().map(|entry| entry.key);
    let epochs = || entries.iter().map(|entry| entry.epoch);
    let key = |key: Option<u32>| key.unwrap_or(0).to_be_bytes().to_vec().into();
    RunMeta {
        table_id,
        level,
        rows: entries.len() as u64,
        min_key: key(keys().min()),
        max_key: key(keys().max()),
        min_epoch: epochs().min().unwrap_or(0),
        max_epoch: epochs().max().unwrap_or(0),
        sequence,
        ..RunMeta::default()
    }
}

pub async fn compact(
    world: &Arc<World>,
    process: &Process,
    task: CompactionTask,
) -> Result<VersionEdit, SqlError> {
    let store = ProcessStore::open(world, process.node);
    let mut entries = Vec::new();
    for run in &task.inputs {
        entries.extend(content::read_run(&store, run).await.map_err(SqlError::internal)?);
    }
    let entries = content::merged(entries, task.horizon);
    let sequence = task.inputs.iter().map(|run| run.sequence).max().unwrap_or(0);
    let table = task.inputs.first().map_or(0, |run| run.table_id);
    let (object, run_id) = object_name(process);
    let bytes = content::encode(&entries);
    let run = RunMeta {
        run_id,
        object: object.clone(),
        length: bytes.len() as u64,
        ..run_of(&entries, table, task.target_level, sequence)
    };
    put(&store, &object, bytes).await;
    world.count("compactions");
    world.note(|| format!("{} compacts {} runs of {}", process.node, task.inputs.len(), task.job));
    let remove_runs = task.inputs.iter().map(|run| run.run_id).collect();
    Ok(VersionEdit { add_runs: vec![run], remove_runs, ..VersionEdit::default() })
}
