//! How many heap bytes the process uses, counted where they are allocated.
//!
//! Accounts of what holders say they hold miss what nobody thought of; resident memory comes late, and
//! holds what the allocator keeps for later. This is the sum of all live allocations, exact but for what
//! each thread has not reported yet, and costs an addition to a thread's own counter an allocation. Errors of the sum
//! would add up as long as the process lives, so it is compared with what the system says from time to time
//! ([`correct`]).

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::sync::atomic::{AtomicIsize, Ordering};

/// A thread reports once it has this much to tell.
const REPORT_BYTES: isize = 64 << 10;

static LIVE: AtomicIsize = AtomicIsize::new(0);
/// By how much the sum was more than the memory that was there when it was last compared. Either it is wrong by that, or
/// no page of it was ever touched.
static EXCESS: AtomicIsize = AtomicIsize::new(0);

thread_local! {
    /// Bytes not reported yet. Needs no destructor, so it may be used while a thread ends.
    static UNREPORTED: Cell<isize> = const { Cell::new(0) };
    static REPORTED: Cell<isize> = const { Cell::new(0) };
    /// From how much on it reports.
    static REPORT_AT: Cell<isize> = const { Cell::new(REPORT_BYTES) };
}

/// Bytes of all live allocations; `None` where the process does not run on [`Counted`].
pub fn live_bytes() -> Option<usize> {
    match LIVE.load(Ordering::Relaxed) {
        0 => None,
        bytes => Some((bytes - EXCESS.load(Ordering::Relaxed)).max(0) as usize),
    }
}

/// Compares the sum with the process's memory that is no part of a file: what is live from now on is at most that, and
/// what is allocated since.
pub fn correct(anonymous: usize) {
    let anonymous = isize::try_from(anonymous).unwrap_or(isize::MAX);
    EXCESS.store((LIVE.load(Ordering::Relaxed) - anonymous).max(0), Ordering::Relaxed);
}

/// Bytes that the calling thread has allocated and not freed: below zero where it frees what others have allocated. What a
/// piece of work keeps is the difference between its end and its beginning.
pub fn thread_bytes() -> isize {
    let reported = REPORTED.try_with(Cell::get).unwrap_or(0);
    reported + UNREPORTED.try_with(Cell::get).unwrap_or(0)
}

/// Reports what the calling thread has not, and from now on everything at once: for its end, since what it leaves unsaid
/// is lost. What its thread-local values hold is freed after that, so the sum would be larger by this with each thread.
pub fn report() {
    let _ = REPORT_AT.try_with(|at| at.set(0));
    let unreported = UNREPORTED.try_with(|unreported| unreported.replace(0));
    LIVE.fetch_add(unreported.unwrap_or(0), Ordering::Relaxed);
}

#[inline]
fn count(bytes: isize) {
    let report = |unreported: &Cell<isize>| {
        let sum = unreported.get() + bytes;
        let report_at = REPORT_AT.try_with(Cell::get).unwrap_or(0);
        if sum.abs() < report_at {
            unreported.set(sum);
        } else {
            unreported.set(0);
            let _ = REPORTED.try_with(|reported| reported.set(reported.get() + sum));
            LIVE.fetch_add(sum, Ordering::Relaxed);
        }
    };
    if UNREPORTED.try_with(report).is_err() {
        LIVE.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// An allocator that counts what it gives out.
#[derive(Debug, Default)]
pub struct Counted<A>(pub A);

// SAFETY: everything is left to `A`; counting neither allocates nor unwinds.
unsafe impl<A: GlobalAlloc> GlobalAlloc for Counted<A> {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise.
        unsafe { self.0.alloc(layout) }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise.
        unsafe { self.0.alloc_zeroed(layout) }
    }

    #[inline]
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promise.
        unsafe { self.0.dealloc(ptr, layout) }
    }

    #[inline]
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(new_size as isize - layout.size() as isize);
        // SAFETY: the caller's promise.
        unsafe { self.0.realloc(ptr, layout, new_size) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// The sum is one for all tests.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

    /// However far the sum has drifted from what there is.
    #[test]
    fn what_is_not_there_is_not_live() {
        let _one = ONE_AT_A_TIME.lock();
        let before = LIVE.swap(90 << 20, Ordering::Relaxed);
        correct(40 << 20);
        assert_eq!(live_bytes(), Some(40 << 20));
        LIVE.fetch_add(5 << 20, Ordering::Relaxed);
        assert_eq!(live_bytes(), Some(45 << 20), "growth counts at once");
        correct(100 << 20);
        assert_eq!(live_bytes(), Some(95 << 20), "where the allocator keeps some");
        LIVE.store(before, Ordering::Relaxed);
        correct(usize::MAX);
    }

    /// A value of a thread is freed after the thread has said that it ends.
    #[test]
    fn what_a_thread_frees_at_its_end_is_counted() {
        let _one = ONE_AT_A_TIME.lock();
        let before = LIVE.load(Ordering::Relaxed);
        for _ in 0..100 {
            let thread = std::thread::spawn(|| {
                count(REPORT_BYTES / 2);
                report();
                count(-REPORT_BYTES / 2);
            });
            thread.join().unwrap();
        }
        assert_eq!(LIVE.load(Ordering::Relaxed), before);
    }
}
