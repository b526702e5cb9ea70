//! NATURAL joins as joins by the columns that both sides have, in the order of the left side's.
//! [`super::using`] does the rest.
//!
//! A column that USING names may be that of one of several tables on the left. The table is noted before the
//! column's name, and taken off again by [`super::using`].

use millrace_common::{SqlError, SqlState};
use sqlparser::ast::{
    BinaryOperator, Expr, Ident, JoinConstraint, JoinOperator, ObjectName, Value,
};

use super::output_names::fold;
use super::scopes::{Column, Joined};
use super::star_expansion;
use crate::bind::expressions::desugar::call;
use crate::parser::joins::{constraint, constraint_mut};

/// How a join by names is written out.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// By the names alone.
    Names,
    /// With the tables that they are of.
    Tables,
    /// As a condition; all columns are known.
    Condition,
}

/// The columns of a join. A NATURAL one gets the names that it is by.
pub fn join(
    left: Joined,
    right: Joined,
    operator: &mut JoinOperator,
    form: Form,
) -> Result<Joined, SqlError> {
    let known = left.complete() && right.complete();
    let names: Vec<Ident> = match constraint(operator) {
        Some(JoinConstraint::Natural) if known => common(&left, &right),
        Some(JoinConstraint::Using(names)) => {
            names.iter().filter_map(|n| n.0.last()?.as_ident().cloned()).collect()
        }
        _ => Vec::new(),
    };
    let natural = matches!(constraint(operator), Some(JoinConstraint::Natural));
    if form == Form::Condition
        && let Some(JoinConstraint::On(on)) = constraint_mut(operator)
    {
        let mut both = left.clone();
        both.extend(right.clone());
        star_expansion::replace(on, &both);
    }
    if natural && names.is_empty() {
        if known {
            join_all(operator);
        }
        return Ok(beside(left, right, &[], operator));
    }
    check_repeated(&names)?;
    if known {
        names.iter().try_for_each(|name| check(&left, &right, &fold(name)))?;
    }
    if let Some(by) = constraint_mut(operator)
        && matches!(by, JoinConstraint::Natural | JoinConstraint::Using(_))
    {
        let noted = |name: &Ident| match owner(&left, &fold(name)).filter(|_| form == Form::Tables)
        {
            Some(table) => ObjectName::from(vec![table, name.clone()]),
            None => ObjectName::from(vec![name.clone()]),
        };
        *by = match condition(&left, &right, &names).filter(|_| form == Form::Condition) {
            Some(all) => JoinConstraint::On(all),
            None => JoinConstraint::Using(names.iter().map(noted).collect()),
        };
    }
    let names: Vec<String> = names.iter().map(fold).collect();
    Ok(beside(left, right, &names, operator))
}

/// What a join by names is by: the columns of both sides are equal.
fn condition(left: &Joined, right: &Joined, names: &[Ident]) -> Option<Expr> {
    let equal = |name: &Ident| {
        let (ours, theirs) = (left.value(&fold(name))?, right.value(&fold(name))?);
        Some(binary(ours, BinaryOperator::Eq, theirs))
    };
    let all = names.iter().map(equal).collect::<Option<Vec<Expr>>>()?;
    all.into_iter().reduce(|a, b| binary(a, BinaryOperator::And, b))
}

fn binary(left: Expr, op: BinaryOperator, right: Expr) -> Expr {
    Expr::BinaryOp { left: Box::new(left), op, right: Box::new(right) }
}

/// What a merged column is.
fn merged_value(
    left: &Joined,
    right: &Joined,
    name: &str,
    operator: &JoinOperator,
) -> Option<Expr> {
    use JoinOperator as J;
    let (ours, theirs) = (left.value(name)?, right.value(name)?);
    Some(match operator {
        J::Right(_) | J::RightOuter(_) => theirs,
        J::FullOuter(_) => call("coalesce", [ours, theirs]),
        _ => ours,
    })
}

/// 42701 where USING names a column twice.
fn check_repeated(names: &[Ident]) -> Result<(), SqlError> {
    let names: Vec<String> = names.iter().map(fold).collect();
    let repeated = |(at, name): &(usize, &String)| names.iter().take(*at).any(|n| n == *name);
    match names.iter().enumerate().find(repeated) {
        Some((_, name)) => Err(SqlError::new(
            SqlState::DUPLICATE_COLUMN,
            format!("column name \"{name}\" appears more than once in USING clause"),
        )),
        None => Ok(()),
    }
}

/// The names that both sides have.
fn common(left: &Joined, right: &Joined) -> Vec<Ident> {
    let mut names: Vec<&String> = Vec::new();
    for column in &left.columns {
        let name = &column.name;
        if !names.contains(&name) && right.columns.iter().any(|c| c.name == *name) {
            names.push(name);
        }
    }
    names.into_iter().map(|name| Ident::with_quote('"', name)).collect()
}

/// Nothing is common to the sides: every pair is joined.
fn join_all(operator: &mut JoinOperator) {
    if let JoinOperator::Join(_) | JoinOperator::Inner(_) = operator {
        *operator = JoinOperator::CrossJoin(JoinConstraint::None);
    } else if let Some(by) = constraint_mut(operator) {
        *by = JoinConstraint::On(Expr::value(Value::Boolean(true)));
    }
}

/// A column that is merged must be one of each side.
fn check(left: &Joined, right: &Joined, name: &str) -> Result<(), SqlError> {
    for (side, columns) in [("left", &left.columns), ("right", &right.columns)] {
        let error = match columns.iter().filter(|c| c.name == name).count() {
            0 => SqlError::new(
                SqlState::UNDEFINED_COLUMN,
                format!(
                    "column \"{name}\" specified in USING clause does not exist in {side} table"
                ),
            ),
            1 => continue,
            _ => SqlError::new(
                SqlState::AMBIGUOUS_COLUMN,
                format!("common column name \"{name}\" appears more than once in {side} table"),
            ),
        };
        return Err(error);
    }
    Ok(())
}

/// The one of several tables that has a column.
fn owner(left: &Joined, name: &str) -> Option<Ident> {
    let mut found = left.columns.iter().filter(|c| c.name == name);
    let (column, None) = (found.next()?, found.next()) else { return None };
    if column.merged || left.tables.len() < 2 {
        return None;
    }
    left.tables.get(column.table?)?.name.clone()
}

/// The columns of two sides: those that are merged by name come first.
fn beside(left: Joined, right: Joined, names: &[String], operator: &JoinOperator) -> Joined {
    use JoinOperator as J;
    let before = left.tables.len();
    let values: Vec<Option<Expr>> =
        names.iter().map(|name| merged_value(&left, &right, name, operator)).collect();
    let theirs: Vec<Column> = right.columns.into_iter().map(|c| c.moved(before)).collect();
    let of = |columns: &[Column], name: &str| {
        columns.iter().find(|c| c.name == name).and_then(|c| c.table)
    };
    let merged = names.iter().zip(values).map(|(name, value)| {
        let table = match operator {
            J::Right(_) | J::RightOuter(_) => of(&theirs, name),
            J::FullOuter(_) => None,
            _ => of(&left.columns, name),
        };
        Column { name: name.clone(), table, merged: true, value }
    });
    let mut columns: Vec<Column> = merged.collect();
    let others = left.columns.into_iter().chain(theirs);
    columns.extend(others.filter(|c| !names.contains(&c.name)));
    let mut tables = left.tables;
    tables.extend(right.tables);
    Joined { tables, columns }
}
