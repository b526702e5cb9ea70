//! Names and types: AST to a logical plan.
//!
//! A query's AST is rewritten ([`rewrites::ast`]) so that everything whose meaning depends on types goes
//! through one hook ([`operators`]); `SqlToRel` does the rest with our [`provider`], and the plan that it
//! makes is rewritten in turn ([`rewrites::plan`]). Views are expanded from their stored text; window
//! functions in FROM become plain plans ([`relations::window_tvf`]). The result runs under DataFusion as it
//! is, and the stream planner takes the same plan.

mod aggregates;
mod expressions;
pub mod names;
mod ordering;
mod relations;
pub mod rewrites;
mod spans;
mod subqueries;
mod windows;

use std::sync::Arc;

use datafusion::arrow::datatypes::DataType;
use datafusion::common::{DFSchema, ScalarValue};
use datafusion::logical_expr::{Expr, ExprSchemable, LogicalPlan};
use datafusion::sql::planner::{ParserOptions, PlannerContext, SqlToRel};
use millrace_common::{SqlError, SqlState, SqlType};
use millrace_functions::error::sql_error_from_datafusion;
use millrace_functions::interrupt;
use millrace_rpc::catalog::Relation;
use sqlparser::ast;

use crate::catalog::CatalogView;
use crate::parser::folded;
use expressions::operators::Parameters;
pub use expressions::volatility::check_view_volatility;
use expressions::zones::Zones;
pub use expressions::{desugar, operators, stored_expressions, types, zones};
use names::outer_names;
pub use names::outputs;
pub use ordering::sort_keys;
use relations::plan_size;
pub use relations::provider;
use relations::provider::{Planning, Provider, Seen};
use rewrites::ast::AstContext;
use rewrites::plan::Of;
use spans::operator_spans;
pub use spans::{locate, misplaced_calls};

/// What of the session a statement's meaning depends on.
#[derive(Clone, Debug)]
pub struct SessionInfo {
    pub database: String,
    pub user: String,
    /// `now()`, fixed for the transaction: microseconds since 1970, UTC.
    pub now_us: i64,
    /// `statement_timestamp()`, likewise.
    pub statement_us: i64,
    /// Binding a view's definition: `now()` and other volatile functions stay as they are.
    pub for_view: bool,
    pub zones: Zones,
}

impl Default for SessionInfo {
    fn default() -> SessionInfo {
        SessionInfo {
            database: "dev".into(),
            user: "root".into(),
            now_us: 0,
            statement_us: 0,
            for_view: false,
            zones: Zones::default(),
        }
    }
}

/// A query with its names and types resolved.
#[derive(Clone, Debug)]
pub struct BoundQuery {
    /// Not yet optimised (see [`crate::optimizer`]); views are expanded and PostgreSQL's semantics
    /// are in. Its own column names may carry a suffix that makes them unique; use `names`.
    pub plan: LogicalPlan,
    /// Output names as PostgreSQL gives them; duplicates are possible.
    pub names: Vec<String>,
    pub types: Vec<SqlType>,
    /// Types of `$1…`, by position; given ones and inferred ones, text where nothing tells.
    pub param_types: Vec<DataType>,
    /// Relations named by the query, plain views and what they read included, by id.
    pub relations: Vec<Arc<Relation>>,
}

impl BoundQuery {
    /// The names as those of a relation: an error (42701) when one is repeated, 42P16 for `?column?`.
    pub fn relation_names(&self) -> Result<Vec<String>, SqlError> {
        for (i, name) in self.names.iter().enumerate() {
            if self.names[..i].contains(name) {
                return Err(SqlError::new(
                    SqlState::DUPLICATE_COLUMN,
                    format!("column \"{name}\" specified more than once"),
                ));
            }
        }
        Ok(self.names.clone())
    }
}

pub struct Binder<'a> {
    catalog: &'a dyn CatalogView,
    session: SessionInfo,
}

impl<'a> Binder<'a> {
    pub fn new(catalog: &'a dyn CatalogView, session: SessionInfo) -> Binder<'a> {
        Binder { catalog, session }
    }

    /// Binds a query. `params`: types of `$1…` as far as the client gave them.
    pub fn query(
        &self,
        query: &ast::Query,
        params: &[Option<DataType>],
    ) -> Result<BoundQuery, SqlError> {
        // A step that is not taken because the statement has ended may look like one that cannot be taken.
        self.bound(query, params).map_err(|e| interrupt::check().err().unwrap_or(e))
    }

    fn bound(
        &self,
        query: &ast::Query,
        params: &[Option<DataType>],
    ) -> Result<BoundQuery, SqlError> {
        let parameters = Arc::new(Parameters::new(params));
        let relations = Seen::default();
        let planning = self.planning(Arc::clone(&parameters), Arc::clone(&relations));
        let plan = plan_query(query, planning)?;
        let plan = rewrites::plan::rewrite(plan, Of::Statement, &self.session)?;
        let fields = plan.schema().fields();
        let names = fields.iter().map(|f| names::shown(f.name()).to_owned()).collect();
        let types = fields
            .iter()
            .map(|f| SqlType::of_field(f))
            .collect::<Result<Vec<_>, _>>()
            .unwrap_or_else(|_| fields.iter().map(|f| output_type(f.data_type())).collect());
        let param_types = parameter_types(&plan, &parameters)?;
        let relations = relations.lock().unwrap_or_else(|e| e.into_inner());
        let relations = relations.values().cloned().collect();
        Ok(BoundQuery { plan, names, types, param_types, relations })
    }

    fn planning(&self, parameters: Arc<Parameters>, relations: Seen) -> Planning<'_> {
        let Binder { catalog, session } = self;
        Planning { catalog: *catalog, session, parameters, relations, depth: 0 }
    }

    /// Binds a scalar expression over the columns of `schema`. With a target, the result has that
    /// type, by PostgreSQL's assignment casts.
    pub fn expr(
        &self,
        expr: &ast::Expr,
        schema: &DFSchema,
        target: Option<SqlType>,
    ) -> Result<Expr, SqlError> {
        let mut expr = expr.clone();
        folded::unfold(&mut expr)?;
        rewrites::ast::rewrite_expr(&mut expr, AstContext::new(self.catalog, &self.session))?;
        let provider = Provider::new(self.planning(Arc::default(), Arc::default()), true);
        let planner = SqlToRel::new_with_options(&provider, parser_options());
        let bound = planner
            .sql_to_expr(expr, schema, &mut PlannerContext::new())
            .map_err(|e| without_marks(sql_error_from_datafusion(e)))?;
        let bound = match target {
            Some(t) => self.assign(bound, schema, t)?,
            None => bound,
        };
        let zones = self.session.zones;
        let bound = match self.session.for_view {
            true => zones.independent(bound, schema),
            false => zones.expr(bound, schema),
        };
        bound.map_err(sql_error_from_datafusion)
    }

    /// An assignment cast (INSERT, UPDATE, DEFAULT) of a bound expression: anything to text, numbers
    /// among each other, literals of unknown type; else error 42804.
    pub fn assign(&self, expr: Expr, schema: &DFSchema, target: SqlType) -> Result<Expr, SqlError> {
        if let Expr::Literal(ScalarValue::Utf8(Some(text)), None) = &expr {
            millrace_functions::cast::check_length(text, target)?;
            let value = self.session.zones.literal(text, target)?;
            return Ok(Expr::Literal(value, None));
        }
        let from = expr.get_type(schema).map_err(sql_error_from_datafusion)?;
        if from == DataType::Null {
            let null =
                ScalarValue::try_from(&target.to_arrow()).map_err(sql_error_from_datafusion)?;
            return Ok(Expr::Literal(null, None));
        }
        if !millrace_functions::cast::assignable(&from, target) {
            return Err(SqlError::new(
                SqlState::DATATYPE_MISMATCH,
                format!(
                    "column is of type {target} but expression is of type {}",
                    millrace_functions::types::type_name(&Some(from))
                ),
            )
            .with_hint("You will need to rewrite or cast the expression."));
        }
        operators::cast_expr(expr, &from, target)
    }
}

/// What `SqlToRel` reads of its own options.
fn parser_options() -> ParserOptions {
    ParserOptions::new().with_parse_float_as_decimal(true).with_map_string_types_to_utf8view(false)
}

/// Plans one query (a statement's, or a view's stored one).
fn plan_query(written: &ast::Query, planning: Planning<'_>) -> Result<LogicalPlan, SqlError> {
    if let Some(found) = misplaced_calls::in_query(written) {
        return Err(found.error);
    }
    let mut query = written.clone();
    if folded::spell_lists(&mut query)? {
        let plan = plan_spelled(query, planning.clone());
        interrupt::check()?;
        return plan.or_else(|_| {
            // What is wrong has its place in the list as it is written.
            let mut written = written.clone();
            folded::unfold(&mut written)?;
            plan_spelled(written, planning)
        });
    }
    plan_spelled(query, planning)
}

/// [`plan_query`] of a query whose lists are expressions.
fn plan_spelled(mut query: ast::Query, planning: Planning<'_>) -> Result<LogicalPlan, SqlError> {
    let session = planning.session;
    plan_size::check_references(&query)?;
    let hidden = locate::names_identifier(&query, ROW_ID);
    let context = AstContext::new(planning.catalog, session);
    rewrites::ast::rewrite_query(&mut query, context).map_err(without_marks)?;
    let provider = Provider::new(planning, hidden);
    let planner = SqlToRel::new_with_options(&provider, parser_options());
    let plan_once = |query: &ast::Query| {
        let statement = ast::Statement::Query(Box::new(query.clone()));
        let plan = planner.sql_statement_to_plan(statement).map_err(sql_error_from_datafusion);
        plan.map_err(without_marks)
    };
    let mut planned = plan_once(&query);
    let names = provider.taken_for_columns.take();
    if !names.is_empty() {
        outer_names::rename(&mut query, &names)?;
        planned = plan_once(&query);
    }
    rewrites::plan::rewrite(planned?, Of::Query, session)
}

/// An error whose message shows nothing of what is noted in names and operators.
fn without_marks(mut e: SqlError) -> SqlError {
    e.message = names::without_marks(&operator_spans::without_marks(&e.message));
    e
}

/// The hidden row id of relations without a key.
const ROW_ID: &str = "_row_id";

/// Lists and structs, which only system queries return, are shown as text.
fn output_type(t: &DataType) -> SqlType {
    SqlType::from_arrow(t).unwrap_or(SqlType::Text)
}

fn parameter_types(plan: &LogicalPlan, parameters: &Parameters) -> Result<Vec<DataType>, SqlError> {
    let fields = plan.get_parameter_fields().map_err(sql_error_from_datafusion)?;
    for (id, field) in fields {
        parameters.note(&id, field.map(|f| f.data_type().clone()));
    }
    Ok(parameters.all().into_iter().map(|t| t.unwrap_or(DataType::Utf8)).collect())
}

#[cfg(test)]
mod tests;
