//! Names and types: AST to a logical plan.
use std::sync::Arc;

use datafusion::arrow::datatypes::DataType;
use datafusion::logical_expr::{Expr, LogicalPlan};
use datafusion::common::DFSchema;
use millrace_common::{SqlError, SqlType};
use millrace_rpc::catalog::Relation;
use sqlparser::ast;

use crate::catalog::CatalogView;

/// What of the session a statement's meaning depends on.
#[derive(Clone, Debug)]
pub struct SessionInfo {
    pub database: String,
    pub user: String,
    /// `now()`, fixed for the statement: microseconds since 1970, UTC.
    pub now_us: i64,
    /// Binding a view's definition: `now()` and other volatile functions stay as they are.
    pub for_view: bool,
}

impl Default for SessionInfo {
    fn default() -> SessionInfo {
        SessionInfo { database: "dev".into(), user: "root".into(), now_us: 0, for_view: false }
    }
}

/// A query with its names and types resolved.
#[derive(Clone, Debug)]
pub struct BoundQuery {
    /// Not yet optimised, except that views are expanded and PostgreSQL's semantics are in.
    /// Its own column names may carry a suffix that makes them unique; use `names`.
    pub plan: LogicalPlan,
    /// Output names as PostgreSQL gives them; duplicates are possible.
    pub names: Vec<String>,
    pub types: Vec<SqlType>,
    /// Types of `$1…`, by position; given ones and inferred ones.
    pub param_types: Vec<DataType>,
    /// Relations named by the query, plain views and what they read included.
    pub relations: Vec<Arc<Relation>>,
}

pub struct Binder<'a> {
    pub(crate) catalog: &'a dyn CatalogView,
    pub(crate) session: SessionInfo,
}

impl<'a> Binder<'a> {
    pub fn new(catalog: &'a dyn CatalogView, session: SessionInfo) -> Binder<'a> {
        Binder { catalog, session }
    }

    /// Binds a query. `params`: types of `$1…` as far as the client gave them.
    pub fn query(
        &self,
        _query: &ast::Query,
        _params: &[Option<DataType>],
    ) -> Result<BoundQuery, SqlError> {
        let _ = (self.catalog, &self.session);
        Err(SqlError::unsupported("binding"))
    }

    /// Binds a scalar expression over the columns of `schema` and casts it to `target` by
    /// PostgreSQL's assignment rules, if one is given.
    pub fn expr(
        &self,
        _expr: &ast::Expr,
        _schema: &DFSchema,
        _target: Option<SqlType>,
    ) -> Result<Expr, SqlError> {
        Err(SqlError::unsupported("binding"))
    }
}

/// Refuses (0A000) functions in a view whose result changes from call to call.
pub fn check_view_volatility(_plan: &LogicalPlan) -> Result<(), SqlError> {
    Ok(())
}
