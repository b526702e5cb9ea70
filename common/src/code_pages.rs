//! Memory that the program's own code takes.
//!
//! A page of the program that was used once, by a start or a rare statement, stays resident until the system as a whole
//! needs memory, which may be never. So it counts against the process, though it can be had again at any time from the
//! file it was read from.

/// Gives back the pages of the program's code and constants. Those that are in use come back with their next use, most
/// of them from the system's page cache: some thousandths of a second in all. Where the system has no such call,
/// nothing changes.
pub fn release() {
    #[cfg(target_os = "linux")]
    linux::release();
}

#[cfg(target_os = "linux")]
mod linux {
    use std::ffi::{c_int, c_void};

    pub fn release() {
        // SAFETY: the function is called with descriptions of the loaded objects, and keeps nothing of them.
        unsafe { libc::dl_iterate_phdr(Some(release_object), std::ptr::null_mut()) };
    }

    /// The first object is the program; a value other than 0 leaves out those after it.
    unsafe extern "C" fn release_object(
        object: *mut libc::dl_phdr_info,
        _size: usize,
        _data: *mut c_void,
    ) -> c_int {
        // SAFETY: the caller describes an object that is loaded.
        let object = unsafe { &*object };
        // SAFETY: so many headers lie there.
        let headers =
            unsafe { std::slice::from_raw_parts(object.dlpi_phdr, usize::from(object.dlpi_phnum)) };
        for header in headers {
            let never_written = header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_W == 0;
            if never_written {
                let begin = (object.dlpi_addr + header.p_vaddr) as usize;
                release_range(begin, begin + header.p_memsz as usize);
            }
        }
        1
    }

    /// Whole pages only: the first and the last may be shared with a part that is written.
    fn release_range(begin: usize, end: usize) {
        // SAFETY: asks for a number.
        let page = match unsafe { libc::sysconf(libc::_SC_PAGESIZE) } {
            size @ 1.. => size as usize,
            _ => return,
        };
        let (begin, end) = (begin.next_multiple_of(page), end / page * page);
        if begin < end {
            let address = begin as *mut c_void;
            // SAFETY: the range is mapped from the program's file and is never written, so its pages are read from the
            // file again when they are used. If the call is refused, they stay.
            unsafe { libc::madvise(address, end - begin, libc::MADV_DONTNEED) };
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// Resident pages of the program's code, in KB.
    fn resident_code() -> u64 {
        let program = std::env::current_exe().expect("a program runs");
        let program = program.to_str().expect("the build's path is text");
        let maps = std::fs::read_to_string("/proc/self/smaps").expect("the kernel tells");
        let mut is_code = false;
        let mut resident = 0;
        for line in maps.lines() {
            let mut words = line.split_ascii_whitespace();
            match (words.next(), words.next()) {
                (Some("Rss:"), Some(kilobytes)) if is_code => {
                    resident += kilobytes.parse::<u64>().expect("a number");
                }
                (_, Some(rights)) if line.contains('/') => {
                    is_code = rights == "r-xp" && line.ends_with(program);
                }
                (Some(name), _) if !name.ends_with(':') => is_code = false,
                _ => {}
            }
        }
        resident
    }

    #[test]
    fn code_is_given_back_and_runs_on() {
        let sorted = |mut words: Vec<String>| {
            words.sort();
            words.join(" ")
        };
        let words = || ["c", "a", "b"].map(str::to_owned).to_vec();
        assert_eq!(sorted(words()), "a b c");
        // Tests beside this one may run code for the first time meanwhile.
        let mut seen = Vec::new();
        let is_given_back = (0..50).any(|_| {
            let before = resident_code();
            release();
            let after = resident_code();
            seen.push((before, after));
            after < before
        });
        assert!(is_given_back, "KB that were resident before and after: {seen:?}");
        assert_eq!(sorted(words()), "a b c");
    }
}
