//! Table functions in FROM: TUMBLE, HOP, SESSION and generate_series; and what of FROM is refused.

use datafusion::arrow::datatypes::DataType;
use datafusion::common::{DFSchema, Result, ScalarValue};
use datafusion::logical_expr::planner::{
    PlannedRelation, RelationPlanner, RelationPlannerContext, RelationPlanning,
};
use datafusion::logical_expr::{Expr, ExprSchemable, LogicalPlan, LogicalPlanBuilder, col, lit};
use millrace_common::{SqlError, SqlState, SqlType};
use millrace_functions::error::external;
use millrace_functions::functions;
use millrace_functions::window_fn::as_of_proctime;
use sqlparser::ast::{
    FunctionArg, FunctionArgExpr, FunctionArguments, Ident, ObjectName, TableAlias,
    TableAliasColumnDef, TableFactor, TableVersion,
};

use super::unions;
use super::window_tvf;
use crate::bind::expressions::operators::cast_expr;
use crate::bind::expressions::zones::Zones;
use crate::bind::names::fold;
use crate::bind::names::outer_outputs;

#[derive(Debug)]
pub struct FromPlanner {
    pub for_view: bool,
    pub zones: Zones,
}

impl RelationPlanner for FromPlanner {
    fn plan_relation(
        &self,
        mut relation: TableFactor,
        context: &mut dyn RelationPlannerContext,
    ) -> Result<RelationPlanning> {
        if take_proctime(&mut relation) {
            let planned = self.as_of_proctime(context.plan(relation)?)?;
            return Ok(RelationPlanning::Planned(Box::new(planned)));
        }
        let (name, args, alias) = match relation {
            TableFactor::Table { ref version, ref sample, with_ordinality, .. }
                if version.is_some() || sample.is_some() || with_ordinality =>
            {
                return Err(external(refused(version.is_some(), sample.is_some())));
            }
            TableFactor::Derived { lateral, subquery, alias: Some(alias), sample: None } => {
                let united = unions::is_set_operation(&subquery.body);
                let query = TableFactor::Derived { lateral, subquery, alias: None, sample: None };
                let plan = outer_outputs::name(context.plan(query)?)?;
                let plan = match united {
                    true => unions::typed_in_from(plan).map_err(external)?,
                    false => plan,
                };
                let planned = PlannedRelation::new(plan, Some(alias));
                return Ok(RelationPlanning::Planned(Box::new(planned)));
            }
            TableFactor::Table { name, args: Some(args), alias, .. } => (name, args.args, alias),
            TableFactor::Function { lateral: false, name, args, alias, .. } => (name, args, alias),
            other => return Ok(RelationPlanning::Original(Box::new(other))),
        };
        let function = function_name(&name);
        let args = plain_args(args).map_err(external)?;
        let planned = match function.as_str() {
            "tumble" | "hop" | "session" => window_tvf::plan(&function, args, alias, context)?,
            "generate_series" => {
                let plan = self.series(bound(args, context)?)?;
                PlannedRelation::new(plan, Some(series_alias(alias, &function)))
            }
            "generate_subscripts" if self.for_view => {
                return Err(external(SqlError::unsupported("generate_subscripts in a view")));
            }
            "generate_subscripts" => {
                let plan = self.subscripts(bound(args, context)?)?;
                PlannedRelation::new(plan, Some(series_alias(alias, &function)))
            }
            _ => return Err(external(unknown_function(&function))),
        };
        Ok(RelationPlanning::Planned(Box::new(planned)))
    }
}

fn unknown_function(name: &str) -> SqlError {
    let message = format!("function {name} does not exist");
    SqlError::new(SqlState::UNDEFINED_FUNCTION, message).with_hint(
        "Functions in FROM are TUMBLE, HOP, SESSION, generate_series, generate_subscripts, unnest, \
         string_to_table, regexp_split_to_table and those of jsonb that return rows.",
    )
}

/// Takes `FOR SYSTEM_TIME AS OF PROCTIME()` off a table; whether it was there.
fn take_proctime(relation: &mut TableFactor) -> bool {
    match relation {
        TableFactor::Table {
            args: None, version, sample: None, with_ordinality: false, ..
        } if version.as_ref().is_some_and(is_proctime) => {
            *version = None;
            true
        }
        _ => false,
    }
}

/// `FOR SYSTEM_TIME AS OF PROCTIME()`.
fn is_proctime(version: &TableVersion) -> bool {
    let TableVersion::ForSystemTimeAsOf(sqlparser::ast::Expr::Function(f)) = version else {
        return false;
    };
    let no_args = match &f.args {
        FunctionArguments::List(list) => list.args.is_empty() && list.clauses.is_empty(),
        FunctionArguments::None => true,
        FunctionArguments::Subquery(_) => false,
    };
    function_name(&f.name) == "proctime" && no_args
}

fn refused(version: bool, sample: bool) -> SqlError {
    SqlError::unsupported(match (version, sample) {
        (true, _) => "FOR SYSTEM_TIME AS OF another time than PROCTIME()",
        (_, true) => "TABLESAMPLE",
        _ => "WITH ORDINALITY",
    })
}

fn function_name(name: &ObjectName) -> String {
    name.0.last().and_then(|p| p.as_ident()).map(fold).unwrap_or_default()
}

fn plain_args(args: Vec<FunctionArg>) -> Result<Vec<sqlparser::ast::Expr>, SqlError> {
    args.into_iter()
        .map(|a| match a {
            FunctionArg::Unnamed(FunctionArgExpr::Expr(e)) => Ok(e),
            _ => Err(SqlError::unsupported("a named argument")),
        })
        .collect()
}

/// Arguments that read no columns.
fn bound(
    args: Vec<sqlparser::ast::Expr>,
    context: &mut dyn RelationPlannerContext,
) -> Result<Vec<Expr>> {
    args.into_iter().map(|a| context.sql_to_expr(a, &DFSchema::empty())).collect()
}

/// More rows than this in a constant relation of a view would not belong into its plan.
const MAX_CONSTANT_ROWS: i64 = 100_000;

impl FromPlanner {
    /// A relation as of the processing time. In a view it is marked for the stream planner (see
    /// `stream::lookup`); in batch the processing time is the statement's epoch.
    fn as_of_proctime(&self, relation: LogicalPlan) -> Result<PlannedRelation> {
        let column = relation.schema().columns().into_iter().next();
        let plan = match column.filter(|_| self.for_view) {
            None => relation,
            Some(column) => {
                let mark = as_of_proctime().call(vec![Expr::Column(column)]);
                LogicalPlanBuilder::from(relation).filter(mark)?.build()?
            }
        };
        Ok(PlannedRelation::new(plan, None))
    }

    /// `generate_series(start, stop [, step])`: in batch a relation that makes its rows as they are
    /// read (a list that is unnested where the arguments are only known later), in a view constant rows.
    fn series(&self, args: Vec<Expr>) -> Result<LogicalPlan> {
        let empty = DFSchema::empty();
        if !(2..=3).contains(&args.len()) {
            return Err(external(SqlError::new(
                SqlState::UNDEFINED_FUNCTION,
                format!("function generate_series with {} arguments does not exist", args.len()),
            )));
        }
        // There is none of dates: they are times with a zone.
        let dated = args.into_iter().map(|a| match a.get_type(&empty)? {
            t @ DataType::Date32 => cast_expr(a, &t, SqlType::Timestamptz).map_err(external),
            _ => Ok(a),
        });
        let args = dated
            .map(|a| a.and_then(|a| self.zones.expr(a, &empty)))
            .collect::<Result<Vec<_>>>()?;
        let zero = |e: &Expr| match e {
            Expr::Literal(v, _) if v.data_type().is_integer() => {
                matches!(v.cast_to(&DataType::Int64), Ok(ScalarValue::Int64(Some(0))))
            }
            _ => false,
        };
        if args.get(2).is_some_and(zero) {
            return Err(external(SqlError::new(
                SqlState::INVALID_PARAMETER_VALUE,
                "step size cannot equal zero",
            )));
        }
        if self.for_view {
            return constant_series(&args);
        }
        if let Some(relation) = super::series::relation(&args, self.zones)? {
            return Ok(relation);
        }
        let t = args[0].get_type(&empty)?;
        let integer = t.is_integer();
        let int4 = args
            .iter()
            .all(|a| matches!(a.get_type(&empty), Ok(DataType::Int32 | DataType::Int16)));
        let args = match integer {
            true => args
                .into_iter()
                .map(|a| a.cast_to(&DataType::Int64, &empty))
                .collect::<Result<Vec<_>>>()?,
            false => args,
        };
        unnested_series(args, int4, "generate_series")
    }

    /// `generate_subscripts(array, dimension)`: from 1, as all our arrays count.
    fn subscripts(&self, args: Vec<Expr>) -> Result<LogicalPlan> {
        let name = "generate_subscripts";
        if args.len() != 2 {
            return Err(external(SqlError::new(
                SqlState::UNDEFINED_FUNCTION,
                format!("function {name} with {} arguments does not exist", args.len()),
            )));
        }
        let Some(length) = functions().scalar("array_length") else {
            return Err(external(SqlError::internal("array_length is not registered")));
        };
        let length = length.call(args).cast_to(&DataType::Int64, &DFSchema::empty())?;
        unnested_series(vec![lit(1i64), length], true, name)
    }
}

/// A series whose bounds are only known when it runs: a list that is unnested.
fn unnested_series(args: Vec<Expr>, int4: bool, name: &str) -> Result<LogicalPlan> {
    let Some(list) = functions().scalar("generate_series") else {
        return Err(external(SqlError::internal("generate_series is not registered")));
    };
    let plan = LogicalPlanBuilder::empty(true)
        .project([list.call(args).alias(name)])?
        .unnest_column(name)?
        .build()?;
    if !int4 {
        return Ok(plan);
    }
    let c = col(name).cast_to(&DataType::Int32, plan.schema())?;
    LogicalPlanBuilder::from(plan).project([c.alias(name)])?.build()
}

/// PostgreSQL names the column after the alias of the function.
fn series_alias(alias: Option<TableAlias>, function: &str) -> TableAlias {
    match alias {
        Some(alias) if alias.columns.is_empty() => TableAlias {
            columns: vec![TableAliasColumnDef { name: alias.name.clone(), data_type: None }],
            ..alias
        },
        Some(alias) => alias,
        None => TableAlias {
            explicit: false,
            name: Ident::new(function),
            columns: Vec::new(),
            at: None,
        },
    }
}

fn constant_series(args: &[Expr]) -> Result<LogicalPlan> {
    let integers: Option<Vec<i64>> = args
        .iter()
        .map(|a| match a {
            Expr::Literal(ScalarValue::Int16(Some(v)), _) => Some(i64::from(*v)),
            Expr::Literal(ScalarValue::Int32(Some(v)), _) => Some(i64::from(*v)),
            Expr::Literal(ScalarValue::Int64(Some(v)), _) => Some(*v),
            _ => None,
        })
        .collect();
    let Some(integers) = integers else {
        return Err(external(SqlError::unsupported(
            "generate_series in a view over other than integer constants",
        )));
    };
    let wide = args.iter().any(|a| matches!(a, Expr::Literal(ScalarValue::Int64(_), _)));
    let (start, stop, step) = (integers[0], integers[1], integers.get(2).copied().unwrap_or(1));
    if step == 0 {
        return Err(external(SqlError::new(
            SqlState::INVALID_PARAMETER_VALUE,
            "step size cannot equal zero",
        )));
    }
    let value = |v: i64| match wide {
        true => lit(v),
        false => lit(v as i32),
    };
    let mut rows = Vec::new();
    let mut next = Some(start);
    while let Some(v) = next.filter(|v| if step > 0 { *v <= stop } else { *v >= stop }) {
        rows.push(vec![value(v)]);
        if rows.len() as i64 > MAX_CONSTANT_ROWS {
            return Err(external(SqlError::unsupported(format!(
                "generate_series of more than {MAX_CONSTANT_ROWS} rows in a view"
            ))));
        }
        next = v.checked_add(step);
    }
    let name = |c: Expr| c.alias("generate_series");
    if rows.is_empty() {
        let one = LogicalPlanBuilder::values(vec![vec![value(start)]])?;
        return one.project([name(col("column1"))])?.filter(lit(false))?.build();
    }
    let plan = LogicalPlanBuilder::values(rows)?.build()?;
    let column = Expr::Column(plan.schema().columns().swap_remove(0));
    LogicalPlanBuilder::from(plan).project([name(column)])?.build()
}
