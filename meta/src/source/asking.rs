//! Whom the leader asks how much there is of a source: a process on which a job reads it (docs/design.md §4, "Roots").
//!
//! The process that has answered last is asked again: it has the source open. After a failure another one is asked first,
//! if jobs on several read the source. That a process is away is no failure of the source: the others are asked at once,
//! and only when nobody could be asked for a while, the source is said to fail.

use std::collections::BTreeSet;
use std::time::Duration;

use millrace_common::JobId;
use tokio::time::Instant;

/// Until processes that were away are asked again.
pub const AWAY_PAUSE: Duration = Duration::from_millis(500);
/// For how long all processes may be away before the source is said to fail: longer than one that is lost keeps its jobs.
const AWAY_LIMIT: Duration = Duration::from_secs(15);

/// A job that reads the source, and the process that it runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reader {
    pub process: u64,
    pub job: JobId,
}

/// What became of asking about one source.
#[derive(Debug, Default)]
pub struct Asking {
    /// The process that has answered last.
    answered: Option<u64>,
    /// Those that have failed since, the last one at the end.
    failed: Vec<u64>,
    /// Since when nobody could be asked.
    away: Option<Instant>,
}

impl Asking {
    /// One reader on each process, in the order in which they are to be asked. `readers`: the fastest first.
    pub fn order(&mut self, mut readers: Vec<Reader>) -> Vec<Reader> {
        let mut processes = BTreeSet::new();
        readers.retain(|reader| processes.insert(reader.process));
        self.failed.retain(|process| processes.contains(process));
        let failed = |process| self.failed.iter().position(|failed| *failed == process);
        readers.sort_by_key(|r| (failed(r.process), self.answered != Some(r.process)));
        readers
    }

    /// A process has said what there is.
    pub fn note_answer(&mut self, process: u64) {
        *self = Asking { answered: Some(process), ..Asking::default() };
    }

    /// A process has said that it cannot tell, or nothing in time.
    pub fn note_failure(&mut self, process: u64) {
        self.put_last(process);
        self.away = None;
    }

    /// A process could not be asked.
    pub fn note_away(&mut self, process: u64) {
        self.put_last(process);
    }

    fn put_last(&mut self, process: u64) {
        self.failed.retain(|failed| *failed != process);
        self.failed.push(process);
    }

    /// Nobody can be asked now. Whether that has been so for too long.
    pub fn are_all_away(&mut self, now: Instant) -> bool {
        now.saturating_duration_since(*self.away.get_or_insert(now)) >= AWAY_LIMIT
    }
}

#[cfg(test)]
mod tests {
    use millrace_common::RelationId;

    use super::*;

    fn readers(on: &[(u64, u32)]) -> Vec<Reader> {
        on.iter()
            .map(|(process, job)| Reader { process: *process, job: RelationId(*job) })
            .collect()
    }

    fn order(asking: &mut Asking, on: &[(u64, u32)]) -> Vec<u32> {
        asking.order(readers(on)).into_iter().map(|reader| reader.job.0).collect()
    }

    #[test]
    fn who_has_answered_is_asked_again_and_who_has_failed_last() {
        let on = [(3, 30), (1, 10), (3, 31), (2, 20)];
        let mut asking = Asking::default();
        assert_eq!(
            order(&mut asking, &on),
            [30, 10, 20],
            "the fastest one first, each process once"
        );
        asking.note_answer(1);
        assert_eq!(order(&mut asking, &on), [10, 30, 20]);
        asking.note_failure(1);
        assert_eq!(order(&mut asking, &on), [30, 20, 10]);
        asking.note_away(3);
        assert_eq!(order(&mut asking, &on), [20, 10, 30]);
        asking.note_failure(2);
        assert_eq!(order(&mut asking, &on), [10, 30, 20], "they take turns");
        asking.note_answer(2);
        assert_eq!(order(&mut asking, &on), [20, 30, 10]);
        assert_eq!(order(&mut asking, &on[..2]), [30, 10], "it runs no reader any more");
    }

    #[tokio::test(start_paused = true)]
    async fn processes_may_be_away_for_a_while() {
        let mut asking = Asking::default();
        assert!(!asking.are_all_away(Instant::now()));
        tokio::time::advance(AWAY_LIMIT / 2).await;
        asking.note_away(1);
        assert!(!asking.are_all_away(Instant::now()));
        tokio::time::advance(AWAY_LIMIT / 2).await;
        assert!(asking.are_all_away(Instant::now()));
        asking.note_failure(1);
        assert!(!asking.are_all_away(Instant::now()), "it was asked");
    }
}
