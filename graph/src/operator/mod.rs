//! The operators of stream plans and job graphs: the one list of them, and what every operator of a graph answers.
//!
//! Each is declared in a file of its own: its payload (settings and state tables), the answers of [`Payload`] and its
//! stored message. A payload is generic over what is not known before state tables are numbered; [`Phase`] says what
//! stands there in a plan and in a graph. A new operator is a variant of [`Operator`], a line of
//! [`dispatch_operator`], and a message in [`OperatorMessage`] with its line in [`decode`].

mod aggregate;
mod buffer;
mod exchange;
mod expand;
mod filter;
mod hop;
mod input;
mod join;
mod lookup;
mod project;
mod repeat;
mod root;
mod stamp;
#[cfg(test)]
mod tests;
mod top_n;
mod union;
mod unnest;
mod values;
mod window;

use std::fmt::Debug;

use prost::bytes::Bytes;

pub use aggregate::*;
pub use buffer::*;
pub use exchange::*;
pub use expand::*;
pub use filter::*;
pub use hop::*;
pub use input::*;
pub use join::*;
pub use lookup::*;
pub use project::*;
pub use repeat::*;
pub use root::*;
pub use stamp::*;
pub use top_n::*;
pub use union::*;
pub use unnest::*;
pub use values::*;
pub use window::*;

use crate::codec::Result;
use crate::codec::decode::Inputs;
use crate::codec::proto::{DerivedWatermark, Nothing};

/// What stands in operators where a plan and a graph differ.
pub trait Phase: Clone + Debug + PartialEq {
    /// A relation that is read, before it is decided how.
    type Scan: Clone + Debug + PartialEq;
    /// A subtree that stands in several places of a plan.
    type Common: Clone + Debug + PartialEq;
    type Exchange: Clone + Debug + PartialEq;
    /// An operator of graphs only; in a plan a type without values.
    type InGraph<T: Clone + Debug + PartialEq>: Clone + Debug + PartialEq;
    /// Of a call of an aggregate.
    type CallState: Clone + Debug + PartialEq;
    /// A state table.
    type Table: Clone + Debug + PartialEq;
    /// Of one side of a join.
    type SideState: Clone + Debug + PartialEq;
    /// What the left rows of a lookup have met.
    type Matches: Clone + Debug + PartialEq;
    type TopNState: Clone + Debug + PartialEq;
    type WindowState: Clone + Debug + PartialEq;
}

/// The phase of job graphs: state tables are numbered and edges known.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InGraph;

impl Phase for InGraph {
    type Scan = std::convert::Infallible;
    type Common = std::convert::Infallible;
    type Exchange = Exchange;
    type InGraph<T: Clone + Debug + PartialEq> = T;
    type CallState = Option<ValueTable>;
    type Table = usize;
    type SideState = SideState;
    type Matches = Option<Matches>;
    type TopNState = TopNState;
    type WindowState = WindowState;
}

/// An operator of a stream plan or, by default, of a job graph.
#[derive(Clone, Debug, PartialEq)]
pub enum Operator<P: Phase = InGraph> {
    /// Of plans only: becomes a subscription or a source.
    Scan(P::Scan),
    Subscribe(P::InGraph<Subscribe>),
    Source(P::InGraph<Source>),
    /// Of plans only: becomes a fragment with several outputs.
    Common(P::Common),
    Exchange(P::Exchange),
    Values(Values),
    Filter(Filter),
    Project(Project),
    Union(Union),
    Hop(Hop),
    Repeat(Repeat),
    Stamp(Stamp),
    Unnest(Unnest),
    Expand(Expand),
    Aggregate(Aggregate<P::CallState, P::Table>),
    Join(Join<P::SideState>),
    Lookup(Lookup<P::SideState, P::Matches>),
    TopN(TopN<P::TopNState>),
    Window(Window<P::WindowState>),
    Buffer(EventTimeBuffer<P::Table>),
    Materialize(P::InGraph<Materialize>),
    Blackhole(P::InGraph<Blackhole>),
    Sink(P::InGraph<Sink>),
}

/// Evaluates an expression with an operator's payload, whichever it is: `dispatch_operator!(op, p => p.facts())`. What
/// the payloads have in common is a trait; an operator whose payload does not implement it does not compile.
#[macro_export]
macro_rules! dispatch_operator {
    ($op:expr, $payload:pat => $body:expr) => {
        match $op {
            $crate::Operator::Scan($payload) => $body,
            $crate::Operator::Subscribe($payload) => $body,
            $crate::Operator::Source($payload) => $body,
            $crate::Operator::Common($payload) => $body,
            $crate::Operator::Exchange($payload) => $body,
            $crate::Operator::Values($payload) => $body,
            $crate::Operator::Filter($payload) => $body,
            $crate::Operator::Project($payload) => $body,
            $crate::Operator::Union($payload) => $body,
            $crate::Operator::Hop($payload) => $body,
            $crate::Operator::Repeat($payload) => $body,
            $crate::Operator::Stamp($payload) => $body,
            $crate::Operator::Unnest($payload) => $body,
            $crate::Operator::Expand($payload) => $body,
            $crate::Operator::Aggregate($payload) => $body,
            $crate::Operator::Join($payload) => $body,
            $crate::Operator::Lookup($payload) => $body,
            $crate::Operator::TopN($payload) => $body,
            $crate::Operator::Window($payload) => $body,
            $crate::Operator::Buffer($payload) => $body,
            $crate::Operator::Materialize($payload) => $body,
            $crate::Operator::Blackhole($payload) => $body,
            $crate::Operator::Sink($payload) => $body,
        }
    };
}

/// Whether an operator takes rows from elsewhere, makes others of them, or ends the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Reads a relation or holds rows itself: one of the job's inputs.
    Input,
    /// Takes the rows of another fragment.
    Exchange,
    Inner,
    /// Keeps the result or hands it on.
    Root,
}

/// What every operator of a job graph answers.
pub(crate) trait Payload {
    fn facts(&self) -> Facts;

    /// Its stored form. Fails for what has none, such as an expression of a kind that is not stored.
    fn encode(&self) -> Result<OperatorMessage>;
}

/// What is declared of an operator.
pub(crate) struct Facts {
    /// See [`Operator::name`].
    pub name: &'static str,
    pub role: Role,
    /// See [`Operator::cleaned_tables`].
    pub cleaned_tables: Vec<usize>,
    /// See [`Operator::has_intermediate_rows`].
    pub has_intermediate_rows: bool,
}

impl Facts {
    /// Of an operator without state that is cleaned, each of whose rows follows from rows alone.
    pub fn new(name: &'static str, role: Role) -> Facts {
        Facts { name, role, cleaned_tables: vec![], has_intermediate_rows: false }
    }

    /// The same of an operator that is neither an input nor a root.
    pub fn inner(name: &'static str) -> Facts {
        Facts::new(name, Role::Inner)
    }

    /// Of one that keeps rows of groups in a table, and whose results of a group change while rows come.
    pub fn grouped(name: &'static str, table: usize) -> Facts {
        let cleaned_tables = vec![table];
        Facts { cleaned_tables, has_intermediate_rows: true, ..Facts::inner(name) }
    }
}

impl Payload for std::convert::Infallible {
    fn facts(&self) -> Facts {
        match *self {}
    }

    fn encode(&self) -> Result<OperatorMessage> {
        match *self {}
    }
}

impl Operator {
    fn facts(&self) -> Facts {
        dispatch_operator!(self, p => p.facts())
    }

    /// As metrics and traces call it.
    pub fn name(&self) -> &'static str {
        self.facts().name
    }

    pub fn role(&self) -> Role {
        self.facts().role
    }

    /// Its state tables that are kept while the watermark allows, by what the cleaning calls tell it.
    pub fn cleaned_tables(&self) -> Vec<usize> {
        self.facts().cleaned_tables
    }

    /// Whether over a part of its input's snapshot it has rows that it does not have over the whole.
    pub fn has_intermediate_rows(&self) -> bool {
        self.facts().has_intermediate_rows
    }
}

/// A stored node. The tags of `op` are those of [`OperatorMessage`].
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct NodeMessage {
    #[prost(uint32, repeated, tag = "1")]
    pub inputs: Vec<u32>,
    #[prost(bytes = "bytes", tag = "2")]
    pub schema: Bytes,
    #[prost(bool, tag = "3")]
    pub append_only: bool,
    #[prost(
        oneof = "OperatorMessage",
        tags = "10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 40, 41, 42, 43, 44, 50, 51, 52, 53, 54"
    )]
    pub op: Option<OperatorMessage>,
    #[prost(message, repeated, tag = "60")]
    pub marks: Vec<DerivedWatermark>,
}

/// A stored operator. Tags never change meaning; a new operator gets a new one, here and in [`NodeMessage`].
#[derive(Clone, PartialEq, prost::Oneof)]
pub(crate) enum OperatorMessage {
    #[prost(message, tag = "10")]
    Subscribe(ScanMessage),
    #[prost(message, tag = "11")]
    Source(ScanMessage),
    #[prost(message, tag = "12")]
    Exchange(ExchangeMessage),
    /// An Arrow IPC stream of one batch.
    #[prost(bytes, tag = "13")]
    Values(Vec<u8>),
    #[prost(message, tag = "14")]
    Filter(ExprsMessage),
    #[prost(message, tag = "15")]
    Project(ExprsMessage),
    #[prost(message, tag = "16")]
    Union(Nothing),
    #[prost(message, tag = "17")]
    Hop(HopMessage),
    #[prost(message, tag = "18")]
    Aggregate(AggregateMessage),
    #[prost(message, tag = "19")]
    Join(JoinMessage),
    #[prost(message, tag = "20")]
    TopN(TopNMessage),
    #[prost(message, tag = "21")]
    Materialize(Nothing),
    #[prost(message, tag = "22")]
    Blackhole(Nothing),
    /// The column that says how often.
    #[prost(uint32, tag = "40")]
    Repeat(u32),
    #[prost(message, tag = "41")]
    Expand(ExpandMessage),
    #[prost(message, tag = "42")]
    Window(WindowMessage),
    #[prost(message, tag = "43")]
    Sink(Nothing),
    #[prost(message, tag = "44")]
    Unnest(UnnestMessage),
    #[prost(message, tag = "50")]
    WindowClose(BufferMessage),
    #[prost(message, tag = "51")]
    TemporalUpperBound(BufferMessage),
    #[prost(message, tag = "52")]
    Lookup(LookupMessage),
    /// Microseconds.
    #[prost(int64, tag = "53")]
    Stamp(i64),
    #[prost(message, tag = "54")]
    TemporalLowerBound(BufferMessage),
}

/// An operator from its stored form, over its inputs. Fails where a number points at nothing.
#[deny(clippy::wildcard_enum_match_arm)]
pub(crate) fn decode(op: &OperatorMessage, inputs: &Inputs<'_>) -> Result<Operator> {
    use OperatorMessage as In;
    let buffer = |m, mode| EventTimeBuffer::decode(m, mode, inputs).map(Operator::Buffer);
    Ok(match op {
        In::Subscribe(m) => Operator::Subscribe(Subscribe::decode(m, inputs)?),
        In::Source(m) => Operator::Source(Source::decode(m, inputs)?),
        In::Exchange(m) => Operator::Exchange(Exchange::decode(m, inputs)?),
        In::Values(m) => Operator::Values(Values::decode(m, inputs)?),
        In::Filter(m) => Operator::Filter(Filter::decode(m, inputs)?),
        In::Project(m) => Operator::Project(Project::decode(m, inputs)?),
        In::Union(_) => Operator::Union(Union),
        In::Hop(m) => Operator::Hop(Hop::decode(m, inputs)?),
        In::Repeat(m) => Operator::Repeat(Repeat::decode(*m, inputs)?),
        In::Stamp(m) => Operator::Stamp(Stamp::decode(*m, inputs)?),
        In::Unnest(m) => Operator::Unnest(Unnest::decode(m, inputs)?),
        In::Expand(m) => Operator::Expand(Expand::decode(m, inputs)?),
        In::Aggregate(m) => Operator::Aggregate(Aggregate::decode(m, inputs)?),
        In::Join(m) => Operator::Join(Join::decode(m, inputs)?),
        In::Lookup(m) => Operator::Lookup(Lookup::decode(m, inputs)?),
        In::TopN(m) => Operator::TopN(TopN::decode(m, inputs)?),
        In::Window(m) => Operator::Window(Window::decode(m, inputs)?),
        In::WindowClose(m) => buffer(m, BufferMode::WindowClose)?,
        In::TemporalUpperBound(m) => buffer(m, BufferMode::UpperBound)?,
        In::TemporalLowerBound(m) => buffer(m, BufferMode::LowerBound)?,
        In::Materialize(_) => Operator::Materialize(Materialize::decode(inputs)?),
        In::Blackhole(_) => Operator::Blackhole(Blackhole::decode(inputs)?),
        In::Sink(_) => Operator::Sink(Sink::decode(inputs)?),
    })
}
