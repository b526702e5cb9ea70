//! PostgreSQL's operators: which exists for which types, what its operands become, and what it
//! returns.
//!
//! Arithmetic, casts and `||` turn into functions of ours ([`crate::functions`]) that compute and fail
//! as PostgreSQL does. Comparisons stay DataFusion's, so that joins and filters are recognised, with
//! literals and parameters of unknown type turned into the other operand's type first.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};

use datafusion::arrow::datatypes::{DataType, Field, IntervalUnit};
use datafusion::common::metadata::FieldMetadata;
use datafusion::common::{DFSchema, Result, ScalarValue};
use datafusion::error::DataFusionError;
use datafusion::logical_expr::expr::{Case, Placeholder, ScalarFunction};
use datafusion::logical_expr::planner::{
    ExprPlanner, PlannerResult, RawBinaryExpr, RawFieldAccessExpr,
};
use datafusion::logical_expr::{
    BinaryExpr, Expr, ExprSchemable, GetFieldAccess, Operator, ScalarUDF, lit,
};
use millrace_common::types::{CHAR_LENGTH, Element};
use millrace_common::{SqlError, SqlState, SqlType};
use sqlparser::ast::BinaryOperator;

use super::desugar::Op;
use super::places;
use crate::error::external;
use crate::functions::arith::{ArithOp, Operands, operands};
use crate::functions::bounded::text_concat;
use crate::functions::call;
use crate::functions::cast::{cast_function, fold_literal, parse_number};
use crate::functions::functions;
use crate::functions::numeric::Num;
use crate::functions::quantified::compare_any;

/// Types of `$1…` as far as known: given by the client, or by the first use that told.
#[derive(Debug, Default)]
pub struct Parameters {
    types: Mutex<Vec<Option<DataType>>>,
}

impl Parameters {
    pub fn new(given: &[Option<DataType>]) -> Parameters {
        Parameters { types: Mutex::new(given.to_vec()) }
    }

    fn with<R>(&self, f: impl FnOnce(&mut Vec<Option<DataType>>) -> R) -> R {
        f(&mut self.types.lock().unwrap_or_else(|e| e.into_inner()))
    }

    fn index(id: &str) -> Option<usize> {
        id.strip_prefix('$')?.parse::<usize>().ok()?.checked_sub(1)
    }

    pub fn get(&self, id: &str) -> Option<DataType> {
        let i = Parameters::index(id)?;
        self.with(|t| t.get(i).cloned().flatten())
    }

    /// Remembers a parameter; its type, if it had none.
    pub fn note(&self, id: &str, t: Option<DataType>) {
        let Some(i) = Parameters::index(id).filter(|&i| i < 65_535) else { return };
        self.with(|types| {
            if types.len() <= i {
                types.resize(i + 1, None);
            }
            if types[i].is_none() {
                types[i] = t;
            }
        });
    }

    pub fn all(&self) -> Vec<Option<DataType>> {
        self.with(|t| t.clone())
    }
}

/// Resolves operators and the custom ones of [`super::desugar`].
#[derive(Debug)]
pub struct OperatorPlanner {
    pub parameters: Arc<Parameters>,
}

impl ExprPlanner for OperatorPlanner {
    fn plan_binary_op(
        &self,
        expr: RawBinaryExpr,
        schema: &DFSchema,
    ) -> Result<PlannerResult<RawBinaryExpr>> {
        let RawBinaryExpr { op, left, right } = expr;
        let (op, after) = places::split(&op);
        let raw = RawBinaryExpr { op, left, right };
        self.plan(raw, schema).map_err(|e| places::placed(e, after))
    }

    /// An element of an aggregate's array. DataFusion would take it for an aggregate of its own.
    fn plan_field_access(
        &self,
        expr: RawFieldAccessExpr,
        _: &DFSchema,
    ) -> Result<PlannerResult<RawFieldAccessExpr>> {
        let RawFieldAccessExpr { field_access, expr } = expr;
        match (field_access, expr, functions().scalar("array_element")) {
            (
                GetFieldAccess::ListIndex { key },
                expr @ Expr::AggregateFunction(_),
                Some(element),
            ) => Ok(PlannerResult::Planned(element.call(vec![expr, *key]))),
            (field_access, expr, _) => {
                Ok(PlannerResult::Original(RawFieldAccessExpr { field_access, expr }))
            }
        }
    }
}

impl OperatorPlanner {
    fn plan(&self, expr: RawBinaryExpr, schema: &DFSchema) -> Result<PlannerResult<RawBinaryExpr>> {
        let RawBinaryExpr { op, left, right } = expr;
        let planned = match Op::decode(&op) {
            Some(ours) => self.custom(ours, left, right, schema)?,
            None => match plain(&op) {
                Some(Plain::Arith(a)) => self.arithmetic(a, left, right, schema)?,
                Some(Plain::Compare(c)) => self.comparison(c, left, right, schema)?,
                Some(Plain::Concat) => self.concat(left, right, schema)?,
                Some(Plain::Json(name, array)) => {
                    self.document(op, name, array, left, right, schema)?
                }
                Some(Plain::Call(name)) => self.call(name, vec![left, right], schema)?,
                Some(Plain::NotCall(name)) => {
                    Expr::Not(Box::new(self.call(name, vec![left, right], schema)?))
                }
                Some(Plain::Logic(op, name)) => {
                    let left = self.boolean(left, name, schema)?;
                    let right = self.boolean(right, name, schema)?;
                    Expr::BinaryExpr(BinaryExpr::new(Box::new(left), op, Box::new(right)))
                }
                None => {
                    return Ok(PlannerResult::Original(RawBinaryExpr { op, left, right }));
                }
            },
        };
        Ok(PlannerResult::Planned(planned))
    }
}

enum Plain {
    Arith(ArithOp),
    Compare(Operator),
    Concat,
    /// An operator of documents, and DataFusion's function if it is one of arrays too.
    Json(&'static str, Option<&'static str>),
    Call(&'static str),
    NotCall(&'static str),
    Logic(Operator, &'static str),
}

fn plain(op: &BinaryOperator) -> Option<Plain> {
    use BinaryOperator as B;
    Some(match op {
        B::Plus => Plain::Arith(ArithOp::Add),
        B::Minus => Plain::Arith(ArithOp::Sub),
        B::Multiply => Plain::Arith(ArithOp::Mul),
        B::Divide => Plain::Arith(ArithOp::Div),
        B::Modulo => Plain::Arith(ArithOp::Mod),
        B::Eq => Plain::Compare(Operator::Eq),
        B::NotEq => Plain::Compare(Operator::NotEq),
        B::Lt => Plain::Compare(Operator::Lt),
        B::LtEq => Plain::Compare(Operator::LtEq),
        B::Gt => Plain::Compare(Operator::Gt),
        B::GtEq => Plain::Compare(Operator::GtEq),
        B::StringConcat => Plain::Concat,
        B::Arrow => Plain::Json("jsonb_get", None),
        B::LongArrow => Plain::Json("jsonb_get_text", None),
        B::HashArrow => Plain::Json("jsonb_follow", None),
        B::HashLongArrow => Plain::Json("jsonb_follow_text", None),
        B::AtArrow => Plain::Json("jsonb_contains", Some("array_has_all")),
        B::ArrowAt => Plain::Json("jsonb_contained", Some("array_has_all")),
        B::PGOverlap => Plain::Json("", Some("array_has_any")),
        B::HashMinus => Plain::Json("jsonb_delete_path", None),
        B::Question => Plain::Json("jsonb_exists", None),
        B::QuestionPipe => Plain::Json("jsonb_exists_any", None),
        B::QuestionAnd => Plain::Json("jsonb_exists_all", None),
        B::PGExp => Plain::Call("power"),
        B::PGStartsWith => Plain::Call("starts_with"),
        B::PGRegexMatch => Plain::Call("regex_match"),
        B::PGRegexIMatch => Plain::Call("regex_imatch"),
        B::PGRegexNotMatch => Plain::NotCall("regex_match"),
        B::PGRegexNotIMatch => Plain::NotCall("regex_imatch"),
        B::And => Plain::Logic(Operator::And, "AND"),
        B::Or => Plain::Logic(Operator::Or, "OR"),
        _ => return None,
    })
}

/// A type as operator resolution sees it: `None` is PostgreSQL's `unknown`.
type Seen = Option<DataType>;

fn is_text(t: &DataType) -> bool {
    matches!(t, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View)
}

impl OperatorPlanner {
    fn seen(&self, e: &Expr, schema: &DFSchema) -> Result<Seen> {
        Ok(match e {
            Expr::Literal(ScalarValue::Utf8(_) | ScalarValue::Null, _) => None,
            Expr::Placeholder(p) => match &p.field {
                Some(f) => Some(f.data_type().clone()),
                None => self.parameters.get(&p.id),
            },
            Expr::Alias(a) => return self.seen(&a.expr, schema),
            e => match e.get_type(schema)? {
                DataType::Null => None,
                t => Some(t),
            },
        })
    }

    fn custom(&self, op: Op, left: Expr, right: Expr, schema: &DFSchema) -> Result<Expr> {
        match op {
            Op::Number => match &left {
                Expr::Literal(ScalarValue::Utf8(Some(text)), _) => {
                    Ok(Expr::Literal(parse_number(text).map_err(external)?, None))
                }
                _ => Err(external(SqlError::internal("number without text"))),
            },
            Op::Cast(to) => self.cast(left, to, schema),
            Op::Negate => self.negate(left, schema),
            Op::Distinct => self.comparison(Operator::IsDistinctFrom, left, right, schema),
            Op::NotDistinct => self.comparison(Operator::IsNotDistinctFrom, left, right, schema),
            Op::Element => {
                let (_, element) = self.comparable(Operator::Eq, left, right, schema)?;
                Ok(element)
            }
            Op::Argument => self.argument(left, right),
            Op::Call(name) => self.call(name, arguments_of(left), schema),
            Op::Parameter => match right {
                Expr::Placeholder(p) => {
                    self.parameters.note(&p.id, None);
                    Ok(match self.parameters.get(&p.id) {
                        Some(t) => placeholder(p.id, t),
                        None => Expr::Placeholder(p),
                    })
                }
                other => Ok(other),
            },
        }
    }

    fn argument(&self, list: Expr, argument: Expr) -> Result<Expr> {
        let mut args = arguments_of(list);
        args.push(argument);
        Ok(Expr::ScalarFunction(ScalarFunction::new_udf(argument_list(), args)))
    }

    /// A call, resolved by the types of its arguments.
    fn call(&self, name: &'static str, args: Vec<Expr>, schema: &DFSchema) -> Result<Expr> {
        let mut args = args;
        let mut seen = args.iter().map(|a| self.seen(a, schema)).collect::<Result<Vec<_>>>()?;
        if name.starts_with("jsonb_") && !name.starts_with("jsonb_build") {
            // Paths and lists of keys are read as the text of an array.
            for (arg, t) in args.iter_mut().zip(seen.iter_mut()) {
                if let Some(from @ DataType::List(_)) = t {
                    let list = std::mem::replace(arg, lit(ScalarValue::Null));
                    *arg = cast_expr(list, from, SqlType::Text).map_err(external)?;
                    *t = Some(DataType::Utf8);
                }
            }
        }
        match name {
            "array_length" | "array_upper" | "array_lower" | "cardinality" | "array_ndims"
            | "array_position" | "array_remove" | "array_replace" => {
                return self.array_function(name, args, &seen);
            }
            "case" => return self.case(args, &seen, schema),
            super::desugar::ANY => return self.any(args, &seen),
            super::desugar::SERIES => return self.series(args, &seen),
            super::desugar::VALUES => {
                let mut args = self.to_common("VALUES", args, &seen)?;
                return Ok(args.swap_remove(0));
            }
            "coalesce" | "greatest" | "least" => {
                let (construct, function) = (name.to_uppercase(), functions().scalar(name));
                let function = function
                    .ok_or_else(|| external(SqlError::internal(format!("no function {name}"))))?;
                let args = self.to_common(&construct, args, &seen)?;
                return Ok(function.call(args));
            }
            "pg_typeof" => {
                let [t] = seen.as_slice() else {
                    return Err(external(crate::error::undefined_function("pg_typeof()")));
                };
                return Ok(lit(type_name(t)));
            }
            _ => {}
        }
        let udf = call::defs().get(name).cloned().or_else(|| functions().scalar(name));
        let udf = udf.ok_or_else(|| external(SqlError::internal(format!("no function {name}"))))?;
        let udf = &udf;
        let overload = call::resolve(udf, &seen).map_err(external)?;
        let types = overload.types(args.len()).unwrap_or_default();
        let mut taken = Vec::with_capacity(args.len());
        for ((arg, seen), t) in args.into_iter().zip(&seen).zip(types) {
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

    /// `op ANY (array)`: the array's elements and the value as one type.
    fn any(&self, args: Vec<Expr>, seen: &[Seen]) -> Result<Expr> {
        let types: Vec<String> = seen.iter().take(2).map(type_name).collect();
        let (Ok([value, list, op]), [vt, lt, _]) = (<[Expr; 3]>::try_from(args), seen) else {
            return Err(external(SqlError::internal("ANY without its operands")));
        };
        let symbol = match &op {
            Expr::Literal(v, _) => v.try_as_str().flatten().unwrap_or("=").to_owned(),
            _ => "=".to_owned(),
        };
        let none = || external(no_operator(&types.join(&format!(" {symbol} ANY "))));
        let any = |list, value| compare_any().call(vec![list, value, op.clone()]);
        let array = |t: &DataType| DataType::List(Arc::new(Field::new_list_field(t.clone(), true)));
        let (value, list, vt, item) = match (vt, lt) {
            (None, Some(DataType::List(item))) => {
                let t = item.data_type().clone();
                (self.coerce_unknown_like(value, &t)?, list, t.clone(), t)
            }
            (Some(vt), None) => {
                let list = self.coerce_unknown_like(list, &array(vt))?;
                (value, list, vt.clone(), vt.clone())
            }
            (Some(vt), Some(DataType::List(item))) => {
                (value, list, vt.clone(), item.data_type().clone())
            }
            (None, None) => {
                let text = DataType::Utf8;
                let list = self.coerce_unknown_like(list, &array(&text))?;
                (self.coerce_unknown_like(value, &text)?, list, text.clone(), text)
            }
            _ => return Err(none()),
        };
        if vt == item {
            return Ok(any(list, value));
        }
        let Some(common) = common_type(&vt, &item) else { return Err(none()) };
        let list = match (SqlType::from_arrow(&common).ok().and_then(Element::of), item == common) {
            (_, true) => list,
            (Some(element), false) => {
                cast_expr(list, &array(&item), SqlType::Array(element)).map_err(external)?
            }
            (None, false) => return Err(none()),
        };
        Ok(any(list, implicit(value, &vt, &common)?))
    }

    /// `generate_series` as an array: of integers, if all arguments are.
    fn series(&self, args: Vec<Expr>, seen: &[Seen]) -> Result<Expr> {
        let types: Vec<String> = seen.iter().map(type_name).collect();
        let none = || {
            let call = format!("generate_series({})", types.join(", "));
            external(crate::error::undefined_function(&call))
        };
        if !(2..=3).contains(&args.len()) {
            return Err(none());
        }
        let list = functions().scalar("generate_series").ok_or_else(none)?;
        let known = seen.iter().flatten();
        if !known.clone().any(DataType::is_integer) {
            return Ok(list.call(args));
        }
        let wide = seen.iter().any(|t| matches!(t, Some(DataType::Int64)));
        let mut bounds = Vec::with_capacity(args.len());
        for (arg, t) in args.into_iter().zip(seen) {
            bounds.push(match t {
                None => self.coerce_unknown(arg, SqlType::BigInt)?,
                Some(t) if t.is_integer() => implicit(arg, t, &DataType::Int64)?,
                Some(_) => return Err(none()),
            });
        }
        let call = list.call(bounds);
        match wide {
            true => Ok(call),
            false => {
                let int4 = SqlType::Array(Element::Int);
                let int8 = SqlType::Array(Element::BigInt).to_arrow();
                cast_expr(call, &int8, int4).map_err(external)
            }
        }
    }

    /// DataFusion's functions of arrays, with PostgreSQL's names and types.
    fn array_function(&self, name: &str, args: Vec<Expr>, seen: &[Seen]) -> Result<Expr> {
        let types: Vec<String> = seen.iter().map(type_name).collect();
        let none =
            || external(crate::error::undefined_function(&format!("{name}({})", types.join(", "))));
        let Some(Some(DataType::List(item))) = seen.first() else { return Err(none()) };
        let theirs = match name {
            "array_upper" | "array_lower" => "array_length",
            "array_remove" => "array_remove_all",
            "array_replace" => "array_replace_all",
            name => name,
        };
        let function = functions().scalar(theirs).ok_or_else(none)?;
        let mut taken = Vec::with_capacity(args.len());
        for (i, (arg, t)) in args.into_iter().zip(seen).enumerate() {
            let element = matches!(name, "array_position" | "array_remove" | "array_replace");
            taken.push(match t {
                None if element && i > 0 => self.coerce_unknown_like(arg, item.data_type())?,
                _ => arg,
            });
        }
        let call = function.call(taken);
        let int = |e| Expr::Cast(datafusion::logical_expr::Cast::new(Box::new(e), DataType::Int32));
        let nullif = functions().scalar("nullif").ok_or_else(none)?;
        Ok(match name {
            "array_remove" | "array_replace" => call,
            // An empty array has no bounds.
            "array_length" | "array_upper" => nullif.call(vec![int(call), lit(0i32)]),
            "array_lower" => {
                let present = nullif.call(vec![int(call), lit(0i32)]).is_not_null();
                Expr::Case(Case {
                    expr: None,
                    when_then_expr: vec![(Box::new(present), Box::new(lit(1i32)))],
                    else_expr: None,
                })
            }
            _ => int(call),
        })
    }

    /// An implicit cast of an argument; a numeric keeps its scale.
    fn implicit_to(&self, e: Expr, from: &DataType, to: SqlType) -> Result<Expr> {
        match (from, to) {
            (DataType::Decimal128(_, _), SqlType::Numeric(None)) => Ok(e),
            (t, SqlType::Numeric(None)) if t.is_integer() => {
                implicit(e, from, &DataType::Decimal128(38, 0))
            }
            (t, SqlType::Text) if is_text(t) => Ok(e),
            (from, to) if *from == to.to_arrow() => Ok(e),
            (DataType::Decimal128(_, _), _) => cast_expr(e, from, to).map_err(external),
            (from, to) => implicit(e, from, &to.to_arrow()),
        }
    }

    /// CASE: conditions and results in turn, then ELSE.
    fn case(&self, args: Vec<Expr>, seen: &[Seen], schema: &DFSchema) -> Result<Expr> {
        let is_condition = |i: usize| i % 2 == 0 && i + 1 < args.len();
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

    /// Values of one construct, as the type that they have in common.
    fn to_common(&self, construct: &str, args: Vec<Expr>, seen: &[Seen]) -> Result<Vec<Expr>> {
        let mut common: Seen = None;
        for t in seen.iter().flatten() {
            common = Some(match common {
                None => t.clone(),
                Some(c) => match common_type(&c, t) {
                    Some(c) => c,
                    None => {
                        let (a, b) = (type_name(&Some(c)), type_name(&Some(t.clone())));
                        return Err(external(SqlError::new(
                            SqlState::DATATYPE_MISMATCH,
                            format!("{construct} types {a} and {b} cannot be matched"),
                        )));
                    }
                },
            });
        }
        let common = common.unwrap_or(DataType::Utf8);
        let Ok(target) = SqlType::from_arrow(&common) else { return Ok(args) };
        args.into_iter()
            .zip(seen)
            .map(|(e, t)| match t {
                None => self.coerce_unknown_like(e, &common).and_then(|e| match &e {
                    Expr::Literal(v, _) if v.data_type() != common => {
                        implicit(e.clone(), &v.data_type(), &common)
                    }
                    _ => Ok(e),
                }),
                Some(t) if *t == common => Ok(e),
                Some(t) => match target {
                    SqlType::Numeric(_) => implicit(e, t, &common),
                    _ => cast_expr(e, t, target).map_err(external),
                },
            })
            .collect()
    }

    /// An operand that has to be boolean.
    fn boolean(&self, e: Expr, place: &str, schema: &DFSchema) -> Result<Expr> {
        match self.seen(&e, schema)? {
            Some(DataType::Boolean) => Ok(e),
            None => match e {
                Expr::Literal(_, _) | Expr::Placeholder(_) => {
                    self.coerce_unknown(e, SqlType::Boolean)
                }
                e => Ok(e),
            },
            Some(t) => {
                let message = format!(
                    "argument of {place} must be type boolean, not type {}",
                    type_name(&Some(t))
                );
                Err(external(SqlError::new(SqlState::DATATYPE_MISMATCH, message)))
            }
        }
    }

    /// An explicit cast.
    fn cast(&self, e: Expr, to: SqlType, schema: &DFSchema) -> Result<Expr> {
        match self.seen(&e, schema)? {
            None if to == SqlType::Numeric(None) => self.coerce_unknown_like(e, &to.to_arrow()),
            None => self.coerce_unknown(e, to),
            // The column says that it is padded, which a text is not.
            Some(from) if to == SqlType::Text && is_char(&e, schema)? => {
                Ok(cast_function(&from, to).map_err(external)?.call(vec![e]))
            }
            Some(from) => cast_expr(e, &from, to).map_err(external),
        }
    }

    /// Gives something of unknown type the type that its place asks for.
    fn coerce_unknown(&self, e: Expr, to: SqlType) -> Result<Expr> {
        match e {
            Expr::Literal(ScalarValue::Utf8(Some(text)), _) => {
                let metadata = to.metadata().map(|one| FieldMetadata::from(BTreeMap::from([one])));
                Ok(Expr::Literal(fold_literal(&text, to).map_err(external)?, metadata))
            }
            Expr::Literal(_, _) => Ok(Expr::Literal(ScalarValue::try_from(&to.to_arrow())?, None)),
            Expr::Placeholder(p) => {
                self.parameters.note(&p.id, Some(to.to_arrow()));
                Ok(placeholder(p.id, to.to_arrow()))
            }
            Expr::Alias(a) => self.coerce_unknown(*a.expr, to),
            e => cast_expr(e, &DataType::Utf8, to).map_err(external),
        }
    }

    fn coerce_unknown_like(&self, e: Expr, like: &DataType) -> Result<Expr> {
        let to = SqlType::from_arrow(like).map_err(external)?;
        // A literal keeps its own scale: it is compared or computed by value.
        if let (SqlType::Numeric(_), Expr::Literal(ScalarValue::Utf8(Some(text)), _)) = (to, &e)
            && let Ok(number) = parse_number(text.trim())
            && let Some(number) = exact(number)
        {
            return Ok(Expr::Literal(number, None));
        }
        self.coerce_unknown(e, to)
    }

    fn negate(&self, e: Expr, schema: &DFSchema) -> Result<Expr> {
        let e = match self.seen(&e, schema)? {
            None => self.coerce_unknown(e, SqlType::Double)?,
            Some(_) => e,
        };
        let t = e.get_type(schema)?;
        if !(t.is_numeric() || matches!(t, DataType::Interval(_))) {
            let name = type_name(&Some(t));
            return Err(external(no_operator(&format!("- {name}"))));
        }
        Ok(crate::functions::arith::negate_function().call(vec![e]))
    }

    fn arithmetic(&self, op: ArithOp, left: Expr, right: Expr, schema: &DFSchema) -> Result<Expr> {
        let (lt, rt) = (self.seen(&left, schema)?, self.seen(&right, schema)?);
        let missing = || external(no_operator(&describe(op.symbol(), &lt, &rt)));
        if op == ArithOp::Sub && matches!(lt, Some(DataType::LargeUtf8)) {
            let name = match &rt {
                Some(DataType::List(_)) => "jsonb_delete_keys",
                _ => "jsonb_delete",
            };
            return self.call(name, vec![left, right], schema);
        }
        let (left, right, lt2, rt2) = match (&lt, &rt) {
            (Some(a), Some(b)) => (left, right, a.clone(), b.clone()),
            (Some(a), None) => {
                let to = op.unknown_right(a);
                let right = self.coerce_unknown_like(right, &to)?;
                let b = right.get_type(schema)?;
                (left, right, a.clone(), b)
            }
            (None, Some(b)) => {
                let to = op.unknown_left(b);
                let left = self.coerce_unknown_like(left, &to)?;
                let a = left.get_type(schema)?;
                (left, right, a, b.clone())
            }
            (None, None) => {
                return Err(external(
                    SqlError::new(
                        SqlState(AMBIGUOUS_FUNCTION),
                        format!("operator is not unique: {}", describe(op.symbol(), &lt, &rt)),
                    )
                    .with_hint(CAST_HINT),
                ));
            }
        };
        let Operands { left: lc, right: rc, .. } = operands(op, &lt2, &rt2).ok_or_else(missing)?;
        if op == ArithOp::Div
            && let (Some(a), Some(b)) = (constant(&left), constant(&right))
            && (lt2.is_decimal() || rt2.is_decimal())
            && let Some(value) = a.div(&b).ok().and_then(|q| q.to_scalar().ok())
        {
            // A quotient of constants has PostgreSQL's scale for these values.
            return Ok(Expr::Literal(value, None));
        }
        let left = implicit(left, &lt2, &lc)?;
        let right = implicit(right, &rt2, &rc)?;
        Ok(op.function().call(vec![left, right]))
    }

    /// `->`, `@>` and their like, of documents or of arrays.
    fn document(
        &self,
        op: BinaryOperator,
        name: &'static str,
        of_arrays: Option<&'static str>,
        left: Expr,
        right: Expr,
        schema: &DFSchema,
    ) -> Result<Expr> {
        let (lt, rt) = (self.seen(&left, schema)?, self.seen(&right, schema)?);
        let json = |t: &Seen| matches!(t, Some(DataType::LargeUtf8));
        let list = |t: &Seen| matches!(t, Some(DataType::List(_)));
        if !name.is_empty() && (json(&lt) || (json(&rt) && lt.is_none())) {
            return self.call(name, vec![left, right], schema);
        }
        if let Some(function) = of_arrays.and_then(|f| functions().scalar(f))
            && (list(&lt) || list(&rt))
        {
            let (left, right) = match (&lt, &rt) {
                (Some(t), None) => (left, self.coerce_unknown_like(right, t)?),
                (None, Some(t)) => (self.coerce_unknown_like(left, t)?, right),
                _ => (left, right),
            };
            return Ok(match op {
                BinaryOperator::ArrowAt => function.call(vec![right, left]),
                _ => function.call(vec![left, right]),
            });
        }
        Err(external(no_operator(&describe(&op.to_string(), &lt, &rt))))
    }

    fn comparison(&self, op: Operator, left: Expr, right: Expr, schema: &DFSchema) -> Result<Expr> {
        let (left, right) = self.comparable(op, left, right, schema)?;
        let is_json =
            |e: &Expr| Ok::<_, DataFusionError>(e.get_type(schema)? == DataType::LargeUtf8);
        let by_value = !matches!(op, Operator::IsDistinctFrom | Operator::IsNotDistinctFrom);
        if by_value && is_json(&left)? && is_json(&right)? {
            // By value: 1 is 1.0.
            let order = self.call("jsonb_cmp", vec![left, right], schema)?;
            return Ok(Expr::BinaryExpr(BinaryExpr::new(Box::new(order), op, Box::new(lit(0i32)))));
        }
        let is_interval = |e: &Expr| Ok::<_, DataFusionError>(e.get_type(schema)? == INTERVAL);
        let (left, right) = match is_interval(&left)? && is_interval(&right)? {
            // Compared by length: 24 hours are a day, 30 days a month.
            true => (
                self.call("interval_span", vec![left], schema)?,
                self.call("interval_span", vec![right], schema)?,
            ),
            false => (left, right),
        };
        Ok(Expr::BinaryExpr(BinaryExpr::new(Box::new(left), op, Box::new(right))))
    }

    /// The operands of a comparison, of types that compare.
    fn comparable(
        &self,
        op: Operator,
        left: Expr,
        right: Expr,
        schema: &DFSchema,
    ) -> Result<(Expr, Expr)> {
        let (left, right) = match (is_char(&left, schema)?, is_char(&right, schema)?) {
            (true, false) => (left, without_blanks(right)),
            (false, true) => (without_blanks(left), right),
            _ => (left, right),
        };
        let (lt, rt) = (self.seen(&left, schema)?, self.seen(&right, schema)?);
        match (&lt, &rt) {
            (Some(a), None) if SqlType::from_arrow(a).is_ok() => {
                let right = self.coerce_unknown_like(right, a)?;
                Ok((left, right))
            }
            (None, Some(b)) if SqlType::from_arrow(b).is_ok() => {
                let left = self.coerce_unknown_like(left, b)?;
                Ok((left, right))
            }
            (Some(a), Some(b)) if !compare(a, b) => {
                let symbol = match op {
                    Operator::IsDistinctFrom | Operator::IsNotDistinctFrom => "=".to_owned(),
                    Operator::NotEq => "<>".to_owned(),
                    op => op.to_string(),
                };
                Err(external(no_operator(&describe(&symbol, &lt, &rt))))
            }
            (Some(a), Some(b)) if let Some(common) = compared_as(a, b) => {
                let left = cast_expr(left, a, common).map_err(external)?;
                Ok((left, cast_expr(right, b, common).map_err(external)?))
            }
            (None, None) => {
                let left = self.coerce_unknown(left, SqlType::Text)?;
                let right = self.coerce_unknown(right, SqlType::Text)?;
                Ok((left, right))
            }
            _ => Ok((left, right)),
        }
    }

    fn concat_arrays(&self, left: Expr, right: Expr, lt: &Seen, rt: &Seen) -> Result<Expr> {
        let none = || external(no_operator(&describe("||", lt, rt)));
        let item = |t: &Seen| match t {
            Some(DataType::List(item)) => Some(item.data_type().clone()),
            _ => None,
        };
        let fit = |e: Expr, t: &Seen, to: &DataType| match t {
            None => self.coerce_unknown_like(e, to),
            Some(t) if t == to => Ok(e),
            Some(t) => match (SqlType::from_arrow(t), SqlType::from_arrow(to)) {
                (Ok(a), Ok(b)) if call::implicit_cast(a, b) => cast_expr(e, t, b).map_err(external),
                _ => Err(none()),
            },
        };
        let (name, args) = match (item(lt), item(rt)) {
            (Some(a), Some(b)) if a == b => ("array_concat", vec![left, right]),
            (Some(a), None) if is_word(&right) => {
                ("array_append", vec![left, self.coerce_unknown_like(right, &a)?])
            }
            (None, Some(b)) if is_word(&left) => {
                ("array_prepend", vec![self.coerce_unknown_like(left, &b)?, right])
            }
            (Some(_), None) if rt.is_none() => {
                let to = lt.clone().unwrap_or(DataType::Null);
                ("array_concat", vec![left, self.coerce_unknown_like(right, &to)?])
            }
            (None, Some(_)) if lt.is_none() => {
                let to = rt.clone().unwrap_or(DataType::Null);
                ("array_concat", vec![self.coerce_unknown_like(left, &to)?, right])
            }
            (Some(a), None) => ("array_append", vec![left, fit(right, rt, &a)?]),
            (None, Some(b)) => ("array_prepend", vec![fit(left, lt, &b)?, right]),
            _ => return Err(none()),
        };
        let function = functions().scalar(name).ok_or_else(none)?;
        Ok(function.call(args))
    }

    fn concat(&self, left: Expr, right: Expr, schema: &DFSchema) -> Result<Expr> {
        let (lt, rt) = (self.seen(&left, schema)?, self.seen(&right, schema)?);
        let list = |t: &Seen| matches!(t, Some(DataType::List(_) | DataType::LargeList(_)));
        if list(&lt) || list(&rt) {
            return self.concat_arrays(left, right, &lt, &rt);
        }
        let json = |t: &Seen| matches!(t, Some(DataType::LargeUtf8));
        if (json(&lt) && (json(&rt) || rt.is_none())) || (json(&rt) && lt.is_none()) {
            return self.call("jsonb_concat", vec![left, right], schema);
        }
        let texty = |t: &Seen| t.as_ref().is_none_or(is_text);
        let bytes = |t: &Seen| matches!(t, Some(DataType::Binary));
        if (bytes(&lt) || bytes(&rt))
            && (bytes(&lt) || lt.is_none())
            && (bytes(&rt) || rt.is_none())
        {
            return self.call("bytea_concat", vec![left, right], schema);
        }
        if !texty(&lt) && !texty(&rt) {
            return Err(external(no_operator(&describe("||", &lt, &rt))));
        }
        let to_text = |e: Expr, t: &Seen| match t {
            None => self.coerce_unknown(e, SqlType::Text),
            Some(t) if is_text(t) => Ok(e),
            Some(t) => cast_expr(e, t, SqlType::Text).map_err(external),
        };
        let (left, right) = (to_text(left, &lt)?, to_text(right, &rt)?);
        Ok(text_concat().call(vec![left, right]))
    }
}

const INTERVAL: DataType = DataType::Interval(IntervalUnit::MonthDayNano);

/// The type of two that values of both can be given: the wider one.
pub fn common_type(a: &DataType, b: &DataType) -> Option<DataType> {
    use DataType as D;
    if a == b {
        return Some(a.clone());
    }
    let whole = |t: &D| match t {
        D::Int16 => Some((5u8, 0i8)),
        D::Int32 => Some((10, 0)),
        D::Int64 => Some((19, 0)),
        D::Decimal128(p, s) => Some((*p, *s)),
        _ => None,
    };
    match (a, b) {
        (D::Decimal128(_, _), _) | (_, D::Decimal128(_, _))
            if let (Some((p1, s1)), Some((p2, s2))) = (whole(a), whole(b)) =>
        {
            let scale = s1.max(s2);
            let digits = (p1 as i8 - s1).max(p2 as i8 - s2) + scale;
            Some(D::Decimal128(digits.clamp(1, 38) as u8, scale.min(38)))
        }
        _ => {
            let (x, y) = (SqlType::from_arrow(a).ok()?, SqlType::from_arrow(b).ok()?);
            match (call::implicit_cast(x, y), call::implicit_cast(y, x)) {
                (true, _) => Some(b.clone()),
                (_, true) => Some(a.clone()),
                _ => None,
            }
        }
    }
}

/// Whether an expression is a `char(n)`.
fn is_char(e: &Expr, schema: &DFSchema) -> Result<bool> {
    Ok(match e {
        Expr::Column(_)
        | Expr::OuterReferenceColumn(_, _)
        | Expr::Alias(_)
        | Expr::Literal(_, Some(_)) => e.to_field(schema)?.1.metadata().contains_key(CHAR_LENGTH),
        Expr::ScalarFunction(f) => f.func.name() == "cast_to_bpchar",
        _ => false,
    })
}

/// A literal to be compared with a `char(n)`: blanks at its end mean nothing.
fn without_blanks(e: Expr) -> Expr {
    match e {
        Expr::Literal(ScalarValue::Utf8(Some(text)), metadata) => {
            let text = text.trim_end_matches(' ').to_owned();
            Expr::Literal(ScalarValue::Utf8(Some(text)), metadata)
        }
        e => e,
    }
}

/// A literal that is not the text of an array.
fn is_word(e: &Expr) -> bool {
    matches!(e, Expr::Literal(ScalarValue::Utf8(Some(text)), _) if !text.trim_start().starts_with('{'))
}

/// Carries the arguments of a call to where it is resolved; never in a plan.
fn argument_list() -> Arc<ScalarUDF> {
    static LIST: OnceLock<Arc<ScalarUDF>> = OnceLock::new();
    Arc::clone(LIST.get_or_init(|| crate::functions::missing::missing_function("#arguments")))
}

fn arguments_of(list: Expr) -> Vec<Expr> {
    match list {
        Expr::ScalarFunction(f) if f.func.name() == "#arguments" => f.args,
        _ => Vec::new(),
    }
}

const AMBIGUOUS_FUNCTION: &str = "42725";
const CAST_HINT: &str = "No operator matches the given name and argument types. You might need to \
                         add explicit type casts.";

/// A number as a numeric with the digits that it has.
fn exact(number: ScalarValue) -> Option<ScalarValue> {
    match number {
        ScalarValue::Int32(Some(v)) => Num::new(v.into(), 0).to_scalar().ok(),
        ScalarValue::Int64(Some(v)) => Num::new(v.into(), 0).to_scalar().ok(),
        v @ ScalarValue::Decimal128(_, _, _) => Some(v),
        _ => None,
    }
}

/// The number of an exact literal.
fn constant(e: &Expr) -> Option<Num> {
    match e {
        Expr::Literal(ScalarValue::Int16(Some(v)), _) => Some(Num::new((*v).into(), 0)),
        Expr::Literal(ScalarValue::Int32(Some(v)), _) => Some(Num::new((*v).into(), 0)),
        Expr::Literal(ScalarValue::Int64(Some(v)), _) => Some(Num::new((*v).into(), 0)),
        Expr::Literal(ScalarValue::Decimal128(Some(v), _, s), _) => Some(Num::new(*v, *s)),
        _ => None,
    }
}

fn placeholder(id: String, t: DataType) -> Expr {
    let field = Arc::new(Field::new(&id, t, true));
    Expr::Placeholder(Placeholder::new_with_field(id, Some(field)))
}

fn no_operator(what: &str) -> SqlError {
    SqlError::new(SqlState::UNDEFINED_FUNCTION, format!("operator does not exist: {what}"))
        .with_hint(CAST_HINT)
}

fn describe(symbol: &str, left: &Seen, right: &Seen) -> String {
    format!("{} {symbol} {}", type_name(left), type_name(right))
}

/// A type's name in a message.
pub fn type_name(t: &Seen) -> String {
    match t {
        None => "unknown".into(),
        Some(t) => match SqlType::from_arrow(t) {
            Ok(SqlType::Numeric(_)) => "numeric".into(),
            Ok(t) => t.to_string(),
            Err(_) => t.to_string(),
        },
    }
}

/// Whether PostgreSQL has comparisons of two known types.
pub fn compare(a: &DataType, b: &DataType) -> bool {
    use DataType as D;
    let datetime = |t: &D| matches!(t, D::Date32 | D::Timestamp(_, _));
    let simple = |t: &D| SqlType::from_arrow(t).is_ok();
    if !simple(a) || !simple(b) {
        return true; // Lists and structs: DataFusion decides.
    }
    match (a, b) {
        (a, b) if a.is_numeric() && b.is_numeric() => true,
        (a, b) if is_text(a) && is_text(b) => true,
        (a, b) if datetime(a) && datetime(b) => true,
        (D::Time64(_), D::Time64(_)) | (D::Interval(_), D::Interval(_)) => true,
        (D::List(a), D::List(b)) => compare(a.data_type(), b.data_type()),
        (a, b) => a == b,
    }
}

/// The type that PostgreSQL compares two types in, where that is not for DataFusion to decide: floats with other
/// numbers as floats, dates with times as times.
fn compared_as(a: &DataType, b: &DataType) -> Option<SqlType> {
    use DataType as D;
    let time = |t: &D| match t {
        D::Timestamp(_, Some(_)) => Some(SqlType::Timestamptz),
        D::Timestamp(_, None) => Some(SqlType::Timestamp),
        _ => None,
    };
    match (a, b) {
        (a, b) if a == b => None,
        (a, b) if (a.is_floating() || b.is_floating()) && a.is_numeric() && b.is_numeric() => {
            Some(SqlType::Double)
        }
        (D::Date32, t) | (t, D::Date32) => time(t),
        _ => None,
    }
}

/// An implicit cast between numbers or dates, which never fails where PostgreSQL's would not.
fn implicit(e: Expr, from: &DataType, to: &DataType) -> Result<Expr> {
    if from == to {
        return Ok(e);
    }
    match e {
        Expr::Placeholder(p) => Ok(placeholder(p.id, to.clone())),
        e if matches!((from, to), (DataType::Time64(_), DataType::Interval(_))) => {
            cast_expr(e, from, SqlType::Interval).map_err(external)
        }
        Expr::Literal(v, _) => Ok(lit(v.cast_to(to)?)),
        e => Ok(Expr::Cast(datafusion::logical_expr::Cast::new(Box::new(e), to.clone()))),
    }
}

/// `e::to` by our cast functions.
pub fn cast_expr(e: Expr, from: &DataType, to: SqlType) -> Result<Expr, SqlError> {
    let arrow = to.to_arrow();
    let plain = !matches!(to, SqlType::Varchar(Some(_)) | SqlType::Char(_));
    if *from == arrow && plain {
        return Ok(e);
    }
    let function: Arc<ScalarUDF> = cast_function(from, to)?;
    Ok(match to {
        SqlType::Array(Element::Varchar(Some(n))) => function.call(vec![e, lit(n as i32)]),
        SqlType::Array(Element::Numeric(Some((p, s)))) => {
            function.call(vec![e, lit(i32::from(p)), lit(i32::from(s))])
        }
        SqlType::Varchar(Some(n)) | SqlType::Char(n) => function.call(vec![e, lit(n as i32)]),
        SqlType::Numeric(Some((p, s))) => {
            function.call(vec![e, lit(i32::from(p)), lit(i32::from(s))])
        }
        _ => function.call(vec![e]),
    })
}
