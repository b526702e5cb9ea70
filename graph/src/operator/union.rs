//! [`Union`]: the rows of all inputs.

use super::{Facts, OperatorMessage, Payload};
use crate::codec::Result;
use crate::codec::proto::Nothing;

/// Bag union: one port an input, same schema.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Union;

impl Payload for Union {
    fn facts(&self) -> Facts {
        Facts::inner("Union")
    }

    fn encode(&self) -> Result<OperatorMessage> {
        Ok(OperatorMessage::Union(Nothing {}))
    }
}
