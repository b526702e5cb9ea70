//! [`Repeat`]: copies of a row.

use super::{Facts, OperatorMessage, Payload};
use crate::codec::decode::{self, Inputs};
use crate::codec::{Result, encode};

/// A row as many times as a BIGINT column of it says; not at all where that is NULL or below one.
/// Passes all columns on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Repeat {
    pub times_column: usize,
}

impl Payload for Repeat {
    fn facts(&self) -> Facts {
        Facts::inner("Repeat")
    }

    fn encode(&self) -> Result<OperatorMessage> {
        Ok(OperatorMessage::Repeat(encode::position(self.times_column)?))
    }
}

impl Repeat {
    pub(crate) fn decode(column: u32, inputs: &Inputs<'_>) -> Result<Repeat> {
        Ok(Repeat { times_column: decode::column(column, inputs.one()?)? })
    }
}
