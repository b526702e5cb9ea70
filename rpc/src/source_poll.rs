//! Asking how much there is of a source (docs/design.md §4, "Roots"): the leader asks a process, and that one asks the
//! outside.

use std::time::Duration;

use millrace_common::{JobId, RelationId, SqlError};

use crate::log::{SourceFile, SourceSplit};
use crate::services::SourceParts;

/// What the leader asks a process: what is there of a source beyond what the log says?
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PollSource {
    pub source: RelationId,
    /// A job that reads the source, or the table that it feeds: the process that this job runs on is asked.
    pub reader: JobId,
    /// The record of the log as of which it is asked: what the log says of the source by then counts.
    pub record: u64,
    /// Where each split's content ends, by split.
    pub offsets: Vec<(u32, u64)>,
    /// Wall-clock milliseconds: of the source's creation, and now.
    pub started_ms: u64,
    pub now_ms: u64,
}

/// What the log says of a source when it is polled.
#[derive(Clone, Debug, Default)]
pub struct Known {
    pub parts: SourceParts,
    /// Where each split's content ends, by split.
    pub offsets: Vec<(u32, u64)>,
    /// Wall-clock milliseconds: of the source's creation, and now.
    pub started_ms: u64,
    pub now_ms: u64,
}

impl Known {
    /// Where a split's content ends.
    pub fn offset(&self, split: u32) -> u64 {
        let logged = self.offsets.iter().find(|(s, _)| *s == split);
        logged.map_or_else(|| self.parts.start(split), |(_, offset)| *offset)
    }
}

/// What there is outside.
#[derive(Clone, Debug, Default)]
pub struct Polled {
    /// New splits; those that have no name and begin at 0 need not be listed.
    pub splits: Vec<SourceSplit>,
    /// New files; their `start` is not set.
    pub files: Vec<SourceFile>,
    /// How far each split could go now, by split, new files included. `u64::MAX`: as far as one likes.
    pub available: Vec<(u32, u64)>,
    pub more: More,
    /// What of the source cannot be read and is left out, while the rest goes on.
    pub trouble: Option<SqlError>,
    /// How many offsets a row takes, roughly; 0: not told. The process that was asked adds it to what the connector says.
    pub offsets_per_row: u64,
}

/// Whether there may be more than what is available now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum More {
    /// With time: the clock makes rows available.
    WithTime,
    /// Ask again after this time.
    After(Duration),
    #[default]
    Never,
}
