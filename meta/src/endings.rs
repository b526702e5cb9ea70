//! Which jobs a record may end generations of: for processes that follow the log and run jobs, which look at these jobs
//! and no others.

use std::collections::BTreeSet;
use std::slice::from_ref;

use millrace_common::{JobId, RelationId};
use millrace_rpc::log::{Entry, LogRecord};

/// Jobs that may have another generation after some records than before, or another process, or are gone. Which of them
/// have, the state tells: an entry may be void.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MayEnd {
    /// All jobs.
    pub any: bool,
    pub jobs: BTreeSet<JobId>,
}

impl MayEnd {
    pub fn of<'a>(records: impl IntoIterator<Item = &'a LogRecord>) -> MayEnd {
        let mut may_end = MayEnd::default();
        let entries = records.into_iter().flat_map(|record| &record.entries);
        entries.filter_map(|entry| entry.entry.as_ref()).for_each(|entry| may_end.add(entry));
        may_end
    }

    pub fn includes(&self, job: JobId) -> bool {
        self.any || self.jobs.contains(&job)
    }

    fn add(&mut self, entry: &Entry) {
        let jobs: &[u32] = match entry {
            Entry::DropRelations(_)
            | Entry::DropSchema(_)
            | Entry::PlaceJobs(_)
            | Entry::FenceProcess(_) => return self.any = true,
            Entry::RaiseGenerations(raised) if raised.jobs.is_empty() => return self.any = true,
            Entry::RaiseGenerations(raised) => &raised.jobs,
            Entry::AlterRelation(altered) => from_ref(&altered.id),
            Entry::Detach(detached) => from_ref(&detached.job),
            Entry::Rebuild(rebuilt) => from_ref(&rebuilt.job),
            // It may be the last one of a rebuild.
            Entry::Commit(commit) => from_ref(&commit.job),
            Entry::CreateRelation(_)
            | Entry::CreateSchema(_)
            | Entry::Transaction(_)
            | Entry::EditVersion(_)
            | Entry::StartBackfill(_)
            | Entry::Published(_)
            | Entry::MoveParts(_)
            | Entry::SourceAdvance(_)
            | Entry::SetSetting(_)
            | Entry::SetUser(_)
            | Entry::DeleteObjects(_)
            | Entry::GiveUp(_)
            | Entry::Tick(_)
            | Entry::RegisterProcess(_)
            | Entry::DrainProcess(_)
            | Entry::CreateBackup(_)
            | Entry::ReleaseBackup(_) => &[],
        };
        self.jobs.extend(jobs.iter().copied().map(RelationId));
    }
}
