//! The cuts of a job that runs in a cluster: what they have made and the log is not known to have, kept for a leader that
//! takes over (docs/design.md §10).

use std::collections::VecDeque;

use millrace_common::{SqlError, SqlState};
use millrace_rpc::services::{Cut, RunningJob};
use millrace_rpc::version::JobCommit;
use parking_lot::Mutex;
use tokio::sync::Notify;

#[derive(Default)]
struct State {
    /// Of the last commit that was sealed, or that the job began with.
    number: u64,
    /// Of the last commit that is visible here.
    published: u64,
    /// Cuts under way.
    running: usize,
    /// Oldest first.
    sealed: VecDeque<JobCommit>,
    /// Cuts that were decided as of an earlier record are those of an earlier leader.
    since: u64,
}

/// See the module. Invariant: the numbers of what is sealed are consecutive, and the last one is `number`.
#[derive(Default)]
pub struct Cuts {
    state: Mutex<State>,
    /// Told when something is sealed or becomes visible, or a cut ends.
    changed: Notify,
}

/// A cut is under way until this is dropped.
pub struct Running<'a>(&'a Cuts);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.state.lock().running -= 1;
        self.0.changed.notify_waiters();
    }
}

impl Cuts {
    /// The job begins with so many commits.
    pub fn begin_after(&self, commits: u64) {
        let mut state = self.state.lock();
        (state.number, state.published) = (commits, commits);
    }

    /// Begins a cut. An error if it is one of a leader that another has followed.
    pub fn begin(&self, cut: Cut) -> Result<Running<'_>, SqlError> {
        let mut state = self.state.lock();
        if cut.record < state.since {
            let message = format!("cut {} is one of a leader that leads no longer", cut.number);
            return Err(SqlError::new(SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE, message));
        }
        state.running += 1;
        Ok(Running(self))
    }

    /// Whether a leader goes on with the job whose claim is later than this record.
    pub fn are_after(&self, record: u64) -> bool {
        self.state.lock().since > record
    }

    /// What a cut has made, which is going to be logged.
    pub fn seal(&self, commit: &JobCommit) {
        let mut state = self.state.lock();
        debug_assert_eq!(commit.number, state.number + 1, "commits are cut in order");
        state.number = commit.number;
        state.sealed.push_back(commit.clone());
        drop(state);
        self.changed.notify_waiters();
    }

    /// The log has the commits up to this number.
    pub fn conclude(&self, number: u64) {
        let mut state = self.state.lock();
        while state.sealed.pop_front_if(|commit| commit.number <= number).is_some() {}
    }

    /// The commit of this number, and those before it, are visible from now on.
    pub fn note_published(&self, number: u64) {
        let mut state = self.state.lock();
        state.published = state.published.max(number);
        drop(state);
        self.changed.notify_waiters();
    }

    /// Completes when so many commits are visible.
    pub async fn published(&self, commits: u64) {
        loop {
            let changed = self.changed.notified();
            if self.state.lock().published >= commits {
                return;
            }
            changed.await;
        }
    }

    /// From now on only a leader whose claim is no later than `record` may cut. What is not concluded, as soon as that is
    /// more than the commits up to `after`, or no cut is under way. The horizon is not known here.
    pub async fn hand_over(&self, record: u64, after: u64) -> RunningJob {
        loop {
            let changed = self.changed.notified();
            {
                let mut state = self.state.lock();
                state.since = state.since.max(record);
                if state.running == 0 || state.number > after {
                    return RunningJob {
                        number: state.number,
                        sealed: state.sealed.iter().cloned().collect(),
                        is_cutting: state.running > 0,
                        ..RunningJob::default()
                    };
                }
            }
            changed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use millrace_common::Epoch;

    use super::*;

    fn cut(number: u64, record: u64) -> Cut {
        Cut { epoch: Epoch::ZERO, number, record }
    }

    fn commit(number: u64) -> JobCommit {
        JobCommit { number, ..JobCommit::default() }
    }

    /// The number of the last one, those that are sealed, and whether a cut is under way; `None`: there is no answer yet.
    fn now(handing_over: impl Future<Output = RunningJob>) -> Option<(u64, Vec<u64>, bool)> {
        let running = handing_over.now_or_never()?;
        let sealed = running.sealed.iter().map(|commit| commit.number).collect();
        Some((running.number, sealed, running.is_cutting))
    }

    #[test]
    fn what_is_not_concluded_is_handed_over() {
        let cuts = Cuts::default();
        cuts.begin_after(4);
        assert_eq!(now(cuts.hand_over(1, 4)), Some((4, vec![], false)));
        for number in 5..=7 {
            let _running = cuts.begin(cut(number, 10)).unwrap();
            cuts.seal(&commit(number));
        }
        cuts.conclude(5);
        cuts.conclude(5);
        let running = cuts.begin(cut(8, 10)).unwrap();
        // It may wait for those before it.
        assert_eq!(now(cuts.hand_over(20, 4)), Some((7, vec![6, 7], true)));
        let mut rest = Box::pin(cuts.hand_over(20, 7));
        assert_eq!(now(rest.as_mut()), None);
        cuts.conclude(7);
        cuts.seal(&commit(8));
        assert_eq!(now(rest), Some((8, vec![8], true)));
        let mut rest = Box::pin(cuts.hand_over(20, 8));
        assert_eq!(now(rest.as_mut()), None);
        drop(running);
        assert_eq!(now(rest), Some((8, vec![8], false)));
        assert_eq!(now(cuts.hand_over(20, 8)), Some((8, vec![8], false)), "asked again");
    }

    #[test]
    fn commits_are_waited_for_until_they_are_visible() {
        let cuts = Cuts::default();
        cuts.begin_after(4);
        assert_eq!(cuts.published(4).now_or_never(), Some(()));
        let mut fifth = Box::pin(cuts.published(5));
        assert_eq!(fifth.as_mut().now_or_never(), None);
        cuts.conclude(5);
        assert_eq!(fifth.as_mut().now_or_never(), None, "in the log is not visible here");
        cuts.note_published(5);
        assert_eq!(fifth.now_or_never(), Some(()));
        cuts.note_published(3);
        assert_eq!(cuts.published(5).now_or_never(), Some(()));
    }

    #[test]
    fn cuts_of_an_earlier_leader_are_refused() {
        let cuts = Cuts::default();
        assert!(now(cuts.hand_over(20, 0)).is_some());
        assert!(cuts.begin(cut(1, 19)).is_err());
        assert!(cuts.begin(cut(1, 20)).is_ok());
        // Of two that ask, the later one leads.
        assert!(now(cuts.hand_over(15, 0)).is_some());
        assert!(cuts.begin(cut(1, 19)).is_err());
    }
}
