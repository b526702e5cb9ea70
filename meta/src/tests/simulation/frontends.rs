//! Frontends: their sessions append to tables, read, and create and drop views.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use millrace_common::task::spawn;
use millrace_common::{Epoch, RelationId, SqlState};
use millrace_rpc::call_error::CallError;
use millrace_rpc::catalog::Relation;
use millrace_rpc::control::{
    CreateRelationRequest, DefineAnswer, DefineRequest, Definition, MetaControl,
};
use millrace_rpc::log::{DropRelations, ProcessRole};
use millrace_rpc::version::StatementId;
use object_store::ObjectStore;

use super::content::{self, Key, Rows};
use super::members::Member;
use super::metas::node_of;
use super::network::Delivery;
use super::store::ProcessStore;
use super::workers::Executed;
use super::world::{Caller, FRONTENDS, Process, World};
use crate::log::settled;
use crate::state::MetaState;
use crate::tests::{table, view};

const SESSIONS: usize = 2;
/// Keys of a table.
const KEYS: u64 = 7;
const VIEWS: usize = 4;
/// How long the fate of a statement is looked for.
const RESOLVED_WITHIN: Duration = Duration::from_secs(40);
/// How long a leader may take to say what it has of the log.
const SETTLED_WITHIN: Duration = Duration::from_secs(3);

pub const TABLES: [&str; 2] = ["t0", "t1"];

pub async fn run(world: Arc<World>, process: Arc<Process>) {
    let Some(member) = Member::register(&world, &process, ProcessRole::Frontend).await else {
        return world.restart(&process, "was fenced before it knew of its registration");
    };
    let follower = Arc::clone(&member.follower);
    spawn("follow the log", follow(Arc::clone(&member)));
    for _ in 0..SESSIONS {
        let store = ProcessStore::open(&world, process.node);
        let session = Session { member: Arc::clone(&member), store };
        spawn("run a session", session.run());
    }
    member.beat(move || follower.number()).await;
}

async fn follow(member: Arc<Member>) {
    loop {
        tokio::time::sleep(member.world.numbers.between(200, 1_500)).await;
        // The next look goes on.
        let _ = member.follower.catch_up().await;
    }
}

/// What a session knows of a relation.
#[derive(Clone, Debug)]
pub struct Known {
    pub id: RelationId,
    pub name: String,
    pub inputs: Vec<RelationId>,
}

pub fn known(state: &MetaState) -> Vec<Known> {
    let relation = |(id, r): (&RelationId, &Arc<_>)| {
        let r: &Relation = r;
        Known { id: *id, name: r.name.clone(), inputs: state.inputs(*id).to_vec() }
    };
    state.relations.iter().map(relation).collect()
}

fn create(relation: Relation) -> Definition {
    let relation = Some(relation);
    Definition::CreateRelation(CreateRelationRequest {
        relation,
        table_count: 1,
        or_replace: false,
    })
}

pub struct Session {
    pub member: Arc<Member>,
    pub store: Arc<dyn ObjectStore>,
}

impl Session {
    async fn run(self) {
        if self.member.process.node == FRONTENDS[0] {
            self.create_tables().await;
        }
        let world = &self.member.world;
        loop {
            tokio::time::sleep(world.numbers.between(30, world.climate.think)).await;
            if world.is_quiet() {
                return;
            }
            let relations = self.member.follower.read(known);
            let tables: Vec<&Known> = relations.iter().filter(|r| r.inputs.is_empty()).collect();
            if tables.is_empty() {
                let _ = self.member.follower.catch_up().await;
                continue;
            }
            match world.numbers.below(100) {
                n if n < 60 => {
                    let (table, key) = (world.numbers.of(&tables), world.numbers.below(KEYS));
                    self.append(table.id, key as Key).await;
                }
                n if n < 88 => {
                    let all: Vec<&Known> = relations.iter().collect();
                    let _ = self.read(world.numbers.of(&all).id).await;
                }
                n if n < 95 => self.create_view(&relations).await,
                _ => self.drop_view(&relations).await,
            }
        }
    }

    async fn create_tables(&self) {
        for name in TABLES {
            while self.member.follower.read(|state| state.relation_named("public", name).is_none())
            {
                if self.define(create(table(name))).await.is_err() {
                    tokio::time::sleep(Duration::from_millis(500)).await;
                }
                let _ = self.member.follower.catch_up().await;
            }
        }
    }

    async fn create_view(&self, relations: &[Known]) {
        let world = &self.member.world;
        if relations.len() >= TABLES.len() + VIEWS {
            return;
        }
        let mut inputs = vec![world.numbers.of(&relations.iter().collect::<Vec<_>>()).id];
        if world.numbers.chance(300) {
            inputs.push(world.numbers.of(&relations.iter().collect::<Vec<_>>()).id);
            inputs.dedup();
        }
        let name = format!("v{}", world.next_name());
        // It is there, or not: the log tells. Nobody else takes the name.
        if let Err(CallError::Sql(error)) = self.define(create(view(&name, &inputs))).await
            && error.state == SqlState::DUPLICATE_TABLE
        {
            world.fail(format!("{name} was created twice: {error}"));
        }
    }

    /// Has the leader make a definition; again by its id, of whoever leads then, while the outcome is open.
    async fn define(&self, change: Definition) -> Result<DefineAnswer, CallError> {
        let (world, env) = (&self.member.world, &self.member.process.env);
        let id = Some(StatementId { frontend: env.random(), number: env.random() });
        let since = self.member.follower.head().0;
        let request = DefineRequest { id, since, change: Some(change) };
        let until = env.now() + RESOLVED_WITHIN;
        loop {
            let request = request.clone();
            let defined = self.member.ask_leader(Delivery::Repeated, move |meta| {
                let request = request.clone();
                async move { MetaControl::define(&*meta, request).await }
            });
            match defined.await {
                Err(error) if error.is_retryable() && env.now() < until && !world.is_quiet() => {
                    world.count("definitions asked for again");
                    tokio::time::sleep(world.numbers.between(100, 500)).await;
                }
                defined => return defined,
            }
        }
    }

    async fn drop_view(&self, relations: &[Known]) {
        let is_read = |id| relations.iter().any(|r| r.inputs.contains(&id));
        let views = relations.iter().filter(|r| !r.inputs.is_empty() && !is_read(r.id));
        let views: Vec<RelationId> = views.map(|r| r.id).collect();
        if views.is_empty() {
            return;
        }
        let id = self.member.world.numbers.of(&views);
        let ids = vec![id.0];
        // Another session may have dropped it.
        let _ = self.define(Definition::DropRelations(DropRelations { ids })).await;
    }

    /// Appends a new statement to a key's list, again if it is proven that it was not committed. Whether it was, as far
    /// as that became known.
    pub async fn append(&self, table: RelationId, key: Key) -> bool {
        let world = &self.member.world;
        let op = world.issue(table, key);
        let until = self.member.process.env.now() + RESOLVED_WITHIN;
        while self.member.process.env.now() < until {
            let Some((process, generation, address)) = self.owner(table) else {
                tokio::time::sleep(Duration::from_millis(300)).await;
                let _ = self.member.follower.catch_up().await;
                continue;
            };
            match self.execute(table, process, generation, &address, op, key).await {
                Ok(Executed::Committed) => return true,
                Ok(Executed::Refused)
                | Err(
                    CallError::NotConnected { .. }
                    | CallError::StaleTerm { .. }
                    | CallError::StaleIncarnation { .. },
                ) => {
                    tokio::time::sleep(world.numbers.between(100, 500)).await;
                    let _ = self.member.follower.catch_up().await;
                }
                Ok(Executed::Unknown) | Err(_) => {
                    match self.resolve(table, process, generation, op).await {
                        Some(true) => {
                            self.settle().await;
                            world.acknowledged(op);
                            return true;
                        }
                        Some(false) => {
                            world.count("sent again");
                            world.note(|| format!("statement {op} is sent again"));
                        }
                        None => return false,
                    }
                }
            }
        }
        false
    }

    /// The process and generation that the log has placed a job on.
    fn owner(&self, job: RelationId) -> Option<(u64, u64, String)> {
        self.member.follower.read(|state| {
            let job = state.jobs.get(&job)?;
            let process = state.processes.live().get(&job.process)?;
            let address = process.registration.address.clone();
            Some((job.process, job.version.generation, address))
        })
    }

    async fn execute(
        &self,
        table: RelationId,
        target: u64,
        generation: u64,
        address: &str,
        op: u32,
        key: Key,
    ) -> Result<Executed, CallError> {
        let process = &self.member.process;
        let to = node_of(address).unwrap_or_default();
        let caller = Caller { term: process.term(), incarnation: process.incarnation(), target };
        let executed =
            self.member.world.call(process, to, Delivery::Once, move |process| async move {
                process.admit(caller)?;
                match process.worker() {
                    Some(worker) => Ok(worker.execute(table, generation, op, key).await),
                    None => Ok(Executed::Refused),
                }
            });
        let executed = executed.await;
        if let Err(CallError::StaleTerm { term }) = &executed {
            process.raise_term(*term);
        }
        executed
    }

    /// Whether a statement was committed: the log has it, or has ended the generation that it was sent to. `None`: it
    /// does not tell in time.
    async fn resolve(
        &self,
        table: RelationId,
        process: u64,
        generation: u64,
        op: u32,
    ) -> Option<bool> {
        let id = StatementId { frontend: 1, number: u64::from(op) };
        let until = self.member.process.env.now() + RESOLVED_WITHIN;
        while self.member.process.env.now() < until {
            if self.member.follower.catch_up().await.is_ok() {
                let found = self.member.follower.read(|state| {
                    let now = state.jobs.get(&table).map_or(u64::MAX, |j| j.version.generation);
                    let has_ended = state.processes.is_fenced(process) || now > generation;
                    match state.statements.get(id) {
                        Some(_) => Some(true),
                        None => has_ended.then_some(false),
                    }
                });
                if found.is_some() {
                    return found;
                }
            }
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
        None
    }

    /// Returns when reads that begin then see all that the log is known to have here.
    async fn settle(&self) {
        let ask = || async {
            let asked = self.member.ask_leader(Delivery::Once, move |meta| async move {
                MetaControl::read_epoch(&*meta, &[], Some(SETTLED_WITHIN), true).await
            });
            asked.await.ok().map(|leader| leader.record)
        };
        settled(&self.member.process.env, self.member.follower.number(), ask).await;
    }

    /// Reads a relation and all behind it, and checks what it sees. Whether it could be read.
    pub async fn read(&self, id: RelationId) -> Result<(), String> {
        let world = &self.member.world;
        let ids = self.member.follower.read(|state| state.closure(&[id]));
        let acknowledged = world.acknowledged_of(&ids);
        let asked = ids.clone();
        let answer = self.member.ask_leader(Delivery::Once, move |meta| {
            let asked = asked.clone();
            async move {
                let patience = Some(Duration::from_secs(8));
                MetaControl::read_epoch(&*meta, &asked, patience, true).await
            }
        });
        let answer = answer.await.map_err(|error| error.to_string())?;
        let deadline = self.member.process.env.now() + Duration::from_secs(10);
        let reached = self.member.follower.wait_for(answer.record, deadline).await;
        reached.map_err(|error| error.to_string())?;
        let relations = self.member.follower.read(known);
        let mut rows = BTreeMap::new();
        for id in &ids {
            rows.insert(*id, self.member.rows_at(&self.store, *id, answer.epoch).await?);
        }
        world.note(|| {
            let sizes = rows.iter().map(|(id, rows)| (id.0, rows.values().map(Vec::len).sum()));
            let sizes: Vec<(u32, usize)> = sizes.collect();
            format!("{} reads {sizes:?} at {}", self.member.process.node, answer.epoch)
        });
        world.count("reads");
        self.check(&relations, &rows, answer.epoch);
        world.check_acknowledged(&rows, &acknowledged);
        Ok(())
    }

    fn check(&self, relations: &[Known], rows: &BTreeMap<RelationId, Rows>, epoch: Epoch) {
        let world = &self.member.world;
        for relation in relations.iter().filter(|r| rows.contains_key(&r.id)) {
            let own = &rows[&relation.id];
            if relation.inputs.is_empty() {
                world.check_table(relation.id, own);
                continue;
            }
            let inputs: Vec<&Rows> = relation.inputs.iter().filter_map(|i| rows.get(i)).collect();
            let expected = content::grouped(&relation.name, inputs);
            if *own != expected {
                world.fail(format!(
                    "a read of {} at {epoch} differs from its query: {own:?} instead of {expected:?}",
                    relation.name
                ));
            }
        }
    }
}
