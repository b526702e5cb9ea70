//! [`Aggregate`]: grouped aggregation.

use arrow::datatypes::{DataType, SchemaRef};
use millrace_functions::aggregate_kind::AggFunc;
use prost::bytes::Bytes;

use super::{Facts, OperatorMessage, Payload};
use crate::codec::decode::{self, Inputs, Sizes};
use crate::codec::names;
use crate::codec::{Result, encode};

/// Grouped aggregation. Output: the group columns, then one column a call. With no group columns
/// there is exactly one output row, also over empty input, and the fragment is a singleton.
/// With no calls it is DISTINCT. `S` and `T`: the calls' state and the table, as far as they are known.
#[derive(Clone, Debug, PartialEq)]
pub struct Aggregate<S = Option<ValueTable>, T = usize> {
    pub group: Vec<usize>,
    /// Input columns, some or all of `group`, whose hash is the vnode of a group's state.
    pub vnode: Vec<usize>,
    pub calls: Vec<AggCall<S>>,
    /// One row a group: count of input rows, then the calls' accumulators.
    pub table: T,
}

/// A value table of which rows read, when they come, how often their value occurs in their group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CountedValues {
    pub table: usize,
    /// Input columns: the value, and the one that must be true.
    pub arg: usize,
    pub filter: Option<usize>,
}

impl Aggregate {
    /// The value tables of DISTINCT calls, in the order of these. Others are read only when a retraction may have taken a
    /// result away, or at the barrier.
    pub fn counted_values(&self) -> Vec<CountedValues> {
        let mut found: Vec<CountedValues> = Vec::new();
        for call in &self.calls {
            let is_extreme = matches!(call.func, AggFunc::Min | AggFunc::Max);
            if is_extreme || call.func.is_collected() {
                continue;
            }
            let (Some(ValueTable { table, .. }), Some(arg)) = (call.state, call.arg) else {
                continue;
            };
            if !found.iter().any(|known| known.table == table) {
                found.push(CountedValues { table, arg, filter: call.filter });
            }
        }
        found
    }
}

impl<S, T> Aggregate<S, T> {
    /// The input's columns that decide the results.
    pub fn columns_read(&self) -> Vec<usize> {
        let arguments = self.calls.iter().flat_map(|c| c.arg.into_iter().chain(c.filter));
        self.group.iter().copied().chain(arguments).collect()
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct AggCall<S = Option<ValueTable>> {
    pub func: AggFunc,
    /// Input column; `None` for `count(*)`.
    pub arg: Option<usize>,
    pub distinct: bool,
    /// A boolean input column: only rows where it is true count.
    pub filter: Option<usize>,
    pub output_type: DataType,
    pub state: S,
}

/// MIN/MAX that may be retracted, and DISTINCT calls: state table `group | value → count`. Calls over the same
/// (arg, filter) and direction share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValueTable {
    pub table: usize,
    /// The value column is encoded descending (MAX), else ascending.
    pub descending: bool,
}

impl<S> AggCall<S> {
    /// The same call, its values kept otherwise.
    pub fn with_state<T>(self, state: T) -> AggCall<T> {
        let AggCall { func, arg, distinct, filter, output_type, .. } = self;
        AggCall { func, arg, distinct, filter, output_type, state }
    }
}

impl Payload for Aggregate {
    fn facts(&self) -> Facts {
        Facts::grouped("Aggregate", self.table)
    }

    fn encode(&self) -> Result<OperatorMessage> {
        Ok(OperatorMessage::Aggregate(AggregateMessage {
            group: encode::positions(&self.group)?,
            vnode: encode::positions(&self.vnode)?,
            calls: self.calls.iter().map(encode_call).collect::<Result<_>>()?,
            table: encode::position(self.table)?,
        }))
    }
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct AggregateMessage {
    #[prost(uint32, repeated, tag = "1")]
    pub group: Vec<u32>,
    #[prost(uint32, repeated, tag = "2")]
    pub vnode: Vec<u32>,
    #[prost(message, repeated, tag = "3")]
    pub calls: Vec<AggCallMessage>,
    #[prost(uint32, tag = "4")]
    pub table: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct AggCallMessage {
    #[prost(uint32, tag = "1")]
    pub func: u32,
    #[prost(uint32, optional, tag = "2")]
    pub arg: Option<u32>,
    #[prost(bool, tag = "3")]
    pub distinct: bool,
    #[prost(uint32, optional, tag = "4")]
    pub filter: Option<u32>,
    /// A schema of one column, of the output's type.
    #[prost(bytes = "bytes", tag = "5")]
    pub output_type: Bytes,
    #[prost(uint32, optional, tag = "6")]
    pub value_table: Option<u32>,
    #[prost(bool, tag = "7")]
    pub value_descending: bool,
    /// The aggregate's; 0 is version 1.
    #[prost(uint32, tag = "8")]
    pub version: u32,
}

impl Aggregate {
    pub(crate) fn decode(m: &AggregateMessage, inputs: &Inputs<'_>) -> Result<Aggregate> {
        let input = inputs.one()?;
        Ok(Aggregate {
            group: decode::columns(&m.group, input)?,
            vnode: decode::columns(&m.vnode, input)?,
            calls: m
                .calls
                .iter()
                .map(|c| decode_call(c, input, inputs.sizes))
                .collect::<Result<_>>()?,
            table: inputs.sizes.table(m.table)?,
        })
    }
}

fn encode_call(c: &AggCall) -> Result<AggCallMessage> {
    let (func, version) = names::of_aggregate(c.func)?;
    Ok(AggCallMessage {
        func,
        version,
        arg: encode::optional(c.arg)?,
        distinct: c.distinct,
        filter: encode::optional(c.filter)?,
        output_type: encode::data_type(&c.output_type)?,
        value_table: encode::optional(c.state.map(|v| v.table))?,
        value_descending: c.state.is_some_and(|v| v.descending),
    })
}

fn decode_call(c: &AggCallMessage, input: &SchemaRef, sizes: Sizes) -> Result<AggCall> {
    let column = |c: u32| decode::position(c, input.fields().len(), "column");
    let value_table = c.value_table.map(|t| -> Result<ValueTable> {
        Ok(ValueTable { table: sizes.table(t)?, descending: c.value_descending })
    });
    Ok(AggCall {
        func: names::aggregate(c.func, c.version)?,
        arg: c.arg.map(column).transpose()?,
        distinct: c.distinct,
        filter: c.filter.map(column).transpose()?,
        output_type: decode::data_type(&c.output_type)?,
        state: value_table.transpose()?,
    })
}
