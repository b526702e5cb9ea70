//! [`Unnest`]: the elements of lists as rows.

use arrow::datatypes::DataType;

use super::{Facts, OperatorMessage, Payload};
use crate::codec::decode::{self, Inputs, damaged};
use crate::codec::{Result, encode};

/// A row once for each element of its lists, which are read side by side, the shorter ones filled up with
/// NULLs: the elements take the lists' places. A row without elements vanishes, or has NULLs.
#[derive(Clone, Debug, PartialEq)]
pub struct Unnest {
    pub lists: Vec<usize>,
    pub keep_empty: bool,
}

impl Payload for Unnest {
    fn facts(&self) -> Facts {
        Facts::inner("Unnest")
    }

    fn encode(&self) -> Result<OperatorMessage> {
        let lists = encode::positions(&self.lists)?;
        Ok(OperatorMessage::Unnest(UnnestMessage { lists, keep_empty: self.keep_empty }))
    }
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct UnnestMessage {
    #[prost(uint32, repeated, tag = "1")]
    pub lists: Vec<u32>,
    #[prost(bool, tag = "2")]
    pub keep_empty: bool,
}

impl Unnest {
    pub(crate) fn decode(m: &UnnestMessage, inputs: &Inputs<'_>) -> Result<Unnest> {
        let input = inputs.one()?;
        let lists = decode::columns(&m.lists, input)?;
        if lists.iter().any(|&c| !matches!(input.field(c).data_type(), DataType::List(_))) {
            return Err(damaged("an unnest of what is no list"));
        }
        Ok(Unnest { lists, keep_empty: m.keep_empty })
    }
}
