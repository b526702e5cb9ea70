//! Prepared statements and portals: what Parse, Bind and Describe work on.

use std::sync::{Arc, Weak};

use arrow::array::{ArrayRef, RecordBatch};
use arrow::datatypes::DataType;
use bytes::Bytes;
use millrace_common::zone::Zone;
use millrace_common::{SqlError, SqlState};
use millrace_planner::ast::Show;
use millrace_planner::bind::locate;
use millrace_planner::parser::with_changes_rows;
use millrace_planner::{ParsedStatement, Statement};
use parking_lot::Mutex;
use sqlparser::ast::Statement as Sql;

use super::execute::prepared_name;
use super::scroll::Scroll;
use super::{Outcome, RowSet, Session, outcome::text_field, params};
use crate::cluster::CatalogSnapshot;
use crate::ddl::explain::form::Form;
use crate::dml;
use crate::encoding::{Column, builder, describe_type, type_of_oid};
use crate::query::catalog_view::fold;
use crate::query::planning::Held;
use crate::wire::Field;

/// A statement and what is known of it without its parameters' values.
pub struct Prepared {
    /// `None`: an empty string.
    pub statement: Option<ParsedStatement>,
    /// OIDs as reported to the client, and the types values are read as.
    pub param_oids: Vec<u32>,
    pub param_types: Vec<DataType>,
    /// Output columns; `None`: the statement returns no rows.
    pub fields: Option<Vec<Field>>,
    /// By PREPARE, not by a message of the client.
    pub from_sql: bool,
    /// When, in microseconds since 1970.
    pub prepared_at: i64,
    /// OIDs that the client declared, 0 where it did not.
    pub(super) given: Vec<u32>,
    /// What the description was last found to be right for. The lock is never held while others wait.
    pub(super) basis: Mutex<Basis>,
    /// Its memory, where a client's message has prepared it.
    pub(crate) _held: Option<Arc<Held>>,
}

impl Prepared {
    /// With what it takes of the queries' memory.
    pub fn holding(self, held: Arc<Held>) -> Prepared {
        Prepared { _held: Some(held), ..self }
    }
}

/// What a description rests on besides the statement.
pub(super) struct Basis {
    /// Only for comparison: a catalog that has been replaced is not kept.
    catalog: Weak<CatalogSnapshot>,
    search_path: Vec<String>,
}

impl PartialEq for Basis {
    fn eq(&self, other: &Basis) -> bool {
        self.catalog.ptr_eq(&other.catalog) && self.search_path == other.search_path
    }
}

/// A statement with its parameters, or the rest of its rows.
pub struct Portal {
    pub prepared: Arc<Prepared>,
    pub values: Vec<ArrayRef>,
    /// The memory that the values take from that of queries.
    pub(crate) _held: Option<Held>,
    pub formats: Vec<i16>,
    pub state: PortalState,
    /// Survives its transaction (a cursor WITH HOLD).
    pub hold: bool,
    /// What DECLARE said; `None`: it is a client's own portal.
    pub declared: Option<Declared>,
}

/// A cursor as `pg_cursors` lists it.
#[derive(Clone)]
pub struct Declared {
    pub statement: String,
    pub binary: bool,
    pub scroll: bool,
    /// When, in microseconds since 1970.
    pub at: i64,
    /// How deep it is in what can be rolled back: 0 is not at all, 1 in the block, 2 behind its first savepoint …
    pub depth: usize,
}

pub enum PortalState {
    Ready,
    /// Rows not yet sent. The lock only makes a stream shareable; it is never waited for.
    Running(Box<Mutex<Running>>),
    /// Rows of a cursor that goes back, too.
    Scroll(Box<Mutex<Scroll>>),
    Done,
    /// It is being read, or that has failed: then rows are lost, and nothing more is read of it.
    Failed,
}

/// An open result: the stream, and the batch of which a part is sent.
pub struct Running {
    pub rows: RowSet,
    pub current: Option<Current>,
    pub sent: u64,
    /// More rows have been asked for than there are.
    pub ended: bool,
}

impl Running {
    pub fn new(rows: RowSet) -> Running {
        Running { rows, current: None, sent: 0, ended: false }
    }
}

/// A batch of which a part is sent or fetched.
pub struct Current {
    pub batch: RecordBatch,
    /// As they are sent, once they are.
    pub columns: Option<Vec<Column>>,
    /// The first row that is not sent.
    pub at: usize,
}

impl Current {
    pub fn new(batch: RecordBatch) -> Current {
        Current { batch, columns: None, at: 0 }
    }

    /// Rows that are not sent.
    pub fn left(&self) -> usize {
        self.batch.num_rows() - self.at
    }
}

/// PostgreSQL's error for a portal that has failed.
pub fn cannot_run(name: &str) -> SqlError {
    let message = format!("portal \"{name}\" cannot be run");
    SqlError::new(SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE, message)
}

/// PostgreSQL's error for a prepared statement whose columns are others by now.
pub fn columns_changed() -> SqlError {
    let message = "cached plan must not change result type";
    // Drivers prepare the statement again when it is this function that says so.
    SqlError::new(SqlState::FEATURE_NOT_SUPPORTED, message).with_routine("RevalidateCachedQuery")
}

impl Session {
    /// Parses and describes one statement. `given`: OIDs the client declared, 0 where it did not.
    pub fn prepare(&self, sql: &str, given: &[u32]) -> Result<Prepared, SqlError> {
        let mut statements = crate::statements::parse(sql)?;
        if statements.len() > 1 {
            return Err(SqlError::new(
                SqlState::SYNTAX_ERROR,
                "cannot insert multiple commands into a prepared statement",
            ));
        }
        let Some(parsed) = statements.pop() else {
            return Ok(Prepared {
                statement: None,
                param_oids: vec![],
                param_types: vec![],
                fields: None,
                from_sql: false,
                prepared_at: chrono::Utc::now().timestamp_micros(),
                given: vec![],
                basis: Mutex::new(self.basis()),
                _held: None,
            });
        };
        self.describe(parsed, given)
    }

    pub fn describe(&self, parsed: ParsedStatement, given: &[u32]) -> Result<Prepared, SqlError> {
        // Before anything is looked up: what changes meanwhile is seen when the statement is run.
        let basis = Mutex::new(self.basis());
        let (fields, mut types) = self.fields_of(&parsed, given)?;
        let highest = match &parsed.statement {
            Statement::Sql(sql) => params::count(sql.as_ref()),
            _ => 0,
        };
        types.resize(types.len().max(highest), None);
        let param_types: Vec<DataType> =
            types.into_iter().map(|t| t.unwrap_or(DataType::Utf8)).collect();
        let param_oids = param_types
            .iter()
            .enumerate()
            .map(|(i, t)| match given.get(i) {
                Some(oid) if *oid != 0 => Ok(*oid),
                _ => describe_type(t).map(|d| d.0),
            })
            .collect::<Result<_, _>>()?;
        Ok(Prepared {
            statement: Some(parsed),
            param_oids,
            param_types,
            fields,
            from_sql: false,
            prepared_at: chrono::Utc::now().timestamp_micros(),
            given: given.to_vec(),
            basis,
            _held: None,
        })
    }

    /// The output columns of a statement, and what is known of its parameters' types.
    fn fields_of(
        &self,
        parsed: &ParsedStatement,
        given: &[u32],
    ) -> Result<(Option<Vec<Field>>, Vec<Option<DataType>>), SqlError> {
        let mut types = given.iter().map(|oid| type_of_oid(*oid)).collect::<Result<Vec<_>, _>>()?;
        let fields = self.describe_statement(&parsed.statement, &mut types);
        Ok((fields.map_err(|e| locate::in_statement(e, parsed))?, types))
    }

    fn basis(&self) -> Basis {
        let catalog = Arc::downgrade(&self.cluster().catalog());
        Basis { catalog, search_path: self.search_path() }
    }

    /// Runs a prepared statement, if its columns are those that were described.
    pub async fn run_prepared(
        &mut self,
        prepared: &Prepared,
        values: &[ArrayRef],
    ) -> Result<Outcome, SqlError> {
        let Some(parsed) = &prepared.statement else { return Ok(Outcome::Empty) };
        self.execute(parsed, values, Some(prepared)).await
    }

    /// Refuses a prepared statement whose columns are not those that were described, before it does anything. Where they
    /// are others in the catalog that is known, which may be an older one than what described them again, the newest counts.
    pub(super) async fn check_columns(&self, prepared: &Prepared) -> Result<(), SqlError> {
        let catalog = self.cluster().catalog();
        let known = self.has_told_columns(prepared);
        let is_doubted = match &known {
            Ok(has_told) => !has_told && self.knows_more(&catalog).await,
            Err(error) => self.learns_more(error, &catalog).await,
        };
        let newest = if is_doubted { self.has_told_columns(prepared) } else { known };
        match newest? {
            true => Ok(()),
            false => Err(columns_changed()),
        }
    }

    /// Whether the columns are those that were described, in the catalog that is known.
    fn has_told_columns(&self, prepared: &Prepared) -> Result<bool, SqlError> {
        let (Some(parsed), Some(told)) = (&prepared.statement, &prepared.fields) else {
            return Ok(true);
        };
        let basis = self.basis();
        if !rests_on_session(&parsed.statement) && *prepared.basis.lock() == basis {
            return Ok(true);
        }
        match self.fields_of(parsed, &prepared.given)?.0 {
            Some(fields) if !alike(&fields, told) => Ok(false),
            // Without columns there is nothing of that name any more, which running it says.
            _ => {
                *prepared.basis.lock() = basis;
                Ok(true)
            }
        }
    }

    /// Refuses a statement with parts that change rows, before one of them runs, whose columns are not those that were
    /// described: it may have been planned again since.
    pub fn check_described(&self, fields: Option<&[Field]>) -> Result<(), SqlError> {
        match (&self.described, fields) {
            (Some(told), Some(fields)) if !alike(fields, told) => Err(columns_changed()),
            _ => Ok(()),
        }
    }

    fn describe_statement(
        &self,
        statement: &Statement,
        types: &mut Vec<Option<DataType>>,
    ) -> Result<Option<Vec<Field>>, SqlError> {
        let text = |names: &[&str]| Some(names.iter().map(|n| text_field(n)).collect());
        Ok(match statement {
            Statement::Sql(sql) => self.describe_sql(sql, types)?,
            Statement::Explain(explain) => Some(vec![Form::of(explain)?.field()]),
            Statement::Show(Show::Setting(name)) => {
                text(&[millrace_common::settings::find(name).map_or(name.as_str(), |s| s.name)])
            }
            Statement::Show(show) => text(crate::ddl::show::columns(show)),
            Statement::Describe { .. } => text(crate::ddl::show::DESCRIBE),
            Statement::FetchWait { cursor, .. } => self.feed_fields(&fold(cursor)),
            _ => None,
        })
    }

    pub(crate) fn describe_sql(
        &self,
        sql: &Sql,
        types: &mut Vec<Option<DataType>>,
    ) -> Result<Option<Vec<Field>>, SqlError> {
        match sql {
            Sql::Query(query) if with_changes_rows(query) => {
                dml::with::describe(self, query, types)
            }
            Sql::Query(query) => {
                crate::catalog::functions::infer_parameters(query.as_ref(), types);
                let (bound, fields) = self.bind(&self.catalog_view(), query, types)?;
                params::merge(types, bound.param_types);
                Ok(Some(fields))
            }
            Sql::Insert(_) | Sql::Update(_) | Sql::Delete(_) => {
                Ok(dml::describe::describe(self, sql, types)?.map(|d| d.fields))
            }
            Sql::Fetch { name, .. } => {
                let name = fold(name);
                let portal = self.portals.get(&name).and_then(|p| p.prepared.fields.clone());
                Ok(portal.or_else(|| self.feed_fields(&name)))
            }
            Sql::Execute { name: Some(name), .. } => {
                Ok(self.prepared.get(&prepared_name(name)).and_then(|p| p.fields.clone()))
            }
            _ => Ok(None),
        }
    }

    /// Reads a Bind message's values.
    pub fn bind_values(
        &self,
        prepared: &Prepared,
        formats: &[i16],
        values: &[Option<Bytes>],
    ) -> Result<Vec<ArrayRef>, SqlError> {
        if values.len() != prepared.param_types.len() {
            return Err(SqlError::new(
                SqlState::PROTOCOL_VIOLATION,
                format!(
                    "bind message supplies {} parameters, but prepared statement requires {}",
                    values.len(),
                    prepared.param_types.len()
                ),
            ));
        }
        let zone = self.settings.zone().unwrap_or(Zone::Fixed(0));
        values
            .iter()
            .zip(&prepared.param_types)
            .enumerate()
            .map(|(i, (value, t))| {
                let format = crate::wire::format_of(formats, i);
                builder::parameter_in(zone, t, format, value.as_deref())
            })
            .collect()
    }
}

/// Whether rows can be read by either description.
fn alike(fields: &[Field], told: &[Field]) -> bool {
    fields.len() == told.len() && fields.iter().zip(told).all(|(a, b)| a.reads_as(b))
}

/// Whether the columns are those of a cursor or of another prepared statement.
fn rests_on_session(statement: &Statement) -> bool {
    match statement {
        Statement::FetchWait { .. } => true,
        Statement::Sql(sql) => matches!(sql.as_ref(), Sql::Fetch { .. } | Sql::Execute { .. }),
        _ => false,
    }
}
