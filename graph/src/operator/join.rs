//! [`Join`]: a hash join on equal keys.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, FieldRef, Schema, SchemaRef};
use millrace_functions::expr::ExprRef;
use millrace_rpc::catalog::RowStorage;
use prost::bytes::Bytes;

use super::{Facts, OperatorMessage, Payload};
use crate::codec::decode::{self, Inputs, Sizes, damaged};
use crate::codec::expr::{decode_expr, encode_expr};
use crate::codec::names::Numbered;
use crate::codec::{Result, encode};
use crate::pair_schema;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum JoinKind {
    Inner,
    LeftOuter,
    RightOuter,
    FullOuter,
    LeftSemi,
    RightSemi,
    LeftAnti,
    RightAnti,
    /// Left rows plus a boolean column: whether a match exists (NULL where NOT IN would not know).
    LeftMark,
}

impl JoinKind {
    /// The fields of the join's full output, before [`Join::output`] selects.
    pub fn output_fields(self, left: &Schema, right: &Schema) -> Vec<FieldRef> {
        let side = |schema: &Schema, nullable: bool| -> Vec<FieldRef> {
            let fields = schema.fields().iter();
            if nullable {
                fields.map(|f| Arc::new(f.as_ref().clone().with_nullable(true))).collect()
            } else {
                fields.cloned().collect()
            }
        };
        let both = |l, r| [side(left, l), side(right, r)].concat();
        match self {
            JoinKind::Inner => both(false, false),
            JoinKind::LeftOuter => both(false, true),
            JoinKind::RightOuter => both(true, false),
            JoinKind::FullOuter => both(true, true),
            JoinKind::LeftSemi | JoinKind::LeftAnti => side(left, false),
            JoinKind::RightSemi | JoinKind::RightAnti => side(right, false),
            JoinKind::LeftMark => {
                let mut fields = side(left, false);
                fields.push(Arc::new(Field::new("mark", DataType::Boolean, true)));
                fields
            }
        }
    }
}

/// One side of a join. `S`: how it keeps its rows, `()` before tables are numbered.
#[derive(Clone, Debug, PartialEq)]
pub struct JoinSide<S = SideState> {
    /// Positions of the join key columns in this side's input.
    pub keys: Vec<usize>,
    /// Input columns, some or all of `keys`, whose hash is the vnode; the other side's list names
    /// the matching keys in the same order. Empty: vnode 0, one task.
    pub vnode: Vec<usize>,
    pub state: S,
}

/// How one side of a join keeps its rows: `join key | row identity → row`; of a null-aware join
/// `row identity → row`, since it compares its keys itself.
#[derive(Clone, Debug, PartialEq)]
pub struct SideState {
    pub table: usize,
    /// Keyed: the identity is `unique_key`; Multiset: the whole row; Append: a sequence.
    pub storage: RowStorage,
    /// Columns of this side's input that make a row unique together with `keys`, for `Keyed`; of a
    /// null-aware join, by themselves. Empty when `unique_per_key`.
    pub unique_key: Vec<usize>,
    /// At most one row a join key: the join key contains a unique key. Of a null-aware join: at most one row.
    pub unique_per_key: bool,
}

impl<S> JoinSide<S> {
    /// The same side, its rows kept otherwise.
    pub fn with_state<T>(self, state: T) -> JoinSide<T> {
        JoinSide { keys: self.keys, vnode: self.vnode, state }
    }
}

/// A hash join on equal keys. No keys: a cross join, singleton. Output: left columns then right
/// columns (outer), left or right columns (semi, anti), left columns then the mark.
#[derive(Clone, Debug, PartialEq)]
pub struct Join<S = SideState> {
    pub kind: JoinKind,
    pub left: JoinSide<S>,
    pub right: JoinSide<S>,
    /// Over left columns then right columns; must be true for a pair to match.
    pub residual: Option<ExprRef>,
    /// `NOT IN`: NULL on either side makes the answer unknown (§12, null-aware anti join).
    pub null_aware: bool,
    /// NULL keys are equal to each other (`IS NOT DISTINCT FROM`, set operations).
    pub null_equals_null: bool,
    /// Positions, in the output described above, of the columns that are kept.
    pub output: Vec<usize>,
}

impl<S> Join<S> {
    /// The (left, right) columns that must be equal.
    pub fn pairs(&self) -> impl Iterator<Item = (usize, usize)> {
        self.left.keys.iter().copied().zip(self.right.keys.iter().copied())
    }
}

impl Payload for Join {
    fn facts(&self) -> Facts {
        Facts {
            cleaned_tables: vec![self.left.state.table, self.right.state.table],
            has_intermediate_rows: self.kind != JoinKind::Inner,
            ..Facts::inner("Join")
        }
    }

    fn encode(&self) -> Result<OperatorMessage> {
        Ok(OperatorMessage::Join(JoinMessage {
            kind: self.kind.number()?,
            left: Some(encode_side(&self.left)?),
            right: Some(encode_side(&self.right)?),
            residual: self.residual.as_ref().map(encode_expr).transpose()?,
            null_aware: self.null_aware,
            null_equals_null: self.null_equals_null,
            output: encode::positions(&self.output)?,
        }))
    }
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct JoinMessage {
    #[prost(uint32, tag = "1")]
    pub kind: u32,
    #[prost(message, optional, tag = "2")]
    pub left: Option<JoinSideMessage>,
    #[prost(message, optional, tag = "3")]
    pub right: Option<JoinSideMessage>,
    #[prost(bytes = "bytes", optional, tag = "4")]
    pub residual: Option<Bytes>,
    #[prost(bool, tag = "5")]
    pub null_aware: bool,
    #[prost(bool, tag = "6")]
    pub null_equals_null: bool,
    #[prost(uint32, repeated, tag = "7")]
    pub output: Vec<u32>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct JoinSideMessage {
    #[prost(uint32, repeated, tag = "1")]
    pub keys: Vec<u32>,
    #[prost(uint32, repeated, tag = "2")]
    pub vnode: Vec<u32>,
    #[prost(uint32, tag = "3")]
    pub table: u32,
    #[prost(uint32, tag = "4")]
    pub storage: u32,
    #[prost(uint32, repeated, tag = "5")]
    pub unique_key: Vec<u32>,
    #[prost(bool, tag = "6")]
    pub unique_per_key: bool,
}

impl Join {
    pub(crate) fn decode(m: &JoinMessage, inputs: &Inputs<'_>) -> Result<Join> {
        let (left, right) = inputs.two()?;
        let pair = Arc::new(pair_schema(left, right));
        // The mark column lies behind the left ones, so the pair's width bounds every kind's output.
        let bound = pair.fields().len().max(left.fields().len() + 1);
        Ok(Join {
            kind: JoinKind::from_number(m.kind)?,
            left: decode_side(m.left.as_ref(), left, inputs.sizes)?,
            right: decode_side(m.right.as_ref(), right, inputs.sizes)?,
            residual: m.residual.as_ref().map(|e| decode_expr(e, &pair)).transpose()?,
            null_aware: m.null_aware,
            null_equals_null: m.null_equals_null,
            output: decode::positions(&m.output, bound, "join column")?,
        })
    }
}

pub(super) fn encode_side(s: &JoinSide) -> Result<JoinSideMessage> {
    Ok(JoinSideMessage {
        keys: encode::positions(&s.keys)?,
        vnode: encode::positions(&s.vnode)?,
        table: encode::position(s.state.table)?,
        storage: s.state.storage.number()?,
        unique_key: encode::positions(&s.state.unique_key)?,
        unique_per_key: s.state.unique_per_key,
    })
}

pub(super) fn decode_side(
    s: Option<&JoinSideMessage>,
    input: &SchemaRef,
    sizes: Sizes,
) -> Result<JoinSide> {
    let s = s.ok_or_else(|| damaged("a join without a side"))?;
    Ok(JoinSide {
        keys: decode::columns(&s.keys, input)?,
        vnode: decode::columns(&s.vnode, input)?,
        state: SideState {
            table: sizes.table(s.table)?,
            storage: RowStorage::from_number(s.storage)?,
            unique_key: decode::columns(&s.unique_key, input)?,
            unique_per_key: s.unique_per_key,
        },
    })
}
