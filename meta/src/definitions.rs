//! Definitions by the ids of their statements, and changes by operators by theirs: one whose leader was lost is asked for
//! again with its id, and answered with what became of it (docs/design.md §10).

use std::collections::VecDeque;

use millrace_common::{Epoch, RelationId, SqlError, SqlState};
use millrace_rpc::call_error::CallError;
use millrace_rpc::control::{CreateRelationRequest, DefineAnswer, DefineRequest, Definition};
use millrace_rpc::log::{CommittedDefinition, Entry, Rebuild};
use millrace_rpc::version::StatementId;

use crate::fold::Applied;
use crate::meta::{CreateOptions, Meta, setting_entry};
use crate::state::{MetaState, has_job};

/// Definitions whose outcome can be looked up: as many as entries may wait for the log, so that one that is asked for
/// again while it waits is found when its turn comes.
const DEFINITIONS_KEPT: usize = 4_096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Defined {
    id: StatementId,
    epoch: Epoch,
    relation: Option<RelationId>,
}

/// The newest definitions that were asked for by an id and took effect, oldest first. They are few beside statements that
/// write rows, which would soon push them out of a common list.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Definitions {
    order: VecDeque<Defined>,
}

impl Definitions {
    pub(crate) fn insert(&mut self, id: StatementId, applied: &Applied) {
        // The leader that appends one knows all that the log has: none is there twice.
        if self.get(id).is_some() {
            return;
        }
        let Applied { epoch, relation, .. } = *applied;
        self.order.push_back(Defined { id, epoch, relation });
        if self.order.len() > DEFINITIONS_KEPT {
            self.order.pop_front();
        }
    }

    fn get(&self, id: StatementId) -> Option<&Defined> {
        self.order.iter().rev().find(|defined| defined.id == id)
    }

    /// Whether every definition after this epoch is still here.
    fn has_all_after(&self, epoch: Epoch) -> bool {
        self.order.len() < DEFINITIONS_KEPT
            || self.order.front().is_some_and(|oldest| oldest.epoch <= epoch)
    }

    pub(crate) fn to_snapshot(&self) -> Vec<CommittedDefinition> {
        let committed = |defined: &Defined| CommittedDefinition {
            id: defined.id,
            epoch: defined.epoch.0,
            relation: defined.relation.map(|id| id.0),
        };
        self.order.iter().map(committed).collect()
    }

    pub(crate) fn from_snapshot(definitions: &[CommittedDefinition]) -> Definitions {
        let defined = |committed: &CommittedDefinition| Defined {
            id: committed.id,
            epoch: Epoch(committed.epoch),
            relation: committed.relation.map(RelationId),
        };
        Definitions { order: definitions.iter().map(defined).collect() }
    }
}

impl MetaState {
    /// What a definition was answered with, if it has taken effect. The record is the newest one.
    pub fn defined(&self, id: StatementId) -> Option<Applied> {
        let Defined { epoch, relation, .. } = *self.definitions.get(id)?;
        Some(Applied { epoch, record: self.number, relation })
    }

    /// Whether what is asked for by this id has taken effect, as far as that is remembered.
    pub fn is_done(&self, id: Option<StatementId>) -> bool {
        id.is_some_and(|id| self.definitions.get(id).is_some())
    }

    /// The same as [`MetaState::defined`]; an error if it is so long ago that it may have been forgotten.
    fn known_definition(&self, id: StatementId, since: Epoch) -> Result<Option<Applied>, SqlError> {
        match self.defined(id) {
            None if !self.definitions.has_all_after(since) => Err(forgotten()),
            found => Ok(found),
        }
    }
}

fn forgotten() -> SqlError {
    let message = "whether the definition was made before is not known any more";
    SqlError::new(SqlState::TRANSACTION_RESOLUTION_UNKNOWN, message)
        .with_detail(format!("More than {DEFINITIONS_KEPT} others have been made since."))
}

fn lacking(field: &str) -> CallError {
    CallError::Malformed(format!("a definition without {field}"))
}

impl Meta {
    /// Makes a definition, or answers what it was answered with before.
    ///
    /// One that the state lacks has not been made and will not be by anybody else: a record of a leader before this one
    /// either came before this one's claim, which it was folded before, or has the claim's number or a higher one. The
    /// first of these is taken, and the fold lets the others, of an older term, change nothing. What an earlier call has
    /// left in the queue of this leader's writer comes into the log before this call's entry, and is found by the writer.
    pub(crate) async fn define_once(
        &self,
        request: DefineRequest,
    ) -> Result<DefineAnswer, CallError> {
        let DefineRequest { id, since, change } = request;
        let id = id.ok_or_else(|| lacking("an id"))?;
        let change = change.ok_or_else(|| lacking("a change"))?;
        let known = self.shared.state.read().known_definition(id, Epoch(since))?;
        if known.is_none() {
            self.await_compute_for(&change).await?;
        }
        let relation = self.make(id, change).await?;
        Ok(DefineAnswer { relation: relation.map(|id| id.0), record: self.record() })
    }

    /// What has a job is not begun before there is a compute process: nothing is left half made of it where none comes.
    async fn await_compute_for(&self, change: &Definition) -> Result<(), SqlError> {
        let Definition::CreateRelation(create) = change else { return Ok(()) };
        match self.cluster.get().filter(|_| create.relation.as_ref().is_some_and(has_job)) {
            Some(cluster) => cluster.await_compute().await,
            None => Ok(()),
        }
    }

    /// One record holds the whole definition. What was created or replaced.
    async fn make(
        &self,
        id: StatementId,
        change: Definition,
    ) -> Result<Option<RelationId>, CallError> {
        let statement = Some(id);
        let entry = match change {
            Definition::CreateRelation(create) => {
                let CreateRelationRequest { relation, table_count, or_replace } = create;
                let relation = relation.ok_or_else(|| lacking("a relation"))?;
                let if_not_exists = false;
                let options = CreateOptions { table_count, or_replace, if_not_exists, statement };
                return Ok(Some(self.create_relation(relation, options).await?));
            }
            Definition::AlterRelation(change) => {
                self.alter_by(statement, change).await?;
                return Ok(None);
            }
            Definition::Rebuild(Rebuild { job }) => {
                self.rebuild_by(statement, RelationId(job)).await?;
                return Ok(None);
            }
            Definition::DropRelations(entry) => Entry::DropRelations(entry),
            Definition::CreateSchema(entry) => Entry::CreateSchema(entry),
            Definition::DropSchema(entry) => Entry::DropSchema(entry),
            Definition::SetSetting(entry) => setting_entry(&entry.name, entry.value.as_deref())?,
            Definition::SetUser(entry) => Entry::SetUser(entry),
        };
        self.apply_by(statement, entry).await?;
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use millrace_rpc::log::{LogEntry, LogRecord, SetSetting};

    use super::*;
    use crate::fold;

    fn id(number: u64) -> StatementId {
        StatementId { frontend: 1, number }
    }

    /// A record of definitions with these numbers. Its epoch.
    fn define(state: &mut MetaState, numbers: Range<u64>) -> Epoch {
        let entry = |number: u64| {
            let set = SetSetting { name: "n".to_owned(), value: Some(number.to_string()) };
            LogEntry { statement: Some(id(number)), entry: Some(Entry::SetSetting(set)) }
        };
        let record = LogRecord {
            number: state.number + 1,
            term: 1,
            leader: 7,
            prev_crc: state.crc,
            epoch: state.epoch.next(1_000_000).0,
            entries: numbers.map(entry).collect(),
            ..LogRecord::default()
        };
        assert!(fold::apply(state, &record, 0).iter().all(Result::is_ok));
        state.epoch
    }

    #[test]
    fn as_many_are_kept_as_promised_and_what_is_forgotten_is_not_taken_as_new() {
        let (mut state, kept) = (MetaState::default(), DEFINITIONS_KEPT as u64);
        let first = define(&mut state, 0..1);
        let rest = define(&mut state, 1..kept);
        assert_eq!(state.defined(id(0)).map(|applied| applied.epoch), Some(first));
        define(&mut state, kept..kept + 1);
        assert_eq!(state.defined(id(0)), None);
        assert_eq!(state.defined(id(1)).map(|applied| applied.epoch), Some(rest));
        // It may have been made after epoch 0, but not after that of the oldest one that is known.
        let unknown = state.known_definition(id(0), Epoch::ZERO).unwrap_err();
        assert_eq!(unknown.state, SqlState::TRANSACTION_RESOLUTION_UNKNOWN);
        assert_eq!(state.known_definition(id(0), rest).unwrap(), None);

        let again = MetaState::from_snapshot(state.to_snapshot());
        assert_eq!(again.definitions, state.definitions);
        assert_eq!(state.for_snapshot().definitions, state.definitions);
    }
}
