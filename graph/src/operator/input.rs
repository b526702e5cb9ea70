//! The operators that read a relation: [`Subscribe`] and [`Source`].

use millrace_common::RelationId;

use super::{Facts, OperatorMessage, Payload, Role};
use crate::codec::decode::Inputs;
use crate::codec::{Result, encode};

/// The snapshot, then the changes of another relation.
#[derive(Clone, Debug, PartialEq)]
pub struct Subscribe {
    pub relation: RelationId,
    /// Positions in that relation.
    pub columns: Vec<usize>,
}

/// Reads a source's splits directly.
#[derive(Clone, Debug, PartialEq)]
pub struct Source {
    pub relation: RelationId,
    /// Positions in that relation.
    pub columns: Vec<usize>,
}

impl Payload for Subscribe {
    fn facts(&self) -> Facts {
        Facts::new("Subscribe", Role::Input)
    }

    fn encode(&self) -> Result<OperatorMessage> {
        Ok(OperatorMessage::Subscribe(ScanMessage::of(self.relation, &self.columns)?))
    }
}

impl Payload for Source {
    fn facts(&self) -> Facts {
        Facts::new("Source", Role::Input)
    }

    fn encode(&self) -> Result<OperatorMessage> {
        Ok(OperatorMessage::Source(ScanMessage::of(self.relation, &self.columns)?))
    }
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ScanMessage {
    #[prost(uint32, tag = "1")]
    pub relation: u32,
    #[prost(uint32, repeated, tag = "2")]
    pub columns: Vec<u32>,
}

impl ScanMessage {
    fn of(relation: RelationId, columns: &[usize]) -> Result<ScanMessage> {
        Ok(ScanMessage { relation: relation.0, columns: encode::positions(columns)? })
    }

    /// The relation is not at hand, so its positions are not checked here.
    fn columns(&self) -> Vec<usize> {
        self.columns.iter().map(|&c| c as usize).collect()
    }
}

impl Subscribe {
    pub(crate) fn decode(m: &ScanMessage, inputs: &Inputs<'_>) -> Result<Subscribe> {
        inputs.none()?;
        Ok(Subscribe { relation: RelationId(m.relation), columns: m.columns() })
    }
}

impl Source {
    pub(crate) fn decode(m: &ScanMessage, inputs: &Inputs<'_>) -> Result<Source> {
        inputs.none()?;
        Ok(Source { relation: RelationId(m.relation), columns: m.columns() })
    }
}
