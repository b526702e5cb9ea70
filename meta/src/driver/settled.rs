//! What is settled when the commit of a cut is concluded.
//!
//! A cut names the record of the log as of which it was decided, and the process that makes it has that record. So whatever
//! has entered the table before the process knew the record is in this commit or in one before it, which are concluded in
//! their order. There is one exception: where tables are written by one transaction, one of them ends the epochs of all,
//! and what another one's cut then brings may have been ended before the record.

use millrace_common::{Generation, JobId, RelationId};
use millrace_rpc::version::JobCommit;

use super::Driver;
use crate::shared::Shared;

/// The tables of which it is settled, when a commit is concluded, what has become of all that had entered before their
/// process knew this record. Of a job that is no table it means nothing.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Settles {
    record: u64,
    tables: Vec<JobId>,
}

impl Settles {
    /// Of a cut that was decided as of this record.
    pub fn of(commit: &JobCommit, record: u64) -> Settles {
        let tables = match &commit.group {
            None => vec![RelationId(commit.job)],
            Some(group) => match group.members.first() {
                // The group is in the log as a whole or not at all.
                Some(first) if first.job == commit.job => {
                    group.members.iter().map(|member| RelationId(member.job)).collect()
                }
                _ => Vec::new(),
            },
        };
        Settles { record, tables }
    }

    /// The commit is concluded.
    pub fn note(&self, shared: &Shared) {
        for handle in self.tables.iter().filter_map(|table| shared.job(*table)) {
            handle.note_settled(self.record);
        }
    }
}

impl Driver {
    /// The generation in the log, after the one before; `None`: the job was dropped.
    pub(super) fn next_generation(&self, before: &mut Option<Generation>) -> Option<Generation> {
        let (generation, record) = {
            let state = self.shared.state.read();
            let job = state.jobs.get(&self.handle.id)?;
            (Generation(job.version.generation), state.number)
        };
        if before.replace(generation).is_some_and(|before| before != generation) {
            // What the one before has not logged is void, and nobody but this driver begins this one.
            self.handle.note_settled(record);
        }
        Some(generation)
    }
}

#[cfg(test)]
mod tests {
    use millrace_rpc::version::{CommitGroup, GroupMember};

    use super::*;

    #[test]
    fn what_another_table_has_ended_settles_nothing_by_itself() {
        let member = |job| GroupMember { job, generation: 1 };
        let group = CommitGroup { id: 7, members: [3, 1, 2].map(member).to_vec() };
        let settled = |job, group: Option<&CommitGroup>| {
            let commit = JobCommit { job, group: group.cloned(), ..JobCommit::default() };
            Settles::of(&commit, 9).tables.iter().map(|table| table.0).collect::<Vec<_>>()
        };
        assert_eq!(settled(1, None), [1]);
        assert_eq!(settled(1, Some(&group)), [0u32; 0]);
        assert_eq!(settled(3, Some(&group)), [3, 1, 2]);
    }
}
