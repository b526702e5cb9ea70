//! [`Stamp`]: the processing time of a row.

use super::{Facts, OperatorMessage, Payload};
use crate::codec::Result;
use crate::codec::decode::Inputs;

/// Appends the processing time plus so many microseconds, a TIMESTAMP: when a row is too old for a job with a
/// TTL.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stamp {
    pub add_us: i64,
}

impl Payload for Stamp {
    fn facts(&self) -> Facts {
        Facts::inner("Stamp")
    }

    fn encode(&self) -> Result<OperatorMessage> {
        Ok(OperatorMessage::Stamp(self.add_us))
    }
}

impl Stamp {
    pub(crate) fn decode(add_us: i64, inputs: &Inputs<'_>) -> Result<Stamp> {
        inputs.one()?;
        Ok(Stamp { add_us })
    }
}
