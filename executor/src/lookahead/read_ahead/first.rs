//! Splits of which a leaf has read nothing: there is no reader yet that it could lend. One is opened where the leaf will
//! begin, as soon as content is known to be there: after a restart that of the backlog, later that of a split which has
//! been found.

use std::collections::{BTreeSet, VecDeque};

use millrace_common::Epoch;
use millrace_connector::SplitReader;
use millrace_rpc::services::SourceParts;

use super::{Lent, ReadAhead, ReadingAhead, close, has_room};

/// Splits that are opened at a time: what is read of one counts as memory when its first rows have been read.
pub(super) const OPENINGS: usize = 16;

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
    /// Something is ahead in these, from there on; to be opened in turn.
    waiting: VecDeque<(u32, u64)>,
}

impl Default for First {
    /// Until the leaf has said what it does; a feed never does.
    fn default() -> First {
        let (met, waiting) = Default::default();
        First { met, is_scanning: true, is_at_end: false, waiting }
    }
}

impl First {
    /// Whether meta is to be asked of splits to which the leaf has not come; it is then.
    fn begin_look(&mut self) -> bool {
        !self.is_scanning && !std::mem::replace(&mut self.is_at_end, true)
    }

    /// Whether meta is to be asked what is behind the place up to which the leaf has lent a reader.
    pub(super) fn asks_beyond(&self) -> bool {
        !self.is_scanning
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
    /// Opens splits that have content and to which the leaf has not come, a few at a time. Whether there may be more that
    /// can be opened now.
    pub(super) fn open_first(&self) -> bool {
        let Some(unread) = self.from.unread.as_deref() else { return false };
        let looks = self.shared.state.lock().first.begin_look();
        if looks {
            let waiting = self.look_for_first(unread);
            self.shared.state.lock().first.waiting = waiting;
        }
        let mut known = None;
        for _ in 0..OPENINGS {
            let Some((split, start)) = self.next_to_open() else { return false };
            let (meta, relation) = (&self.from.meta, self.from.relation);
            let parts = known.get_or_insert_with(|| meta.source_parts(relation));
            self.open_at(unread, split, start, parts);
        }
        true
    }

    /// Splits that have content and to which the leaf has not come, with where it will begin.
    fn look_for_first(&self, unread: &dyn Unread) -> VecDeque<(u32, u64)> {
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
            return VecDeque::new();
        }
        let ends = meta.source_ahead(relation, &splits);
        splits.into_iter().zip(ends).filter_map(|(split, end)| end.map(|_| split)).collect()
    }

    /// The next split to open, if one may be opened now: while few are there of which nothing has been read.
    fn next_to_open(&self) -> Option<(u32, u64)> {
        let mut state = self.shared.state.lock();
        if state.first.waiting.is_empty() || state.is_over || !has_room(&self.from.governor) {
            return None;
        }
        let is_to_read = |lent: &&Lent| lent.is_first && !lent.is_at_end;
        if state.splits.iter().filter(is_to_read).count() >= OPENINGS {
            return None;
        }
        let First { met, waiting, .. } = &mut state.first;
        while let Some(next) = waiting.pop_front() {
            if !met.contains(&next.0) {
                return Some(next);
            }
        }
        None
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
            state.split(split).into_iter().for_each(|lent| lent.is_first = true);
        }
        drop(state);
        close(opened);
    }
}
