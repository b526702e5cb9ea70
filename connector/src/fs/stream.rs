//! A file's bytes from an offset on, decompressed, in pieces of bounded size.

use std::io::Write;

use bytes::{Bytes, BytesMut};
use flate2::write::MultiGzDecoder;
use futures::StreamExt;
use futures::stream::BoxStream;
use millrace_rpc::log::SourceFile;
use object_store::path::Path;
use object_store::{GetOptions, GetRange};

use super::listing::{Location, changed, version_of};
use crate::ConnectorError;

/// Compressed bytes decompressed at a time: they may become a thousand times as many.
const COMPRESSED_STEP: usize = 8 << 10;

pub struct ByteStream {
    shown: String,
    stream: BoxStream<'static, object_store::Result<Bytes>>,
    gzip: Option<Gzip>,
    /// Bytes to drop before the first wanted one.
    skip: u64,
}

struct Gzip {
    decoder: MultiGzDecoder<Vec<u8>>,
    pending: Bytes,
    ended: bool,
}

impl ByteStream {
    /// `offset`: of the first byte wanted, decompressed.
    pub async fn open(
        location: &Location,
        file: &SourceFile,
        gzip: bool,
        offset: u64,
    ) -> Result<ByteStream, ConnectorError> {
        location.check_file(&file.path).await?;
        let shown = location.shown(&file.path);
        let path = Path::parse(&file.path).map_err(|e| ConnectorError::io(&shown, e))?;
        // A range that begins at the end of the object is refused by some stores.
        let range = (!gzip && offset > 0 && offset < file.size).then_some(GetRange::Offset(offset));
        let options = GetOptions { range, ..GetOptions::default() };
        let result = location.store().get_opts(&path, options).await.map_err(|e| match e {
            object_store::Error::NotFound { .. } => {
                ConnectorError::io(&shown, "the file is gone, and its rows are still needed")
            }
            e => ConnectorError::io(&shown, e),
        })?;
        if result.meta.size != file.size || version_of(&result.meta) != file.version {
            return Err(changed(&shown, file.size, result.meta.size));
        }
        let skip = if range_given(gzip, offset, file.size) { 0 } else { offset };
        let gzip = gzip.then(|| Gzip {
            decoder: MultiGzDecoder::new(Vec::new()),
            pending: Bytes::new(),
            ended: false,
        });
        Ok(ByteStream { shown, stream: result.into_stream(), gzip, skip })
    }

    /// The next bytes; `None` at the end of the file. Cancel-safe.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ConnectorError> {
        loop {
            let Some(mut bytes) = self.next_raw().await? else { return Ok(None) };
            let dropped = self.skip.min(bytes.len() as u64);
            self.skip -= dropped;
            let _ = bytes.split_to(dropped as usize);
            if !bytes.is_empty() {
                return Ok(Some(bytes));
            }
        }
    }

    async fn next_raw(&mut self) -> Result<Option<Bytes>, ConnectorError> {
        let Some(gzip) = &mut self.gzip else {
            let next = self.stream.next().await.transpose();
            return next.map_err(|e| ConnectorError::io(&self.shown, e));
        };
        loop {
            if gzip.ended {
                return Ok(None);
            }
            if gzip.pending.is_empty() {
                match self.stream.next().await.transpose() {
                    Err(e) => return Err(ConnectorError::io(&self.shown, e)),
                    Ok(Some(bytes)) => gzip.pending = bytes,
                    Ok(None) => {
                        gzip.ended = true;
                        gzip.decoder.try_finish().map_err(|e| damaged(&self.shown, &e))?;
                    }
                }
            }
            let step = gzip.pending.split_to(gzip.pending.len().min(COMPRESSED_STEP));
            gzip.decoder.write_all(&step).map_err(|e| damaged(&self.shown, &e))?;
            let out = std::mem::take(gzip.decoder.get_mut());
            if !out.is_empty() {
                return Ok(Some(Bytes::from(out)));
            }
        }
    }
}

fn range_given(gzip: bool, offset: u64, size: u64) -> bool {
    !gzip && offset > 0 && offset < size
}

fn damaged(shown: &str, e: &std::io::Error) -> ConnectorError {
    ConnectorError::io(shown, format!("it is not a complete gzip file ({e})"))
}

/// Bytes of a file that have been read and not used.
#[derive(Default)]
pub struct Buffer {
    pub bytes: BytesMut,
    /// Where `bytes` begins in the file.
    pub offset: u64,
    pub ended: bool,
}
