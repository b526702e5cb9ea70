//! [`Exchange`]: the end of an edge.

use super::{Facts, OperatorMessage, Payload, Role};
use crate::codec::decode::{self, Inputs};
use crate::codec::{Result, encode};

/// What an edge from another fragment of this job brings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exchange {
    pub fragment: usize,
    /// Which of that fragment's outputs.
    pub output: usize,
}

impl Payload for Exchange {
    fn facts(&self) -> Facts {
        Facts::new("Exchange", Role::Exchange)
    }

    fn encode(&self) -> Result<OperatorMessage> {
        Ok(OperatorMessage::Exchange(ExchangeMessage {
            fragment: encode::position(self.fragment)?,
            output: encode::position(self.output)?,
        }))
    }
}

/// Which edge an exchange takes.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(crate) struct ExchangeMessage {
    #[prost(uint32, tag = "1")]
    pub fragment: u32,
    #[prost(uint32, tag = "2")]
    pub output: u32,
}

impl Exchange {
    pub(crate) fn decode(m: &ExchangeMessage, inputs: &Inputs<'_>) -> Result<Exchange> {
        inputs.none()?;
        let fragment = decode::position(m.fragment, inputs.sizes.fragments, "fragment")?;
        Ok(Exchange { fragment, output: m.output as usize })
    }
}
