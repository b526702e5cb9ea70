//! COPY … FROM STDIN and COPY … TO STDOUT, text and CSV.
//!
//! Input is parsed as it arrives, each field straight into its column's builder; nothing reaches the
//! table before the last line has been read and checked, so a bad line leaves nothing behind.

pub mod reader;
pub mod writer;

use std::sync::Arc;

use arrow::array::{Array, ArrayRef};
use millrace_common::{DeltaChunk, SqlError, SqlState};
use millrace_rpc::catalog::{OnConflict, Relation};
use sqlparser::ast::{
    CopyLegacyCsvOption, CopyLegacyOption, CopyOption, CopySource, CopyTarget, Statement as Sql,
};

use crate::cluster::DmlKind;
use crate::dml::{self, insert, rewrite};
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

/// A COPY FROM under way.
pub struct CopyIn {
    pub table: Arc<Relation>,
    pub targets: Vec<usize>,
    pub reader: Reader,
    /// Bytes of input so far, and how many there may be.
    bytes: usize,
    limit: usize,
}

/// A COPY TO about to send.
pub struct CopyOut {
    pub rows: RowSet,
    pub format: Format,
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
            Ok(Outcome::CopyIn(Box::new(CopyIn { table, targets, reader, bytes: 0, limit })))
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
            Ok(Outcome::CopyOut(Box::new(CopyOut { rows, format })))
        }
        _ => Err(SqlError::unsupported("COPY from or to a file of the server")
            .with_hint("Use COPY FROM STDIN or TO STDOUT; psql's \\copy does.")),
    }
}

impl CopyIn {
    /// Takes the next bytes of input. All rows wait in memory for the last line.
    pub fn push(&mut self, data: &[u8]) -> Result<(), SqlError> {
        self.bytes += data.len();
        if self.bytes > self.limit {
            let message = format!("the rows of one COPY exceed {} MB", self.limit >> 20);
            return Err(SqlError::new(SqlState::STATEMENT_TOO_COMPLEX, message)
                .with_hint("Split the file, or give the server a larger --memory-limit."));
        }
        self.reader.push(data)
    }

    /// All lines have been read: the rows enter the table as one statement.
    pub async fn finish(self, session: &Session) -> Result<String, SqlError> {
        let CopyIn { table, targets, reader, .. } = self;
        let (columns, count): (Vec<ArrayRef>, usize) = reader.finish()?;
        let batch = insert::complete_rows(session, &table, &targets, columns, count).await?;
        let kind = match OnConflict::try_from(table.on_conflict) {
            Ok(OnConflict::Overwrite) => DmlKind::InsertOrOverwrite,
            Ok(OnConflict::Ignore) => DmlKind::InsertOrIgnore,
            _ => DmlKind::Insert,
        };
        debug_assert!(batch.columns().iter().all(|c| c.len() == count));
        let evaluated = dml::Evaluated {
            delta: DeltaChunk::inserts(batch.clone()),
            kind,
            rows: None,
            output: batch,
            resolves_conflicts: false,
        };
        if evaluated.delta.is_empty() {
            return Ok("COPY 0".to_owned());
        }
        for _ in 0..dml::MAX_ATTEMPTS {
            if let Some(rows) = dml::apply(session, &table, &evaluated).await? {
                return Ok(format!("COPY {rows}"));
            }
        }
        Err(dml::too_many_conflicts())
    }
}

fn format_of(options: &[CopyOption], legacy: &[CopyLegacyOption]) -> Result<Format, SqlError> {
    let csv = options
        .iter()
        .any(|o| matches!(o, CopyOption::Format(f) if f.value.eq_ignore_ascii_case("csv")))
        || legacy.iter().any(|o| matches!(o, CopyLegacyOption::Csv(_)));
    let mut f = Format {
        csv,
        header: false,
        delimiter: if csv { b',' } else { b'\t' },
        null: if csv { String::new() } else { "\\N".to_owned() },
        quote: b'"',
        escape: b'"',
    };
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
