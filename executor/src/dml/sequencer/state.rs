//! What a sequencer keeps of its epochs, the open one and those on their way, and who waits for them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};

use arrow::array::UInt32Array;
use millrace_common::{Epoch, JobId, SqlError};
use millrace_rpc::version::{RunMeta, StatementId};
use millrace_storage::TableWriter;
use tokio::sync::oneshot;

use super::{SealedEpoch, Sequencer};
use crate::changelog_cache::HubChunk;
use crate::dml::{DmlError, SinkMark};
use crate::input::watermark::SplitWatermark;
use crate::lookahead::uncommitted::Announced;
use crate::memory::Reservation;

/// What became of an epoch.
#[derive(Clone, Debug)]
pub(in crate::dml) enum StatementOutcome {
    Committed(Epoch),
    /// Provably not in the log.
    NotCommitted,
    /// The same, for a reason that evaluating the statement again would meet again.
    Refused(SqlError),
    Unknown,
}

type Waiter = oneshot::Sender<StatementOutcome>;

/// The epoch at which everything so far is committed, or where to wait for it.
pub(in crate::dml) type Settled = Result<Epoch, oneshot::Receiver<StatementOutcome>>;

/// Statements of one epoch.
#[derive(Default)]
pub(super) struct Statements {
    pub(super) ids: Vec<StatementId>,
    pub(super) waiters: Vec<Waiter>,
    pub(super) delta: Vec<HubChunk>,
    pub(super) delta_bytes: usize,
    /// The change is too large for the changelog cache: `delta` is empty.
    pub(super) overflow: bool,
    pub(super) row_count: i64,
    pub(super) changed: bool,
    pub(super) account: Option<Reservation>,
    /// Tables that hold other parts of transactions in this epoch: they end theirs together with it.
    pub(super) ties: BTreeMap<JobId, Weak<Sequencer>>,
    pub(super) load: Option<Vec<RunMeta>>,
    /// The epoch is a load's, also after its runs were sealed.
    pub(super) is_load: bool,
    /// How far the table's connector is with these rows.
    pub(super) fed: BTreeMap<String, u64>,
    /// Who feeds it waits for the end of these.
    pub(super) concluded: Vec<oneshot::Sender<()>>,
    /// To those that look ahead.
    pub(super) announced: Announced,
}

impl Statements {
    pub(super) fn conclude(self, fate: StatementOutcome) {
        for waiter in self.waiters {
            // A session that went away does not wait.
            let _ = waiter.send(fate.clone());
        }
    }
}

pub(in crate::dml) struct State {
    pub(super) writer: TableWriter,
    pub(super) open: Statements,
    /// Sealed epochs, oldest first, and whether the commit may have reached the log.
    pub(super) in_flight: VecDeque<(Statements, bool)>,
    /// Those of them that another table's seal made, and no cut has taken yet.
    pub(super) ahead: VecDeque<SealedEpoch>,
    pub(super) committed: Epoch,
    pub(super) stopped: bool,
    /// Of a table with a watermark: its only split.
    pub(super) watermark: SplitWatermark,
    /// How far each sink's changes are in the table, those of open epochs included.
    pub(super) marks: BTreeMap<String, u64>,
    /// A mark has moved in the open epoch.
    pub(super) marked: bool,
}

impl State {
    /// A statement enters: the watermark moves on.
    pub(in crate::dml) fn note(&mut self, on_time: &OnTime) {
        self.watermark.running = self.watermark.running.max(on_time.running);
        self.watermark.late += on_time.late;
    }

    /// Whether a sink's change is in the table, or in an epoch on its way.
    pub(super) fn has(&self, mark: &SinkMark) -> bool {
        self.marks.get(&mark.counter).is_some_and(|n| *n >= mark.sequence)
    }

    pub(in crate::dml) fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// The open epoch ends together with these tables'.
    pub(in crate::dml) fn tie(&mut self, tables: &[Arc<Sequencer>]) {
        self.open.ties.extend(tables.iter().map(|t| (t.job, Arc::downgrade(t))));
    }

    /// When everything written so far is committed: `Ok` if it is.
    pub(in crate::dml) fn settled(&mut self) -> Settled {
        let statements = if !self.open.ids.is_empty() {
            &mut self.open
        } else if let Some((last, _)) = self.in_flight.back_mut() {
            last
        } else {
            return Ok(self.committed);
        };
        let (sender, receiver) = oneshot::channel();
        statements.waiters.push(sender);
        Err(receiver)
    }
}

/// What the watermark made of a statement's rows.
#[derive(Default)]
pub(in crate::dml) struct OnTime {
    /// The table's watermark after it.
    pub(super) running: Option<i64>,
    pub(in crate::dml) late: u64,
    /// Positions of the rows that are not late; `None`: all.
    pub(super) kept: Option<UInt32Array>,
}

impl OnTime {
    /// Positions in the statement as it came.
    pub(super) fn original(&self, kept: Option<UInt32Array>) -> Option<UInt32Array> {
        match (&self.kept, kept) {
            (None, kept) => kept,
            (Some(own), None) => Some(own.clone()),
            (Some(own), Some(kept)) => {
                let at = |i: &u32| own.values().get(*i as usize).copied();
                Some(kept.values().iter().filter_map(at).collect::<Vec<u32>>().into())
            }
        }
    }

    /// An error about a row, which it names as the statement came.
    pub(super) fn original_error(&self, e: DmlError) -> DmlError {
        match (e, &self.kept) {
            (DmlError::UniqueViolation { constraint, detail, row: Some(row) }, Some(own)) => {
                let row = own.values().get(row).map(|r| *r as usize);
                DmlError::UniqueViolation { constraint, detail, row }
            }
            (e, _) => e,
        }
    }
}
