//! [`Window`]: window functions over the rows of each group.

use arrow::compute::SortOptions;
use arrow::datatypes::{Schema, SchemaRef};
use datafusion::logical_expr::{WindowFrame, WindowFrameBound, WindowFrameUnits};
use millrace_functions::expr::{self, as_literal, literal};
use millrace_functions::versions;
use millrace_functions::window_call::{RankFunction, WindowCall};
use millrace_rpc::catalog::RowStorage;
use prost::bytes::Bytes;

use super::{Facts, OperatorMessage, Payload};
use crate::codec::decode::{self, Inputs, damaged};
use crate::codec::expr::{decode_expr, encode_expr};
use crate::codec::names::Numbered;
use crate::codec::proto::Order;
use crate::codec::{CodecError, Result, encode};

/// Window functions over the rows of each group in an order. Output: the input's columns, then one
/// column a call. Rows that are level are in the order of their own bytes. `S` as in [`TopN`].
#[derive(Clone, Debug, PartialEq)]
pub struct Window<S = WindowState> {
    pub group: Vec<usize>,
    /// As in [`TopN`].
    pub vnode: Vec<usize>,
    pub order: Vec<(usize, SortOptions)>,
    pub calls: Vec<WindowCall>,
    pub state: S,
}

#[derive(Clone, Debug, PartialEq)]
pub struct WindowState {
    /// `group | order | identity → row`, every row.
    pub table: usize,
    /// `Keyed` or `Multiset`.
    pub storage: RowStorage,
    /// As in [`TopNState`].
    pub unique_key: Vec<usize>,
    /// Of sessions and ASOF joins over a time with a watermark: when their rows go.
    pub closing: Option<Closing>,
}

impl<S> Window<S> {
    /// The same calls, their rows kept otherwise.
    pub fn with_state<T>(self, state: T) -> Window<T> {
        Window { group: self.group, vnode: self.vnode, order: self.order, calls: self.calls, state }
    }

    /// The input's columns that decide the results.
    pub fn columns_read(&self) -> Vec<usize> {
        let arguments = self.calls.iter().flat_map(|c| c.args.iter().chain(&c.filter));
        let order = self.order.iter().map(|o| o.0);
        let own = self.group.iter().copied().chain(order);
        own.chain(arguments.flat_map(expr::columns_of)).collect()
    }
}

/// How rows of sessions and ASOF joins leave the state. A session is closed when the watermark of its time
/// has come to its last time plus the gap, because no row that joins it can come any more. Of an ASOF join
/// all rows below the watermark go but those of each group that rows to come may concern.
#[derive(Clone, Debug, PartialEq)]
pub struct Closing {
    /// The input's timestamp column, the first of the order.
    pub column: usize,
    /// Of sessions, in microseconds; else 0.
    pub gap: i64,
    /// When to look at a group: `time | group`. Times that are over are left where they are; retention takes them.
    pub table: usize,
}

impl Payload for Window {
    fn facts(&self) -> Facts {
        Facts::grouped("Window", self.state.table)
    }

    fn encode(&self) -> Result<OperatorMessage> {
        let closing = self.state.closing.as_ref().map(|c| -> Result<ClosingMessage> {
            let (column, table) = (encode::position(c.column)?, encode::position(c.table)?);
            Ok(ClosingMessage { column, gap: c.gap, table })
        });
        Ok(OperatorMessage::Window(WindowMessage {
            closing: closing.transpose()?,
            group: encode::positions(&self.group)?,
            vnode: encode::positions(&self.vnode)?,
            order: self.order.iter().map(encode::order).collect::<Result<_>>()?,
            calls: self.calls.iter().map(encode_call).collect::<Result<_>>()?,
            table: encode::position(self.state.table)?,
            storage: self.state.storage.number()?,
            unique_key: encode::positions(&self.state.unique_key)?,
        }))
    }
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct WindowMessage {
    #[prost(uint32, repeated, tag = "1")]
    pub group: Vec<u32>,
    #[prost(uint32, repeated, tag = "2")]
    pub vnode: Vec<u32>,
    #[prost(message, repeated, tag = "3")]
    pub order: Vec<Order>,
    #[prost(message, repeated, tag = "4")]
    pub calls: Vec<WindowCallMessage>,
    #[prost(uint32, tag = "5")]
    pub table: u32,
    #[prost(uint32, tag = "6")]
    pub storage: u32,
    #[prost(uint32, repeated, tag = "7")]
    pub unique_key: Vec<u32>,
    #[prost(message, optional, tag = "8")]
    pub closing: Option<ClosingMessage>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(crate) struct ClosingMessage {
    #[prost(uint32, tag = "1")]
    pub column: u32,
    #[prost(int64, tag = "2")]
    pub gap: i64,
    #[prost(uint32, tag = "3")]
    pub table: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct WindowCallMessage {
    #[prost(string, tag = "1")]
    pub function: String,
    #[prost(bool, tag = "2")]
    pub aggregate: bool,
    #[prost(bytes = "bytes", repeated, tag = "3")]
    pub args: Vec<Bytes>,
    #[prost(bytes = "bytes", optional, tag = "4")]
    pub filter: Option<Bytes>,
    #[prost(bool, tag = "5")]
    pub distinct: bool,
    #[prost(bool, tag = "6")]
    pub ignore_nulls: bool,
    #[prost(uint32, tag = "7")]
    pub units: u32,
    #[prost(message, optional, tag = "8")]
    pub start: Option<BoundMessage>,
    #[prost(message, optional, tag = "9")]
    pub end: Option<BoundMessage>,
    /// A ranking function, for calls that are computed from places alone.
    #[prost(uint32, optional, tag = "10")]
    pub numbering: Option<u32>,
    /// A schema of one column, of the output's type.
    #[prost(bytes = "bytes", tag = "11")]
    pub output_type: Bytes,
    /// The function's.
    #[prost(uint32, tag = "12")]
    pub version: u32,
}

/// An end of a window frame.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct BoundMessage {
    /// 1 preceding, 2 current row, 3 following.
    #[prost(uint32, tag = "1")]
    pub kind: u32,
    /// A literal; NULL: unbounded. Absent for the current row.
    #[prost(bytes = "bytes", optional, tag = "2")]
    pub offset: Option<Bytes>,
}

impl Window {
    pub(crate) fn decode(m: &WindowMessage, inputs: &Inputs<'_>) -> Result<Window> {
        let input = inputs.one()?;
        let closing = m.closing.as_ref().map(|c| -> Result<Closing> {
            let (column, table) =
                (decode::timestamp(c.column, input)?, inputs.sizes.table(c.table)?);
            Ok(Closing { column, gap: c.gap, table })
        });
        Ok(Window {
            group: decode::columns(&m.group, input)?,
            vnode: decode::columns(&m.vnode, input)?,
            order: m.order.iter().map(|o| decode::order(o, input)).collect::<Result<_>>()?,
            calls: m.calls.iter().map(|c| decode_call(c, input)).collect::<Result<_>>()?,
            state: WindowState {
                table: inputs.sizes.table(m.table)?,
                storage: RowStorage::from_number(m.storage)?,
                unique_key: decode::columns(&m.unique_key, input)?,
                closing: closing.transpose()?,
            },
        })
    }
}

fn encode_call(c: &WindowCall) -> Result<WindowCallMessage> {
    Ok(WindowCallMessage {
        function: c.function.clone(),
        aggregate: c.aggregate,
        args: c.args.iter().map(encode_expr).collect::<Result<_>>()?,
        filter: c.filter.as_ref().map(encode_expr).transpose()?,
        distinct: c.distinct,
        ignore_nulls: c.ignore_nulls,
        units: c.frame.units.number()?,
        start: Some(encode_bound(&c.frame.start_bound)?),
        end: Some(encode_bound(&c.frame.end_bound)?),
        numbering: c.numbering.map(Numbered::number).transpose()?,
        output_type: encode::data_type(&c.output_type)?,
        version: versions::newest(&c.function),
    })
}

fn encode_bound(b: &WindowFrameBound) -> Result<BoundMessage> {
    let (kind, offset) = match b {
        WindowFrameBound::Preceding(offset) => (1, Some(offset)),
        WindowFrameBound::CurrentRow => (2, None),
        WindowFrameBound::Following(offset) => (3, Some(offset)),
    };
    let offset = offset.map(|o| encode_expr(&literal(o.clone()))).transpose()?;
    Ok(BoundMessage { kind, offset })
}

fn decode_call(c: &WindowCallMessage, input: &SchemaRef) -> Result<WindowCall> {
    let units = WindowFrameUnits::from_number(c.units)?;
    let (start, end) = (decode_bound(c.start.as_ref())?, decode_bound(c.end.as_ref())?);
    if c.version != versions::newest(&c.function) {
        let (name, version) = (c.function.clone(), c.version);
        return Err(CodecError::UnknownFunction { name, version });
    }
    Ok(WindowCall {
        function: c.function.clone(),
        aggregate: c.aggregate,
        args: c.args.iter().map(|e| decode_expr(e, input)).collect::<Result<_>>()?,
        filter: c.filter.as_ref().map(|e| decode_expr(e, input)).transpose()?,
        distinct: c.distinct,
        ignore_nulls: c.ignore_nulls,
        frame: WindowFrame::new_bounds(units, start, end),
        numbering: c.numbering.map(RankFunction::from_number).transpose()?,
        output_type: decode::data_type(&c.output_type)?,
    })
}

fn decode_bound(b: Option<&BoundMessage>) -> Result<WindowFrameBound> {
    let b = b.ok_or_else(|| damaged("a window frame without an end"))?;
    let offset = b.offset.as_ref().map(|e| decode_expr(e, &Schema::empty())).transpose()?;
    let offset = offset.as_ref().and_then(as_literal).cloned();
    match (b.kind, offset) {
        (1, Some(offset)) => Ok(WindowFrameBound::Preceding(offset)),
        (2, None) => Ok(WindowFrameBound::CurrentRow),
        (3, Some(offset)) => Ok(WindowFrameBound::Following(offset)),
        (kind, _) => Err(damaged(format!("a window frame's end of kind {kind}"))),
    }
}
