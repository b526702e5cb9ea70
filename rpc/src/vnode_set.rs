//! Sets of vnodes as slices, runs and flushes carry them: bitmaps in which vnode `v` is bit `v % 8` of byte `v / 8`. No
//! bytes: all vnodes.

use millrace_common::VNODE_COUNT;

const BYTES: usize = VNODE_COUNT / 8;

/// Whether these bytes are a set.
pub fn is_valid(set: &[u8]) -> bool {
    set.is_empty() || set.len() == BYTES
}

/// Whether a set has all vnodes of another.
pub fn covers(set: &[u8], other: &[u8]) -> bool {
    let byte = |set: &[u8], at: usize| set.get(at).copied().unwrap_or(u8::MAX);
    (0..BYTES).all(|at| byte(other, at) & !byte(set, at) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(vnodes: std::ops::Range<usize>) -> Vec<u8> {
        let mut set = vec![0; BYTES];
        vnodes.for_each(|v| set[v / 8] |= 1 << (v % 8));
        set
    }

    #[test]
    fn a_set_covers_its_parts_and_no_bytes_are_all() {
        let (low, high) = (of(0..100), of(100..VNODE_COUNT));
        assert!(covers(&[], &[]) && covers(&[], &low) && covers(&[], &of(0..VNODE_COUNT)));
        assert!(covers(&of(0..VNODE_COUNT), &[]), "all of them, one by one");
        assert!(!covers(&low, &[]) && !covers(&low, &high) && !covers(&low, &of(99..101)));
        assert!(covers(&low, &low) && covers(&low, &of(3..50)) && covers(&low, &of(0..0)));
    }

    #[test]
    fn bytes_that_are_no_set_are_told() {
        assert!(is_valid(&[]) && is_valid(&of(7..8)));
        assert!(!is_valid(&[1]) && !is_valid(&[0; BYTES + 1]));
    }
}
