//! [`Expand`]: a row for each grouping set.

use super::{Facts, OperatorMessage, Payload};
use crate::codec::decode::{self, Inputs, damaged};
use crate::codec::{Result, encode};

/// GROUPING SETS: a row leaves once for each set, with the input's columns, then a copy of each of
/// `columns` that is NULL where the set does not group by it, then the set's id (BIGINT NOT NULL).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expand {
    /// Input columns that some set groups by.
    pub columns: Vec<usize>,
    pub sets: Vec<GroupingSet>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupingSet {
    /// Parallel to [`Expand::columns`]: whether the set groups by it.
    pub keep: Vec<bool>,
    pub id: i64,
}

impl Payload for Expand {
    fn facts(&self) -> Facts {
        Facts::inner("Expand")
    }

    fn encode(&self) -> Result<OperatorMessage> {
        let set = |s: &GroupingSet| GroupingSetMessage { keep: s.keep.clone(), id: s.id };
        Ok(OperatorMessage::Expand(ExpandMessage {
            columns: encode::positions(&self.columns)?,
            sets: self.sets.iter().map(set).collect(),
        }))
    }
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ExpandMessage {
    #[prost(uint32, repeated, tag = "1")]
    pub columns: Vec<u32>,
    #[prost(message, repeated, tag = "2")]
    pub sets: Vec<GroupingSetMessage>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct GroupingSetMessage {
    #[prost(bool, repeated, tag = "1")]
    pub keep: Vec<bool>,
    #[prost(int64, tag = "2")]
    pub id: i64,
}

impl Expand {
    pub(crate) fn decode(m: &ExpandMessage, inputs: &Inputs<'_>) -> Result<Expand> {
        if m.sets.iter().any(|s| s.keep.len() != m.columns.len()) {
            return Err(damaged("a grouping set over other columns"));
        }
        let set = |s: &GroupingSetMessage| GroupingSet { keep: s.keep.clone(), id: s.id };
        let columns = decode::columns(&m.columns, inputs.one()?)?;
        Ok(Expand { columns, sets: m.sets.iter().map(set).collect() })
    }
}
