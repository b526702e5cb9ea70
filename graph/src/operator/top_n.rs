//! [`TopN`]: the first rows of each group.

use arrow::compute::SortOptions;
use millrace_functions::window_call::RankFunction;
use millrace_rpc::catalog::RowStorage;

use super::{Facts, OperatorMessage, Payload};
use crate::codec::decode::{self, Inputs};
use crate::codec::names::Numbered;
use crate::codec::proto::Order;
use crate::codec::{Result, encode};

/// The first rows of every group by an order (ORDER BY … LIMIT, DISTINCT ON, row_number() <= n).
/// Ties are broken by the row's own bytes, so the result is a function of the content. `S`: how its rows are kept,
/// as far as that is known where it stands.
#[derive(Clone, Debug, PartialEq)]
pub struct TopN<S = TopNState> {
    pub group: Vec<usize>,
    /// Input columns, some or all of `group`, whose hash is the vnode of a group's state. Empty:
    /// vnode 0, one task.
    pub vnode: Vec<usize>,
    pub order: Vec<(usize, SortOptions)>,
    pub offset: u64,
    /// `None`: all rows from `offset` (an OFFSET without LIMIT).
    pub limit: Option<u64>,
    /// What counts toward offset and limit: a row is kept when its rank by this function is in
    /// `offset + 1 ..= offset + limit`.
    pub rank: RankFunction,
    /// Appends the rank (from 1, counted from the group's first row) as a BIGINT NOT NULL column.
    pub emit_rank: bool,
    pub state: S,
}

#[derive(Clone, Debug, PartialEq)]
pub struct TopNState {
    /// `group | order | identity → row`.
    pub table: usize,
    /// `Keyed` or `Multiset`.
    pub storage: RowStorage,
    /// Columns, beyond `group` and `order`, that together with them make a row unique, for `Keyed`.
    pub unique_key: Vec<usize>,
    /// The input never retracts: a row that has left the window never comes back, so only the
    /// window's rows are kept. Fixed for the life of the job: it decides what the table holds.
    pub append_only_input: bool,
}

impl<S> TopN<S> {
    /// The same rows, kept otherwise.
    pub fn with_state<T>(self, state: T) -> TopN<T> {
        TopN {
            group: self.group,
            vnode: self.vnode,
            order: self.order,
            offset: self.offset,
            limit: self.limit,
            rank: self.rank,
            emit_rank: self.emit_rank,
            state,
        }
    }

    /// The input's columns that decide which rows are put out.
    pub fn columns_read(&self) -> Vec<usize> {
        self.group.iter().copied().chain(self.order.iter().map(|o| o.0)).collect()
    }
}

impl Payload for TopN {
    fn facts(&self) -> Facts {
        Facts::grouped("TopN", self.state.table)
    }

    fn encode(&self) -> Result<OperatorMessage> {
        Ok(OperatorMessage::TopN(TopNMessage {
            group: encode::positions(&self.group)?,
            vnode: encode::positions(&self.vnode)?,
            order: self.order.iter().map(encode::order).collect::<Result<_>>()?,
            offset: self.offset,
            limit: self.limit,
            rank: self.rank.number()?,
            emit_rank: self.emit_rank,
            table: encode::position(self.state.table)?,
            storage: self.state.storage.number()?,
            unique_key: encode::positions(&self.state.unique_key)?,
            append_only_input: self.state.append_only_input,
        }))
    }
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct TopNMessage {
    #[prost(uint32, repeated, tag = "1")]
    pub group: Vec<u32>,
    #[prost(uint32, repeated, tag = "2")]
    pub vnode: Vec<u32>,
    #[prost(message, repeated, tag = "3")]
    pub order: Vec<Order>,
    #[prost(uint64, tag = "4")]
    pub offset: u64,
    #[prost(uint64, optional, tag = "5")]
    pub limit: Option<u64>,
    #[prost(uint32, tag = "6")]
    pub rank: u32,
    #[prost(bool, tag = "7")]
    pub emit_rank: bool,
    #[prost(uint32, tag = "8")]
    pub table: u32,
    #[prost(uint32, tag = "9")]
    pub storage: u32,
    #[prost(uint32, repeated, tag = "10")]
    pub unique_key: Vec<u32>,
    #[prost(bool, tag = "11")]
    pub append_only_input: bool,
}

impl TopN {
    pub(crate) fn decode(m: &TopNMessage, inputs: &Inputs<'_>) -> Result<TopN> {
        let input = inputs.one()?;
        Ok(TopN {
            group: decode::columns(&m.group, input)?,
            vnode: decode::columns(&m.vnode, input)?,
            order: m.order.iter().map(|o| decode::order(o, input)).collect::<Result<_>>()?,
            offset: m.offset,
            limit: m.limit,
            rank: RankFunction::from_number(m.rank)?,
            emit_rank: m.emit_rank,
            state: TopNState {
                table: inputs.sizes.table(m.table)?,
                storage: RowStorage::from_number(m.storage)?,
                unique_key: decode::columns(&m.unique_key, input)?,
                append_only_input: m.append_only_input,
            },
        })
    }
}
