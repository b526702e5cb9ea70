//! The process's allocator, counted (`millrace_common::heap`), and how it gives memory back.
//!
//! Blocks, chunks and buffers come in all sizes from 16 KB to some megabytes, and are freed by other
//! threads than allocated them. mimalloc keeps pages a thread and size class: under a small limit that is
//! several times what is in use. jemalloc returns every extent that is free. With neither feature the
//! system's allocator serves, which heap profilers can watch.

use millrace_common::heap::Counted;

#[cfg(feature = "jemalloc")]
use self::jemalloc as chosen;
#[cfg(all(feature = "mimalloc", not(feature = "jemalloc")))]
use self::mimalloc as chosen;
#[cfg(not(any(feature = "mimalloc", feature = "jemalloc")))]
use self::system as chosen;

#[global_allocator]
static ALLOCATOR: Counted<chosen::Allocator> = Counted(chosen::Allocator);

/// Freed memory goes back to the system only after some seconds: the next epoch needs as much again,
/// and the first touch of a page costs the kernel more than most work on it. Under a small limit it
/// would be what breaks the limit.
pub fn tune(limit: usize) {
    const SCARCE: usize = 1 << 30;
    const ROOMY: usize = 4 << 30;
    let milliseconds = match limit {
        0..SCARCE => 0,
        SCARCE..ROOMY => 500,
        _ => 5_000,
    };
    chosen::keep_freed(milliseconds);
}

#[cfg(feature = "jemalloc")]
mod jemalloc {
    pub use tikv_jemallocator::Jemalloc as Allocator;

    /// Few arenas: each keeps free memory of its own. Read by the allocator when it starts.
    #[unsafe(export_name = "malloc_conf")]
    pub static CONFIGURATION: &[u8; 44] = b"narenas:4,dirty_decay_ms:0,muzzy_decay_ms:0\0";

    pub fn keep_freed(milliseconds: isize) {
        // The first is for arenas to come, the second for the one that exists.
        for name in [c"arenas.dirty_decay_ms", c"arena.0.dirty_decay_ms"] {
            let mut value = milliseconds;
            // SAFETY: both options take an `ssize_t`; a name that is unknown is refused, no more.
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
}

#[cfg(all(feature = "mimalloc", not(feature = "jemalloc")))]
mod mimalloc {
    use std::ffi::{c_int, c_long};

    pub use ::mimalloc::MiMalloc as Allocator;

    /// The allocator's option of that name (mimalloc.h, `mi_option_e`).
    const PURGE_DELAY: c_int = 15;

    unsafe extern "C" {
        fn mi_option_set(option: c_int, value: c_long);
    }

    pub fn keep_freed(milliseconds: isize) {
        // SAFETY: sets a number in the allocator linked above; no other thread runs yet.
        unsafe { mi_option_set(PURGE_DELAY, milliseconds as c_long) }
    }
}

#[cfg(not(any(feature = "mimalloc", feature = "jemalloc")))]
mod system {
    pub use std::alloc::System as Allocator;

    pub fn keep_freed(_milliseconds: isize) {}
}
