//! Files as a source: CSV and JSON lines, plain or gzip, under a directory or bucket prefix.
//!
//! A split is a row of files, in the order in which they were found; its offsets count the files'
//! bytes, decompressed, one file after the other. So an offset names a byte of a file for ever, any
//! offset may end an epoch, and the log holds a file once and a few numbers an epoch. That needs a
//! file's length when it is found: of a compressed one it is measured by decompressing it once, which
//! also finds a damaged file before anybody depends on it.
//!
//! Files are immutable once found: another size or version later is an error that names the file.

mod listing;
mod reader;
mod stream;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use arrow::datatypes::SchemaRef;
use async_trait::async_trait;
use millrace_common::SqlError;
use millrace_rpc::catalog::Relation;
use parking_lot::Mutex;

use crate::columns::{Columns, Include};
use crate::decode::{ENCODE_OPTIONS, Encoding};
use crate::{ConnectorError, Known, More, OnError, OpenResult, Polled, ReadFrom, Source, options};
use listing::{Location, Settling};

const OPTIONS: &[&str] =
    &["connector", "path", "splits", "on_error", "compression", "discovery_interval", "rate_limit"];
const S3_OPTIONS: &[&str] =
    &["s3.endpoint", "s3.region", "s3.access_key_id", "s3.secret_access_key"];
const INCLUDES: &[Include] =
    &[Include::Partition, Include::Offset, Include::Timestamp, Include::File];
/// How often to look for files: a bucket's listing costs money.
const LOCAL_INTERVAL: Duration = Duration::from_secs(1);
const BUCKET_INTERVAL: Duration = Duration::from_secs(10);
/// A guess at a row's bytes.
const ROW_BYTES: u64 = 128;

/// How a file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// By its name: `.gz` is gzip.
    Auto,
    None,
    Gzip,
}

impl Compression {
    pub fn is_gzip(self, path: &str) -> bool {
        match self {
            Compression::Auto => path.ends_with(".gz") || path.ends_with(".gzip"),
            Compression::None => false,
            Compression::Gzip => true,
        }
    }
}

pub struct FsSource {
    columns: Arc<Columns>,
    encoding: Encoding,
    location: Location,
    compression: Compression,
    on_error: OnError,
    splits: u32,
    interval: Duration,
    settling: Mutex<Settling>,
}

impl FsSource {
    /// Reads and checks the WITH clause and the declared columns. Touches no file.
    pub fn new(relation: &Relation) -> Result<FsSource, SqlError> {
        options::only_known(relation, &[OPTIONS, S3_OPTIONS, ENCODE_OPTIONS].concat())?;
        let (format, encode) = options::format(relation, ("PLAIN", "JSON"));
        if format != "PLAIN" {
            return Err(SqlError::unsupported(format!("FORMAT {format} of files"))
                .with_hint("Use FORMAT PLAIN."));
        }
        if !matches!(encode, "CSV" | "JSON") {
            return Err(SqlError::unsupported(format!("ENCODE {encode} of files"))
                .with_hint("Use ENCODE CSV or ENCODE JSON (an object a line)."));
        }
        let path =
            options::required(relation, "path", "'/data/*.csv' or 's3://bucket/prefix/*.json'")?;
        let location = Location::open(path, relation)?;
        let interval = match location.is_local() {
            true => LOCAL_INTERVAL,
            false => BUCKET_INTERVAL,
        };
        let splits =
            options::number(relation, "splits", 1u32, 1, "a number of splits, at least 1")?;
        if splits > 1_024 {
            return Err(options::invalid("option \"splits\" must be at most 1024"));
        }
        Ok(FsSource {
            columns: Arc::new(Columns::new(relation, INCLUDES)?),
            encoding: Encoding::of(relation, encode)?,
            location,
            compression: match options::word(relation, "compression", &["auto", "none", "gzip"])? {
                "none" => Compression::None,
                "gzip" => Compression::Gzip,
                _ => Compression::Auto,
            },
            on_error: OnError::of(relation)?,
            splits,
            interval: options::duration(relation, "discovery_interval", interval)?,
            settling: Mutex::default(),
        })
    }

    fn ends(&self, known: &Known) -> Vec<u64> {
        let mut ends = vec![0; self.splits as usize];
        for file in known.parts.files.iter() {
            if let Some(end) = ends.get_mut(file.split as usize) {
                *end = file.start + file.length;
            }
        }
        ends
    }
}

#[async_trait]
impl Source for FsSource {
    fn schema(&self) -> SchemaRef {
        Arc::clone(&self.columns.schema)
    }

    async fn poll(&self, known: &Known) -> Result<Polled, ConnectorError> {
        let found = self.location.list().await?;
        let changed = listing::check_unchanged(&self.location, &found, &known.parts.files).err();
        let paths: Vec<String> = found.iter().map(|m| m.location.to_string()).collect();
        let fresh = {
            let mut settling = self.settling.lock();
            let fresh = settling.settled(found, &known.parts.files, self.location.is_local());
            fresh.into_iter().filter(|m| settling.is_due(m.location.as_ref())).collect()
        };
        let mut ends = self.ends(known);
        let (files, unreadable) =
            listing::measure(&self.location, self.compression, fresh, &mut ends).await;
        let trouble = {
            let mut settling = self.settling.lock();
            settling.taken(&files);
            settling.note_failures(&paths, unreadable);
            settling.trouble()
        };
        Ok(Polled {
            files,
            available: (0..self.splits).zip(ends).collect(),
            more: More::After(self.interval),
            trouble: trouble.or(changed.map(SqlError::from)),
            ..Polled::default()
        })
    }

    fn offsets_per_row(&self) -> u64 {
        ROW_BYTES
    }

    fn open(&self, at: ReadFrom, columns: &[usize]) -> OpenResult {
        if at.split >= self.splits {
            return Err(ConnectorError::NoSuchSplit(at.split));
        }
        let reader = reader::FileReader::new(
            self.location.clone(),
            self.compression,
            Arc::clone(&self.columns),
            self.encoding.clone(),
            self.on_error,
            u64::from(self.splits),
            at,
            columns,
        )?;
        Ok(Box::new(reader))
    }
}
