//! System catalogs: `pg_catalog`, `information_schema`, `millrace_catalog` as tables made on demand.
//!
//! A table is built from the catalog snapshot when a statement names it; nothing is kept. OIDs are
//! relation ids; namespaces, types and roles have PostgreSQL's own where it has one. What clients ask
//! for and Millrace does not have (triggers, policies, publications …) is an empty table with
//! PostgreSQL's columns ([`columns`]). Functions that look into the catalogs are in [`functions`];
//! what clients write beyond our SQL is rewritten in [`rewrite`] and [`subquery`].

pub mod activity;
pub mod columns;
mod expanded;
pub mod functions;
pub mod information;
mod lookahead;
pub mod mentions;
pub mod objects;
pub mod pg;
pub mod procedures;
pub mod rewrite;
pub mod rows;
pub mod subquery;
mod tableoid;

use std::sync::{Arc, OnceLock};

use datafusion::catalog::TableProvider;
use datafusion::logical_expr::ScalarUDF;

use crate::cluster::CatalogSnapshot;
use crate::server::Shared;
use crate::session::prepare::Declared;
use crate::session::{Portal, Prepared, Session};

/// Builds system tables and catalog functions for one statement.
pub struct SystemTables {
    pub(crate) shared: Arc<Shared>,
    pub(crate) settings: crate::session::Settings,
    pub(crate) search_path: Vec<String>,
    pub(crate) user: String,
    pub(crate) database: String,
    pub(crate) pid: i32,
    /// What belongs to a transaction outlasts the statement.
    pub(crate) in_transaction: bool,
    /// Prepared statements and cursors by name; of a cursor, whether it is WITH HOLD.
    pub(crate) prepared: Vec<(String, Arc<Prepared>)>,
    pub(crate) cursors: Vec<(String, bool, Declared)>,
    snapshot: Arc<CatalogSnapshot>,
    /// Made when they are asked for: functions ask for each row.
    indexes: OnceLock<Vec<objects::Index>>,
}

impl SystemTables {
    pub fn new(session: &Session) -> SystemTables {
        let cursor = |(name, portal): (&String, &Portal)| {
            Some((name.clone(), portal.hold, portal.declared.clone()?))
        };
        let named = session.prepared.iter().filter(|(name, _)| !name.is_empty());
        SystemTables {
            shared: session.shared.clone(),
            settings: session.settings.clone(),
            search_path: session.search_path(),
            user: session.user.clone(),
            database: session.database.clone(),
            pid: session.pid,
            in_transaction: session.in_transaction(),
            prepared: named.map(|(name, p)| (name.clone(), Arc::clone(p))).collect(),
            cursors: session.portals.iter().filter_map(cursor).collect(),
            snapshot: session.shared.cluster.catalog(),
            indexes: OnceLock::new(),
        }
    }

    /// All indexes of the catalog.
    pub(crate) fn indexes(&self) -> &[objects::Index] {
        self.indexes.get_or_init(|| objects::indexes(&self.snapshot))
    }

    pub(crate) fn catalog(&self) -> &CatalogSnapshot {
        &self.snapshot
    }

    /// All roles and their OIDs. Of one that was created the OID follows from its name.
    pub(crate) fn roles(&self) -> Vec<(i64, String)> {
        let mut all: Vec<(i64, String)> =
            objects::ROLES.iter().map(|(oid, name)| (*oid, (*name).to_owned())).collect();
        let created = self.shared.cluster.users();
        for name in self.shared.config.users.iter().chain(created.keys()) {
            if !all.iter().any(|(_, known)| known == name) {
                // FNV-1a, among numbers that relations do not come to.
                let hash = name.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
                    (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
                });
                all.push((i64::from(hash >> 1) | 1 << 30, name.clone()));
            }
        }
        all
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
