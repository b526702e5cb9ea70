//! Priorities of threads.
//!
//! Threads that answer clients (sessions, meta, commits) keep the priority of the process. Those that may be busy for long
//! (tasks of jobs, queries, writing and merging of runs) have a lower one: on busy cores the kernel lets the first
//! run almost at once, and leaves the others about a quarter of a core that both want.
//! The merges of a process that does nothing else have the lowest: they may take all of a host of their own, and on one
//! that others use they take what is left. They get a fiftieth of a core that others want, so none stops.

/// Added to the nice value of threads that may be busy for long.
const NICE: libc::c_int = 5;
/// The same for the lowest priority: the kernel goes no further than to 19.
const LOWEST: libc::c_int = 19;

/// Lowers the priority of the calling thread, for good. Where the system knows no priorities of threads, nothing
/// changes.
pub fn lower_priority() {
    lower_by(NICE);
}

/// The same, as far as it goes.
pub fn lowest_priority() {
    lower_by(LOWEST);
}

#[cfg_attr(not(target_os = "linux"), expect(unused_variables))]
fn lower_by(nice: libc::c_int) {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: takes and gives a number. On Linux it is the thread's, not the process's (sched(7)). It cannot fail: it
        // may always be lowered, and is cut off at the lowest.
        unsafe { libc::nice(nice) };
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
        let lowest = std::thread::spawn(|| {
            lowest_priority();
            nice()
        });
        assert_eq!(lowest.join().unwrap(), 19);
        assert_eq!(nice(), before);
    }
}
