//! Reads a split: file after file, record after record.
//!
//! A record belongs to the offset at which it begins. Where a CSV record begins in the middle of a
//! file is known for certain only by reading the file from its start (a line feed may be quoted), so a
//! reader tells where it is ([`crate::SplitReader::position`]) and the job that owns it keeps that with
//! its epoch; without it the file is read again from its start up to the offset.

use std::sync::Arc;

use arrow::array::Int64Array;
use async_trait::async_trait;
use bytes::Buf;
use millrace_common::{SqlError, SqlState};
use millrace_rpc::log::SourceFile;
use millrace_rpc::services::SourceParts;

use super::Compression;
use super::listing::Location;
use super::stream::{Buffer, ByteStream};
use crate::OnError;
use crate::batch::{BatchBuilder, Facts};
use crate::columns::Columns;
use crate::decode::csv::Quotes;
use crate::decode::{Decoder, Encoding};
use crate::{BadRow, ConnectorError, Position, ReadFrom, ReadResult, SplitReader};

/// A record longer than this is a missing quote, or not a file of lines at all.
const MAX_RECORD: usize = 16 << 20;
/// Bytes of records in one batch.
const MAX_BATCH_BYTES: u64 = 4 << 20;
/// Bad rows kept for the report; further ones are only counted by their own report.
const MAX_BAD_ROWS: usize = 1_000;
const BOM: &[u8] = b"\xef\xbb\xbf";

/// A file that is open.
struct OpenFile {
    file: SourceFile,
    shown: String,
    stream: ByteStream,
    buffer: Buffer,
    decoder: Decoder,
    /// Lines before the buffer's first byte.
    line: u64,
}

/// A record in the buffer: its bytes without the end of its line, and all it takes.
struct Found {
    length: usize,
    taken: usize,
    too_long: bool,
}

pub struct FileReader {
    location: Location,
    compression: Compression,
    columns: Arc<Columns>,
    encoding: Encoding,
    on_error: OnError,
    /// An empty line is a row: of a CSV file with one column it is a null.
    takes_blank: bool,
    splits: u64,
    split: u32,
    partition: String,
    /// The split's files.
    files: Vec<SourceFile>,
    /// Parts of the source that `files` has been taken from.
    seen: usize,
    open: Option<OpenFile>,
    /// The first record that has not been handed out begins here or later.
    offset: u64,
    /// It begins exactly here, after so many lines of its file.
    known: Option<Position>,
    out: BatchBuilder,
    bad: Vec<BadRow>,
}

impl FileReader {
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        location: Location,
        compression: Compression,
        columns: Arc<Columns>,
        encoding: Encoding,
        on_error: OnError,
        splits: u64,
        at: ReadFrom,
        wanted: &[usize],
    ) -> Result<FileReader, ConnectorError> {
        let out = BatchBuilder::new(Arc::clone(&columns), wanted)?;
        let takes_blank = matches!(encoding, Encoding::Csv(_)) && columns.values().count() == 1;
        let mut reader = FileReader {
            location,
            compression,
            columns,
            encoding,
            on_error,
            takes_blank,
            splits,
            split: at.split,
            partition: at.split.to_string(),
            files: Vec::new(),
            seen: 0,
            open: None,
            offset: at.offset,
            known: at.position,
            out,
            bad: Vec::new(),
        };
        reader.extend(&at.parts);
        Ok(reader)
    }

    /// The file that holds an offset; `None`: the offset is at the end of them all.
    fn file_at(&self, offset: u64) -> Option<&SourceFile> {
        let after = self.files.partition_point(|f| f.start <= offset);
        // Empty files begin where the next one does.
        self.files[..after]
            .iter()
            .rev()
            .find(|f| f.length > 0)
            .filter(|f| offset < f.start + f.length)
    }

    async fn open_at(&mut self, offset: u64) -> Result<(), ConnectorError> {
        let Some(file) = self.file_at(offset).cloned() else {
            return Err(ConnectorError::Other(Box::new(SqlError::internal(format!(
                "no file of split {} holds offset {offset}",
                self.split
            )))));
        };
        let gzip = self.compression.is_gzip(&file.path);
        // The end of one file is the beginning of the next, whose lines count from its own.
        let known = self.known.filter(|p| p.offset > file.start && p.offset >= offset);
        let (begin, line) = known.map_or((0, 0), |p| (p.offset - file.start, p.line));
        let mut decoder = Decoder::new(Arc::clone(&self.columns), self.encoding.clone());
        let header = matches!(&self.encoding, Encoding::Csv(format) if format.header);
        let mut unfit = None;
        if header && begin > 0 {
            let any = Decoder::new(Arc::clone(&self.columns), self.encoding.clone());
            let mut head = start(self.location.clone(), file.clone(), gzip, 0, 0, any).await?;
            unfit = take_header(&mut head, self.encoding.clone(), &mut decoder).await?;
        }
        let any = Decoder::new(Arc::clone(&self.columns), self.encoding.clone());
        let mut opened = start(self.location.clone(), file, gzip, begin, line, any).await?;
        if begin == 0 {
            strip_bom(&mut opened).await?;
            if header {
                unfit = take_header(&mut opened, self.encoding.clone(), &mut decoder).await?;
            }
        }
        opened.decoder = decoder;
        if unfit.is_some() {
            // None of its rows can be read.
            opened.buffer = Buffer { ended: true, ..Buffer::default() };
        }
        self.open = Some(opened);
        match unfit {
            None => Ok(()),
            Some(error) => self.bad_row(1, error),
        }
    }

    /// Handles one record of the open file; `false`: there is none before `until`.
    async fn step(&mut self, until: u64) -> Result<bool, ConnectorError> {
        if self.open.is_none() {
            if self.known.is_some_and(|p| p.offset >= until) {
                self.offset = until;
                return Ok(false);
            }
            self.open_at(self.offset).await?;
        }
        let Some(open) = &mut self.open else { return Ok(false) };
        let begin = open.file.start + open.buffer.offset;
        if begin >= until && begin >= self.offset {
            self.known = Some(Position { offset: begin, line: open.line });
            self.offset = self.offset.max(until);
            return Ok(false);
        }
        let Some(found) = next_record(open, &self.encoding).await? else {
            // The end of the file; its length is known, and whatever is after belongs to the next.
            let end = open.file.start + open.file.length;
            self.offset = self.offset.max(end.min(until));
            self.known = Some(Position { offset: end, line: 0 });
            self.open = None;
            return Ok(self.offset < until);
        };
        let record = open.buffer.bytes.split_to(found.length).freeze();
        open.buffer.bytes.advance(found.taken - found.length);
        let offset_in_file = open.buffer.offset;
        open.buffer.offset += found.taken as u64;
        let line = open.line + 1;
        let ends = memchr::memchr_iter(b'\n', &record).count() as u64;
        open.line += ends + u64::from(found.taken > found.length);
        if begin < self.offset {
            // Handed out before.
            return Ok(true);
        }
        self.offset = (open.file.start + open.buffer.offset).min(until);
        if found.too_long {
            let error = SqlError::new(
                SqlState::BAD_COPY_FILE_FORMAT,
                format!("the record is longer than {} MB, or a quote is missing", MAX_RECORD >> 20),
            );
            return self.bad_row(line, error).map(|()| true);
        }
        let record = record.strip_suffix(b"\r").unwrap_or(&record);
        if record.iter().all(u8::is_ascii_whitespace) && !self.takes_blank {
            return Ok(true);
        }
        let row_id = begin.wrapping_mul(self.splits).wrapping_add(u64::from(self.split));
        let facts = Facts {
            partition: &self.partition,
            offset: offset_in_file,
            timestamp: Some(open.file.modified_ms * 1_000),
            file: &open.shown,
            row_id: row_id as i64,
            key: None,
        };
        match open.decoder.push(record, &facts, 1, &mut self.out) {
            Ok(()) => Ok(true),
            Err(error) => self.bad_row(line, error).map(|()| true),
        }
    }

    fn bad_row(&mut self, line: u64, mut error: SqlError) -> Result<(), ConnectorError> {
        let place = self.open.as_ref().map_or_else(String::new, |o| o.shown.clone());
        error.message = format!("line {line}: {}", error.message);
        if self.on_error == OnError::Fail {
            let place = format!("file {place}");
            return Err(ConnectorError::BadRow { place, error: Box::new(error) });
        }
        self.bad.push(BadRow { place, error });
        Ok(())
    }
}

async fn start(
    location: Location,
    file: SourceFile,
    gzip: bool,
    begin: u64,
    line: u64,
    decoder: Decoder,
) -> Result<OpenFile, ConnectorError> {
    let stream = ByteStream::open(&location, &file, gzip, begin).await?;
    let shown = location.shown(&file.path);
    let buffer = Buffer { offset: begin, ..Buffer::default() };
    Ok(OpenFile { file, shown, stream, buffer, decoder, line })
}

/// Makes a record's end stand in the buffer, or says that the file has ended.
async fn next_record(
    open: &mut OpenFile,
    encoding: &Encoding,
) -> Result<Option<Found>, ConnectorError> {
    let mut quotes = Quotes::default();
    let mut searched = 0;
    loop {
        let bytes = &open.buffer.bytes;
        let end = match encoding {
            Encoding::Csv(f) => quotes.find_end(bytes, searched, f.quote, f.escape),
            _ => memchr::memchr(b'\n', &bytes[searched..]).map(|at| searched + at),
        };
        if let Some(end) = end {
            return Ok(Some(Found { length: end, taken: end + 1, too_long: false }));
        }
        searched = bytes.len();
        let too_long = searched > MAX_RECORD;
        if too_long || (open.buffer.ended && searched > 0) {
            return Ok(Some(unended(open, encoding, too_long).await?));
        }
        if open.buffer.ended {
            return Ok(None);
        }
        fill(open).await?;
    }
}

async fn fill(open: &mut OpenFile) -> Result<(), ConnectorError> {
    match open.stream.next().await? {
        Some(bytes) => open.buffer.bytes.extend_from_slice(&bytes),
        None => open.buffer.ended = true,
    }
    Ok(())
}

/// A record whose end is not in sight: of a file without a last line feed it is the rest; else only
/// its first line is given up, and reading goes on behind it.
async fn unended(
    open: &mut OpenFile,
    encoding: &Encoding,
    too_long: bool,
) -> Result<Found, ConnectorError> {
    let quoted = |bytes: &[u8]| match encoding {
        Encoding::Csv(f) => {
            let mut quotes = Quotes::default();
            quotes.find_end(bytes, 0, f.quote, f.escape);
            quotes.is_inside()
        }
        _ => false,
    };
    if !too_long && !quoted(&open.buffer.bytes) {
        let length = open.buffer.bytes.len();
        return Ok(Found { length, taken: length, too_long: false });
    }
    // The rest of a line that is too long is dropped in steps, each a bad record of its own.
    let bytes = &open.buffer.bytes;
    let (length, taken) = match memchr::memchr(b'\n', bytes) {
        Some(at) => (at, at + 1),
        None => (bytes.len(), bytes.len()),
    };
    Ok(Found { length, taken, too_long: true })
}

async fn strip_bom(open: &mut OpenFile) -> Result<(), ConnectorError> {
    while open.buffer.bytes.len() < BOM.len() && !open.buffer.ended {
        fill(open).await?;
    }
    if open.buffer.bytes.starts_with(BOM) {
        open.buffer.bytes.advance(BOM.len());
        open.buffer.offset += BOM.len() as u64;
    }
    Ok(())
}

/// Reads the header of a CSV file, which must have the relation's columns; else says why not.
async fn take_header(
    open: &mut OpenFile,
    encoding: Encoding,
    decoder: &mut Decoder,
) -> Result<Option<SqlError>, ConnectorError> {
    if open.buffer.offset == 0 {
        strip_bom(open).await?;
    }
    let Some(found) = next_record(open, &encoding).await? else { return Ok(None) };
    let record = open.buffer.bytes.split_to(found.length);
    open.buffer.bytes.advance(found.taken - found.length);
    open.buffer.offset += found.taken as u64;
    open.line += 1;
    let record = record.strip_suffix(b"\r").unwrap_or(&record);
    Ok(decoder.set_header(record).err())
}

#[async_trait]
impl SplitReader for FileReader {
    async fn read(&mut self, until: u64, max_rows: usize) -> ReadResult {
        if self.offset >= until {
            return Ok(None);
        }
        let stop = self.offset.saturating_add(MAX_BATCH_BYTES);
        loop {
            let more = self.step(until).await?;
            if !more || self.out.rows() >= max_rows || self.offset >= stop {
                break;
            }
            if self.bad.len() >= MAX_BAD_ROWS {
                break;
            }
        }
        let (batch, _) = self.out.finish()?;
        Ok(Some((batch, self.offset)))
    }

    fn weights(&mut self) -> Option<Int64Array> {
        None
    }

    fn position(&self) -> Option<Position> {
        match &self.open {
            Some(open) if open.file.start + open.buffer.offset >= self.offset => {
                let offset = open.file.start + open.buffer.offset;
                Some(Position { offset, line: open.line })
            }
            _ => self.known.filter(|p| p.offset >= self.offset),
        }
    }

    fn set_on_error(&mut self, on_error: OnError) {
        self.on_error = on_error;
    }

    fn take_bad_rows(&mut self) -> Vec<BadRow> {
        std::mem::take(&mut self.bad)
    }

    fn extend(&mut self, parts: &SourceParts) {
        let fresh = parts.files.get(self.seen..).unwrap_or_default();
        self.files.extend(fresh.iter().filter(|f| f.split == self.split).cloned());
        self.seen = self.seen.max(parts.files.len());
    }
}
