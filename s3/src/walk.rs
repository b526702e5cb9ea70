//! Listings in the order of the keys, which is what S3 promises and directories do not.

use std::fs;
use std::io;
use std::path::Path as FilePath;

use object_store::ObjectMeta;
use object_store::path::Path;

use crate::directory::meta_of;

/// The first objects below `prefix` (a directory, or nothing: all) whose names come after `after`. Runs on a blocking
/// thread.
pub fn page(
    root: &FilePath,
    prefix: &str,
    after: &str,
    limit: usize,
) -> io::Result<Vec<ObjectMeta>> {
    let mut found = Vec::new();
    let (dir, names) = match prefix {
        "" => (root.to_path_buf(), String::new()),
        prefix => (root.join(prefix), format!("{prefix}/")),
    };
    walk(&dir, &names, after, limit, &mut found)?;
    Ok(found)
}

/// `names`: what the names of all objects of `dir` begin with.
fn walk(
    dir: &FilePath,
    names: &str,
    after: &str,
    limit: usize,
    found: &mut Vec<ObjectMeta>,
) -> io::Result<()> {
    for name in sorted(dir)? {
        if found.len() >= limit {
            return Ok(());
        }
        let full = format!("{names}{name}");
        if name.ends_with('/') {
            // All names in it begin with `full`.
            if full.as_str() > after || after.starts_with(&full) {
                walk(&dir.join(&name), &full, after, limit, found)?;
            }
        } else if full.as_str() > after
            && let Some(meta) = look(&dir.join(&name), &full)?
        {
            found.push(meta);
        }
    }
    Ok(())
}

/// The names of a directory; those of directories end in `/`, which puts them where their objects belong. Names that no
/// key has, such as those of files that are being written, are left out.
fn sorted(dir: &FilePath) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if is_gone(&e) => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry?;
        let Ok(mut name) = entry.file_name().into_string() else { continue };
        if name.contains('#') || Path::parse(&name).is_err() {
            continue;
        }
        if entry.file_type()?.is_dir() {
            name.push('/');
        }
        names.push(name);
    }
    names.sort_unstable();
    Ok(names)
}

/// `None`: it has been deleted meanwhile.
fn look(file: &FilePath, name: &str) -> io::Result<Option<ObjectMeta>> {
    let metadata = match fs::metadata(file) {
        Ok(metadata) => metadata,
        Err(e) if is_gone(&e) => return Ok(None),
        Err(e) => return Err(e),
    };
    let location = Path::parse(name).map_err(io::Error::other)?;
    Ok(meta_of(location, &metadata).ok())
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_any_size_together_are_all_names_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let names = ["a.b/x", "a/b", "a/c/d", "a/c/e", "a0", "b", "c/d/e/f", "c/d/e0"];
        for name in names {
            let file = dir.path().join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, name).unwrap();
        }
        fs::write(dir.path().join("a/being-written#17"), "").unwrap();
        fs::create_dir_all(dir.path().join("empty/er")).unwrap();
        for limit in 1..=names.len() + 1 {
            let mut all: Vec<String> = Vec::new();
            loop {
                let after = all.last().cloned().unwrap_or_default();
                let found = page(dir.path(), "", &after, limit).unwrap();
                assert!(found.len() <= limit);
                all.extend(found.iter().map(|m| m.location.to_string()));
                if found.len() < limit {
                    break;
                }
            }
            assert_eq!(all, names, "{limit} at a time");
        }
        let below: Vec<String> = page(dir.path(), "a", "a/b", 10)
            .unwrap()
            .iter()
            .map(|m| m.location.to_string())
            .collect();
        assert_eq!(below, ["a/c/d", "a/c/e"]);
        assert!(page(dir.path(), "missing", "", 10).unwrap().is_empty());
    }
}
