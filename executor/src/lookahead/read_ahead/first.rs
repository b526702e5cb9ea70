//! Splits of which a leaf has read nothing: there is no reader yet that it could lend. One is opened where the leaf will
//! begin, as soon as content is known to be there: after a restart that of the backlog, later that of a split which has
//! been found.

use std::collections::BTreeSet;

use millrace_common::Epoch;
use millrace_connector::SplitReader;
use millrace_rpc::services::SourceParts;

use super::{ReadAhead, ReadingAhead, close};

/// Splits as a leaf will begin to read them.
pub trait Unread: Send + Sync {
    /// Where it begins in a split; `None`: it does not read it.
    fn start(&self, split: u32, parts: &SourceParts) -> Option<u64>;

    /// A reader that begins there. `None`: it cannot be opened, which is the leaf's to meet.
    fn open(&self, split: u32, offset: u64, parts: &SourceParts) -> Option<Box<dyn SplitReader>>;
}

/// To which splits a leaf has come.
pub(super) struct First {
    /// To these, or they have been opened for it.
    pub(super) met: BTreeSet<u32>,
    /// It goes in steps of a first scan, of which the log does not tell.
    is_scanning: bool,
    /// Nothing is ahead in the others, as meta has said; until it says that something has changed.
    pub(super) is_at_end: bool,
}

impl Default for First {
    /// Until the leaf has said what it does.
    fn default() -> First {
        First { met: BTreeSet::new(), is_scanning: true, is_at_end: false }
    }
}

impl First {
    /// Whether meta is to be asked of splits to which the leaf has not come; it is then.
    fn begin_look(&mut self) -> bool {
        !self.is_scanning && !std::mem::replace(&mut self.is_at_end, true)
    }
}

impl ReadAhead {
    /// Whether the leaf goes in steps of a first scan. While it does, no split is opened to which it has not come: where
    /// a step ends is not for meta to say.
    pub fn scans(&self, is_scan: bool) {
        let mut state = self.0.state.lock();
        let before = std::mem::replace(&mut state.first.is_scanning, is_scan);
        drop(state);
        if before != is_scan {
            self.0.lent.notify_one();
        }
    }
}

impl ReadingAhead {
    /// Opens splits that have content and to which the leaf has not come.
    pub(super) fn open_first(&self) {
        let Some(unread) = self.from.unread.as_deref() else { return };
        let looks = self.shared.state.lock().first.begin_look();
        if !looks {
            return;
        }
        let (meta, relation) = (&self.from.meta, self.from.relation);
        // Before the parts: what is content lies in parts that are known.
        let known = meta.source_offsets(relation, Epoch::MAX);
        let parts = meta.source_parts(relation);
        let mut splits = Vec::new();
        for (split, _) in known {
            if let Some(start) = unread.start(split, &parts).filter(|_| !self.is_met(split)) {
                splits.push((split, start));
            }
        }
        if splits.is_empty() {
            return;
        }
        let ends = meta.source_ahead(relation, &splits);
        for (&(split, start), end) in splits.iter().zip(ends) {
            if end.is_some() && !self.is_met(split) {
                self.open_at(unread, split, start, &parts);
            }
        }
    }

    fn is_met(&self, split: u32) -> bool {
        self.shared.state.lock().first.met.contains(&split)
    }

    fn open_at(&self, unread: &dyn Unread, split: u32, start: u64, parts: &SourceParts) {
        let mut opened = unread.open(split, start, parts);
        let mut state = self.shared.state.lock();
        // The leaf may have been faster.
        if state.first.met.insert(split)
            && let Some(reader) = opened.take()
        {
            state.lend(split, reader, start, None);
        }
        drop(state);
        close(opened);
    }
}
