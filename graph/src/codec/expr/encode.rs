//! Expression → messages.

use arrow::compute::CastOptions;
use arrow::datatypes::Schema;
use datafusion::common::format::DEFAULT_CAST_OPTIONS;
use datafusion::physical_expr::expressions::{
    BinaryExpr, CaseExpr, CastExpr, Column, InListExpr, IsNotNullExpr, IsNullExpr, LikeExpr,
    Literal, NegativeExpr, NotExpr, TryCastExpr,
};
use datafusion::physical_expr::{PhysicalExpr, ScalarFunctionExpr};
use millrace_functions::expr::ExprRef;
use millrace_functions::versions;

use crate::codec::expr::MAX_DEPTH;
use crate::codec::expr::literal::encode_literal;
use crate::codec::expr::message::{self, Kind, Node};
use crate::codec::expr::types::encode_field;
use crate::codec::names::Numbered;
use crate::codec::proto::Nothing;
use crate::codec::{CodecError, Result};

/// An expression whose operands are being encoded.
struct Open<'a> {
    expr: &'a ExprRef,
    operands: std::vec::IntoIter<&'a ExprRef>,
}

impl Open<'_> {
    fn new(expr: &ExprRef) -> Open<'_> {
        Open { expr, operands: expr.children().into_iter() }
    }
}

pub fn expression(e: &ExprRef) -> Result<message::Expression> {
    let mut nodes = Vec::new();
    let mut open = vec![Open::new(e)];
    while let Some(mut top) = open.pop() {
        match top.operands.next() {
            Some(operand) => {
                open.push(top);
                if open.len() == MAX_DEPTH {
                    return Err(CodecError::TooDeep);
                }
                open.push(Open::new(operand));
            }
            None => nodes.push(Node { kind: Some(kind(top.expr)?) }),
        }
    }
    Ok(message::Expression { nodes })
}

fn count(n: usize) -> Result<u32> {
    u32::try_from(n).map_err(|_| CodecError::Encode(format!("an expression of {n} operands")))
}

/// The expression without its operands.
fn kind(e: &ExprRef) -> Result<Kind> {
    Ok(if let Some(e) = e.downcast_ref::<Column>() {
        Kind::Column(message::Column { position: count(e.index())?, name: e.name().to_owned() })
    } else if let Some(literal) = e.downcast_ref::<Literal>() {
        let field = e.return_field(&Schema::empty());
        let field = field.map_err(|error| CodecError::Encode(format!("{e} ({error})")))?;
        Kind::Literal(encode_literal(literal.value(), field.metadata().clone())?)
    } else if let Some(e) = e.downcast_ref::<BinaryExpr>() {
        let number = e.op().number();
        Kind::Binary(number.map_err(|_| CodecError::Encode(format!("the operator {}", e.op())))?)
    } else if e.is::<NotExpr>() {
        Kind::Not(Nothing {})
    } else if e.is::<IsNullExpr>() {
        Kind::IsNull(Nothing {})
    } else if e.is::<IsNotNullExpr>() {
        Kind::IsNotNull(Nothing {})
    } else if e.is::<NegativeExpr>() {
        Kind::Negative(Nothing {})
    } else if let Some(e) = e.downcast_ref::<CaseExpr>() {
        Kind::Case(message::Case {
            compared: e.expr().is_some(),
            branches: count(e.when_then_expr().len())?,
            otherwise: e.else_expr().is_some(),
        })
    } else if let Some(e) = e.downcast_ref::<CastExpr>() {
        Kind::Cast(cast(e)?)
    } else if let Some(e) = e.downcast_ref::<TryCastExpr>() {
        let exact = e.target_metadata().is_some();
        let target = Some(encode_field(e.target_field())?);
        Kind::TryCast(message::Cast { target, exact, safe: true })
    } else if let Some(e) = e.downcast_ref::<LikeExpr>() {
        let (negated, case_insensitive) = (e.negated(), e.case_insensitive());
        Kind::Like(message::Like { negated, case_insensitive })
    } else if let Some(e) = e.downcast_ref::<InListExpr>() {
        Kind::InList(message::InList { negated: e.negated(), items: count(e.list().len())? })
    } else if let Some(e) = e.downcast_ref::<ScalarFunctionExpr>() {
        Kind::Call(call(e)?)
    } else {
        return Err(CodecError::Encode(format!("the expression {e}")));
    })
}

fn cast(e: &CastExpr) -> Result<message::Cast> {
    let options = e.cast_options();
    if *options != (CastOptions { safe: options.safe, ..DEFAULT_CAST_OPTIONS }) {
        return Err(CodecError::Encode(format!("the expression {e} with formats of its own")));
    }
    let exact = e.has_explicit_metadata();
    Ok(message::Cast { target: Some(encode_field(e.target_field())?), exact, safe: options.safe })
}

fn call(e: &ScalarFunctionExpr) -> Result<message::Call> {
    let named = versions::name_of(e.fun());
    let unknown = || CodecError::Encode(format!("the function {}", e.fun().name()));
    let (function, version) = named.ok_or_else(unknown)?;
    let result = e.return_field(&Schema::empty());
    let result = result.map_err(|error| CodecError::Encode(format!("{function} ({error})")))?;
    Ok(message::Call {
        function: function.to_owned(),
        version,
        arguments: count(e.args().len())?,
        result: Some(encode_field(&result)?),
    })
}
