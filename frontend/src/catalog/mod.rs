//! System catalogs: `pg_catalog`, `information_schema`, `millrace_catalog` as tables made on demand.
//!
//! A table is built from the catalog snapshot when a statement names it; nothing is kept. OIDs are
//! relation ids; namespaces, types and roles have PostgreSQL's own where it has one. What clients ask
//! for and Millrace does not have (triggers, policies, publications …) is an empty table with
//! PostgreSQL's columns ([`columns`]). Functions that look into the catalogs are in [`functions`];
//! what clients write beyond our SQL is rewritten in [`rewrite`] and [`subquery`].

pub mod columns;
pub mod functions;
pub mod information;
pub mod objects;
pub mod pg;
pub mod rewrite;
pub mod rows;
pub mod subquery;

use std::sync::Arc;

use datafusion::catalog::TableProvider;
use datafusion::logical_expr::ScalarUDF;

use crate::cluster::CatalogSnapshot;
use crate::server::Shared;
use crate::session::Session;

/// Builds system tables and catalog functions for one statement.
pub struct SystemTables {
    pub(crate) shared: Arc<Shared>,
    pub(crate) settings: millrace_common::settings::SessionSettings,
    pub(crate) search_path: Vec<String>,
    pub(crate) user: String,
    pub(crate) database: String,
    pub(crate) pid: i32,
    /// Prepared statements: name and text.
    pub(crate) prepared: Vec<(String, String)>,
    snapshot: Arc<CatalogSnapshot>,
}

impl SystemTables {
    pub fn new(session: &Session) -> SystemTables {
        let text = |p: &crate::session::Prepared| {
            p.statement.as_ref().map(|s| s.text.clone()).unwrap_or_default()
        };
        let named = session.prepared.iter().filter(|(name, _)| !name.is_empty());
        SystemTables {
            shared: session.shared.clone(),
            settings: session.settings.clone(),
            search_path: session.search_path(),
            user: session.user.clone(),
            database: session.database.clone(),
            pid: session.pid,
            prepared: named.map(|(name, p)| (name.clone(), text(p))).collect(),
            snapshot: session.shared.cluster.catalog(),
        }
    }

    pub(crate) fn catalog(&self) -> &CatalogSnapshot {
        &self.snapshot
    }

    /// A system table by name; without a schema `pg_catalog` is searched, as in PostgreSQL.
    pub fn table(&self, schema: Option<&str>, name: &str) -> Option<Arc<dyn TableProvider>> {
        let batch = match schema {
            None | Some("pg_catalog") => pg::table(self, name),
            Some("information_schema") => information::table(self, name),
            Some("millrace_catalog") => information::millrace_catalog(self, name),
            Some(_) => None,
        }?;
        match crate::dml::rows::mem_table(batch) {
            Ok(table) => Some(table),
            Err(e) => {
                tracing::error!(error = %e, table = name, "a system table could not be built");
                None
            }
        }
    }

    /// A function over the catalogs.
    pub fn function(self: &Arc<Self>, name: &str) -> Option<Arc<ScalarUDF>> {
        functions::lookup(self, name)
    }
}
