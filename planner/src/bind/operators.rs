//! PostgreSQL's operators: which exists for which types, what its operands become, and what it
//! returns.
//!
//! Arithmetic, casts and `||` turn into functions of ours ([`crate::functions`]) that compute and fail
//! as PostgreSQL does. Comparisons stay DataFusion's, so that joins and filters are recognised, with
//! literals and parameters of unknown type turned into the other operand's type first.

use std::sync::{Arc, Mutex};

use datafusion::arrow::datatypes::{DataType, Field};
use datafusion::common::{DFSchema, Result, ScalarValue};
use datafusion::logical_expr::expr::Placeholder;
use datafusion::logical_expr::planner::{ExprPlanner, PlannerResult, RawBinaryExpr};
use datafusion::logical_expr::{BinaryExpr, Expr, ExprSchemable, Operator, ScalarUDF, lit};
use millrace_common::{SqlError, SqlState, SqlType};
use sqlparser::ast::BinaryOperator;

use super::desugar::Op;
use crate::error::external;
use crate::functions::arith::{ArithOp, Operands, operands};
use crate::functions::cast::{cast_function, fold_literal, parse_number};

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
        let planned = match Op::decode(&op) {
            Some(ours) => self.custom(ours, left, right, schema)?,
            None => match plain(&op) {
                Some(Plain::Arith(a)) => self.arithmetic(a, left, right, schema)?,
                Some(Plain::Compare(c)) => self.comparison(c, left, right, schema)?,
                Some(Plain::Concat) => self.concat(left, right, schema)?,
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
            Op::Common(construct) => self.common(construct, &left, right, schema),
            Op::Condition => self.boolean(left, "CASE/WHEN", schema),
            Op::Text => match self.seen(&left, schema)? {
                Some(t) if !is_text(&t) && t != DataType::Binary => {
                    let function = match &right {
                        Expr::Literal(ScalarValue::Utf8(Some(name)), _) => name.as_str(),
                        _ => "",
                    };
                    let call = format!("{function}({})", type_name(&Some(t)));
                    Err(external(crate::error::undefined_function(&call)))
                }
                _ => Ok(left),
            },
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

    /// A result of CASE and its like, whose type `like` is a result too.
    fn common(&self, construct: &str, like: &Expr, e: Expr, schema: &DFSchema) -> Result<Expr> {
        let (model, own) = (self.seen(like, schema)?, self.seen(&e, schema)?);
        match (&model, &own) {
            (Some(a), None) if SqlType::from_arrow(a).is_ok() => self.coerce_unknown_like(e, a),
            (Some(a), Some(b)) if !compare(a, b) => {
                let (a, b) = (type_name(&model), type_name(&own));
                Err(external(SqlError::new(
                    SqlState::DATATYPE_MISMATCH,
                    format!("{construct} types {a} and {b} cannot be matched"),
                )))
            }
            _ => Ok(e),
        }
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
            None => self.coerce_unknown(e, to),
            Some(from) => cast_expr(e, &from, to).map_err(external),
        }
    }

    /// Gives something of unknown type the type that its place asks for.
    fn coerce_unknown(&self, e: Expr, to: SqlType) -> Result<Expr> {
        match e {
            Expr::Literal(ScalarValue::Utf8(Some(text)), _) => {
                Ok(Expr::Literal(fold_literal(&text, to).map_err(external)?, None))
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
            && !matches!(number, ScalarValue::Float64(_))
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
        let left = implicit(left, &lt2, &lc)?;
        let right = implicit(right, &rt2, &rc)?;
        Ok(op.function().call(vec![left, right]))
    }

    fn comparison(&self, op: Operator, left: Expr, right: Expr, schema: &DFSchema) -> Result<Expr> {
        let (left, right) = self.comparable(op, left, right, schema)?;
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
            (None, None) => {
                let left = self.coerce_unknown(left, SqlType::Text)?;
                let right = self.coerce_unknown(right, SqlType::Text)?;
                Ok((left, right))
            }
            _ => Ok((left, right)),
        }
    }

    fn concat(&self, left: Expr, right: Expr, schema: &DFSchema) -> Result<Expr> {
        let (lt, rt) = (self.seen(&left, schema)?, self.seen(&right, schema)?);
        let list = |t: &Seen| matches!(t, Some(DataType::List(_) | DataType::LargeList(_)));
        if list(&lt) || list(&rt) {
            return Ok(Expr::BinaryExpr(BinaryExpr::new(
                Box::new(left),
                Operator::StringConcat,
                Box::new(right),
            )));
        }
        let texty = |t: &Seen| t.as_ref().is_none_or(is_text);
        let bytes = |t: &Seen| matches!(t, Some(DataType::Binary));
        if (bytes(&lt) || bytes(&rt))
            && (bytes(&lt) || lt.is_none())
            && (bytes(&rt) || rt.is_none())
        {
            return Err(external(SqlError::unsupported("|| of bytea")));
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
        Ok(Expr::BinaryExpr(BinaryExpr::new(
            Box::new(left),
            Operator::StringConcat,
            Box::new(right),
        )))
    }
}

const AMBIGUOUS_FUNCTION: &str = "42725";
const CAST_HINT: &str = "No operator matches the given name and argument types. You might need to \
                         add explicit type casts.";

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
        (a, b) => a == b,
    }
}

/// An implicit cast between numbers or dates, which never fails where PostgreSQL's would not.
fn implicit(e: Expr, from: &DataType, to: &DataType) -> Result<Expr> {
    if from == to {
        return Ok(e);
    }
    match e {
        Expr::Placeholder(p) => Ok(placeholder(p.id, to.clone())),
        Expr::Literal(v, _) => Ok(lit(v.cast_to(to)?)),
        e => Ok(Expr::Cast(datafusion::logical_expr::Cast::new(Box::new(e), to.clone()))),
    }
}

/// `e::to` by our cast functions.
pub fn cast_expr(e: Expr, from: &DataType, to: SqlType) -> Result<Expr, SqlError> {
    let arrow = to.to_arrow();
    let plain = !matches!(to, SqlType::Varchar(Some(_)));
    if *from == arrow && plain {
        return Ok(e);
    }
    let function: Arc<ScalarUDF> = cast_function(from, to)?;
    Ok(match to {
        SqlType::Varchar(Some(n)) => function.call(vec![e, lit(n as i32)]),
        SqlType::Numeric(Some((p, s))) => {
            function.call(vec![e, lit(i32::from(p)), lit(i32::from(s))])
        }
        _ => function.call(vec![e]),
    })
}
