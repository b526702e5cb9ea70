//! Disk runs as sources of reads.

use std::sync::Arc;

use futures::StreamExt;
use millrace_common::Epoch;

use crate::error::{Result, StorageError};
use crate::lookup::Sorted;
use crate::merge::{Input, Mode, Source};
use crate::run::RunReader;
use crate::snapshot::KeyRange;
use crate::state_store::Shared;
use crate::version::TableVersion;
use crate::writer::Question;

/// What disk runs add to a lookup.
pub(crate) enum Probe {
    /// These blocks, which were in memory; none where no run can hold the keys.
    Ready(Vec<Sorted>),
    Fetch(Fetch),
}

pub(crate) struct Fetch {}

impl Fetch {
    pub async fn run(self, _question: &Question) -> Result<Vec<Sorted>> {
        Err(StorageError::internal("runs cannot be read yet"))
    }
}

pub(crate) fn probe(_shared: &Shared, table: &TableVersion, _as_of: Epoch, _question: &Question) -> Probe {
    if table.disk.is_empty() { Probe::Ready(Vec::new()) } else { Probe::Fetch(Fetch {}) }
}

pub(crate) fn scan(
    _shared: &Arc<Shared>,
    run: &Arc<RunReader>,
    _mode: Mode,
    _range: &KeyRange,
    _projection: Option<&[usize]>,
) -> Option<Source> {
    let error = StorageError::internal("runs cannot be read yet");
    let stream = futures::stream::once(futures::future::ready(Err(error))).boxed();
    Some(Source { rank: run.meta().sequence, input: Input::Stream(stream) })
}
