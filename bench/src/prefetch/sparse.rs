//! Copies of directories whose files are mostly holes, such as those of a disk tier.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

const PART: usize = 256 << 10;

/// Copies the files of a directory, and those of its directories. Parts of zeros become holes.
pub fn copy(from: &Path, to: &Path) -> Result<(), String> {
    copy_directory(from, to).map_err(|e| format!("cannot copy {}: {e}", from.display()))
}

fn copy_directory(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        match entry.file_type()?.is_dir() {
            true => copy_directory(&entry.path(), &target)?,
            false => copy_file(&entry.path(), &target)?,
        }
    }
    Ok(())
}

fn copy_file(from: &Path, to: &Path) -> std::io::Result<()> {
    let (mut source, mut target) = (File::open(from)?, File::create(to)?);
    let mut part = vec![0; PART];
    loop {
        let read = source.read(&mut part)?;
        if read == 0 {
            break;
        }
        match part[..read].iter().all(|byte| *byte == 0) {
            true => drop(target.seek(SeekFrom::Current(read as i64))?),
            false => target.write_all(&part[..read])?,
        }
    }
    target.set_len(source.metadata()?.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_the_bytes_and_length_of_its_original() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut content = vec![0; 2 * PART];
        content.extend([7; 10]);
        content.extend(vec![0; PART]);
        std::fs::create_dir(from.path().join("in")).unwrap();
        std::fs::write(from.path().join("in/a"), &content).unwrap();
        copy(from.path(), &to.path().join("copy")).unwrap();
        assert!(std::fs::read(to.path().join("copy/in/a")).unwrap() == content);
    }
}
