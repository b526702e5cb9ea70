//! [`Filter`]: rows for which a predicate is true.

use millrace_functions::expr::ExprRef;

use super::{ExprsMessage, Facts, OperatorMessage, Payload};
use crate::codec::Result;
use crate::codec::decode::{Inputs, damaged};
use crate::codec::expr::{decode_expr, encode_expr};

/// Passes on the rows for which the predicate is true.
#[derive(Clone, Debug)]
pub struct Filter {
    pub predicate: ExprRef,
}

// A derived one would move the trait object out of its pointer.
impl PartialEq for Filter {
    fn eq(&self, other: &Filter) -> bool {
        *self.predicate == *other.predicate
    }
}

impl Payload for Filter {
    fn facts(&self) -> Facts {
        Facts::inner("Filter")
    }

    fn encode(&self) -> Result<OperatorMessage> {
        Ok(OperatorMessage::Filter(ExprsMessage { exprs: vec![encode_expr(&self.predicate)?] }))
    }
}

impl Filter {
    pub(crate) fn decode(m: &ExprsMessage, inputs: &Inputs<'_>) -> Result<Filter> {
        match m.exprs.as_slice() {
            [predicate] => Ok(Filter { predicate: decode_expr(predicate, inputs.one()?)? }),
            _ => Err(damaged("a filter without one predicate")),
        }
    }
}
