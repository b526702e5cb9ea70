//! What `SqlToRel` asks: relations, functions, options.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use datafusion::arrow::datatypes::{DataType, Schema, SchemaRef};
use datafusion::catalog::cte_worktable::CteWorkTable;
use datafusion::common::{Column, Result, TableReference};
use datafusion::config::ConfigOptions;
use datafusion::datasource::provider_as_source;
use datafusion::execution::SessionStateDefaults;
use datafusion::logical_expr::planner::{ContextProvider, ExprPlanner, RelationPlanner};
use datafusion::logical_expr::{
    AggregateUDF, Expr, HigherOrderUDF, LogicalPlan, LogicalPlanBuilder, ScalarUDF, TableSource,
    TableType, WindowUDF,
};
use datafusion::sql::planner::{PlannerContext, SqlToRel};
use millrace_common::{SqlError, SqlState};
use millrace_functions::error::{closest, external};
use millrace_functions::functions;
use millrace_functions::interrupt;
use millrace_rpc::catalog::{Column as CatalogColumn, Relation, RelationKind};

use super::from_items::FromPlanner;
use crate::bind::SessionInfo;
use crate::bind::expressions::operators::{OperatorPlanner, Parameters};
use crate::bind::expressions::zones::Zones;
use crate::bind::names::outer_names::TakenForColumns;
use crate::bind::rewrites::ast::{AstContext, rewrite_expr};
use crate::catalog::CatalogView;
use crate::optimizer::config_options;

/// Relations that a statement has named so far, by id.
pub type Seen = Arc<Mutex<BTreeMap<u32, Arc<Relation>>>>;

/// What the queries of one text are planned with.
#[derive(Clone)]
pub struct Planning<'a> {
    pub catalog: &'a dyn CatalogView,
    pub session: &'a SessionInfo,
    pub parameters: Arc<Parameters>,
    pub relations: Seen,
    /// Views within views.
    pub depth: usize,
}

pub struct Provider<'a> {
    catalog: &'a dyn CatalogView,
    session: &'a SessionInfo,
    options: ConfigOptions,
    expr_planners: Vec<Arc<dyn ExprPlanner>>,
    relation_planners: Vec<Arc<dyn RelationPlanner>>,
    relations: Seen,
    /// The query names a hidden column, so scans show them.
    show_hidden: bool,
    /// Views within views.
    depth: usize,
    /// What the names of the query that it serves were taken for.
    pub taken_for_columns: Arc<TakenForColumns>,
}

/// Views may nest this deep: bounds the stack of later passes.
const MAX_VIEW_DEPTH: usize = 64;
/// Binding goes on with more stack where less than the first is left.
const STACK_LEFT: usize = 512 << 10;
const MORE_STACK: usize = 4 << 20;

impl<'a> Provider<'a> {
    pub fn new(planning: Planning<'a>, show_hidden: bool) -> Provider<'a> {
        let Planning { catalog, session, parameters, relations, depth } = planning;
        let taken_for_columns = Arc::new(TakenForColumns::default());
        let mut expr_planners: Vec<Arc<dyn ExprPlanner>> = vec![Arc::new(OperatorPlanner {
            parameters,
            taken_for_columns: Arc::clone(&taken_for_columns),
            zones: session.zones,
        })];
        expr_planners.extend(SessionStateDefaults::default_expr_planners());
        Provider {
            catalog,
            session,
            options: config_options(),
            expr_planners,
            relation_planners: vec![Arc::new(FromPlanner {
                for_view: session.for_view,
                zones: session.zones,
            })],
            relations,
            show_hidden,
            depth,
            taken_for_columns,
        }
    }

    /// What another text is planned with, whose relations are the statement's too.
    fn planning<'s>(&'s self, session: &'s SessionInfo, depth: usize) -> Planning<'s> {
        let relations = Arc::clone(&self.relations);
        Planning { catalog: self.catalog, session, parameters: Arc::default(), relations, depth }
    }

    fn source(&self, name: &TableReference) -> Result<Arc<dyn TableSource>, SqlError> {
        interrupt::check()?;
        if let Some(catalog) = name.catalog()
            && catalog != self.session.database
        {
            return Err(SqlError::unsupported("a reference to another database"));
        }
        if let Some(relation) = self.catalog.relation(name.schema(), name.table()) {
            return self.relation(relation);
        }
        match self.catalog.system_table(name.schema(), name.table()) {
            Some(source) => Ok(source),
            None => Err(self.undefined(name)),
        }
    }

    fn relation(&self, relation: Arc<Relation>) -> Result<Arc<dyn TableSource>, SqlError> {
        let seen = Arc::clone(&relation);
        self.relations.lock().unwrap_or_else(|e| e.into_inner()).insert(relation.id, seen);
        match RelationKind::try_from(relation.kind).unwrap_or(RelationKind::Unspecified) {
            RelationKind::View => self.view(&relation),
            RelationKind::Table | RelationKind::Source | RelationKind::MaterializedView => {
                let source = self.catalog.table_source(&relation)?;
                let computed = |c: &CatalogColumn| c.generated_sql.is_some();
                if relation.kind() == RelationKind::Source && relation.columns.iter().any(computed)
                {
                    return self.with_generated(&relation, source);
                }
                if self.show_hidden || !relation.columns.iter().any(|c| c.hidden) {
                    return Ok(source);
                }
                hide_columns(&relation, source)
            }
            _ => Err(SqlError::new(
                SqlState::WRONG_OBJECT_TYPE,
                format!("cannot open relation \"{}\"", relation.name),
            )),
        }
    }

    /// A source's generated columns, as expressions over a scan of the others. Its time column is read: whoever reads a
    /// source computes it, since that decides which rows are late.
    fn with_generated(
        &self,
        relation: &Relation,
        source: Arc<dyn TableSource>,
    ) -> Result<Arc<dyn TableSource>, SqlError> {
        let failed = millrace_functions::error::sql_error_from_datafusion;
        let shown = |c: &CatalogColumn| self.show_hidden || !c.hidden;
        let time = relation.watermark.as_ref().map(|w| w.column as usize);
        let is_read = |i: usize| relation.columns[i].generated_sql.is_none() || time == Some(i);
        let read = (0..relation.columns.len())
            .filter(|&i| is_read(i) && shown(&relation.columns[i]))
            .collect();
        let name = TableReference::partial(relation.schema.as_str(), relation.name.as_str());
        let scan = LogicalPlanBuilder::scan(name, source, Some(read))
            .and_then(|b| b.build())
            .map_err(failed)?;
        // In UTC, as whoever else reads the source computes them.
        let utc;
        let in_utc;
        let provider = match self.session.zones.zone {
            None => self,
            Some(_) => {
                utc = SessionInfo { zones: Zones::default(), ..self.session.clone() };
                in_utc = Provider::new(self.planning(&utc, self.depth), self.show_hidden);
                &in_utc
            }
        };
        let planner = SqlToRel::new_with_options(provider, crate::bind::parser_options());
        let mut columns = Vec::new();
        for (i, column) in relation.columns.iter().enumerate().filter(|(_, c)| shown(c)) {
            let expr = match column.generated_sql.as_ref().filter(|_| !is_read(i)) {
                None => {
                    let field = scan.schema().qualified_field_with_unqualified_name(&column.name);
                    Expr::Column(field.map_err(failed)?.into())
                }
                Some(text) => {
                    let mut expr = crate::parser::parse_expr(text)?;
                    rewrite_expr(&mut expr, AstContext::new(self.catalog, provider.session))?;
                    planner
                        .sql_to_expr(expr, scan.schema(), &mut PlannerContext::new())
                        .and_then(|e| self.session.zones.independent(e, scan.schema()))
                        .map_err(failed)?
                }
            };
            columns.push(expr.alias(column.name.clone()));
        }
        let plan = LogicalPlanBuilder::from(scan)
            .project(columns)
            .and_then(|b| b.build())
            .map_err(failed)?;
        Ok(Arc::new(PlanSource::new(plan)))
    }

    /// A plain view's query in place of a scan.
    fn view(&self, view: &Relation) -> Result<Arc<dyn TableSource>, SqlError> {
        if self.depth >= MAX_VIEW_DEPTH {
            return Err(SqlError::new(
                SqlState::STATEMENT_TOO_COMPLEX,
                format!("views are nested more than {MAX_VIEW_DEPTH} deep"),
            ));
        }
        let query = crate::parser::parse_query(&view.query)?;
        // Its places are those of another text.
        let elsewhere = |mut e: SqlError| {
            e.after = None;
            e
        };
        let stored;
        let session = match self.session.zones.zone {
            None => self.session,
            Some(_) => {
                let zones = self.session.zones.of_stored();
                stored = SessionInfo { zones, ..self.session.clone() };
                &stored
            }
        };
        let bind = || crate::bind::plan_query(&query, self.planning(session, self.depth + 1));
        let plan = stacker::maybe_grow(STACK_LEFT, MORE_STACK, bind)
            .and_then(super::unions::unify)
            .map_err(elsewhere)?;
        let fields = plan.schema().columns();
        if fields.len() != view.columns.len() {
            let message = format!("view \"{}\" no longer has its columns", view.name);
            return Err(SqlError::internal(message));
        }
        let named = fields
            .into_iter()
            .zip(&view.columns)
            .map(|(f, c)| Expr::Column(f).alias(c.name.clone()));
        let plan = LogicalPlanBuilder::from(plan)
            .project(named)
            .and_then(|b| b.build())
            .map_err(millrace_functions::error::sql_error_from_datafusion)?;
        Ok(Arc::new(PlanSource::new(plan)))
    }

    fn undefined(&self, name: &TableReference) -> SqlError {
        if let Some(schema) = name.schema()
            && !self.catalog.schemas().iter().any(|s| s == schema)
        {
            return SqlError::new(
                SqlState::UNDEFINED_TABLE,
                format!("relation \"{schema}.{}\" does not exist", name.table()),
            )
            .with_detail(format!("There is no schema \"{schema}\"."));
        }
        let shown = match name.schema() {
            Some(schema) => format!("{schema}.{}", name.table()),
            None => name.table().to_owned(),
        };
        let e = SqlError::new(
            SqlState::UNDEFINED_TABLE,
            format!("relation \"{shown}\" does not exist"),
        );
        let names = self.catalog.names();
        match closest(name.table(), names.iter().map(String::as_str)) {
            Some(near) => e.with_hint(format!("Perhaps you meant the relation \"{near}\".")),
            None => e,
        }
    }
}

/// A scan of the columns that `*` shows.
fn hide_columns(
    relation: &Relation,
    source: Arc<dyn TableSource>,
) -> Result<Arc<dyn TableSource>, SqlError> {
    let visible = (0..relation.columns.len()).filter(|&i| !relation.columns[i].hidden).collect();
    let name = TableReference::partial(relation.schema.as_str(), relation.name.as_str());
    let scan = LogicalPlanBuilder::scan(name, source, Some(visible))
        .and_then(|b| b.build())
        .map_err(millrace_functions::error::sql_error_from_datafusion)?;
    Ok(Arc::new(PlanSource::new(scan)))
}

/// A relation that is a plan: it is put in the place of its scan.
#[derive(Debug)]
struct PlanSource {
    plan: LogicalPlan,
    schema: SchemaRef,
}

impl PlanSource {
    fn new(plan: LogicalPlan) -> PlanSource {
        let schema = Arc::new(Schema::clone(plan.schema().as_arrow()));
        PlanSource { plan, schema }
    }
}

impl TableSource for PlanSource {
    fn schema(&self) -> SchemaRef {
        Arc::clone(&self.schema)
    }

    fn table_type(&self) -> TableType {
        TableType::View
    }

    fn get_logical_plan(&self) -> Option<Cow<'_, LogicalPlan>> {
        Some(Cow::Borrowed(&self.plan))
    }
}

/// The columns of a plan, qualified.
pub fn columns_of(plan: &LogicalPlan) -> Vec<Expr> {
    plan.schema().iter().map(|field| Expr::Column(Column::from(field))).collect()
}

impl ContextProvider for Provider<'_> {
    fn get_table_source(&self, name: TableReference) -> Result<Arc<dyn TableSource>> {
        self.source(&name).map_err(external)
    }

    fn create_cte_work_table(&self, name: &str, schema: SchemaRef) -> Result<Arc<dyn TableSource>> {
        if self.session.for_view {
            return Err(external(SqlError::unsupported("WITH RECURSIVE in a view")));
        }
        Ok(provider_as_source(Arc::new(CteWorkTable::new(name, schema))))
    }

    fn get_expr_planners(&self) -> &[Arc<dyn ExprPlanner>] {
        &self.expr_planners
    }

    fn get_relation_planners(&self) -> &[Arc<dyn RelationPlanner>] {
        &self.relation_planners
    }

    fn get_function_meta(&self, name: &str) -> Option<Arc<ScalarUDF>> {
        let known = self.catalog.function(name).or_else(|| functions().scalar(name));
        if known.is_some()
            || functions().aggregate(name).is_some()
            || functions().window(name).is_some()
            || name == "unnest"
        {
            return known;
        }
        Some(millrace_functions::undefined_function::missing_function(name))
    }

    fn get_higher_order_meta(&self, _name: &str) -> Option<Arc<HigherOrderUDF>> {
        None
    }

    fn get_aggregate_meta(&self, name: &str) -> Option<Arc<AggregateUDF>> {
        functions().aggregate(name)
    }

    fn get_window_meta(&self, name: &str) -> Option<Arc<WindowUDF>> {
        functions().window(name)
    }

    fn get_variable_type(&self, _names: &[String]) -> Option<DataType> {
        None
    }

    fn options(&self) -> &ConfigOptions {
        &self.options
    }

    fn udf_names(&self) -> Vec<String> {
        functions().scalar_names()
    }

    fn higher_order_function_names(&self) -> Vec<String> {
        Vec::new()
    }

    fn udaf_names(&self) -> Vec<String> {
        functions().aggregate_names()
    }

    fn udwf_names(&self) -> Vec<String> {
        functions().window_names()
    }
}
