//! What a process that takes the lead puts into its first record, and whom it takes the lead from.

use std::collections::BTreeSet;

use millrace_common::{EnvHandle, RelationId};
use millrace_rpc::log::{
    DropRelations, Entry, FenceProcess, PlaceJobs, ProcessRole, RegisterProcess,
};
use millrace_rpc::store_id::StoreId;
use prost::bytes::Bytes;

use crate::cluster::has_role;
use crate::state::MetaState;

/// The nonces of those that may lead in this state. Logs of earlier releases name none.
pub fn leaders_before(state: &MetaState) -> Vec<u64> {
    if state.processes.last() == 0 {
        return if state.term == 0 { Vec::new() } else { vec![0] };
    }
    let live = state.processes.live().values().map(|process| &process.registration);
    live.filter(|p| has_role(p, ProcessRole::Meta)).map(|p| p.nonce).collect()
}

/// The store id that the first record gives: a new one, where the store has none. Empty: it has one.
pub fn store_id(state: &MetaState, env: &EnvHandle) -> Bytes {
    match state.store_id {
        Some(_) => Bytes::new(),
        None => StoreId::random(env).to_bytes(),
    }
}

/// How a process begins that leads and does everything alone: it fences the others, and what belonged to their sessions
/// ends with them.
pub fn alone(state: &MetaState, term: u64, process: &RegisterProcess) -> Vec<Entry> {
    let incarnation = state.processes.next(term);
    let others: Vec<u64> = state.processes.live().keys().copied().collect();
    let ended = ephemeral_relations(state);
    let mut entries = vec![
        Entry::RegisterProcess(process.clone()),
        Entry::PlaceJobs(PlaceJobs { incarnation, ..PlaceJobs::default() }),
    ];
    if !others.is_empty() {
        entries.push(Entry::FenceProcess(FenceProcess { incarnations: others }));
    }
    if !ended.is_empty() {
        entries.push(Entry::DropRelations(DropRelations { ids: ended }));
    }
    entries
}

/// Relations that end with a session, and all that depends on them.
fn ephemeral_relations(state: &MetaState) -> Vec<u32> {
    let mut ids: BTreeSet<RelationId> =
        state.relations.iter().filter(|(_, r)| r.ephemeral != 0).map(|(id, _)| *id).collect();
    crate::fold::add_dependants(state, &mut ids);
    ids.into_iter().map(|id| id.0).collect()
}
