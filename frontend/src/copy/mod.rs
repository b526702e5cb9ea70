//! COPY … FROM STDIN and COPY … TO STDOUT: text, CSV and binary.
//!
//! Input is parsed as it arrives, each field straight into its column's builder, and goes on its way in
//! chunks (see `millrace_executor::dml::load`); nothing is visible before the last line has been read
//! and checked, so a bad line leaves nothing behind.

pub mod binary;
mod condition;
mod lines;
pub mod options;
pub mod reader;
pub mod text;
pub mod writer;

use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch};
use millrace_common::{DeltaChunk, SqlError, SqlState};
use millrace_executor::dml::DmlKind;
use millrace_executor::dml::{DmlError, LoadKind};
use millrace_executor::layout::RowLayout;
use millrace_planner::ParsedStatement;
use millrace_rpc::catalog::Relation;
use sqlparser::ast::{CopySource, CopyTarget, Ident, ObjectName, Statement as Sql};

use crate::cluster::Load;
use crate::dml::{self, insert, rewrite, rows};
use crate::session::{Outcome, RowSet, Session};
use binary::BinaryReader;
use condition::Condition;
use lines::Lines;
use options::{Columns, Forced, Options};
pub use reader::Reader;

/// How rows are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Format {
    pub csv: bool,
    pub binary: bool,
    pub header: bool,
    /// The header must name the columns.
    pub header_match: bool,
    pub delimiter: u8,
    pub null: String,
    pub quote: u8,
    pub escape: u8,
    /// By column; empty: of none. Values that always have quotes, that are NULL though they have them, and
    /// that are not NULL though they read as it.
    pub force_quote: Vec<bool>,
    pub force_null: Vec<bool>,
    pub force_not_null: Vec<bool>,
}

impl Format {
    /// PostgreSQL's defaults.
    pub fn new(csv: bool) -> Format {
        Format {
            csv,
            binary: false,
            header: false,
            header_match: false,
            delimiter: if csv { b',' } else { b'\t' },
            null: if csv { String::new() } else { "\\N".to_owned() },
            quote: b'"',
            escape: b'"',
            force_quote: Vec::new(),
            force_null: Vec::new(),
            force_not_null: Vec::new(),
        }
    }
}

/// The reader of a format.
enum Input {
    Text(Box<Reader>),
    Binary(Box<BinaryReader>),
}

impl Input {
    fn rows(&self) -> usize {
        match self {
            Input::Text(reader) => reader.rows(),
            Input::Binary(reader) => reader.rows(),
        }
    }

    fn push(&mut self, data: &[u8]) -> Result<(), SqlError> {
        match self {
            Input::Text(reader) => reader.push(data),
            Input::Binary(reader) => reader.push(data),
        }
    }

    fn take(&mut self) -> (Vec<ArrayRef>, usize) {
        match self {
            Input::Text(reader) => reader.take(),
            Input::Binary(reader) => reader.take(),
        }
    }

    fn finish(&mut self) -> Result<(Vec<ArrayRef>, usize), SqlError> {
        match self {
            Input::Text(reader) => reader.finish(),
            Input::Binary(reader) => reader.finish(),
        }
    }

    fn lines(&self) -> &Lines {
        match self {
            Input::Text(reader) => &reader.lines,
            Input::Binary(reader) => &reader.lines,
        }
    }

    fn lines_mut(&mut self) -> &mut Lines {
        match self {
            Input::Text(reader) => &mut reader.lines,
            Input::Binary(reader) => &mut reader.lines,
        }
    }
}

/// A COPY FROM under way.
pub struct CopyIn {
    pub table: Arc<Relation>,
    pub targets: Vec<usize>,
    reader: Input,
    /// WHERE: the rows that enter.
    condition: Option<Condition>,
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
pub async fn plan(
    session: &mut Session,
    copy: &Sql,
    parsed: &ParsedStatement,
) -> Result<Outcome, SqlError> {
    let Sql::Copy { source, to, target, .. } = copy else {
        return Err(SqlError::internal("not a COPY"));
    };
    if !matches!((to, target), (false, CopyTarget::Stdin) | (true, CopyTarget::Stdout)) {
        return Err(SqlError::unsupported("COPY from or to a file of the server")
            .with_hint("Use COPY FROM STDIN or TO STDOUT; psql's \\copy does."));
    }
    let options = options::read(parsed, *to)?;
    match source {
        _ if *to => plan_out(session, source, options).await,
        CopySource::Table { table_name, columns } => plan_in(session, table_name, columns, options),
        CopySource::Query(_) => {
            Err(SqlError::new(SqlState::SYNTAX_ERROR, "COPY FROM needs a table"))
        }
    }
}

fn plan_in(
    session: &Session,
    name: &ObjectName,
    columns: &[Ident],
    options: Options,
) -> Result<Outcome, SqlError> {
    session.check_writable("COPY FROM")?;
    let table = session.catalog_view().resolve(name)?;
    dml::check_table(&table, "copy to")?;
    let targets = insert::target_columns(&table, columns)?;
    let Options { mut format, forced, condition } = options;
    let copied: Vec<String> = targets.iter().map(|t| table.columns[*t].name.clone()).collect();
    let all = column_names(&table);
    let known = Some((table.name.as_str(), all.as_slice()));
    let Forced { null, not_null, .. } = forced;
    format.force_not_null = options::flags("FORCE_NOT_NULL", &not_null, &copied, known)?;
    format.force_null = options::flags("FORCE_NULL", &null, &copied, known)?;
    let condition = condition.map(|expr| Condition::new(session, &table, expr)).transpose()?;
    let reader = match format.binary {
        true => Input::Binary(Box::new(BinaryReader::new(&table, &targets)?)),
        false => {
            let reader = Reader::new(&table, &targets, format)?;
            Input::Text(Box::new(match session.settings.zone() {
                None => reader,
                Some(zone) => reader.in_zone(zone),
            }))
        }
    };
    let limit = session.shared.config.query_memory;
    Ok(Outcome::CopyIn(Box::new(CopyIn {
        table,
        targets,
        reader,
        condition,
        bytes: 0,
        load: None,
        held: Vec::new(),
        held_bytes: 0,
        limit,
    })))
}

async fn plan_out(
    session: &Session,
    source: &CopySource,
    options: Options,
) -> Result<Outcome, SqlError> {
    let Options { mut format, forced, .. } = options;
    let query = match source {
        CopySource::Query(query) => query.as_ref().clone(),
        CopySource::Table { table_name, columns } => {
            let list = columns.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            let list = if list.is_empty() { "*".to_owned() } else { list };
            rewrite::parse_query(&format!("SELECT {list} FROM {table_name}"))?
        }
    };
    let rows = session.query(&query).await?;
    if forced.quote != Columns::None {
        let copied: Vec<String> = rows.fields.iter().map(|f| f.name.clone()).collect();
        // It has been read: it is there.
        let relation = match source {
            CopySource::Table { table_name, .. } => session.catalog_view().resolve(table_name).ok(),
            CopySource::Query(_) => None,
        };
        let all = relation.as_deref().map(column_names).unwrap_or_default();
        let known = relation.as_ref().map(|r| (r.name.as_str(), all.as_slice()));
        format.force_quote = options::flags("FORCE_QUOTE", &forced.quote, &copied, known)?;
    }
    Ok(Outcome::CopyOut(Box::new(CopyOut { rows, format, live: false })))
}

/// The columns that a user sees.
fn column_names(relation: &Relation) -> Vec<String> {
    relation.columns.iter().filter(|c| !c.hidden).map(|c| c.name.clone()).collect()
}

impl CopyIn {
    /// How many columns the input has.
    pub fn columns(&self) -> usize {
        self.targets.len()
    }

    pub fn is_binary(&self) -> bool {
        matches!(self.reader, Input::Binary(_))
    }

    /// Takes the next bytes of input.
    pub fn push(&mut self, data: &[u8]) -> Result<(), SqlError> {
        self.bytes += data.len();
        self.reader.push(data)
    }

    /// Whether there are rows enough to be sent on.
    pub fn is_due(&self) -> bool {
        self.bytes > CHUNK_BYTES || self.reader.rows() > CHUNK_ROWS
    }

    /// Whether rows have been sent on their way, which a transaction of several statements could not take in.
    pub fn is_on_its_way(&self) -> bool {
        self.load.is_some()
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
        let mut columns = insert::complete_columns(session, table, targets, columns, count).await?;
        let mut count = count;
        if let Some(condition) = &self.condition {
            let kept = condition.kept(session, table, &columns, count).await?;
            if kept.len() < count {
                self.reader.lines_mut().keep(&kept);
                columns = condition::only(&columns, &kept)?;
                count = kept.len();
            }
            if count == 0 {
                return Ok(());
            }
        }
        if let Some((row, e)) = rows::null_violation(table, &columns)? {
            return Err(self.reader.lines().at_row(row, e));
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
                let id = session.shared.next_statement().await?;
                let kind = LoadKind::Insert { on_conflict: insert::load_conflict(table) };
                let table = millrace_common::RelationId(table.id);
                self.load.insert(session.cluster().begin_load(table, id, kind).await?)
            }
        };
        let appended = load.append(DeltaChunk::inserts(rows)).await;
        if load.has_spilled() && appended.is_ok() {
            self.reader.lines_mut().forget();
        }
        appended.map_err(|e| at_duplicate(self.reader.lines(), e))
    }

    /// All lines have been read: the rows enter the table as one statement.
    pub async fn finish(mut self, session: &Session) -> Result<String, SqlError> {
        let (columns, count) = self.reader.finish()?;
        self.add(session, columns, count).await?;
        if let Some(load) = self.load.take() {
            let done = load.finish(session.step.entered()).await;
            let done = done.map_err(|e| at_duplicate(self.reader.lines(), e))?;
            return Ok(format!("COPY {}", done.rows_affected));
        }
        let Some(first) = self.held.first() else { return Ok("COPY 0".to_owned()) };
        let batch = rows::concat(&first.schema(), &self.held)?;
        let kind = DmlKind::Insert { on_conflict: insert::load_conflict(&self.table) };
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
            Some(row) => self.reader.lines().at_input_row(row, e),
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
fn at_duplicate(lines: &Lines, e: DmlError) -> SqlError {
    let e = SqlError::from(e);
    match e.row {
        Some(row) => lines.at_input_row(row as usize, e),
        None => e,
    }
}
