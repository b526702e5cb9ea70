//! COPY … FROM STDIN and COPY … TO STDOUT, text and CSV.
//!
//! Input is parsed as it arrives, each field straight into its column's builder, and goes on its way in
//! chunks (see `millrace_executor::dml::load`); nothing is visible before the last line has been read
//! and checked, so a bad line leaves nothing behind.

pub mod reader;
pub mod writer;

use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch};
use millrace_common::{DeltaChunk, SqlError, SqlState};
use millrace_executor::dml::{DmlError, InsertConflict, Load, LoadKind};
use millrace_executor::layout::RowLayout;
use millrace_rpc::catalog::Relation;
use sqlparser::ast::{
    CopyLegacyCsvOption, CopyLegacyOption, CopyOption, CopySource, CopyTarget, Statement as Sql,
};

use crate::cluster::DmlKind;
use crate::dml::{self, insert, rewrite, rows};
use crate::session::{Outcome, RowSet, Session};
pub use reader::Reader;

/// How rows are written as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Format {
    pub csv: bool,
    pub header: bool,
    pub delimiter: u8,
    pub null: String,
    pub quote: u8,
    pub escape: u8,
}

impl Format {
    /// PostgreSQL's defaults.
    pub fn new(csv: bool) -> Format {
        Format {
            csv,
            header: false,
            delimiter: if csv { b',' } else { b'\t' },
            null: if csv { String::new() } else { "\\N".to_owned() },
            quote: b'"',
            escape: b'"',
        }
    }
}

/// A COPY FROM under way.
pub struct CopyIn {
    pub table: Arc<Relation>,
    pub targets: Vec<usize>,
    pub reader: Reader,
    /// Bytes of input since rows were last sent on.
    bytes: usize,
    load: Option<Load>,
    /// In a transaction block: all rows so far, and how many bytes of them there may be.
    held: Vec<RecordBatch>,
    held_bytes: usize,
    limit: usize,
}

/// Input that is gathered before its rows are sent on.
const CHUNK_BYTES: usize = 2 << 20;
const CHUNK_ROWS: usize = 32_768;

/// A COPY TO about to send.
pub struct CopyOut {
    pub rows: RowSet,
    pub format: Format,
    /// Rows come as they arise: each batch is sent at once.
    pub live: bool,
}

/// Checks a COPY and opens it.
pub async fn plan(session: &mut Session, copy: &Sql) -> Result<Outcome, SqlError> {
    let Sql::Copy { source, to, target, options, legacy_options, .. } = copy else {
        return Err(SqlError::internal("not a COPY"));
    };
    let format = format_of(options, legacy_options)?;
    match (to, target) {
        (false, CopyTarget::Stdin) => {
            session.check_writable("COPY FROM")?;
            let CopySource::Table { table_name, columns } = source else {
                return Err(SqlError::new(SqlState::SYNTAX_ERROR, "COPY FROM needs a table"));
            };
            let table = session.catalog_view().resolve(table_name)?;
            dml::check_table(&table, "copy to")?;
            let targets = insert::target_columns(&table, columns)?;
            let reader = Reader::new(&table, &targets, format)?;
            let limit = session.shared.config.query_memory;
            Ok(Outcome::CopyIn(Box::new(CopyIn {
                table,
                targets,
                reader,
                bytes: 0,
                load: None,
                held: Vec::new(),
                held_bytes: 0,
                limit,
            })))
        }
        (true, CopyTarget::Stdout) => {
            let query = match source {
                CopySource::Query(query) => query.as_ref().clone(),
                CopySource::Table { table_name, columns } => {
                    let list =
                        columns.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
                    let list = if list.is_empty() { "*".to_owned() } else { list };
                    rewrite::parse_query(&format!("SELECT {list} FROM {table_name}"))?
                }
            };
            let rows = session.query(&query).await?;
            Ok(Outcome::CopyOut(Box::new(CopyOut { rows, format, live: false })))
        }
        _ => Err(SqlError::unsupported("COPY from or to a file of the server")
            .with_hint("Use COPY FROM STDIN or TO STDOUT; psql's \\copy does.")),
    }
}

impl CopyIn {
    /// Takes the next bytes of input.
    pub fn push(&mut self, data: &[u8]) -> Result<(), SqlError> {
        self.bytes += data.len();
        self.reader.push(data)
    }

    /// Whether there are rows enough to be sent on.
    pub fn is_due(&self) -> bool {
        self.bytes > CHUNK_BYTES || self.reader.rows() > CHUNK_ROWS
    }

    /// Sends the rows read so far on their way; nothing of them is visible before `finish`.
    pub async fn flush(&mut self, session: &Session) -> Result<(), SqlError> {
        self.bytes = 0;
        let (columns, count) = self.reader.take();
        self.add(session, columns, count).await
    }

    async fn add(
        &mut self,
        session: &Session,
        columns: Vec<ArrayRef>,
        count: usize,
    ) -> Result<(), SqlError> {
        if count == 0 {
            return Ok(());
        }
        let (table, targets) = (&self.table, &self.targets);
        let columns = insert::complete_columns(session, table, targets, columns, count).await?;
        if let Some((row, e)) = rows::null_violation(table, &columns)? {
            return Err(self.reader.at_row(row, e));
        }
        let rows = rows::batch(&rows::nullable(table.arrow_schema()?.as_ref()), columns, count)?;
        if session.stages_writes() {
            self.held_bytes += rows.get_array_memory_size();
            if self.held_bytes > self.limit {
                let message = format!("the rows of one COPY exceed {} MB", self.limit >> 20);
                return Err(SqlError::new(SqlState::STATEMENT_TOO_COMPLEX, message)
                    .with_hint("Outside a transaction block a COPY may be of any size."));
            }
            self.held.push(rows);
            return Ok(());
        }
        let load = match &mut self.load {
            Some(load) => load,
            None => {
                let id = session.shared.next_statement();
                let kind = LoadKind::Insert { on_conflict: insert::load_conflict(table) };
                let table = millrace_common::RelationId(table.id);
                self.load.insert(session.cluster().begin_load(table, id, kind).await?)
            }
        };
        let appended = load.append(DeltaChunk::inserts(rows)).await;
        if load.has_spilled() && appended.is_ok() {
            self.reader.forget_lines();
        }
        appended.map_err(|e| at_duplicate(&self.reader, e))
    }

    /// All lines have been read: the rows enter the table as one statement.
    pub async fn finish(mut self, session: &Session) -> Result<String, SqlError> {
        let (columns, count) = self.reader.finish()?;
        self.add(session, columns, count).await?;
        if let Some(load) = self.load.take() {
            let done = load.finish().await.map_err(|e| at_duplicate(&self.reader, e))?;
            return Ok(format!("COPY {}", done.rows_affected));
        }
        let Some(first) = self.held.first() else { return Ok("COPY 0".to_owned()) };
        let batch = rows::concat(&first.schema(), &self.held)?;
        let kind = match insert::load_conflict(&self.table) {
            InsertConflict::Overwrite => DmlKind::InsertOrOverwrite,
            InsertConflict::Nothing => DmlKind::InsertOrIgnore,
            InsertConflict::Error => DmlKind::Insert,
        };
        let evaluated = dml::Evaluated {
            delta: DeltaChunk::inserts(batch.clone()),
            kind,
            rows: None,
            output: batch,
            resolves_conflicts: false,
        };
        for _ in 0..dml::MAX_ATTEMPTS {
            let applied = dml::apply(session, &self.table, &evaluated).await;
            if let Some(rows) = applied.map_err(|e| self.at_held_duplicate(&evaluated.output, e))? {
                return Ok(format!("COPY {rows}"));
            }
        }
        Err(dml::too_many_conflicts())
    }

    /// A duplicate key of a block's COPY, with the line.
    fn at_held_duplicate(&self, rows: &RecordBatch, e: SqlError) -> SqlError {
        let row = match &e.detail {
            Some(detail) if e.state == SqlState::UNIQUE_VIOLATION => self.row_of_key(rows, detail),
            _ => None,
        };
        match row {
            Some(row) => self.reader.at_input_row(row, e),
            None => e,
        }
    }

    /// The row that an error's detail is about. Of two with that key it is the second: that one is too many,
    /// whatever the table has.
    fn row_of_key(&self, rows: &RecordBatch, detail: &str) -> Option<usize> {
        let layout = RowLayout::of_relation(&self.table).ok()?;
        let has_key = |row: &usize| {
            detail == format!("Key {} already exists.", layout.describe_key(rows, *row))
        };
        (0..rows.num_rows()).filter(has_key).take(2).last()
    }
}

/// The error with the line of a duplicate key, if it is known which row has it.
fn at_duplicate(reader: &Reader, e: DmlError) -> SqlError {
    let row = match &e {
        DmlError::UniqueViolation { row, .. } => *row,
        _ => None,
    };
    match row {
        Some(row) => reader.at_input_row(row, e.into()),
        None => e.into(),
    }
}

fn format_of(options: &[CopyOption], legacy: &[CopyLegacyOption]) -> Result<Format, SqlError> {
    let csv = options
        .iter()
        .any(|o| matches!(o, CopyOption::Format(f) if f.value.eq_ignore_ascii_case("csv")))
        || legacy.iter().any(|o| matches!(o, CopyLegacyOption::Csv(_)));
    let mut f = Format::new(csv);
    let mut escape = None;
    for option in options {
        match option {
            CopyOption::Format(name) => match name.value.to_ascii_lowercase().as_str() {
                "csv" | "text" => {}
                "binary" => return Err(SqlError::unsupported("COPY in binary format")),
                other => {
                    return Err(SqlError::new(
                        SqlState::INVALID_PARAMETER_VALUE,
                        format!("COPY format \"{other}\" not recognized"),
                    ));
                }
            },
            CopyOption::Delimiter(c) => f.delimiter = single_byte("delimiter", *c)?,
            CopyOption::Null(text) => f.null = text.clone(),
            CopyOption::Header(on) => f.header = *on,
            CopyOption::Quote(c) => f.quote = single_byte("quote", *c)?,
            CopyOption::Escape(c) => escape = Some(single_byte("escape", *c)?),
            CopyOption::Freeze(_) => {}
            CopyOption::Encoding(name)
                if name.eq_ignore_ascii_case("utf8") || name.eq_ignore_ascii_case("utf-8") => {}
            other => return Err(SqlError::unsupported(format!("COPY option {other}"))),
        }
    }
    for option in legacy {
        match option {
            CopyLegacyOption::Delimiter(c) => f.delimiter = single_byte("delimiter", *c)?,
            CopyLegacyOption::Null(text) => f.null = text.clone(),
            CopyLegacyOption::Csv(list) => {
                for o in list {
                    match o {
                        CopyLegacyCsvOption::Header => f.header = true,
                        CopyLegacyCsvOption::Quote(c) => f.quote = single_byte("quote", *c)?,
                        CopyLegacyCsvOption::Escape(c) => escape = Some(single_byte("escape", *c)?),
                        other => return Err(SqlError::unsupported(format!("COPY option {other}"))),
                    }
                }
            }
            CopyLegacyOption::Header => f.header = true,
            other => return Err(SqlError::unsupported(format!("COPY option {other}"))),
        }
    }
    f.escape = escape.unwrap_or(f.quote);
    if f.null.contains(['\n', '\r']) || f.delimiter == b'\n' || f.delimiter == b'\r' {
        return Err(SqlError::new(
            SqlState::INVALID_PARAMETER_VALUE,
            "COPY delimiter and null cannot be newline or carriage return",
        ));
    }
    Ok(f)
}

fn single_byte(what: &str, c: char) -> Result<u8, SqlError> {
    u8::try_from(c).ok().filter(u8::is_ascii).ok_or_else(|| {
        SqlError::unsupported(format!("a COPY {what} that is not a single one-byte character"))
    })
}
