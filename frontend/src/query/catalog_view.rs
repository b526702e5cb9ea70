//! The catalog as one statement of one session sees it.

use std::sync::Arc;

use datafusion::catalog::TableProvider;
use datafusion::datasource::provider_as_source;
use datafusion::logical_expr::{ScalarUDF, TableSource};
use millrace_common::{SqlError, SqlState};
use millrace_planner::CatalogView;
use millrace_rpc::catalog::Relation;
use parking_lot::Mutex;
use sqlparser::ast::{ObjectName, ObjectNamePart};

use super::snapshot_table::{EpochCell, SnapshotTable};
use crate::catalog::SystemTables;
use crate::catalog::objects::system_table;
use crate::cluster::{CatalogSnapshot, Cluster};
use crate::session::StagedWrites;
use crate::session::reads::NotedReads;

/// Schemas that exist without having been created.
pub const SYSTEM_SCHEMAS: [&str; 3] = ["pg_catalog", "information_schema", "millrace_catalog"];

/// Names resolved by `search_path` over one catalog snapshot.
pub struct SessionCatalog {
    pub snapshot: Arc<CatalogSnapshot>,
    pub epoch: EpochCell,
    cluster: Arc<dyn Cluster>,
    search_path: Vec<String>,
    system: Arc<SystemTables>,
    /// Tables that exist for this statement only (rows in conflict, `excluded`).
    temporary: Vec<(String, Arc<dyn TableProvider>, Arc<Relation>)>,
    /// Uncommitted writes of the session's block.
    writes: Arc<Mutex<StagedWrites>>,
    /// Where scans note what they read.
    reads: NotedReads,
}

impl SessionCatalog {
    pub fn new(
        cluster: Arc<dyn Cluster>,
        search_path: Vec<String>,
        system: SystemTables,
    ) -> SessionCatalog {
        SessionCatalog {
            snapshot: cluster.catalog(),
            epoch: EpochCell::default(),
            cluster,
            search_path,
            system: Arc::new(system),
            temporary: Vec::new(),
            writes: Arc::default(),
            reads: NotedReads::default(),
        }
    }

    pub fn with_reads(mut self, reads: NotedReads) -> SessionCatalog {
        self.reads = reads;
        self
    }

    /// Tables are read with these writes laid over them.
    pub fn with_writes(mut self, writes: Arc<Mutex<StagedWrites>>) -> SessionCatalog {
        self.writes = writes;
        self
    }

    pub fn add_temporary(&mut self, relation: Relation, provider: Arc<dyn TableProvider>) {
        self.temporary.push((relation.name.clone(), provider, Arc::new(relation)));
    }

    /// Schema (if written) and name of an object, folded as PostgreSQL folds them.
    pub fn split_name(name: &ObjectName) -> Result<(Option<String>, String), SqlError> {
        let parts: Vec<String> = name
            .0
            .iter()
            .map(|p| match p {
                ObjectNamePart::Identifier(i) => Ok(fold(i)),
                other => {
                    Err(SqlError::new(SqlState::SYNTAX_ERROR, format!("invalid name \"{other}\"")))
                }
            })
            .collect::<Result<_, _>>()?;
        match parts.as_slice() {
            [name] => Ok((None, name.clone())),
            [schema, name] | [_, schema, name] => Ok((Some(schema.clone()), name.clone())),
            _ => Err(SqlError::new(
                SqlState::SYNTAX_ERROR,
                format!("improper qualified name (too many dotted names): {name}"),
            )),
        }
    }

    /// The relation of a name, or PostgreSQL's error with a suggestion.
    pub fn resolve(&self, name: &ObjectName) -> Result<Arc<Relation>, SqlError> {
        let (schema, table) = Self::split_name(name)?;
        if let Some(relation) = self.relation(schema.as_deref(), &table) {
            return Ok(relation);
        }
        let full = schema.map_or(table.clone(), |s| format!("{s}.{table}"));
        let e =
            SqlError::new(SqlState::UNDEFINED_TABLE, format!("relation \"{full}\" does not exist"));
        let names = self.names();
        Err(match millrace_functions::error::closest(&table, names.iter().map(String::as_str)) {
            Some(close) => e.with_hint(format!("Perhaps you meant \"{close}\".")),
            None => e,
        })
    }

    /// Where a new object goes: its schema, which must exist, and its name.
    pub fn target(&self, name: &ObjectName) -> Result<(String, String), SqlError> {
        let (schema, name) = Self::split_name(name)?;
        let schema = match schema {
            Some(s) if SYSTEM_SCHEMAS.contains(&s.as_str()) => {
                return Err(SqlError::new(
                    SqlState::INSUFFICIENT_PRIVILEGE,
                    format!("permission denied to create \"{s}.{name}\""),
                )
                .with_detail("System catalog modifications are currently disallowed."));
            }
            Some(s) if self.snapshot.schemas.contains(&s) => s,
            Some(s) => {
                return Err(SqlError::new(
                    SqlState::INVALID_SCHEMA_NAME,
                    format!("schema \"{s}\" does not exist"),
                ));
            }
            None => self
                .search_path
                .iter()
                .find(|s| self.snapshot.schemas.contains(s))
                .cloned()
                .ok_or_else(|| {
                    SqlError::new(
                        SqlState::INVALID_SCHEMA_NAME,
                        "no schema has been selected to create in",
                    )
                })?,
        };
        Ok((schema, name))
    }
}

/// An identifier as the catalog holds it.
pub fn fold(ident: &sqlparser::ast::Ident) -> String {
    if ident.quote_style.is_some() { ident.value.clone() } else { ident.value.to_lowercase() }
}

impl CatalogView for SessionCatalog {
    fn relation(&self, schema: Option<&str>, name: &str) -> Option<Arc<Relation>> {
        if schema.is_none()
            && let Some((_, _, relation)) = self.temporary.iter().find(|(n, ..)| n == name)
        {
            return Some(relation.clone());
        }
        match schema {
            Some(schema) => self.snapshot.get(schema, name).cloned(),
            None => self.search_path.iter().find_map(|s| self.snapshot.get(s, name).cloned()),
        }
    }

    fn table_source(&self, relation: &Arc<Relation>) -> Result<Arc<dyn TableSource>, SqlError> {
        if let Some((_, provider, _)) =
            self.temporary.iter().find(|(.., r)| Arc::ptr_eq(r, relation))
        {
            return Ok(provider_as_source(provider.clone()));
        }
        let staged = self.writes.lock().table(relation.id);
        let table = SnapshotTable::new(self.cluster.clone(), relation.clone(), self.epoch.clone())?
            .with_staged(staged)
            .with_reads(self.reads.clone());
        Ok(provider_as_source(Arc::new(table)))
    }

    fn system_table(&self, schema: Option<&str>, name: &str) -> Option<Arc<dyn TableSource>> {
        self.system.table(schema, name).map(provider_as_source)
    }

    fn system_columns(&self, schema: Option<&str>, name: &str) -> Option<(u32, Vec<String>)> {
        let (.., oid, _, columns) = system_table(schema.unwrap_or("pg_catalog"), name)?;
        let name = |column: &str| column.split(':').next().unwrap_or(column).to_owned();
        Some((*oid, columns.split_whitespace().map(name).collect()))
    }

    fn function(&self, name: &str) -> Option<Arc<ScalarUDF>> {
        self.system.function(name)
    }

    fn search_path(&self) -> Vec<String> {
        let mut path = self.search_path.clone();
        if !path.iter().any(|s| s == "pg_catalog") {
            path.push("pg_catalog".to_owned());
        }
        path
    }

    fn schemas(&self) -> Vec<String> {
        let system = SYSTEM_SCHEMAS.iter().map(|s| (*s).to_owned());
        self.snapshot.schemas.iter().cloned().chain(system).collect()
    }

    fn names(&self) -> Vec<String> {
        self.snapshot
            .relations()
            .iter()
            .filter(|r| self.search_path.contains(&r.schema))
            .map(|r| r.name.clone())
            .collect()
    }
}
