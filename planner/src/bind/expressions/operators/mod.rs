//! PostgreSQL's operators: which exists for which types, what its operands become, and what it
//! returns.
//!
//! Arithmetic, casts and `||` turn into functions of ours ([`millrace_functions`]) that compute and fail
//! as PostgreSQL does. Comparisons stay DataFusion's, so that joins and filters are recognised, with
//! literals and parameters of unknown type turned into the other operand's type first.

mod arithmetic;
mod arrays;
mod calls;
mod coercion;
mod comparison;
mod concat;
mod rows;
mod typing;

use std::sync::{Arc, Mutex};

use datafusion::arrow::datatypes::{DataType, Field};
use datafusion::common::{DFSchema, Result, ScalarValue, TableReference};
use datafusion::logical_expr::planner::{
    ExprPlanner, PlannerResult, RawBinaryExpr, RawFieldAccessExpr,
};
use datafusion::logical_expr::{BinaryExpr, Expr, GetFieldAccess, Operator};
use millrace_common::{SqlError, SqlState};
use sqlparser::ast::BinaryOperator;

use super::desugar::Op;
use super::zones::Zones;
use crate::bind::names::outer_names::TakenForColumns;
use crate::bind::spans::operator_spans;
use calls::arguments_of;
use coercion::placeholder;
pub use coercion::{cast_expr, is_unknown};
pub use comparison::compare;
use millrace_functions::arith::ArithOp;
use millrace_functions::cast::parse_number;
use millrace_functions::error::external;
use millrace_functions::functions;
use millrace_functions::interrupt;
use millrace_functions::types::type_name;
use typing::type_of;

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
    /// See [`crate::bind::names::outer_names`].
    pub taken_for_columns: Arc<TakenForColumns>,
    pub zones: Zones,
}

impl ExprPlanner for OperatorPlanner {
    fn plan_binary_op(
        &self,
        expr: RawBinaryExpr,
        schema: &DFSchema,
    ) -> Result<PlannerResult<RawBinaryExpr>> {
        interrupt::check().map_err(external)?;
        let RawBinaryExpr { op, left, right } = expr;
        let (op, after) = operator_spans::split(&op);
        let raw = RawBinaryExpr { op, left, right };
        self.plan(raw, schema).map_err(|e| operator_spans::placed(e, after))
    }

    /// `name.field` where a column has the name: no column has fields here, so that it is not what is meant.
    fn plan_compound_identifier(
        &self,
        field: &Field,
        _: Option<&TableReference>,
        _: &[String],
    ) -> Result<PlannerResult<Vec<Expr>>> {
        self.taken_for_columns.note(field.name());
        Ok(PlannerResult::Planned(Expr::Literal(ScalarValue::Null, None)))
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
            e if is_unknown(e) => None,
            Expr::Placeholder(p) => match &p.field {
                Some(f) => Some(f.data_type().clone()),
                None => self.parameters.get(&p.id),
            },
            Expr::Alias(a) => return self.seen(&a.expr, schema),
            e => match type_of(e, schema)? {
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
            Op::Assign(to) => self.assign(left, &right, to, schema),
            Op::Negate => self.negate(left, schema),
            Op::Plus => self.signed("+", left, schema),
            Op::Absolute => {
                let number = self.signed("@", left, schema)?;
                self.function_of("abs", number)
            }
            Op::Complement => self.complement(left, schema),
            Op::Rows => self.rows(left, &right, schema),
            Op::Distinct => self.comparison(Operator::IsDistinctFrom, left, right, schema),
            Op::NotDistinct => self.comparison(Operator::IsNotDistinctFrom, left, right, schema),
            Op::Element => {
                let (_, element) = self.comparable(Operator::Eq, left, right, schema)?;
                Ok(element)
            }
            Op::Argument => self.argument(left, right),
            Op::Call(name) => self.call(name, arguments_of(left), schema),
            Op::Row { padded } => match rows::whole_row(&left, &right, padded, schema)? {
                None => Ok(left),
                Some(columns) => self.row(columns, schema),
            },
            Op::RowText { padded } => match rows::whole_row(&left, &right, padded, schema)? {
                None => Ok(left),
                Some(columns) => self.row_text(columns, schema),
            },
            Op::RowTest { not_null } => Ok(rows::test(left, &right, not_null, schema)),
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
}

const CAST_HINT: &str = "No operator matches the given name and argument types. You might need to \
                         add explicit type casts.";

fn no_operator(what: &str) -> SqlError {
    SqlError::new(SqlState::UNDEFINED_FUNCTION, format!("operator does not exist: {what}"))
        .with_hint(CAST_HINT)
}

fn describe(symbol: &str, left: &Seen, right: &Seen) -> String {
    format!("{} {symbol} {}", type_name(left), type_name(right))
}
