//! The operators that end a job: [`Materialize`], [`Blackhole`] and [`Sink`].

use super::{Facts, OperatorMessage, Payload, Role};
use crate::codec::Result;
use crate::codec::decode::Inputs;
use crate::codec::proto::Nothing;

/// Writes the relation's rows to table 0 and its change to subscribers. The root.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Materialize;

/// Computes all and stores nothing but counts: rows and an order-independent hash. The root.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Blackhole;

/// Nets each epoch's change and hands it on to a target; stores no rows. The root.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sink;

/// Roots differ in their name and their tag.
macro_rules! root {
    ($root:ident) => {
        impl Payload for $root {
            fn facts(&self) -> Facts {
                Facts::new(stringify!($root), Role::Root)
            }

            fn encode(&self) -> Result<OperatorMessage> {
                Ok(OperatorMessage::$root(Nothing {}))
            }
        }

        impl $root {
            pub(crate) fn decode(inputs: &Inputs<'_>) -> Result<$root> {
                inputs.one()?;
                Ok($root)
            }
        }
    };
}

root!(Materialize);
root!(Blackhole);
root!(Sink);
