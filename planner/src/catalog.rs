//! What the planner asks of the catalog.

use std::sync::Arc;

use datafusion::logical_expr::{ScalarUDF, TableSource};
use millrace_common::SqlError;
use millrace_rpc::catalog::Relation;

/// An immutable view of the catalog, for one statement.
///
/// Names arrive folded (unquoted ones in lower case). Without a schema the implementation follows
/// `search_path`.
pub trait CatalogView: Send + Sync {
    fn relation(&self, schema: Option<&str>, name: &str) -> Option<Arc<Relation>>;

    /// What a scan of the relation is bound to: all columns of [`Relation::arrow_schema`], hidden
    /// ones included. In a frontend it wraps a table provider, so that the plan can be executed.
    fn table_source(&self, relation: &Arc<Relation>) -> Result<Arc<dyn TableSource>, SqlError>;

    /// A system table (`pg_catalog`, `information_schema`, `millrace_catalog`), if there is one.
    fn system_table(&self, _schema: Option<&str>, _name: &str) -> Option<Arc<dyn TableSource>> {
        None
    }

    /// OID and column names of such a table.
    fn system_columns(&self, _schema: Option<&str>, _name: &str) -> Option<(u32, Vec<String>)> {
        None
    }

    /// A function that only this catalog knows (`pg_get_viewdef` and the like).
    fn function(&self, _name: &str) -> Option<Arc<ScalarUDF>> {
        None
    }

    /// The schemas searched for unqualified names, first match wins.
    fn search_path(&self) -> Vec<String> {
        vec!["public".into(), "pg_catalog".into()]
    }

    /// All schema names, for "schema does not exist".
    fn schemas(&self) -> Vec<String> {
        vec!["public".into(), "pg_catalog".into(), "information_schema".into()]
    }

    /// Visible relation names, for suggestions.
    fn names(&self) -> Vec<String>;
}
