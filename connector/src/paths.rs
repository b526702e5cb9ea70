//! Which local files statements may name.
//!
//! Whoever can run statements could otherwise read and write as the server's own user. So a server that other
//! hosts can reach, or that asks for passwords, is limited to directories that its operator names, and so is every
//! process of a cluster that opens files: it does not know who may come in elsewhere. The limit is the process's and is
//! set once, before the first relation is opened; without one every path is allowed.
//!
//! It is checked twice: by the text of a path when a relation is defined or started, and, with symbolic links
//! resolved, before a file is opened.

use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use millrace_common::{SqlError, SqlState};
use parking_lot::RwLock;
use tokio::runtime::{Handle, RuntimeFlavor};

use crate::ConnectorError;

/// `None`: no limit.
static LIMIT: RwLock<Option<Arc<PathLimit>>> = RwLock::new(None);

/// Who is limited, for errors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Limited {
    /// A server that runs all roles.
    #[default]
    Server,
    /// A process of a cluster: its role, and where others reach it.
    Process { role: &'static str, address: String },
}

impl std::fmt::Display for Limited {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Limited::Server => f.write_str("this server"),
            Limited::Process { role, address } => write!(f, "the {role} process at {address}"),
        }
    }
}

/// The directories that may be used, with all that is in them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PathLimit {
    limited: Limited,
    /// As given, for errors.
    given: Vec<PathBuf>,
    /// The same, absolute, as given and with links resolved.
    roots: Vec<PathBuf>,
}

/// Limits this process to what is in these directories; `None`: to nothing.
pub fn set_limit(limit: Option<PathLimit>) {
    *LIMIT.write() = limit.map(Arc::new);
}

fn limit() -> Option<Arc<PathLimit>> {
    LIMIT.read().clone()
}

/// Refuses a path that does not lie in a directory that may be used. Touches no file.
pub fn check_text(path: &Path) -> Result<(), SqlError> {
    limit().map_or(Ok(()), |limit| limit.check_text(path))
}

/// The same for what the path leads to when symbolic links are followed. What does not exist yet lies where it
/// would be made.
pub async fn check(path: &Path) -> Result<(), ConnectorError> {
    let Some(limit) = limit() else { return Ok(()) };
    let path = path.to_path_buf();
    let checked = tokio::task::spawn_blocking(move || limit.check(&path)).await;
    Ok(checked.map_err(|_| SqlError::internal("looking up a path was cut off"))??)
}

/// The same, blocking. On a thread of the runtime, whose other tasks go on elsewhere meanwhile: a file system that
/// does not answer holds only its own statement up.
pub fn check_blocking(path: &Path) -> Result<(), SqlError> {
    let Some(limit) = limit() else { return Ok(()) };
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(|| limit.check(path)),
        _ => limit.check(path),
    }
}

impl PathLimit {
    /// Of directories that must exist; otherwise the first that cannot be used, and why.
    pub fn new(
        limited: Limited,
        directories: &[PathBuf],
    ) -> Result<PathLimit, (PathBuf, std::io::Error)> {
        let mut limit = PathLimit { limited, given: directories.to_vec(), roots: Vec::new() };
        for directory in directories {
            let roots = roots_of(directory).map_err(|e| (directory.clone(), e))?;
            limit.roots.extend(roots);
        }
        Ok(limit)
    }

    fn check_text(&self, path: &Path) -> Result<(), SqlError> {
        match self.holds(&plain(path)) {
            true => Ok(()),
            false => Err(self.refused(path)),
        }
    }

    fn check(&self, path: &Path) -> Result<(), SqlError> {
        match resolve(path) {
            Ok(resolved) if self.holds(&resolved) => Ok(()),
            Ok(_) => Err(self.refused(path)),
            Err(e) => Err(SqlError::new(
                SqlState::IO_ERROR,
                format!("cannot find out where \"{}\" is: {e}", path.display()),
            )),
        }
    }

    fn holds(&self, path: &Path) -> bool {
        self.roots.iter().any(|root| path.starts_with(root))
    }

    fn refused(&self, path: &Path) -> SqlError {
        let given: Vec<String> = self.given.iter().map(|d| d.display().to_string()).collect();
        let (unnamed, hint) = match self.limited {
            Limited::Server => (
                "Other hosts can reach this server, or it asks for passwords, and no directory has been named for files.",
                "Start the server with --allow-path DIR for the directory.",
            ),
            Limited::Process { .. } => (
                "No directory has been named for files of this process.",
                "Start all compute processes and frontends with --allow-path DIR for the directory.",
            ),
        };
        let detail = match given.is_empty() {
            true => unnamed.to_owned(),
            false => format!("Files may be in: {}.", given.join(", ")),
        };
        let (path, limited) = (path.display(), &self.limited);
        SqlError::new(
            SqlState::INSUFFICIENT_PRIVILEGE,
            // What is told of a job is this alone.
            format!("path \"{path}\" is not in a directory that {limited} may use (--allow-path)"),
        )
        .with_detail(detail)
        .with_hint(hint)
    }
}

fn roots_of(directory: &Path) -> std::io::Result<[PathBuf; 2]> {
    let resolved = directory.canonicalize()?;
    match resolved.is_dir() {
        true => Ok([resolved, plain(&std::path::absolute(directory)?)]),
        false => Err(std::io::ErrorKind::NotADirectory.into()),
    }
}

/// Without `.` and `..`, as far as the text tells.
fn plain(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => drop(out.pop()),
            other => out.push(other),
        }
    }
    out
}

/// Follows the links of what exists; the rest is appended.
fn resolve(path: &Path) -> std::io::Result<PathBuf> {
    let mut missing: Vec<OsString> = Vec::new();
    let mut there = path;
    loop {
        match there.canonicalize() {
            Ok(mut resolved) => {
                resolved.extend(missing.iter().rev());
                return Ok(resolved);
            }
            // A link that leads nowhere is not missing: what is made there appears where it leads.
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && !there.is_symlink() => {
                let (Some(name), Some(parent)) = (there.file_name(), there.parent()) else {
                    return Err(e);
                };
                missing.push(name.to_owned());
                there = parent;
            }
            Err(e) => return Err(e),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_judged_by_where_they_lead() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().canonicalize().unwrap();
        let (open, shut) = (base.join("open"), base.join("shut"));
        std::fs::create_dir_all(open.join("in")).unwrap();
        std::fs::create_dir_all(&shut).unwrap();
        std::fs::write(shut.join("secret"), "x").unwrap();
        std::os::unix::fs::symlink(shut.join("secret"), open.join("link")).unwrap();
        std::os::unix::fs::symlink(&shut, open.join("folder")).unwrap();
        std::os::unix::fs::symlink(shut.join("later"), open.join("dangling")).unwrap();
        std::os::unix::fs::symlink(&open, base.join("alias")).unwrap();
        let limit = PathLimit::new(Limited::Server, std::slice::from_ref(&open)).unwrap();

        for allowed in ["", "in", "in/new/file", "in/../in", "new"] {
            let path = open.join(allowed);
            limit.check_text(&path).and_then(|()| limit.check(&path)).unwrap();
        }
        for refused in ["../shut/secret", "in/../../shut", "in/../../openly"] {
            let error = limit.check_text(&open.join(refused)).unwrap_err();
            assert_eq!(error.state, SqlState::INSUFFICIENT_PRIVILEGE, "{refused}");
        }
        // `..` behind a link leads elsewhere than its text says.
        for link in
            ["link", "folder", "folder/secret", "folder/new", "dangling", "folder/../x", "x/../y"]
        {
            let path = open.join(link);
            limit.check_text(&path).unwrap();
            assert!(limit.check(&path).is_err(), "{link}");
        }
        assert!(limit.check_text(&base.join("open2")).is_err());

        // A directory that is named by a link may be written both ways.
        let alias = PathLimit::new(Limited::Server, &[base.join("alias")]).unwrap();
        for path in [base.join("alias/in"), open.join("in")] {
            alias.check_text(&path).and_then(|()| alias.check(&path)).unwrap();
        }
        assert!(PathLimit::new(Limited::Server, &[base.join("nowhere")]).is_err());
        assert!(PathLimit::default().check_text(&open).is_err());
        // All of the file system may be named as well.
        let all = PathLimit::new(Limited::Server, &[PathBuf::from("/")]).unwrap();
        for path in [open.join("folder/secret"), base.join("nowhere")] {
            all.check_text(&path).and_then(|()| all.check(&path)).unwrap();
        }
    }

    #[test]
    fn a_refusal_names_the_path_the_flag_and_who_refuses() {
        let dir = tempfile::tempdir().unwrap();
        let limited = || Limited::Process { role: "compute", address: "10.0.0.2:4571".to_owned() };
        let limit = PathLimit::new(limited(), &[dir.path().to_path_buf()]).unwrap();
        let error = limit.check_text(Path::new("/etc/passwd")).unwrap_err();
        assert_eq!(error.state, SqlState::INSUFFICIENT_PRIVILEGE);
        assert_eq!(
            error.message,
            "path \"/etc/passwd\" is not in a directory that the compute process at 10.0.0.2:4571 may use (--allow-path)"
        );
        let named = format!("Files may be in: {}.", dir.path().display());
        assert_eq!(error.detail, Some(named));
        let error = PathLimit::new(limited(), &[]).unwrap().check_text(dir.path()).unwrap_err();
        let unnamed = "No directory has been named for files of this process.";
        assert_eq!(error.detail.as_deref(), Some(unnamed));
    }
}
