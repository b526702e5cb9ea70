//! System catalogs: `pg_catalog`, `information_schema`, `millrace_catalog` as tables made on demand.
//!
//! A table is built from the catalog snapshot when a statement names it; nothing is kept. OIDs are
//! relation ids; namespaces, types and roles have PostgreSQL's own where it has one. What clients ask
//! for and Millrace does not have (triggers, policies, publications …) is an empty table.

pub mod rewrite;
pub mod tables;

use std::sync::Arc;

use datafusion::catalog::TableProvider;

use crate::cluster::Cluster;
use crate::server::Shared;
use crate::session::Session;

/// Builds system tables for one statement.
pub struct SystemTables {
    pub(crate) shared: Arc<Shared>,
    pub(crate) settings: millrace_common::settings::SessionSettings,
}

impl SystemTables {
    pub fn new(session: &Session) -> SystemTables {
        SystemTables {
            shared: session.shared.clone(),
            settings: session.settings.clone(),
        }
    }

    pub(crate) fn cluster(&self) -> &Arc<dyn Cluster> {
        &self.shared.cluster
    }

    /// A system table by name; without a schema `pg_catalog` is searched, as in PostgreSQL.
    pub fn table(&self, schema: Option<&str>, name: &str) -> Option<Arc<dyn TableProvider>> {
        let batch = match schema {
            None | Some("pg_catalog") => tables::pg_catalog(self, name),
            Some("information_schema") => tables::information_schema(self, name),
            Some("millrace_catalog") => tables::millrace_catalog(self, name),
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
}
