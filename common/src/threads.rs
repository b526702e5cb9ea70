//! Priorities of threads.
//!
//! Threads that answer clients (sessions, meta, commits) keep the priority of the process. Those that may be busy for long
//! (tasks of jobs, queries, writing and merging of runs) have a lower one: on busy cores the kernel lets the first
//! run almost at once, and leaves the others about a quarter of a core that both want.

/// Added to the nice value of threads that may be busy for long.
const NICE: libc::c_int = 5;

/// Lowers the priority of the calling thread, for good. Where the system knows no priorities of threads, nothing
/// changes.
pub fn lower_priority() {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: takes and gives a number. On Linux it is the thread's, not the process's (sched(7)). It cannot fail: it
        // may always be lowered, and is cut off at the lowest.
        unsafe { libc::nice(NICE) };
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    fn nice() -> libc::c_int {
        // SAFETY: takes and gives numbers; 0 is the calling thread.
        unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) }
    }

    #[test]
    fn only_the_calling_thread_has_a_lower_priority() {
        let before = nice();
        let lowered = std::thread::spawn(|| {
            lower_priority();
            nice()
        });
        assert_eq!(lowered.join().unwrap(), (before + NICE).min(19));
        assert_eq!(nice(), before);
    }
}
