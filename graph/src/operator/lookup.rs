//! [`Lookup`]: a join with a relation as of the processing time.

use std::sync::Arc;

use millrace_functions::expr::ExprRef;
use millrace_rpc::catalog::RowStorage;
use prost::bytes::Bytes;

use super::join::{decode_side, encode_side};
use super::{Facts, JoinSide, JoinSideMessage, OperatorMessage, Payload, SideState};
use crate::codec::decode::{self, Inputs, damaged};
use crate::codec::expr::{decode_expr, encode_expr};
use crate::codec::names::Numbered;
use crate::codec::{Result, encode};
use crate::pair_schema;

/// A join with a relation as of the processing time: a left row meets the right rows as they are at the
/// epoch that it comes with, and what it has met stays, whatever becomes of the right side. Right changes of
/// an epoch are taken in before the epoch's left rows; they emit nothing. Output as a join's; left rows with a
/// NULL key meet nothing. `S` and `M`: how the right side and the matches are kept, as far as that is known.
#[derive(Clone, Debug, PartialEq)]
pub struct Lookup<S = SideState, M = Option<Matches>> {
    /// Left rows that meet nothing are padded with NULLs (LEFT JOIN), else dropped.
    pub outer: bool,
    /// Positions of the join key columns in the left input; never empty.
    pub left_keys: Vec<usize>,
    /// Left columns, some or all of `left_keys`, whose hash is the vnode.
    pub left_vnode: Vec<usize>,
    pub right: JoinSide<S>,
    /// Over left columns then right columns; must be true for a pair to match.
    pub residual: Option<ExprRef>,
    /// Positions in left columns then right columns.
    pub output: Vec<usize>,
    /// In a graph present where left rows may be retracted: what each has met.
    pub matches: M,
}

/// What left rows of a lookup have met: an entry a pair, one with NULLs for a row that met nothing (none if the
/// rows are told apart by a unique key and not padded).
#[derive(Clone, Debug, PartialEq)]
pub struct Matches {
    pub table: usize,
    /// How left rows are told apart beside their key: `Keyed` by `unique_key`, `Multiset` by the whole row.
    pub identity: RowStorage,
    pub unique_key: Vec<usize>,
}

impl Lookup {
    /// Of `width` left columns those by which it is told what a left row has met: the join key, then what tells rows of a
    /// key apart. `None`: that is not stored.
    pub fn told_by(&self, width: usize) -> Option<Vec<usize>> {
        let matches = self.matches.as_ref()?;
        let mut columns = self.left_keys.clone();
        let mut add = |c: usize| {
            if !columns.contains(&c) {
                columns.push(c);
            }
        };
        match matches.identity {
            RowStorage::Keyed => matches.unique_key.iter().copied().for_each(&mut add),
            _ => (0..width).for_each(&mut add),
        }
        Some(columns)
    }
}

impl Payload for Lookup {
    /// What is looked up is scanned before what it is looked up for.
    fn facts(&self) -> Facts {
        Facts {
            cleaned_tables: [self.right.state.table]
                .into_iter()
                .chain(self.matches.iter().map(|m| m.table))
                .collect(),
            has_intermediate_rows: false,
            ..Facts::inner("Lookup")
        }
    }

    fn encode(&self) -> Result<OperatorMessage> {
        let matches = self.matches.as_ref().map(|m| -> Result<MatchesMessage> {
            Ok(MatchesMessage {
                table: encode::position(m.table)?,
                identity: m.identity.number()?,
                unique_key: encode::positions(&m.unique_key)?,
            })
        });
        Ok(OperatorMessage::Lookup(LookupMessage {
            outer: self.outer,
            left_keys: encode::positions(&self.left_keys)?,
            left_vnode: encode::positions(&self.left_vnode)?,
            right: Some(encode_side(&self.right)?),
            residual: self.residual.as_ref().map(encode_expr).transpose()?,
            output: encode::positions(&self.output)?,
            matches: matches.transpose()?,
        }))
    }
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct LookupMessage {
    #[prost(bool, tag = "1")]
    pub outer: bool,
    #[prost(uint32, repeated, tag = "2")]
    pub left_keys: Vec<u32>,
    #[prost(uint32, repeated, tag = "3")]
    pub left_vnode: Vec<u32>,
    #[prost(message, optional, tag = "4")]
    pub right: Option<JoinSideMessage>,
    #[prost(bytes = "bytes", optional, tag = "5")]
    pub residual: Option<Bytes>,
    #[prost(uint32, repeated, tag = "6")]
    pub output: Vec<u32>,
    #[prost(message, optional, tag = "7")]
    pub matches: Option<MatchesMessage>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct MatchesMessage {
    #[prost(uint32, tag = "1")]
    pub table: u32,
    #[prost(uint32, tag = "2")]
    pub identity: u32,
    #[prost(uint32, repeated, tag = "3")]
    pub unique_key: Vec<u32>,
}

impl Lookup {
    pub(crate) fn decode(message: &LookupMessage, inputs: &Inputs<'_>) -> Result<Lookup> {
        let (left, right) = inputs.two()?;
        let pair = Arc::new(pair_schema(left, right));
        let matches = message.matches.as_ref().map(|m| -> Result<Matches> {
            Ok(Matches {
                table: inputs.sizes.table(m.table)?,
                identity: RowStorage::from_number(m.identity)?,
                unique_key: decode::columns(&m.unique_key, left)?,
            })
        });
        let found = Lookup {
            outer: message.outer,
            left_keys: decode::columns(&message.left_keys, left)?,
            left_vnode: decode::columns(&message.left_vnode, left)?,
            right: decode_side(message.right.as_ref(), right, inputs.sizes)?,
            residual: message.residual.as_ref().map(|e| decode_expr(e, &pair)).transpose()?,
            output: decode::columns(&message.output, &pair)?,
            matches: matches.transpose()?,
        };
        if found.left_keys.is_empty() || found.left_keys.len() != found.right.keys.len() {
            return Err(damaged("a lookup without keys on both sides"));
        }
        Ok(found)
    }
}
