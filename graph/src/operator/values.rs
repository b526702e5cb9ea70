//! [`Values`]: constant rows.

use arrow::record_batch::RecordBatch;

use super::{Facts, OperatorMessage, Payload, Role};
use crate::codec::Result;
use crate::codec::decode::Inputs;
use crate::codec::ipc::{decode_batch, encode_batch};

/// Constant rows, emitted once, in the job's first epoch. Singleton.
#[derive(Clone, Debug, PartialEq)]
pub struct Values {
    pub batch: RecordBatch,
}

impl Payload for Values {
    fn facts(&self) -> Facts {
        Facts::new("Values", Role::Input)
    }

    fn encode(&self) -> Result<OperatorMessage> {
        Ok(OperatorMessage::Values(encode_batch(&self.batch)?))
    }
}

impl Values {
    pub(crate) fn decode(bytes: &[u8], inputs: &Inputs<'_>) -> Result<Values> {
        inputs.none()?;
        Ok(Values { batch: decode_batch(bytes)? })
    }
}
