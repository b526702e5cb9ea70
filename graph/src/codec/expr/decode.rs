//! Messages → expression.

use std::sync::{Arc, OnceLock};

use arrow::compute::CastOptions;
use arrow::datatypes::{Field, FieldRef, Schema};
use datafusion::common::config::ConfigOptions;
use datafusion::common::format::DEFAULT_CAST_OPTIONS;
use datafusion::logical_expr::Operator;
use datafusion::physical_expr::expressions::{
    BinaryExpr, CaseExpr, CastExpr, Column, InListExpr, IsNotNullExpr, IsNullExpr, LikeExpr,
    Literal, NegativeExpr, NotExpr, TryCastExpr,
};
use datafusion::physical_expr::{PhysicalExpr, ScalarFunctionExpr};
use millrace_functions::expr::ExprRef;
use millrace_functions::versions;

use crate::codec::expr::MAX_DEPTH;
use crate::codec::expr::literal::decode_literal;
use crate::codec::expr::message::{self, Kind};
use crate::codec::expr::types::decode_field;
use crate::codec::names::Numbered;
use crate::codec::{CodecError, Result};

fn damaged(what: impl ToString) -> CodecError {
    CodecError::Damaged(what.to_string())
}

/// `input`: the schema of the columns it reads.
pub fn expression(e: &message::Expression, input: &Schema) -> Result<ExprRef> {
    // What no node has taken as an operand yet, with the levels of each.
    let mut free: Vec<(ExprRef, usize)> = Vec::new();
    for node in &e.nodes {
        let kind = node.kind.as_ref();
        let kind = kind.ok_or_else(|| CodecError::Unknown("the kind of an expression".into()))?;
        let first = free.len().checked_sub(operands(kind));
        let first = first.ok_or_else(|| damaged("an expression without its operands"))?;
        let taken = free.split_off(first);
        let depth = 1 + taken.iter().map(|(_, depth)| *depth).max().unwrap_or(0);
        if depth > MAX_DEPTH {
            return Err(CodecError::TooDeep);
        }
        let taken: Vec<ExprRef> = taken.into_iter().map(|(e, _)| e).collect();
        free.push((build(kind, taken, input)?, depth));
    }
    match (free.pop(), free.as_slice()) {
        (Some((e, _)), []) => Ok(e),
        _ => Err(damaged("a message that is not one expression")),
    }
}

/// How many operands it has.
fn operands(kind: &Kind) -> usize {
    match kind {
        Kind::Column(_) | Kind::Literal(_) => 0,
        Kind::Not(_) | Kind::IsNull(_) | Kind::IsNotNull(_) | Kind::Negative(_) => 1,
        Kind::Cast(_) | Kind::TryCast(_) => 1,
        Kind::Binary(_) | Kind::Like(_) => 2,
        Kind::Case(c) => {
            let branches = (c.branches as usize).saturating_mul(2);
            branches.saturating_add(usize::from(c.compared) + usize::from(c.otherwise))
        }
        Kind::InList(l) => (l.items as usize).saturating_add(1),
        Kind::Call(c) => c.arguments as usize,
    }
}

/// `taken`: its operands, as many as [`operands`] says.
fn build(kind: &Kind, taken: Vec<ExprRef>, input: &Schema) -> Result<ExprRef> {
    let mut taken = taken.into_iter();
    let mut next = || taken.next().ok_or_else(|| damaged("an expression without its operands"));
    Ok(match kind {
        Kind::Column(c) => Arc::new(column(c, input)?),
        Kind::Literal(l) => Arc::new(decode_literal(l)?),
        Kind::Binary(number) => {
            let op = Operator::from_number(*number);
            let op = op.map_err(|_| CodecError::Unknown(format!("the operator {number}")))?;
            Arc::new(BinaryExpr::new(next()?, op, next()?))
        }
        Kind::Not(_) => Arc::new(NotExpr::new(next()?)),
        Kind::IsNull(_) => Arc::new(IsNullExpr::new(next()?)),
        Kind::IsNotNull(_) => Arc::new(IsNotNullExpr::new(next()?)),
        Kind::Negative(_) => Arc::new(NegativeExpr::new(next()?)),
        Kind::Case(c) => {
            let compared = c.compared.then(&mut next).transpose()?;
            let branches = (0..c.branches).map(|_| Ok((next()?, next()?)));
            let branches = branches.collect::<Result<Vec<_>>>()?;
            let otherwise = c.otherwise.then(&mut next).transpose()?;
            Arc::new(CaseExpr::try_new(compared, branches, otherwise).map_err(damaged)?)
        }
        Kind::Cast(c) => cast(c, next()?)?,
        Kind::TryCast(c) => try_cast(c, next()?)?,
        Kind::Like(l) => Arc::new(LikeExpr::new(l.negated, l.case_insensitive, next()?, next()?)),
        Kind::InList(l) => {
            let value = next()?;
            in_list(value, taken.collect(), l.negated, input)?
        }
        Kind::Call(c) => Arc::new(call(c, taken.collect())?),
    })
}

/// A list of literals is prepared for a fast search, which evaluates it. No other list may be
/// evaluated here: damaged bytes may be a call that its function does not expect. It is therefore
/// made of columns, which have no value yet, and gets its own items afterwards.
fn in_list(value: ExprRef, list: Vec<ExprRef>, negated: bool, input: &Schema) -> Result<ExprRef> {
    if list.iter().all(|e| e.is::<Literal>()) {
        let list = InListExpr::try_new(value, list, negated, input).map_err(damaged)?;
        return Ok(Arc::new(list));
    }
    let field = Field::new("", value.data_type(input).map_err(damaged)?, true);
    let column = || Arc::new(Column::new("", 0)) as ExprRef;
    let columns = list.iter().map(|_| column()).collect();
    let shape = InListExpr::try_new(column(), columns, negated, &Schema::new(vec![field]));
    let items = std::iter::once(value).chain(list).collect();
    Arc::new(shape.map_err(damaged)?).with_new_children(items).map_err(damaged)
}

fn column(c: &message::Column, input: &Schema) -> Result<Column> {
    let (position, width) = (c.position as usize, input.fields().len());
    if position >= width {
        return Err(damaged(format!("column {position} of {width}")));
    }
    Ok(Column::new(&c.name, position))
}

fn target(field: &Option<message::Field>) -> Result<FieldRef> {
    let field = field.as_ref().ok_or_else(|| damaged("an expression without its type"))?;
    Ok(Arc::new(decode_field(field)?))
}

fn cast(c: &message::Cast, operand: ExprRef) -> Result<ExprRef> {
    let target = target(&c.target)?;
    let options = Some(CastOptions { safe: c.safe, ..DEFAULT_CAST_OPTIONS });
    Ok(Arc::new(match c.exact {
        true => CastExpr::new_with_target_field(operand, target, options),
        false => CastExpr::new(operand, target.data_type().clone(), options),
    }))
}

fn try_cast(c: &message::Cast, operand: ExprRef) -> Result<ExprRef> {
    let target = target(&c.target)?;
    Ok(Arc::new(match c.exact {
        true => TryCastExpr::new_with_target_field(operand, target),
        false => TryCastExpr::new(operand, target.data_type().clone()),
    }))
}

fn call(c: &message::Call, arguments: Vec<ExprRef>) -> Result<ScalarFunctionExpr> {
    /// What a session may set for functions; stored expressions have the defaults.
    static OPTIONS: OnceLock<Arc<ConfigOptions>> = OnceLock::new();
    let Some(function) = versions::scalar(&c.function, c.version) else {
        let (name, version) = (c.function.clone(), c.version);
        return Err(CodecError::UnknownFunction { name, version });
    };
    let options = Arc::clone(OPTIONS.get_or_init(Arc::default));
    let name = function.name().to_owned();
    Ok(ScalarFunctionExpr::new(&name, function, arguments, target(&c.result)?, options))
}
