//! The process's allocator, counted (`millrace_common::heap`), and how it gives memory back.
//!
//! Blocks, chunks and buffers come in all sizes from 16 KB to some megabytes, and are freed by other
//! threads than allocated them. An allocator that keeps pages a thread and size class holds several times
//! what is in use; jemalloc returns every extent that is free. Without the feature `jemalloc` the system's
//! allocator serves, which heap profilers can watch.

#[cfg(not(feature = "jemalloc"))]
use std::alloc::System as Allocator;

use millrace_common::heap::Counted;
#[cfg(feature = "jemalloc")]
use tikv_jemallocator::Jemalloc as Allocator;

#[global_allocator]
static ALLOCATOR: Counted<Allocator> = Counted(Allocator);

/// Freed memory goes back to the system only after some seconds: the next epoch needs as much again,
/// and the first touch of a page costs the kernel more than most work on it. Under a small limit it
/// would be what breaks the limit.
#[cfg(feature = "jemalloc")]
pub fn tune(limit: usize) {
    const SCARCE: usize = 1 << 30;
    const ROOMY: usize = 4 << 30;
    let decay_ms: isize = match limit {
        0..SCARCE => 0,
        SCARCE..ROOMY => 500,
        _ => 5_000,
    };
    // The first is for arenas to come, the second for those that exist (4096: all of them).
    let options = [c"arenas.dirty_decay_ms", c"arena.4096.dirty_decay_ms"];
    for name in options {
        let mut value = decay_ms;
        // SAFETY: both options take an `ssize_t`; a name that is unknown is refused, nothing else happens.
        let refused = unsafe {
            tikv_jemalloc_sys::mallctl(
                name.as_ptr(),
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                (&raw mut value).cast(),
                size_of::<isize>(),
            )
        };
        if refused != 0 {
            tracing::warn!(?name, refused, "the allocator does not take this option");
        }
    }
}

#[cfg(not(feature = "jemalloc"))]
pub fn tune(_limit: usize) {}

/// Few arenas: each keeps free memory of its own. Read by the allocator when it starts.
#[cfg(feature = "jemalloc")]
#[unsafe(export_name = "malloc_conf")]
pub static CONFIGURATION: &[u8; 44] = b"narenas:4,dirty_decay_ms:0,muzzy_decay_ms:0\0";
