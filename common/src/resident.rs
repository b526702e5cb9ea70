//! Memory that this process holds, as the system sees it.

/// In bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    pub all: usize,
    /// What is no part of a file: heap and stacks.
    pub anonymous: usize,
}

impl Resident {
    /// Of now; `None` where the system does not tell.
    pub fn now() -> Option<Resident> {
        const PAGE: usize = 4096;
        let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
        let mut pages = statm.split_ascii_whitespace().skip(1).map(str::parse::<usize>);
        let (all, of_files) = (pages.next()?.ok()?, pages.next()?.ok()?);
        Some(Resident { all: all * PAGE, anonymous: all.saturating_sub(of_files) * PAGE })
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn what_is_touched_is_resident() {
        const BYTES: usize = 64 << 20;
        let before = Resident::now().expect("the kernel tells");
        let touched = std::hint::black_box(vec![1_u8; BYTES]);
        let after = Resident::now().expect("the kernel tells");
        assert!(after.anonymous >= before.anonymous + BYTES / 4 * 3, "{before:?}, {after:?}");
        assert!(after.all >= after.anonymous);
        drop(touched);
    }
}
