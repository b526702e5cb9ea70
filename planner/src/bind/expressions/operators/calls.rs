//! Calls, resolved by the types of their arguments, and constructs that are resolved as calls.

use std::sync::{Arc, OnceLock};

use datafusion::arrow::datatypes::DataType;
use datafusion::common::{DFSchema, Result, ScalarValue};
use datafusion::logical_expr::expr::{Case, ScalarFunction};
use datafusion::logical_expr::{Expr, ExprSchemable, Operator, ScalarUDF, lit, when};
use millrace_common::{SqlError, SqlType};
use millrace_functions::error::external;
use millrace_functions::tree::Walk;
use millrace_functions::types::type_name;
use millrace_functions::{call, functions, greatest_least};

use super::coercion::{as_text, cast_expr};
use super::comparison::is_char;
use super::{OperatorPlanner, Seen};
use crate::bind::expressions::desugar;

impl OperatorPlanner {
    pub(super) fn argument(&self, list: Expr, argument: Expr) -> Result<Expr> {
        let mut args = arguments_of(list);
        match argument {
            Expr::ScalarFunction(f) if f.func.name() == LIST => args.extend(f.args),
            argument => args.push(argument),
        }
        Ok(Expr::ScalarFunction(ScalarFunction::new_udf(argument_list(), args)))
    }

    /// `nullif(a, b)`, whose second argument is compared as `=` compares it.
    fn nullif(&self, args: Vec<Expr>, seen: &[Seen], schema: &DFSchema) -> Result<Expr> {
        let types: Vec<String> = seen.iter().map(type_name).collect();
        let none = || {
            let call = format!("nullif({})", types.join(", "));
            external(millrace_functions::error::undefined_function(&call))
        };
        let [a, b] = <[Expr; 2]>::try_from(args).map_err(|_| none())?;
        let (_, b) = self.comparable(Operator::Eq, a.clone(), b, schema)?;
        let function = functions().scalar("nullif").ok_or_else(none)?;
        Ok(function.call(vec![a, b]))
    }

    /// A call, resolved by the types of its arguments.
    pub(super) fn call(
        &self,
        name: &'static str,
        args: Vec<Expr>,
        schema: &DFSchema,
    ) -> Result<Expr> {
        let mut args = args;
        let mut seen = args.iter().map(|a| self.seen(a, schema)).collect::<Result<Vec<_>>>()?;
        if name.starts_with("jsonb_") && !name.starts_with("jsonb_build") {
            lists_as_text(&mut args, &mut seen)?;
        }
        match name {
            "array_length" | "array_upper" | "array_lower" | "cardinality" | "array_ndims"
            | "array_position" | "array_remove" | "array_replace" => {
                return self.array_function(name, args, &seen);
            }
            "case" => return self.case(args, &seen, schema),
            "width_bucket" if args.len() == 2 => return self.bucket(args, &seen),
            desugar::ANY => return self.any(args, &seen),
            desugar::ARRAY => return self.array(args, &seen),
            desugar::ITEM => return self.item(args, &seen, schema),
            desugar::SLICE => return self.slice(args, &seen),
            desugar::SCALAR => return super::arrays::scalar(args, &seen),
            desugar::SERIES => return self.series(args, &seen),
            desugar::VALUES => {
                let mut args = self.to_common("VALUES", args, &seen)?;
                return Ok(args.swap_remove(0));
            }
            "coalesce" | "greatest" | "least" => return self.one_of(name, args, &seen, schema),
            "nullif" => return self.nullif(args, &seen, schema),
            "pg_typeof" => return pg_typeof(&args, &seen, schema),
            _ => {}
        }
        self.by_types(name, args, &seen)
    }

    /// `coalesce`, `greatest` and `least`, of values of a common type.
    fn one_of(
        &self,
        name: &'static str,
        args: Vec<Expr>,
        seen: &[Seen],
        schema: &DFSchema,
    ) -> Result<Expr> {
        let mut args = self.to_common(&name.to_uppercase(), args, seen)?;
        if name == "coalesce" {
            args = spliced(args);
        }
        let common = args.first().and_then(|a| a.get_type(schema).ok());
        let name = common.and_then(|t| greatest_least::name_for(name, &t)).unwrap_or(name);
        let function = functions()
            .scalar(name)
            .ok_or_else(|| external(SqlError::internal(format!("no function {name}"))))?;
        Ok(function.call(args))
    }

    /// A call of what its name and the types of its arguments stand for.
    fn by_types(&self, name: &'static str, args: Vec<Expr>, seen: &[Seen]) -> Result<Expr> {
        let udf = call::defs().get(name).cloned().or_else(|| functions().scalar(name));
        let udf = udf.ok_or_else(|| external(SqlError::internal(format!("no function {name}"))))?;
        let udf = &udf;
        let overload = call::resolve(udf, seen).map_err(external)?;
        let types = overload.types(args.len()).unwrap_or_default();
        let mut taken = Vec::with_capacity(args.len());
        for ((arg, seen), t) in args.into_iter().zip(seen).zip(types) {
            taken.push(match seen {
                _ if call::takes_any(udf) && seen.is_some() => arg,
                None if matches!(t, SqlType::Numeric(_)) => {
                    self.coerce_unknown_like(arg, &t.to_arrow())?
                }
                None => self.coerce_unknown(arg, t)?,
                Some(from) => self.implicit_to(arg, from, t)?,
            });
        }
        if matches!(overload.returns, SqlType::Numeric(None)) {
            let constants: Option<Vec<ScalarValue>> = taken
                .iter()
                .map(|e| match e {
                    Expr::Literal(v, _) => Some(v.clone()),
                    _ => None,
                })
                .collect();
            // What fails stays a call, and fails when it runs.
            if let Some(constants) = constants
                && let Ok(value) = call::fold(overload, &constants, udf)
            {
                return Ok(Expr::Literal(value, None));
            }
        }
        Ok(udf.call(taken))
    }

    /// CASE: conditions and results in turn, then ELSE.
    fn case(&self, args: Vec<Expr>, seen: &[Seen], schema: &DFSchema) -> Result<Expr> {
        let is_condition = |i: usize| i.is_multiple_of(2) && i + 1 < args.len();
        let (mut conditions, mut results, mut types) = (Vec::new(), Vec::new(), Vec::new());
        let count = args.len();
        let flags: Vec<bool> = (0..count).map(is_condition).collect();
        for (i, arg) in args.into_iter().enumerate() {
            match flags[i] {
                true => conditions.push(Box::new(self.boolean(arg, "CASE/WHEN", schema)?)),
                false => {
                    results.push(arg);
                    types.push(seen[i].clone());
                }
            }
        }
        // PostgreSQL looks at ELSE first.
        let has_else = results.len() > conditions.len();
        if has_else {
            results.rotate_right(1);
            types.rotate_right(1);
        }
        let mut results = self.to_common("CASE", results, &types)?;
        let otherwise = has_else.then(|| Box::new(results.remove(0)));
        let when_then = conditions.into_iter().zip(results.into_iter().map(Box::new)).collect();
        Ok(Expr::Case(Case { expr: None, when_then_expr: when_then, else_expr: otherwise }))
    }
}

/// Paths and lists of keys are read as the text of an array.
fn lists_as_text(args: &mut [Expr], seen: &mut [Seen]) -> Result<()> {
    for (arg, t) in args.iter_mut().zip(seen.iter_mut()) {
        if let Some(from @ DataType::List(_)) = t {
            let list = std::mem::replace(arg, lit(ScalarValue::Null));
            *arg = cast_expr(list, from, SqlType::Text).map_err(external)?;
            *t = Some(DataType::Utf8);
        }
    }
    Ok(())
}

/// `pg_typeof`, which the types tell.
fn pg_typeof(args: &[Expr], seen: &[Seen], schema: &DFSchema) -> Result<Expr> {
    let [t] = seen else {
        return Err(external(millrace_functions::error::undefined_function("pg_typeof()")));
    };
    let name = match args.first().map(|arg| is_char(arg, schema)).transpose()? {
        Some(true) => "character".to_owned(),
        _ => type_name(t),
    };
    let named = as_text(lit(name));
    match args.first() {
        // It makes the rows of its query one, whatever its value is.
        Some(arg) if arg.any(|e| Ok(matches!(e, Expr::AggregateFunction(_))))? => {
            when(arg.clone().is_null(), named.clone()).otherwise(named)
        }
        _ => Ok(named),
    }
}

/// The name of what carries arguments.
const LIST: &str = "#arguments";

/// The arguments of COALESCE with those of a COALESCE among them, which has the same type, in its place. What is nested
/// is planned in time that doubles with every level, as each value is asked for twice: whether it is NULL
/// and what it is. Merged columns of many FULL joins are nested so.
fn spliced(args: Vec<Expr>) -> Vec<Expr> {
    let mut flat = Vec::with_capacity(args.len());
    for arg in args {
        match arg {
            Expr::ScalarFunction(f) if f.func.name() == "coalesce" => flat.extend(f.args),
            arg => flat.push(arg),
        }
    }
    flat
}

/// Carries the arguments of a call to where it is resolved; never in a plan.
fn argument_list() -> Arc<ScalarUDF> {
    static CARRIER: OnceLock<Arc<ScalarUDF>> = OnceLock::new();
    Arc::clone(
        CARRIER.get_or_init(|| millrace_functions::undefined_function::missing_function(LIST)),
    )
}

pub(super) fn arguments_of(list: Expr) -> Vec<Expr> {
    match list {
        Expr::ScalarFunction(f) if f.func.name() == LIST => f.args,
        _ => Vec::new(),
    }
}
