//! Asks the processes that read a source how much there is of it, and notes what they answer.

use std::cmp::Reverse;
use std::mem;
use std::time::Duration;

use millrace_common::{JobId, SqlError, SqlState};
use millrace_rpc::source_poll::{Known, More, PollSource, Polled};
use tokio::time::Instant;

use super::asking::{AWAY_PAUSE, Asking, Reader};
use super::pace::reached;
use super::{Coordinator, Session, retry_pause};
use crate::read::is_cut_off;

/// A poll that takes longer has failed: a store or broker that does not answer.
const POLL_LIMIT: Duration = Duration::from_secs(120);

impl Coordinator {
    /// Asks what there is, and notes the answer, or that there is none.
    pub(super) async fn poll(&self, session: &mut Session, known: &Known) {
        let answer = self.ask(&mut session.asking, known).await;
        session.is_checked = answer.is_ok();
        let now = self.shared.env.now();
        match answer {
            Ok(mut polled) => {
                session.failures = 0;
                session.retry_at = None;
                session.offsets_per_row = Some(polled.offsets_per_row.max(1));
                self.status.lock().available = polled.available.clone();
                session.found = (mem::take(&mut polled.splits), mem::take(&mut polled.files));
                session.polled = Some((now, polled));
            }
            Err(error) if is_cut_off(error.state) => {
                session.retry_at = Some(now + AWAY_PAUSE);
                if session.asking.are_all_away(now) {
                    self.failing(&error);
                }
            }
            Err(error) => {
                session.failures += 1;
                session.retry_at = Some(now + retry_pause(session.failures));
                self.failing(&error);
            }
        }
    }

    /// Asks one process after the other, until one is not away.
    async fn ask(&self, asking: &mut Asking, known: &Known) -> Result<Polled, SqlError> {
        let mut away = SqlError::new(SqlState::CANNOT_CONNECT_NOW, "no job that reads it runs");
        for Reader { process, job } in asking.order(self.readers()) {
            let poll = PollSource {
                source: self.id,
                reader: job,
                record: self.shared.state.read().number,
                offsets: known.offsets.clone(),
                started_ms: known.started_ms,
                now_ms: known.now_ms,
            };
            match tokio::time::timeout(POLL_LIMIT, self.compute.poll_source(poll)).await {
                Ok(Ok(polled)) => {
                    asking.note_answer(process);
                    return Ok(polled);
                }
                Ok(Err(error)) if is_cut_off(error.state) => {
                    asking.note_away(process);
                    away = error;
                }
                Ok(Err(error)) => {
                    asking.note_failure(process);
                    return Err(error);
                }
                Err(_) => {
                    asking.note_failure(process);
                    let message = format!("cannot read source {}: it does not answer", self.id);
                    return Err(SqlError::new(SqlState::IO_ERROR, message)
                        .with_hint("It is tried again by itself."));
                }
            }
        }
        Err(away)
    }

    /// Whom to ask what there is: the jobs that read the source and run, the fastest first. While none runs, all that are
    /// placed somewhere.
    pub(super) fn readers(&self) -> Vec<Reader> {
        let state = self.shared.state.read();
        let placed = |job: JobId| {
            let process = state.jobs.get(&job)?.process;
            (process != 0).then_some(Reader { process, job })
        };
        if state.jobs.contains_key(&self.id) {
            return placed(self.id).into_iter().collect();
        }
        let mut running = self.running(&state);
        running.sort_by_key(|(_, epoch, sealed)| Reverse(reached(*epoch, *sealed)));
        let running: Vec<Reader> = running.iter().filter_map(|(job, ..)| placed(*job)).collect();
        match running.is_empty() {
            true => state.readers(self.id).into_iter().filter_map(placed).collect(),
            false => running,
        }
    }
}

/// Whether to ask again: nothing is known, or what is known does not fill the next epoch and there
/// may be more.
pub(super) fn is_poll_due(
    session: &Session,
    known: &Known,
    wanted: u64,
    interval: Duration,
    now: Instant,
) -> bool {
    if session.retry_at.is_some_and(|at| now < at) {
        return false;
    }
    let Some((at, polled)) = &session.polled else { return true };
    match polled.more {
        More::Never => false,
        More::WithTime => now - *at >= interval / 2,
        More::After(pause) => {
            let left = |(split, end): &(u32, u64)| end.saturating_sub(known.offset(*split));
            let left = polled.available.iter().map(left).fold(0, u64::saturating_add);
            now - *at >= pause && left < wanted
        }
    }
}
