//! The stream algebra: what a logical plan becomes before it is cut into fragments.
//!
//! A tree of operators over columns by position, with compiled expressions. It is the graph's
//! algebra without ids: no tables, no fragments, and exchanges only after the pass that places them.
//! Every pass takes a tree and gives a tree, so that each can be tested alone. How a tree gets an operator, and what
//! the passes ask of it, stands in [`crate::stream::operators`].

use std::convert::Infallible;
use std::fmt::Debug;
use std::sync::Arc;

use arrow::datatypes::SchemaRef;
use millrace_graph::{Operator, Phase};
use millrace_rpc::catalog::Relation;

/// A subtree: an operator, its inputs in port order, and the schema of what it puts out.
#[derive(Clone, Debug, PartialEq)]
pub struct Stream {
    pub op: Op,
    pub inputs: Vec<Stream>,
    pub schema: SchemaRef,
}

/// The phase of plans: no state tables, and exchanges by columns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InPlan;

impl Phase for InPlan {
    type Scan = Scan;
    type Exchange = Exchange;
    type Common = Common;
    type InGraph<T: Clone + Debug + PartialEq> = Infallible;
    type CallState = Named;
    type Table = ();
    type SideState = ();
    type Matches = ();
    type TopNState = Identity;
    type WindowState = Identity;
}

/// An operator of a plan.
pub type Op = Operator<InPlan>;

/// A relation's content and changes.
#[derive(Clone, Debug, PartialEq)]
pub struct Scan {
    pub relation: Arc<Relation>,
    /// Positions in the relation.
    pub columns: Vec<usize>,
}

/// Rows move to the owner of their hash; no columns: to the only task.
#[derive(Clone, Debug, PartialEq)]
pub struct Exchange {
    pub hash: Vec<usize>,
}

/// The subtree stands in several places of the plan, in each below one of these with the same `id`. Its rows pass
/// unchanged.
#[derive(Clone, Debug, PartialEq)]
pub struct Common {
    pub id: usize,
}

/// The column that a call puts out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    pub name: String,
    pub nullable: bool,
}

// The graph's operators before their tables are known. Exchange placement sets their `vnode`.
pub type Aggregate = millrace_graph::Aggregate<Named, ()>;
pub type Call = millrace_graph::AggCall<Named>;
pub type Join = millrace_graph::Join<()>;
pub type JoinSide = millrace_graph::JoinSide<()>;
pub type TopN = millrace_graph::TopN<Identity>;
pub type Window = millrace_graph::Window<Identity>;
pub type Lookup = millrace_graph::Lookup<(), ()>;
pub type EventTimeBuffer = millrace_graph::EventTimeBuffer<()>;

/// Columns that, with group and order, make a row unique; set by the pass `identity`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity(pub Vec<usize>);

impl Stream {
    pub fn width(&self) -> usize {
        self.schema.fields().len()
    }

    /// The input of a node that has one; the stream itself where it has none.
    pub fn into_input(mut self) -> Stream {
        self.inputs.pop().unwrap_or(self)
    }

    /// The same operator over other inputs, for passes that rebuild from below.
    pub fn map_inputs<E>(
        self,
        mut f: impl FnMut(Stream) -> Result<Stream, E>,
    ) -> Result<Stream, E> {
        let inputs = self.inputs.into_iter().map(&mut f).collect::<Result<Vec<_>, E>>()?;
        Ok(Stream { op: self.op, inputs, schema: self.schema })
    }
}
