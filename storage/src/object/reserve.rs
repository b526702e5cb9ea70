//! Space kept aside in a local store, so that a server starts when there is none left.
//!
//! Taking the lead writes one small record, and without it nothing can be read. So a file of a fixed size lies in
//! the store's directory; a start that fails for want of space frees a piece of it and tries again. Statements
//! never take from it. What was freed is filled up at a later start, when there is space again.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::PathBuf;

use super::local_directory;

/// Of the file.
const SIZE: u64 = 1 << 20;
/// Freed at a time: enough for a start.
const STEP: u64 = 128 << 10;
/// Ends as temporary names do, which listings leave out.
const NAME: &str = "reserve#0";

/// The reserve of a store in a local directory.
#[derive(Clone, Debug)]
pub struct Reserve {
    path: PathBuf,
}

impl Reserve {
    /// `None`: the store is not a local directory, and does not fill up.
    pub fn of(url: &str) -> Option<Reserve> {
        let directory = local_directory(url).ok()??;
        Some(Reserve { path: directory.join(NAME) })
    }

    /// Fills it up, unless there is no space for all of it. Blocks.
    pub fn keep(&self) -> io::Result<()> {
        let mut file =
            OpenOptions::new().create(true).truncate(false).write(true).open(&self.path)?;
        let had = file.metadata()?.len();
        if had >= SIZE {
            return Ok(());
        }
        let filled = fill(&mut file, had);
        if filled.is_err() {
            // The last bytes are left to statements.
            file.set_len(had)?;
        }
        filled
    }

    /// Frees a piece; `false`: there is none. Blocks.
    pub fn release(&self) -> io::Result<bool> {
        let file = match OpenOptions::new().write(true).open(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
            file => file?,
        };
        let had = file.metadata()?.len();
        file.set_len(had.saturating_sub(STEP))?;
        file.sync_all()?;
        Ok(had > 0)
    }
}

/// With bytes that a file system does not compress or leave out.
fn fill(file: &mut File, from: u64) -> io::Result<()> {
    file.seek(SeekFrom::Start(from))?;
    let mut x = 0x9e37_79b9_7f4a_7c15u64 ^ from;
    let mut block = Vec::with_capacity(STEP as usize);
    let mut at = from;
    while at < SIZE {
        block.clear();
        while block.len() < STEP.min(SIZE - at) as usize {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            block.extend_from_slice(&x.to_le_bytes());
        }
        file.write_all(&block)?;
        at += block.len() as u64;
    }
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_freed_in_pieces_and_filled_up_again() {
        let dir = tempfile::tempdir().unwrap();
        let reserve = Reserve::of(&format!("file://{}", dir.path().display())).unwrap();
        assert!(!reserve.release().unwrap());
        let length = || std::fs::metadata(dir.path().join(NAME)).unwrap().len();
        reserve.keep().unwrap();
        assert_eq!(length(), SIZE);
        let mut pieces = 0;
        while reserve.release().unwrap() {
            pieces += 1;
            assert_eq!(length(), SIZE - pieces * STEP);
        }
        assert_eq!(pieces, SIZE / STEP);
        reserve.keep().unwrap();
        assert_eq!(length(), SIZE);
        assert!(Reserve::of("s3://bucket/prefix").is_none());
    }
}
