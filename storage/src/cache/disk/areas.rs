//! The areas of the directory, before the cache is opened on it.
//!
//! foyer makes an area free when it takes another that is free. Where it finds none at first, it never writes again,
//! and closing it waits for ever. A directory comes to that by a kill in a burst of writes, or when its cache is opened
//! with a smaller capacity.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// An area whose first page is zero is free: that page tells what is in the area.
const PAGE_BYTES: usize = 4096;

/// The name that foyer gives the file of an area.
pub(super) fn path(directory: &Path, area: usize) -> PathBuf {
    directory.join(format!("foyer-storage-direct-fs-{area:08}"))
}

/// Makes the area that was written first free if none of the first `count` is. Says whether it had to.
///
/// # Errors
///
/// Of the file system.
pub(super) fn free_one(directory: &Path, count: usize) -> io::Result<bool> {
    let mut oldest = None;
    for path in (0..count).map(|area| path(directory, area)) {
        let mut file = match File::open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(false),
            Err(e) => return Err(e),
        };
        if is_free(&mut file)? {
            return Ok(false);
        }
        let written = file.metadata()?.modified()?;
        if oldest.as_ref().is_none_or(|(earliest, _)| written < *earliest) {
            oldest = Some((written, path));
        }
    }
    let Some((_, path)) = oldest else { return Ok(false) };
    OpenOptions::new().write(true).open(path)?.write_all_at(&[0; PAGE_BYTES], 0)?;
    Ok(true)
}

/// What a file does not have counts as zero.
pub(super) fn is_free(file: &mut File) -> io::Result<bool> {
    let mut page = Vec::with_capacity(PAGE_BYTES);
    file.take(PAGE_BYTES as u64).read_to_end(&mut page)?;
    Ok(page.iter().all(|byte| *byte == 0))
}
