//! Short identities for rows in order: brings a unique key to every top-N and window whose input has
//! lost its own.
//!
//! A top-N orders rows of equal rank by an identity and keeps them under it. Without a unique key
//! that is the whole row: every column twice, once encoded. Most inputs have a key that a projection
//! below dropped (a hidden row id, above all), and carrying it is far cheaper. With a row id, rows
//! of equal rank are also in order of arrival. The key is carried through filters, projections,
//! hops and inner joins; behind anything else the whole row stays the identity.

use std::sync::Arc;

use arrow::datatypes::{FieldRef, Schema};
use datafusion::common::Result;
use millrace_common::SqlError;
use millrace_functions::error::sql_error_from_datafusion;
use millrace_functions::expr;
use millrace_graph::JoinKind;
use millrace_graph::pair_schema;
use millrace_rpc::catalog::{RelationKind, RowStorage};

use crate::passes::Pass;
use crate::passes::properties::Properties;
use crate::stream::plan::{Identity, Join, Op, Stream};

/// See [`add_identities`].
pub struct AddIdentities;

impl Pass for AddIdentities {
    fn name(&self) -> &'static str {
        "add identities"
    }

    fn run(&self, stream: Stream) -> std::result::Result<Stream, SqlError> {
        add_identities(stream).map_err(sql_error_from_datafusion)
    }
}

pub fn add_identities(stream: Stream) -> Result<Stream> {
    let mut stream = stream.map_inputs(add_identities)?;
    let (group, order) = match &stream.op {
        Op::TopN(t) => (&t.group, &t.order),
        Op::Window(w) => (&w.group, &w.order),
        _ => return Ok(stream),
    };
    let Some(input) = stream.inputs.first() else { return Ok(stream) };
    let p = Properties::of(input);
    let given: Vec<usize> = group.iter().copied().chain(order.iter().map(|o| o.0)).collect();
    if let Some(key) = p.best_key(&given) {
        identify(&mut stream.op, key);
        return Ok(stream);
    }
    let width = input.width();
    let Some((keyed, key)) = with_key(input)? else { return Ok(stream) };
    // The output as it was: the input's columns, then the operator's own.
    let (grown, own) = (keyed.width(), stream.width() - width);
    let columns: Vec<usize> = (0..width).chain(grown..grown + own).collect();
    let mut op = stream.op;
    identify(&mut op, key);
    Ok(match op {
        Op::TopN(t) => keyed.top_n(t).select(&columns),
        Op::Window(w) => keyed.window(w).select(&columns),
        op => Stream { op, inputs: vec![keyed], schema: stream.schema },
    })
}

/// Tells an operator that keeps its input's rows what tells them apart; others need no key.
#[deny(clippy::wildcard_enum_match_arm)]
fn identify(op: &mut Op, key: Vec<usize>) {
    match op {
        Op::TopN(t) => t.state = Identity(key),
        Op::Window(w) => w.state = Identity(key),
        Op::Scan { .. }
        | Op::Values { .. }
        | Op::Filter { .. }
        | Op::Project { .. }
        | Op::Union
        | Op::Hop { .. }
        | Op::Repeat { .. }
        | Op::Unnest { .. }
        | Op::Expand(_)
        | Op::Aggregate(_)
        | Op::Join(_)
        | Op::Lookup(_)
        | Op::WindowClose(_)
        | Op::Stamp { .. }
        | Op::TemporalUpperBound(_)
        | Op::TemporalLowerBound(_)
        | Op::Exchange { .. } => {}
    }
}

/// The stream with a unique key: its columns stay where they are, more may follow.
#[deny(clippy::wildcard_enum_match_arm)]
fn with_key(stream: &Stream) -> Result<Option<(Stream, Vec<usize>)>> {
    if let Some(key) = Properties::of(stream).keys.first() {
        return Ok(Some((stream.clone(), key.iter().copied().collect())));
    }
    let Some(input) = stream.inputs.first() else { return Ok(scan(stream)) };
    match &stream.op {
        Op::Filter { predicate } => {
            let found = with_key(input)?;
            Ok(found.map(|(input, key)| (input.filter(Arc::clone(predicate)), key)))
        }
        Op::Project { .. } => {
            let found = with_key(input)?;
            Ok(found.map(|(input, key)| project(stream, input, &key)))
        }
        Op::Hop { .. } => Ok(with_key(input)?.map(|(input, key)| hop(stream, input, &key))),
        Op::Join(j) => match stream.inputs.as_slice() {
            [left, right] if j.kind == JoinKind::Inner => {
                match (with_key(left)?, with_key(right)?) {
                    (Some(l), Some(r)) => join(j, (left.width(), l), r).map(Some),
                    _ => Ok(None),
                }
            }
            _ => Ok(None),
        },
        Op::Scan { .. }
        | Op::Values { .. }
        | Op::Union
        | Op::Repeat { .. }
        | Op::Unnest { .. }
        | Op::Expand(_)
        | Op::Aggregate(_)
        | Op::Lookup(_)
        | Op::TopN(_)
        | Op::Window(_)
        | Op::WindowClose(_)
        | Op::Stamp { .. }
        | Op::TemporalUpperBound(_)
        | Op::TemporalLowerBound(_)
        | Op::Exchange { .. } => Ok(None),
    }
}

fn scan(stream: &Stream) -> Option<(Stream, Vec<usize>)> {
    let Op::Scan { relation, columns } = &stream.op else { return None };
    let keyed = relation.storage() == RowStorage::Keyed || relation.kind() == RelationKind::Source;
    if relation.key.is_empty() || !keyed {
        return None;
    }
    let all = relation.arrow_schema().ok()?;
    let mut columns = columns.clone();
    let mut fields: Vec<FieldRef> = stream.schema.fields().iter().cloned().collect();
    let mut key = Vec::with_capacity(relation.key.len());
    for &k in &relation.key {
        let k = k as usize;
        let at = columns.iter().position(|&c| c == k);
        key.push(at.unwrap_or(columns.len()));
        if at.is_none() {
            columns.push(k);
            fields.push(Arc::clone(all.fields().get(k)?));
        }
    }
    let schema = Arc::new(Schema::new(fields));
    Some((Stream::scan(Arc::clone(relation), schema, columns), key))
}

/// A projection that passes the key on behind its own columns.
fn project(stream: &Stream, input: Stream, key: &[usize]) -> (Stream, Vec<usize>) {
    let Op::Project { exprs } = &stream.op else { return (stream.clone(), vec![]) };
    let mut exprs = exprs.clone();
    let mut fields: Vec<FieldRef> = stream.schema.fields().iter().cloned().collect();
    let mut at = Vec::with_capacity(key.len());
    for &k in key {
        let have = exprs.iter().position(|e| expr::as_column(e) == Some(k));
        at.push(have.unwrap_or(exprs.len()));
        if have.is_none() {
            exprs.push(expr::column(&input.schema, k));
            fields.push(Arc::clone(&input.schema.fields()[k]));
        }
    }
    let schema = Arc::new(Schema::new(fields));
    (Stream { op: Op::Project { exprs }, inputs: vec![input], schema }, at)
}

/// The windows come behind the input's columns, and a grown input moves them: they move back.
fn hop(stream: &Stream, input: Stream, key: &[usize]) -> (Stream, Vec<usize>) {
    let Op::Hop { time_column, size_us, slide_us, offset_us } = stream.op else {
        return (stream.clone(), vec![]);
    };
    let (own, grown) = (stream.width() - 2, input.width());
    let hop = input.hop(time_column, size_us, slide_us, offset_us);
    let columns: Vec<usize> = (0..own).chain([grown, grown + 1]).chain(own..grown).collect();
    let place = |k: usize| if k < own { k } else { k + 2 };
    let mut key: Vec<usize> = key.iter().map(|&k| place(k)).collect();
    key.push(own);
    (hop.select(&columns), key)
}

/// An inner join's rows are pairs: both keys together are unique.
fn join(
    j: &Join,
    (left_width, (left, left_key)): (usize, (Stream, Vec<usize>)),
    (right, right_key): (Stream, Vec<usize>),
) -> Result<(Stream, Vec<usize>)> {
    let grown = left.width();
    let place = |c: usize| if c < left_width { c } else { c - left_width + grown };
    let mut j = j.clone();
    if let Some(residual) = &j.residual {
        let pair = pair_schema(&left.schema, &right.schema);
        j.residual =
            Some(expr::replace_columns(residual, |c| Some(expr::column(&pair, place(c))))?);
    }
    j.output = j.output.iter().map(|&c| place(c)).collect();
    let full = left_key.into_iter().chain(right_key.into_iter().map(|k| k + grown));
    let mut key = Vec::new();
    for k in full {
        let have = j.output.iter().position(|&c| c == k);
        key.push(have.unwrap_or(j.output.len()));
        if have.is_none() {
            j.output.push(k);
        }
    }
    Ok((left.join(right, j), key))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes::tests::{ranked, table};

    fn identity(stream: &Stream) -> Vec<usize> {
        match &stream.op {
            Op::TopN(t) => t.state.0.clone(),
            _ => identity(&stream.inputs[0]),
        }
    }

    #[test]
    fn a_key_that_was_dropped_comes_back() {
        // (b, c): the key a is gone; group by c, order by b.
        let plan = ranked(table().select(&[1, 2]));
        let fields = plan.schema.clone();
        let plan = add_identities(plan).unwrap();
        assert_eq!(identity(&plan), vec![2]);
        assert_eq!(plan.schema, fields, "the output is as before");
    }

    #[test]
    fn a_key_that_is_there_is_used() {
        let plan = add_identities(ranked(table())).unwrap();
        // It is part of the order already: nothing more is needed.
        assert_eq!(identity(&plan), Vec::<usize>::new());
    }
}
