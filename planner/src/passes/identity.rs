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
use millrace_graph::dispatch_operator;

use crate::passes::Pass;
use crate::passes::properties::Properties;
use crate::stream::operators::{OperatorRules, RowIdentity};
use crate::stream::plan::{Identity, Stream};

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
    let Some(input) = stream.inputs.first() else { return Ok(stream) };
    let Some(RowIdentity { given, identity }) =
        dispatch_operator!(&mut stream.op, p => p.identity())
    else {
        return Ok(stream);
    };
    if let Some(key) = Properties::of(input).best_key(&given) {
        *identity = Identity(key);
        return Ok(stream);
    }
    let Some((keyed, key)) = with_key(input)? else { return Ok(stream) };
    *identity = Identity(key);
    // The output as it was: the input's columns, then the operator's own.
    let (width, grown) = (input.width(), keyed.width());
    let own = &stream.schema.fields()[width..];
    let columns: Vec<usize> = (0..width).chain(grown..grown + own.len()).collect();
    let fields: Vec<FieldRef> = keyed.schema.fields().iter().chain(own).cloned().collect();
    let schema = Arc::new(Schema::new(fields));
    Ok(Stream { op: stream.op, inputs: vec![keyed], schema }.select(&columns))
}

/// A stream and columns that are a unique key of it.
pub type Keyed = (Stream, Vec<usize>);

/// The stream with a unique key: its columns stay where they are, more may follow.
pub fn with_key(stream: &Stream) -> Result<Option<Keyed>> {
    if let Some(key) = Properties::of(stream).keys.first() {
        return Ok(Some((stream.clone(), key.iter().copied().collect())));
    }
    dispatch_operator!(&stream.op, p => p.with_key(stream))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes::tests::{ranked, table};
    use crate::stream::plan::Op;

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
