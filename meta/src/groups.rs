//! Transactions over several tables on their way to the log (docs/design.md §4): the epochs of a group
//! meet here, each brought by its table's driver, and the last to come has all of them appended as one
//! entry. If a table's generation ends before it has brought its epoch, the group is void: the others
//! are told so, and nothing of it is in the log.

use std::collections::BTreeMap;

use millrace_common::collections::HashMap;
use millrace_common::task::spawn;
use millrace_common::{Generation, JobId, RelationId, crash};
use millrace_rpc::log::{Entry, Transaction};
use millrace_rpc::version::{CommitGroup, JobCommit};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::error::{MetaError, VoidReason};
use crate::fold::Verdict;
use crate::log::LogWriter;

type Answer = Result<Verdict, MetaError>;

/// A group whose epochs have not all come.
#[derive(Default)]
struct Gathering {
    members: BTreeMap<JobId, Generation>,
    commits: Vec<JobCommit>,
    answers: Vec<oneshot::Sender<Answer>>,
}

#[derive(Default)]
struct State {
    gathering: HashMap<u64, Gathering>,
    /// The newest generation of each job that has ended.
    ended: HashMap<JobId, Generation>,
}

#[derive(Default)]
pub struct Groups {
    state: Mutex<State>,
}

impl Groups {
    /// Commits a driver's epoch together with the rest of its group.
    pub async fn commit(&self, log: &LogWriter, group: CommitGroup, commit: JobCommit) -> Answer {
        let (answer, verdict) = oneshot::channel();
        let Some(complete) = self.join(group, commit, answer) else {
            return verdict.await.unwrap_or(Ok(Err(VoidReason::PartLost)));
        };
        let log = log.clone();
        // A task of its own: a driver that is dropped must not take the others' answers with it.
        spawn("log a transaction", async move {
            crash::point("meta-before-transaction");
            let entry = Entry::Transaction(Transaction { commits: complete.commits });
            let verdict = log.append(entry).await;
            crash::point("meta-after-transaction");
            for answer in complete.answers {
                // A driver that ended does not wait.
                let _ = answer.send(verdict.clone());
            }
        });
        verdict.await.unwrap_or(Ok(Err(VoidReason::PartLost)))
    }

    /// Adds an epoch to its group; the whole group if it was the last one. An answer that is dropped
    /// says that the group is void.
    fn join(
        &self,
        group: CommitGroup,
        commit: JobCommit,
        answer: oneshot::Sender<Answer>,
    ) -> Option<Gathering> {
        let mut state = self.state.lock();
        let State { gathering, ended } = &mut *state;
        let members: BTreeMap<JobId, Generation> =
            group.members.iter().map(|m| (RelationId(m.job), Generation(m.generation))).collect();
        if members.iter().any(|(job, generation)| ended.get(job) >= Some(generation)) {
            gathering.remove(&group.id);
            return None;
        }
        let own = gathering.entry(group.id).or_default();
        own.members = members;
        own.commits.push(commit);
        own.answers.push(answer);
        if own.commits.len() < own.members.len() {
            return None;
        }
        gathering.remove(&group.id)
    }

    /// A job's generation has ended: groups that miss its epoch are void.
    pub fn abort(&self, job: JobId, generation: Generation) {
        let mut state = self.state.lock();
        let ended = state.ended.entry(job).or_insert(generation);
        *ended = generation.max(*ended);
        let lost = |g: &Gathering| g.members.get(&job).is_some_and(|m| *m <= generation);
        state.gathering.retain(|_, group| !lost(group));
    }
}

#[cfg(test)]
mod tests {
    use millrace_rpc::version::GroupMember;

    use super::*;

    fn group(id: u64) -> CommitGroup {
        let member = |job| GroupMember { job, generation: 3 };
        CommitGroup { id, members: vec![member(1), member(2)] }
    }

    fn part(job: u32) -> JobCommit {
        JobCommit { job, generation: 3, ..JobCommit::default() }
    }

    #[test]
    fn the_last_part_completes_the_group() {
        let groups = Groups::default();
        let (first, second) = (oneshot::channel(), oneshot::channel());
        assert!(groups.join(group(7), part(1), first.0).is_none());
        let complete = groups.join(group(7), part(2), second.0).unwrap();
        assert_eq!(complete.commits.iter().map(|c| c.job).collect::<Vec<_>>(), [1, 2]);
        assert!(groups.state.lock().gathering.is_empty());
    }

    #[test]
    fn a_lost_part_voids_the_group_before_and_after_the_others_come() {
        let groups = Groups::default();
        let (mut first, mut second) = (oneshot::channel::<Answer>(), oneshot::channel::<Answer>());
        assert!(groups.join(group(7), part(1), first.0).is_none());
        groups.abort(RelationId(2), Generation(3));
        assert!(first.1.try_recv().is_err());
        assert!(groups.join(group(8), part(1), second.0).is_none());
        assert!(second.1.try_recv().is_err() && groups.state.lock().gathering.is_empty());
        // An older generation's end says nothing of this one.
        let third = oneshot::channel::<Answer>();
        groups.abort(RelationId(1), Generation(2));
        let later = CommitGroup {
            id: 9,
            members: vec![
                GroupMember { job: 1, generation: 3 },
                GroupMember { job: 4, generation: 1 },
            ],
        };
        assert!(groups.join(later, part(1), third.0).is_none());
        assert_eq!(groups.state.lock().gathering.len(), 1);
    }
}
