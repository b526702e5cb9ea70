//! How far a first scan has come, in the form that survives a change of parallelism.
//!
//! The positions of one input, ordered by vnode, partition the vnodes: one that starts at `v` holds
//! until the next one's start. Whatever tasks resume the scan cut these spans along their own vnodes.

use std::ops::Range;

use bytes::Bytes;
use millrace_common::{VNODE_COUNT, Vnode};
use millrace_rpc::version::BackfillPosition;

/// A part of the key space that one task scans in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    pub vnodes: Range<Vnode>,
    /// The last key read; empty: none yet.
    pub last_key: Bytes,
    pub done: bool,
}

/// The spans of `input` inside `own`, from committed positions.
pub fn spans(positions: &[BackfillPosition], input: u32, own: &Range<Vnode>) -> Vec<Span> {
    let mut known: Vec<&BackfillPosition> = positions.iter().filter(|p| p.input == input).collect();
    known.sort_by_key(|p| p.vnode);
    let mut spans = Vec::with_capacity(known.len() + 1);
    let first = known.first().map_or(VNODE_COUNT as u32, |p| p.vnode);
    let fresh = Span { vnodes: 0..first as Vnode, last_key: Bytes::new(), done: false };
    spans.push(fresh);
    for (i, p) in known.iter().enumerate() {
        let end = known.get(i + 1).map_or(VNODE_COUNT as u32, |n| n.vnode);
        let vnodes = p.vnode as Vnode..end as Vnode;
        spans.push(Span { vnodes, last_key: p.last_key.clone(), done: p.done });
    }
    for span in &mut spans {
        span.vnodes = span.vnodes.start.max(own.start)..span.vnodes.end.min(own.end);
    }
    spans.retain(|s| !s.vnodes.is_empty());
    spans
}

impl Span {
    pub fn position(&self, input: u32) -> BackfillPosition {
        BackfillPosition {
            input,
            vnode: u32::from(self.vnodes.start),
            last_key: self.last_key.clone(),
            done: self.done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(vnode: u32, key: &'static [u8], done: bool) -> BackfillPosition {
        BackfillPosition { input: 1, vnode, last_key: Bytes::from_static(key), done }
    }

    #[test]
    fn a_new_scan_covers_the_tasks_vnodes() {
        let got = spans(&[], 1, &(64..128));
        assert_eq!(got, [Span { vnodes: 64..128, last_key: Bytes::new(), done: false }]);
    }

    #[test]
    fn other_parallelism_resumes_every_span_where_it_was() {
        let stored = [at(128, b"k", false), at(0, b"", true)];
        let whole = spans(&stored, 1, &(0..256));
        assert_eq!(whole.len(), 2);
        assert_eq!((whole[0].vnodes.clone(), whole[0].done), (0..128, true));
        assert_eq!((whole[1].vnodes.clone(), &whole[1].last_key[..]), (128..256, &b"k"[..]));
        let third: Vec<Span> = spans(&stored, 1, &(86..171));
        assert_eq!(third[0].vnodes, 86..128);
        assert_eq!(third[1].vnodes, 128..171);
        assert!(spans(&stored, 2, &(0..256))[0].last_key.is_empty());
    }
}
