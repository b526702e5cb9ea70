//! What a source is doing, as its coordinator says and SHOW SOURCES shows.

use millrace_common::SqlError;
use millrace_rpc::log::SplitOffset;
use tracing::{info, warn};

use super::Coordinator;

/// What a source is doing, for SHOW SOURCES.
#[derive(Clone, Debug, Default)]
pub struct SourceStatus {
    pub state: SourceState,
    /// Why it is failing.
    pub reason: Option<String>,
    /// How far each split could go, as far as is known.
    pub available: Vec<(u32, u64)>,
    /// Where splits end by the record that was last on its way into the log; for those that read ahead.
    pub planned: Vec<SplitOffset>,
    /// What it fixed last is as much as its readers work off in an epoch, or all there will ever be: they need not
    /// wait for more.
    pub is_full: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SourceState {
    #[default]
    Starting,
    /// No job reads it: it does not advance.
    Idle,
    Running,
    Paused,
    /// All there will ever be is fixed.
    Finished,
    /// It cannot be asked what there is.
    Failing,
}

impl SourceState {
    pub fn name(self) -> &'static str {
        match self {
            SourceState::Starting => "starting",
            SourceState::Idle => "idle",
            SourceState::Running => "running",
            SourceState::Paused => "paused",
            SourceState::Finished => "finished",
            SourceState::Failing => "failing",
        }
    }
}

impl Coordinator {
    pub(super) fn set_state(&self, state: SourceState) {
        let mut status = self.status.lock();
        status.state = state;
        if state != SourceState::Failing && status.reason.take().is_some() {
            info!(source = %self.shared.label(self.id), "source can be read again");
        }
    }

    pub(super) fn failing(&self, error: &SqlError) {
        let reason = one_line(error);
        let mut status = self.status.lock();
        if status.reason.as_deref() != Some(&reason) {
            warn!(source = %self.shared.label(self.id), %error, "source cannot be read");
        }
        status.state = SourceState::Failing;
        status.reason = Some(reason);
    }
}

/// Message, detail and hint, where only the last sentence keeps its full stop.
fn one_line(error: &SqlError) -> String {
    let mut line = error.message.clone();
    for part in [&error.detail, &error.hint].into_iter().flatten() {
        if line.ends_with('.') {
            line.pop();
        }
        line.push_str(". ");
        line.push_str(part);
    }
    line
}

#[cfg(test)]
mod tests {
    use millrace_common::SqlState;

    use super::*;

    #[test]
    fn a_reason_has_one_full_stop_between_its_sentences() {
        let error = SqlError::new(SqlState::IO_ERROR, "a file has changed");
        assert_eq!(one_line(&error), "a file has changed");
        let error = error.with_hint("Leave it.");
        assert_eq!(one_line(&error), "a file has changed. Leave it.");
        let error = error.with_detail("It was short.");
        assert_eq!(one_line(&error), "a file has changed. It was short. Leave it.");
    }
}
