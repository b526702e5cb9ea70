//! [`Project`]: columns computed from each row.

use millrace_functions::expr::ExprRef;
use prost::bytes::Bytes;

use super::{Facts, OperatorMessage, Payload};
use crate::codec::Result;
use crate::codec::decode::Inputs;
use crate::codec::expr::{decode_expr, encode_expr};

/// Computes a row's columns from each row.
#[derive(Clone, Debug, PartialEq)]
pub struct Project {
    pub exprs: Vec<ExprRef>,
}

impl Payload for Project {
    fn facts(&self) -> Facts {
        Facts::inner("Project")
    }

    fn encode(&self) -> Result<OperatorMessage> {
        let exprs = self.exprs.iter().map(encode_expr).collect::<Result<_, _>>()?;
        Ok(OperatorMessage::Project(ExprsMessage { exprs }))
    }
}

/// Expressions over the columns of the only input.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ExprsMessage {
    #[prost(bytes = "bytes", repeated, tag = "1")]
    pub exprs: Vec<Bytes>,
}

impl Project {
    pub(crate) fn decode(m: &ExprsMessage, inputs: &Inputs<'_>) -> Result<Project> {
        let input = inputs.one()?;
        let exprs = m.exprs.iter().map(|e| decode_expr(e, input)).collect::<Result<_, _>>()?;
        Ok(Project { exprs })
    }
}
