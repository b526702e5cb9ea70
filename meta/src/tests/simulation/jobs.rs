//! What a simulated worker has of a job: its rows, the statements that have entered, and the commits that are sealed and
//! not concluded, which a leader that takes over is handed.

use std::collections::{BTreeMap, VecDeque};

use millrace_common::{Epoch, Generation, RelationId};
use millrace_rpc::services::RunningJob;
use millrace_rpc::version::{BackfillPosition, BackfillState, JobCommit, StatementId};
use tokio::sync::oneshot;

use super::content::{self, Entry, Key, Rows};

/// Keys of its inputs that one commit of a first scan takes, at most.
const SCANNED: usize = 2;

/// A statement that has entered a table.
pub struct Statement {
    pub op: u32,
    pub key: Key,
    pub answer: oneshot::Sender<Epoch>,
}

/// An epoch whose commit is on its way into the log.
pub struct Sealed {
    pub number: u64,
    pub statements: Vec<Statement>,
    pub objects: Vec<String>,
    /// `None`: its slices are not durable yet.
    pub commit: Option<JobCommit>,
}

pub struct Job {
    pub generation: Generation,
    /// Tells it from the same generation that was started before.
    pub instance: u64,
    pub name: String,
    pub is_table: bool,
    /// Of its rows.
    pub table: u32,
    pub inputs: Vec<RelationId>,
    /// Of its last commit.
    pub number: u64,
    /// With what is sealed.
    pub rows: Rows,
    /// Versions below are left out of what is written from now on.
    pub horizon: Epoch,
    pub backfill: Option<BackfillState>,
    pub open: Vec<Statement>,
    pub sealed: VecDeque<Sealed>,
    /// Cuts under way.
    pub cutting: usize,
    /// Cuts that were decided as of an earlier record are those of an earlier leader.
    pub since: u64,
}

impl Job {
    /// What a leader goes on with whose claim is no later than `record`: from now on only such a one may cut. `None`:
    /// nothing yet, because a cut is under way and no commit after number `after` is durable.
    pub fn hand_over(&mut self, record: u64, after: u64) -> Option<RunningJob> {
        self.since = self.since.max(record);
        let durable = self.sealed.iter().map_while(|sealed| sealed.commit.clone());
        let sealed: Vec<JobCommit> = durable.collect();
        let oldest = self.sealed.front().map_or(self.number + 1, |sealed| sealed.number);
        let number = oldest - 1 + sealed.len() as u64;
        let is_cutting = self.cutting > 0;
        let running = RunningJob { number, horizon: self.horizon, sealed, is_cutting };
        (!is_cutting || number > after).then_some(running)
    }

    fn seal(&mut self, number: u64, statements: Vec<Statement>) {
        self.number = number;
        let sealed = Sealed { number, statements, objects: Vec::new(), commit: None };
        self.sealed.push_back(sealed);
    }

    /// Of each half of the statements what it changes: an early part, and what comes with the barrier.
    pub fn seal_table(&mut self, commit: &mut JobCommit) -> Vec<Vec<Entry>> {
        let statements = std::mem::take(&mut self.open);
        if statements.is_empty() {
            return Vec::new();
        }
        let mut parts = Vec::new();
        for half in statements.chunks(statements.len().div_ceil(2)) {
            let mut changed = BTreeMap::new();
            for statement in half {
                let list = self.rows.entry(statement.key).or_default();
                list.push(statement.op);
                changed.insert(statement.key, list.clone());
            }
            parts.push(entries_of(changed, 0));
        }
        let id = |s: &Statement| StatementId { frontend: 1, number: u64::from(s.op) };
        commit.statements = statements.iter().map(id).collect();
        commit.row_count_delta = statements.len() as i64;
        self.seal(commit.number, statements);
        parts
    }

    pub fn seal_view(&mut self, commit: &mut JobCommit, inputs: &[Rows]) -> Vec<Vec<Entry>> {
        let parts = match self.backfill.take() {
            Some(backfill) => {
                let (parts, after) = self.scan(backfill, inputs, commit.epoch);
                commit.backfill.clone_from(&after);
                self.backfill = after;
                parts
            }
            None => {
                let mut rows = content::grouped(&self.name, inputs);
                rows.retain(|key, list| self.rows.get(key) != Some(list));
                self.rows.extend(rows.clone());
                if rows.is_empty() { Vec::new() } else { vec![entries_of(rows, commit.epoch)] }
            }
        };
        self.seal(commit.number, Vec::new());
        parts
    }

    /// The next keys of a first scan, each a part: all are of one epoch, and several of one group.
    fn scan(
        &mut self,
        mut backfill: BackfillState,
        inputs: &[Rows],
        epoch: u64,
    ) -> (Vec<Vec<Entry>>, Option<BackfillState>) {
        backfill.snapshot_epoch = epoch;
        if backfill.positions.is_empty() {
            let position = |input| BackfillPosition { input, ..BackfillPosition::default() };
            backfill.positions = (0..inputs.len() as u32).map(position).collect();
        }
        let mut parts = Vec::new();
        for (position, rows) in backfill.positions.iter_mut().zip(inputs) {
            while !position.done && parts.len() < SCANNED {
                let last = position.last_key[..].try_into().ok().map(u32::from_be_bytes);
                let next = rows.iter().find(|(key, _)| last.is_none_or(|last| **key > last));
                let Some((key, list)) = next else {
                    position.done = true;
                    break;
                };
                position.last_key = key.to_be_bytes().to_vec().into();
                let group = key % content::groups(&self.name);
                let own = self.rows.entry(group).or_default();
                own.extend(list);
                own.sort_unstable();
                parts.push(entries_of(BTreeMap::from([(group, own.clone())]), epoch));
            }
        }
        let is_done = backfill.positions.iter().all(|position| position.done);
        (parts, (!is_done).then_some(backfill))
    }
}

fn entries_of(rows: Rows, epoch: u64) -> Vec<Entry> {
    let entry = |(key, list)| Entry { key, epoch, sequence: 0, list };
    rows.into_iter().map(entry).collect()
}
