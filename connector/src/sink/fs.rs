//! Files in a directory or under the prefix of a bucket.
//!
//! Each publication becomes one file, or several when it is large, named by sink, epoch, sequence and part.
//! A file appears whole: locally it is written beside its place, synced and renamed; an object store puts
//! it at once. Publishing again writes the same bytes under the same names, so nothing is there twice.
//!
//! A process that has lost the sink may still be in the middle of a publication, and go on with it at any time. Every
//! attempt therefore writes a file of its own before it renames it. What attempts that were broken off have left is
//! removed before the first publication.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use millrace_common::SqlError;
use millrace_common::env::EnvHandle;
use millrace_rpc::catalog::Relation;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};
use tracing::warn;

use super::format::{Encode, LineWriter};
use super::{Definition, Publication, Rows, SinkTarget, flag, known, required};
use crate::error::ConnectorError;
use crate::options::{invalid, number};
use crate::paths;

const OPTIONS: &[&str] = &["path", "file_size", "header", "delimiter", "s3.endpoint", "s3.region"];
/// Bytes after which a publication goes on in another file.
const FILE_BYTES: usize = 64 << 20;
/// Of the epoch in a file's name.
const EPOCH_DIGITS: usize = 20;
/// The end of the name of a file that is being written.
const STAGED: &str = ".tmp";

enum Place {
    Directory(PathBuf),
    Bucket { store: Arc<dyn ObjectStore>, prefix: object_store::path::Path },
}

pub struct FsTarget {
    place: Place,
    lines: LineWriter,
    /// `name-id`, the beginning of every file's name.
    stem: String,
    extension: &'static str,
    file_bytes: usize,
    /// What earlier owners of the sink have left was looked for.
    is_tidy: AtomicBool,
    env: EnvHandle,
}

impl FsTarget {
    pub fn new(relation: &Relation) -> Result<FsTarget, SqlError> {
        known(relation, OPTIONS)?;
        let path = required(relation, "path", "'/exports/orders'")?;
        let definition = Definition::of(relation)?;
        let delimiter = super::delimiter(relation)?;
        let (encode, extension) = match relation.option("encode").unwrap_or("JSON") {
            "JSON" => (Encode::Json, "json"),
            "CSV" => (Encode::Csv { delimiter, header: flag(relation, "header", false)? }, "csv"),
            other => {
                return Err(SqlError::unsupported(format!("ENCODE {other} of a file sink"))
                    .with_hint("Encodings of file sinks: JSON, CSV."));
            }
        };
        let file_bytes =
            number(relation, "file_size", FILE_BYTES as u64, 1, "a number of bytes")? as usize;
        let plain = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' };
        let name: String = definition.name.chars().map(plain).collect();
        let stem = format!("{name}-{}", definition.id);
        let lines = LineWriter::new(definition, encode)?;
        Ok(FsTarget {
            place: open(path, relation)?,
            lines,
            stem,
            extension,
            file_bytes,
            is_tidy: AtomicBool::new(false),
            env: EnvHandle::default(),
        })
    }

    /// The files of a publication.
    fn files(&self, change: &Publication) -> Result<Vec<(String, Bytes)>, ConnectorError> {
        let mut files = Vec::new();
        let mut out = BytesMut::new();
        let mut text = BytesMut::new();
        let mut empty = 0;
        self.lines.header(&mut out);
        let header = out.len();
        let mut close = |out: &mut BytesMut| {
            let name = format!(
                "{}-{:020}-{:010}-{:04}.{}",
                self.stem,
                change.epoch.0,
                change.sequence,
                files.len(),
                self.extension
            );
            files.push((name, out.split().freeze()));
        };
        for chunk in &change.chunks {
            let rows = Rows::new(chunk)?;
            for one in rows.changes(self.lines.key())? {
                self.lines.line(&rows, one, change.epoch, &mut text, &mut out)?;
                if out.len() >= self.file_bytes {
                    close(&mut out);
                    self.lines.header(&mut out);
                    empty = out.len();
                }
            }
        }
        if out.len() > header.max(empty) {
            close(&mut out);
        }
        Ok(files)
    }

    /// Removes, once, what attempts have left that were broken off. One that is still under way then fails, and is
    /// repeated if its process has the sink.
    async fn tidy(&self) {
        let Place::Directory(path) = &self.place else { return };
        if self.is_tidy.swap(true, Ordering::Relaxed) {
            return;
        }
        let (path, stem) = (path.clone(), self.stem.clone());
        if let Err(error) = blocking(move || remove_leftovers(&path, &stem)).await {
            warn!(sink = %self.stem, %error, "files of broken-off publications stay");
        }
    }
}

#[async_trait]
impl SinkTarget for FsTarget {
    async fn check(&self) -> Result<(), ConnectorError> {
        match &self.place {
            Place::Directory(path) => {
                let (path, attempt) = (path.clone(), self.env.random());
                let made = blocking(move || {
                    let probe = stage(&path, "probe", attempt, &[])?;
                    std::fs::remove_file(&probe).map_err(|e| ConnectorError::file(&path, &e))
                });
                made.await
            }
            Place::Bucket { store, prefix } => {
                use futures::StreamExt;
                match store.list(Some(prefix)).next().await {
                    Some(Err(e)) => Err(ConnectorError::target("the bucket", &e)),
                    _ => Ok(()),
                }
            }
        }
    }

    async fn publish(&self, change: &Publication) -> Result<(), ConnectorError> {
        self.tidy().await;
        for (name, bytes) in self.files(change)? {
            match &self.place {
                Place::Directory(path) => {
                    let (path, attempt) = (path.clone(), self.env.random());
                    blocking(move || write_file(&path, &name, attempt, &bytes)).await?;
                }
                Place::Bucket { store, prefix } => {
                    let path = prefix.clone().join(name.as_str());
                    let put = store.put(&path, PutPayload::from_bytes(bytes)).await;
                    put.map_err(|e| ConnectorError::target("the bucket", &e))?;
                }
            }
        }
        Ok(())
    }
}

fn open(path: &str, relation: &Relation) -> Result<Place, SqlError> {
    let bad = |why: &str| invalid(format!("invalid path \"{path}\": {why}"));
    if let Some(rest) = path.strip_prefix("s3://") {
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err(bad("the bucket is missing"));
        }
        let mut builder = AmazonS3Builder::from_env().with_bucket_name(bucket);
        if let Some(endpoint) = relation.option("s3.endpoint") {
            builder = builder.with_endpoint(endpoint);
        }
        if let Some(region) = relation.option("s3.region") {
            builder = builder.with_region(region);
        }
        let endpoint = builder.get_config_value(&AmazonS3ConfigKey::Endpoint);
        if endpoint.is_some_and(|e| e.starts_with("http://")) {
            builder = builder.with_allow_http(true);
        }
        let store = builder.build().map_err(|e| bad(&e.to_string()))?;
        let prefix = object_store::path::Path::parse(prefix).map_err(|e| bad(&e.to_string()))?;
        return Ok(Place::Bucket { store: Arc::new(store), prefix });
    }
    let local = path.strip_prefix("file://").unwrap_or(path);
    if local.contains("://") {
        return Err(
            bad("the scheme is not known").with_hint("Give a directory or s3://bucket/prefix.")
        );
    }
    if !Path::new(local).is_absolute() {
        return Err(bad("it is not absolute").with_hint("Give a directory by its absolute path."));
    }
    paths::check_text(Path::new(local))?;
    Ok(Place::Directory(PathBuf::from(local)))
}

/// Beside its place, synced, renamed, and the directory synced: there whole or not at all.
fn write_file(
    directory: &Path,
    name: &str,
    attempt: u64,
    bytes: &[u8],
) -> Result<(), ConnectorError> {
    let staged = stage(directory, name, attempt, bytes)?;
    put_in_place(directory, name, &staged)
}

/// Writes a file beside its place, under a name that is this attempt's alone.
fn stage(
    directory: &Path,
    name: &str,
    attempt: u64,
    bytes: &[u8],
) -> Result<PathBuf, ConnectorError> {
    let failed = |e: std::io::Error| ConnectorError::file(directory, &e);
    paths::check_blocking(directory)?;
    std::fs::create_dir_all(directory).map_err(failed)?;
    let staged = directory.join(format!(".{name}.{attempt:016x}{STAGED}"));
    let mut file = File::create_new(&staged).map_err(failed)?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all());
    written.map_err(|e| given_up(directory, &staged, &e))?;
    Ok(staged)
}

fn put_in_place(directory: &Path, name: &str, staged: &Path) -> Result<(), ConnectorError> {
    let renamed = std::fs::rename(staged, directory.join(name));
    renamed.map_err(|e| given_up(directory, staged, &e))?;
    let synced = File::open(directory).and_then(|d| d.sync_all());
    synced.map_err(|e| ConnectorError::file(directory, &e))
}

fn given_up(directory: &Path, staged: &Path, error: &std::io::Error) -> ConnectorError {
    // If it stays, the next owner of the sink removes it.
    let _ = std::fs::remove_file(staged);
    ConnectorError::file(directory, error)
}

/// Removes the staged files of a sink.
fn remove_leftovers(directory: &Path, stem: &str) -> Result<(), ConnectorError> {
    let failed = |e: std::io::Error| ConnectorError::file(directory, &e);
    let beginning = format!(".{stem}-");
    paths::check_blocking(directory)?;
    let entries = match std::fs::read_dir(directory) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(failed)?,
    };
    for entry in entries {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let Some(rest) = name.strip_prefix(&beginning) else { continue };
        if !begins_with_epoch(rest) || !name.ends_with(STAGED) {
            continue;
        }
        match std::fs::remove_file(entry.path()) {
            // Its attempt has come to an end meanwhile.
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            removed => removed.map_err(failed)?,
        }
    }
    Ok(())
}

/// Whether what comes after a sink's stem is the rest of one of its files. Another sink's name may begin with the stem.
fn begins_with_epoch(rest: &str) -> bool {
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    digits == EPOCH_DIGITS && rest.as_bytes().get(digits) == Some(&b'-')
}

async fn blocking(
    work: impl FnOnce() -> Result<(), ConnectorError> + Send + 'static,
) -> Result<(), ConnectorError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(_) => Err(ConnectorError::Target("writing a file was cut off".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(directory).unwrap();
        let mut names: Vec<_> =
            entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// A process that was stopped in the middle of a publication goes on with it while the next owner of the sink writes
    /// the same file.
    #[test]
    fn an_attempt_puts_nothing_in_place_that_another_writes() {
        let dir = tempfile::tempdir().unwrap();
        let stopped = stage(dir.path(), "s-1-1.csv", 1, b"1\n2\n").unwrap();
        let half_written = stage(dir.path(), "s-1-1.csv", 2, b"1\n").unwrap();
        put_in_place(dir.path(), "s-1-1.csv", &stopped).unwrap();
        assert_eq!(std::fs::read(dir.path().join("s-1-1.csv")).unwrap(), b"1\n2\n");
        assert!(half_written.exists());
    }

    #[test]
    fn what_broken_off_attempts_have_left_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        remove_leftovers(&dir.path().join("nowhere"), "s-1").unwrap();
        let file = |stem: &str, epoch: u64| format!("{stem}-{epoch:020}-0000000000-0000.csv");
        let (zeroth, first) = (file("s-1", 0), file("s-1", 1));
        let stopped = stage(dir.path(), &first, 1, b"1\n").unwrap();
        // Of another sink, and of one that is named like the first with its number.
        let others = [file("s-2", 1), file("s-1-7", 1)];
        for other in &others {
            stage(dir.path(), other, 2, b"2\n").unwrap();
        }
        // As earlier builds name it.
        std::fs::write(dir.path().join(format!(".{}.tmp", file("s-1", 2))), b"3").unwrap();
        write_file(dir.path(), &zeroth, 3, b"0\n").unwrap();
        remove_leftovers(dir.path(), "s-1").unwrap();
        let mut left: Vec<String> =
            others.iter().map(|name| format!(".{name}.0000000000000002.tmp")).collect();
        left.push(zeroth.clone());
        left.sort();
        assert_eq!(names(dir.path()), left);
        // It wakes up, and puts nothing there.
        put_in_place(dir.path(), &first, &stopped).unwrap_err();
        write_file(dir.path(), &first, 4, b"1\n").unwrap();
        assert_eq!(names(dir.path())[2..], [zeroth, first]);
    }

    #[test]
    fn an_attempt_that_fails_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("s-1-1.csv")).unwrap();
        write_file(dir.path(), "s-1-1.csv", 1, b"1\n").unwrap_err();
        assert_eq!(names(dir.path()), ["s-1-1.csv"]);
    }
}
