//! Prepared statements and portals: what Parse, Bind and Describe work on.

use std::sync::Arc;

use arrow::array::ArrayRef;
use arrow::datatypes::DataType;
use bytes::Bytes;
use millrace_common::{SqlError, SqlState};
use millrace_planner::ast::Show;
use millrace_planner::bind::locate;
use millrace_planner::{ParsedStatement, Statement};
use parking_lot::Mutex;
use sqlparser::ast::Statement as Sql;

use super::{RowSet, Session, outcome::text_field, params};
use crate::dml;
use crate::encoding::{Column, builder, describe_type, type_of_oid};
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
}

/// A statement with its parameters, or the rest of its rows.
pub struct Portal {
    pub prepared: Arc<Prepared>,
    pub values: Vec<ArrayRef>,
    pub formats: Vec<i16>,
    pub state: PortalState,
    /// Survives its transaction (a cursor WITH HOLD).
    pub hold: bool,
}

pub enum PortalState {
    Ready,
    /// Rows not yet sent. The lock only makes a stream shareable; it is never waited for.
    Running(Box<Mutex<Running>>),
    Done,
}

/// An open result: the stream, and the batch of which a part is sent.
pub struct Running {
    pub rows: RowSet,
    pub current: Option<(Vec<Column>, usize, usize)>,
    pub sent: u64,
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
            });
        };
        self.describe(parsed, given)
    }

    pub fn describe(&self, parsed: ParsedStatement, given: &[u32]) -> Result<Prepared, SqlError> {
        let mut types = given.iter().map(|oid| type_of_oid(*oid)).collect::<Result<Vec<_>, _>>()?;
        let fields = self
            .describe_statement(&parsed.statement, &mut types)
            .map_err(|e| locate::in_statement(e, &parsed))?;
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
        Ok(Prepared { statement: Some(parsed), param_oids, param_types, fields })
    }

    fn describe_statement(
        &self,
        statement: &Statement,
        types: &mut Vec<Option<DataType>>,
    ) -> Result<Option<Vec<Field>>, SqlError> {
        let text = |names: &[&str]| Some(names.iter().map(|n| text_field(n)).collect());
        Ok(match statement {
            Statement::Sql(sql) => self.describe_sql(sql, types)?,
            Statement::Explain(_) => text(&["QUERY PLAN"]),
            Statement::Show(Show::Setting(name)) => {
                text(&[millrace_common::settings::find(name).map_or(name.as_str(), |s| s.name)])
            }
            Statement::Show(show) => text(crate::ddl::show::columns(show)),
            Statement::Describe { .. } => text(crate::ddl::show::DESCRIBE),
            Statement::FetchWait { cursor, .. } => {
                self.feed_fields(&crate::query::catalog_view::fold(cursor))
            }
            _ => None,
        })
    }

    fn describe_sql(
        &self,
        sql: &Sql,
        types: &mut Vec<Option<DataType>>,
    ) -> Result<Option<Vec<Field>>, SqlError> {
        let view = self.catalog_view();
        match sql {
            Sql::Query(query) => {
                let (bound, fields) = self.bind(&view, query, types)?;
                merge(types, bound.param_types);
                Ok(Some(fields))
            }
            Sql::Insert(insert) => {
                let table = dml::insert::table_of(&view, insert)?;
                dml::insert::infer_parameters(&table, insert, types)?;
                if let Some(source) = &insert.source
                    && !matches!(source.body.as_ref(), sqlparser::ast::SetExpr::Values(_))
                {
                    merge(types, self.bind(&view, source, types)?.0.param_types);
                }
                insert
                    .returning
                    .as_deref()
                    .map(|items| dml::describe_returning(self, &table, items))
                    .transpose()
            }
            Sql::Update(update) => {
                let plan = dml::update::plan_update(&view, update)?;
                dml::update::infer_parameters(&plan.table, update, types)?;
                merge(types, self.bind(&view, &plan.query, types)?.0.param_types);
                update
                    .returning
                    .as_deref()
                    .map(|items| dml::describe_returning(self, &plan.table, items))
                    .transpose()
            }
            Sql::Delete(delete) => {
                let plan = dml::update::plan_delete(&view, delete)?;
                merge(types, self.bind(&view, &plan.query, types)?.0.param_types);
                delete
                    .returning
                    .as_deref()
                    .map(|items| dml::describe_returning(self, &plan.table, items))
                    .transpose()
            }
            Sql::Fetch { name, .. } => {
                let portal = self.portals.get(&name.value).and_then(|p| p.prepared.fields.clone());
                Ok(portal.or_else(|| self.feed_fields(&name.value)))
            }
            Sql::Execute { name: Some(name), .. } => {
                Ok(self.prepared.get(&name.to_string()).and_then(|p| p.fields.clone()))
            }
            _ => Ok(None),
        }
    }

    /// Reads a Bind message's values.
    pub fn bind_values(
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
        values
            .iter()
            .zip(&prepared.param_types)
            .enumerate()
            .map(|(i, (value, t))| {
                builder::parameter(t, crate::wire::format_of(formats, i), value.as_deref())
            })
            .collect()
    }
}

/// Fills in inferred types; what the client declared stays.
fn merge(types: &mut Vec<Option<DataType>>, inferred: Vec<DataType>) {
    types.resize(types.len().max(inferred.len()), None);
    for (slot, t) in types.iter_mut().zip(inferred) {
        if t != DataType::Null {
            slot.get_or_insert(t);
        }
    }
}
