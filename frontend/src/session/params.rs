//! Parameters `$1…`: their types while a statement is prepared, their values when it runs.
//!
//! Values go into the statement as typed literals (`CAST('…' AS type)`) before it is planned: then
//! every place that takes an expression takes a parameter, and a plan sees the value.

use std::ops::ControlFlow;

use arrow::array::{Array, ArrayRef};
use arrow::datatypes::DataType;
use bytes::BytesMut;
use millrace_common::types::Element;
use millrace_common::{SqlError, SqlState, SqlType};
use sqlparser::ast::{Expr, Value, VisitMut};

use crate::dml::rewrite::typed_literal;
use crate::encoding::Column;
use millrace_planner::parser::walk;

/// The number of `$n`, from 1.
fn placeholder(expr: &Expr) -> Option<usize> {
    match expr {
        Expr::Value(v) => match &v.value {
            Value::Placeholder(p) => {
                p.strip_prefix('$')?.parse().ok().filter(|n| (1..=65_535).contains(n))
            }
            _ => None,
        },
        Expr::Nested(inner) => placeholder(inner),
        _ => None,
    }
}

/// The highest parameter number in a statement.
pub fn count<V: sqlparser::ast::Visit>(statement: &V) -> usize {
    let mut highest = 0;
    let _ = walk::expressions(statement, |e| {
        highest = highest.max(placeholder(e).unwrap_or(0));
        ControlFlow::<()>::Continue(())
    });
    highest
}

/// Notes a type for `expr` if it is a parameter whose type is not known yet.
pub fn note_type(expr: &Expr, t: DataType, types: &mut Vec<Option<DataType>>) {
    if let Some(n) = placeholder(expr) {
        if types.len() < n {
            types.resize(n, None);
        }
        types[n - 1].get_or_insert(t);
    }
}

/// Fills in inferred types; what the client declared stays.
pub fn merge(types: &mut Vec<Option<DataType>>, inferred: Vec<DataType>) {
    types.resize(types.len().max(inferred.len()), None);
    for (slot, t) in types.iter_mut().zip(inferred) {
        if t != DataType::Null {
            slot.get_or_insert(t);
        }
    }
}

/// Fills in what was inferred of the parameters that a part of a statement has: of others it knows nothing.
pub fn merge_of<V: sqlparser::ast::Visit>(
    part: &V,
    types: &mut Vec<Option<DataType>>,
    inferred: &[DataType],
) {
    types.resize(types.len().max(inferred.len()), None);
    let _ = walk::expressions(part, |e| {
        if let Some(n) = placeholder(e)
            && let (Some(slot), Some(t)) = (types.get_mut(n - 1), inferred.get(n - 1))
            && *t != DataType::Null
        {
            slot.get_or_insert_with(|| t.clone());
        }
        ControlFlow::<()>::Continue(())
    });
}

/// Replaces every `$n` by its value.
pub fn substitute<V: VisitMut>(statement: &mut V, values: &[ArrayRef]) -> Result<(), SqlError> {
    if values.is_empty() {
        return Ok(());
    }
    let flow = walk::expressions_mut(statement, |e| {
        let Some(n) = placeholder(e) else { return ControlFlow::Continue(()) };
        match values.get(n - 1).ok_or_else(|| undefined(n)).and_then(literal_of) {
            Ok(literal) => {
                *e = literal;
                ControlFlow::Continue(())
            }
            Err(error) => ControlFlow::Break(error),
        }
    });
    match flow {
        ControlFlow::Break(error) => Err(error),
        ControlFlow::Continue(()) => Ok(()),
    }
}

pub fn undefined(n: usize) -> SqlError {
    SqlError::new(SqlState::UNDEFINED_PARAMETER, format!("there is no parameter ${n}"))
}

/// A one-row column as a literal of its type.
fn literal_of(value: &ArrayRef) -> Result<Expr, SqlError> {
    let sql = SqlType::from_arrow(value.data_type())?;
    let name = match sql {
        SqlType::Varchar(_) | SqlType::Char(_) => "text".to_owned(),
        SqlType::Numeric(_) => "numeric".to_owned(),
        SqlType::Array(Element::Numeric(_)) => "numeric[]".to_owned(),
        SqlType::Array(Element::Varchar(_)) => "text[]".to_owned(),
        other => other.to_string(),
    };
    if value.is_null(0) {
        return typed_literal(None, &name);
    }
    let mut text = BytesMut::new();
    Column::new(value)?.put_text(0, &mut text)?;
    let text = std::str::from_utf8(&text).map_err(|_| SqlError::internal("text is not UTF-8"))?;
    typed_literal(Some(text), &name)
}
