//! Files in a directory or under the prefix of a bucket.
//!
//! Each publication becomes one file, or several when it is large, named by sink, epoch, sequence and part.
//! A file appears whole: locally it is written beside its place, synced and renamed; an object store puts
//! it at once. Publishing again writes the same bytes under the same names, so nothing is there twice.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use millrace_common::SqlError;
use millrace_rpc::catalog::Relation;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};

use super::format::{Encode, LineWriter};
use super::{Definition, Publication, Rows, SinkTarget, flag, known, required};
use crate::error::ConnectorError;
use crate::options::{invalid, number};
use crate::paths;

const OPTIONS: &[&str] = &["path", "file_size", "header", "delimiter", "s3.endpoint", "s3.region"];
/// Bytes after which a publication goes on in another file.
const FILE_BYTES: usize = 64 << 20;

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
        Ok(FsTarget { place: open(path, relation)?, lines, stem, extension, file_bytes })
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
}

#[async_trait]
impl SinkTarget for FsTarget {
    async fn check(&self) -> Result<(), ConnectorError> {
        match &self.place {
            Place::Directory(path) => {
                let path = path.clone();
                let made = blocking(move || {
                    paths::check_blocking(&path)?;
                    std::fs::create_dir_all(&path).map_err(|e| ConnectorError::file(&path, &e))?;
                    let probe = path.join(format!(".{:016x}.tmp", std::process::id()));
                    File::create(&probe).map_err(|e| ConnectorError::file(&path, &e))?;
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
        for (name, bytes) in self.files(change)? {
            match &self.place {
                Place::Directory(path) => {
                    let path = path.clone();
                    blocking(move || write_file(&path, &name, &bytes)).await?;
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
fn write_file(directory: &Path, name: &str, bytes: &[u8]) -> Result<(), ConnectorError> {
    let failed = |e: std::io::Error| ConnectorError::file(directory, &e);
    paths::check_blocking(directory)?;
    std::fs::create_dir_all(directory).map_err(failed)?;
    let staged = directory.join(format!(".{name}.tmp"));
    let mut file = File::create(&staged).map_err(failed)?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(failed)?;
    std::fs::rename(&staged, directory.join(name)).map_err(failed)?;
    File::open(directory).and_then(|d| d.sync_all()).map_err(failed)
}

async fn blocking(
    work: impl FnOnce() -> Result<(), ConnectorError> + Send + 'static,
) -> Result<(), ConnectorError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(_) => Err(ConnectorError::Target("writing a file was cut off".to_owned())),
    }
}
