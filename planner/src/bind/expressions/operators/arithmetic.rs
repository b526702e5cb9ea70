//! `+`, `-`, `*`, `/`, `%` and unary minus.

use datafusion::arrow::datatypes::DataType;
use datafusion::common::{DFSchema, Result, ScalarValue};
use datafusion::error::DataFusionError;
use datafusion::logical_expr::{BinaryExpr, Expr, Operator, lit};
use millrace_common::{SqlError, SqlState, SqlType};
use millrace_functions::arith::{ArithOp, Operands, operands};
use millrace_functions::error::external;
use millrace_functions::functions;
use millrace_functions::numeric::Num;
use millrace_functions::types::type_name;

use super::{CAST_HINT, OperatorPlanner, describe, is_unknown, no_operator, type_of};

const AMBIGUOUS_FUNCTION: &str = "42725";

impl OperatorPlanner {
    pub(super) fn negate(&self, e: Expr, schema: &DFSchema) -> Result<Expr> {
        let (e, t) = self.operand("-", e, SqlType::Double, schema)?;
        if !(t.is_numeric() || matches!(t, DataType::Interval(_))) {
            let name = type_name(&Some(t));
            return Err(external(no_operator(&format!("- {name}"))));
        }
        Ok(millrace_functions::arith::negate_function().call(vec![e]))
    }

    /// What a prefix operator takes, and its type: a parameter without one is `parameter`.
    fn operand(
        &self,
        symbol: &str,
        e: Expr,
        parameter: SqlType,
        schema: &DFSchema,
    ) -> Result<(Expr, DataType)> {
        let e = match self.seen(&e, schema)? {
            None if is_unknown(&e) => return Err(ambiguous(&format!("{symbol} unknown"))),
            None => self.coerce_unknown(e, parameter)?,
            Some(_) => e,
        };
        let t = type_of(&e, schema)?;
        Ok((e, t))
    }

    /// A number, which is all that a prefix operator takes.
    pub(super) fn signed(&self, symbol: &str, e: Expr, schema: &DFSchema) -> Result<Expr> {
        match self.seen(&e, schema)? {
            None => self.coerce_unknown(e, SqlType::Double),
            Some(t) if t.is_numeric() => Ok(e),
            t => Err(external(no_operator(&format!("{symbol} {}", type_name(&t))))),
        }
    }

    pub(super) fn function_of(&self, name: &str, e: Expr) -> Result<Expr> {
        match functions().scalar(name) {
            Some(function) => Ok(function.call(vec![e])),
            None => Err(external(SqlError::internal(format!("no function {name}")))),
        }
    }

    /// `~e`: all bits of -1 are set.
    pub(super) fn complement(&self, e: Expr, schema: &DFSchema) -> Result<Expr> {
        let (e, t) = self.operand("~", e, SqlType::Int, schema)?;
        if !t.is_signed_integer() {
            return Err(external(no_operator(&format!("~ {}", type_name(&Some(t))))));
        }
        let ones = Box::new(lit(ScalarValue::Int16(Some(-1)).cast_to(&t)?));
        Ok(Expr::BinaryExpr(BinaryExpr::new(Box::new(e), Operator::BitwiseXor, ones)))
    }

    pub(super) fn arithmetic(
        &self,
        op: ArithOp,
        left: Expr,
        right: Expr,
        schema: &DFSchema,
    ) -> Result<Expr> {
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
                let b = type_of(&right, schema)?;
                (left, right, a.clone(), b)
            }
            (None, Some(b)) => {
                let to = op.unknown_left(b);
                let left = self.coerce_unknown_like(left, &to)?;
                let a = type_of(&left, schema)?;
                (left, right, a, b.clone())
            }
            (None, None) => {
                return Err(ambiguous(&describe(op.symbol(), &lt, &rt)));
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
        let left = self.implicit(left, &lt2, &lc)?;
        let right = self.implicit(right, &rt2, &rc)?;
        Ok(op.function().call(vec![left, right]))
    }
}

fn ambiguous(what: &str) -> DataFusionError {
    let message = format!("operator is not unique: {what}");
    external(SqlError::new(SqlState(AMBIGUOUS_FUNCTION), message).with_hint(CAST_HINT))
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
