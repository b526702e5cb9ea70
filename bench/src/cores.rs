//! Which cores threads run on.

use std::io;
use std::mem::{size_of, zeroed};

/// The cores that this thread may run on, ascending.
pub fn allowed() -> io::Result<Vec<usize>> {
    // SAFETY: a set of cores is plain numbers, and no core is in it where all are zero.
    let mut set: libc::cpu_set_t = unsafe { zeroed() };
    // SAFETY: the set lives, and is as large as is said.
    let done = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    let most = libc::CPU_SETSIZE as usize;
    // SAFETY: the core is below the number of those that the set has room for.
    Ok((0..most).filter(|core| unsafe { libc::CPU_ISSET(*core, &set) }).collect())
}

/// The calling thread, and those that it starts from now on, run on this core only.
pub fn pin_thread(core: usize) -> io::Result<()> {
    pin(0, core)
}

/// All threads that this process has, and those that they start, run on this core only.
pub fn pin_process(core: usize) -> io::Result<()> {
    for thread in std::fs::read_dir("/proc/self/task")? {
        let name = thread?.file_name();
        let id = name.to_str().and_then(|name| name.parse().ok());
        match pin(id.ok_or(io::ErrorKind::InvalidData)?, core) {
            // It has ended meanwhile.
            Err(e) if e.raw_os_error() == Some(libc::ESRCH) => {}
            done => done?,
        }
    }
    Ok(())
}

/// 0 is the calling thread.
fn pin(thread: libc::pid_t, core: usize) -> io::Result<()> {
    if core >= libc::CPU_SETSIZE as usize {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: a set of cores is plain numbers, and no core is in it where all are zero.
    let mut set: libc::cpu_set_t = unsafe { zeroed() };
    // SAFETY: the core is below the number of those that the set has room for.
    unsafe { libc::CPU_SET(core, &mut set) };
    // SAFETY: the set lives, and is as large as is said.
    let done =
        unsafe { libc::sched_setaffinity(thread, size_of::<libc::cpu_set_t>(), &raw const set) };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_is_pinned_has_one_core_and_so_have_those_it_starts() {
        let pinned = std::thread::spawn(|| {
            let core = *allowed()?.last().ok_or(io::ErrorKind::NotFound)?;
            pin_thread(core)?;
            let inherited = std::thread::spawn(allowed).join();
            Ok::<_, io::Error>((core, allowed()?, inherited))
        });
        let (core, own, inherited) = pinned.join().unwrap().unwrap();
        assert_eq!(own, [core]);
        assert_eq!(inherited.unwrap().unwrap(), [core]);
    }

    #[test]
    fn a_core_that_cannot_be_is_an_error() {
        assert!(pin_thread(usize::MAX).is_err());
    }
}
