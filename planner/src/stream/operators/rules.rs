//! What is asked of every operator of a stream plan.

use std::convert::Infallible;

use arrow::datatypes::{Schema, SchemaRef};
use datafusion::common::Result;
use millrace_common::{RelationId, SqlError};
use millrace_graph::{DerivedWatermark, JobGraph, Operator};

use crate::passes::exchange::Placed;
use crate::passes::identity::Keyed;
use crate::passes::properties::Properties;
use crate::passes::prune::{Pruned, Pruning};
use crate::stream::plan::{Identity, Stream};
use crate::stream::tables::StateTables;

/// The rules of an operator, one method a pass. Methods that take inputs get them in port order.
pub trait OperatorRules: Sized {
    /// The properties of its `width` output columns over inputs with these properties.
    fn properties(&self, width: usize, inputs: &[Properties]) -> Properties;

    /// The watermarks of its output, over inputs with these watermarks and numbers of columns.
    fn watermarks(
        &self,
        inputs: &[Vec<DerivedWatermark>],
        widths: &[usize],
    ) -> Vec<DerivedWatermark>;

    /// Whether it keeps rows or what it made of them from one epoch to the next.
    fn keeps_state(&self) -> bool;

    /// Brings its inputs' rows to where its state is, with exchanges where that is needed, and notes by which columns
    /// they lie there.
    fn place(&mut self, inputs: Vec<Placed>) -> Vec<Placed>;

    /// Of an operator that keeps its input's rows in order: what tells rows apart.
    fn identity(&mut self) -> Option<RowIdentity<'_>>;

    /// `stream`, whose operator it is, widened such that its output has a unique key; `None`: it cannot have one. Asked
    /// only where the output has none. The columns of `stream` stay where they are.
    fn with_key(&self, stream: &Stream) -> Result<Option<Keyed>>;

    /// The same over pruned inputs, with at least the required columns, and where each of its columns (by `schema`) is
    /// now.
    fn prune(self, at: Pruning<'_>) -> Result<Pruned>;

    /// The operator of the job graph. Its state tables go into `tables`, with what the watermarks of the inputs let
    /// them forget.
    fn lower(self, tables: &mut StateTables, inputs: &[Input<'_>]) -> Result<Lowered, SqlError>;
}

/// The rules of an operator that keeps nothing and takes rows wherever they are. As in [`OperatorRules`].
pub trait RowRules: Sized {
    fn properties(&self, width: usize, inputs: &[Properties]) -> Properties;

    fn watermarks(
        &self,
        inputs: &[Vec<DerivedWatermark>],
        widths: &[usize],
    ) -> Vec<DerivedWatermark>;

    fn with_key(&self, stream: &Stream) -> Result<Option<Keyed>>;

    fn prune(self, at: Pruning<'_>) -> Result<Pruned>;

    fn lower(self, tables: &mut StateTables, inputs: &[Input<'_>]) -> Result<Lowered, SqlError>;
}

impl<T: RowRules> OperatorRules for T {
    fn properties(&self, width: usize, inputs: &[Properties]) -> Properties {
        RowRules::properties(self, width, inputs)
    }

    fn watermarks(
        &self,
        inputs: &[Vec<DerivedWatermark>],
        widths: &[usize],
    ) -> Vec<DerivedWatermark> {
        RowRules::watermarks(self, inputs, widths)
    }

    fn keeps_state(&self) -> bool {
        false
    }

    fn place(&mut self, inputs: Vec<Placed>) -> Vec<Placed> {
        inputs
    }

    fn identity(&mut self) -> Option<RowIdentity<'_>> {
        None
    }

    fn with_key(&self, stream: &Stream) -> Result<Option<Keyed>> {
        RowRules::with_key(self, stream)
    }

    fn prune(self, at: Pruning<'_>) -> Result<Pruned> {
        RowRules::prune(self, at)
    }

    fn lower(self, tables: &mut StateTables, inputs: &[Input<'_>]) -> Result<Lowered, SqlError> {
        RowRules::lower(self, tables, inputs)
    }
}

/// An operator's line of EXPLAIN.
pub trait OperatorLine {
    /// In a job graph it notes the keys of its state tables, too.
    fn line(&self, at: &mut LineContext<'_>) -> String;
}

/// By which columns an operator keeps rows, and where it notes the others that make them unique.
pub struct RowIdentity<'a> {
    pub given: Vec<usize>,
    pub identity: &'a mut Identity,
}

/// What is known of an input when an operator gets its state tables.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    pub schema: &'a SchemaRef,
    pub properties: &'a Properties,
    pub watermarks: &'a [DerivedWatermark],
}

impl<'a> Input<'a> {
    /// The only input. Fails for another number of them.
    pub fn one(inputs: &[Input<'a>]) -> Result<Input<'a>, SqlError> {
        if let [input] = inputs { Ok(*input) } else { Err(wrong_inputs()) }
    }

    /// Both inputs. Fails for another number of them.
    pub fn two(inputs: &[Input<'a>]) -> Result<[Input<'a>; 2], SqlError> {
        if let [left, right] = inputs { Ok([*left, *right]) } else { Err(wrong_inputs()) }
    }
}

fn wrong_inputs() -> SqlError {
    SqlError::internal("an operator has the wrong number of inputs")
}

/// An operator of a job graph.
pub struct Lowered {
    pub op: Operator,
    /// Its output's columns, by their positions in the plan, where its state wants them in another order.
    pub order: Option<Vec<usize>>,
}

impl Lowered {
    /// With its columns in the plan's order.
    pub fn of(op: Operator) -> Lowered {
        Lowered { op, order: None }
    }
}

/// What stands around an operator of a plan or of a job graph that is explained.
pub struct LineContext<'a> {
    /// Of the first two inputs; without columns where there is none.
    pub inputs: [&'a Schema; 2],
    pub output: &'a Schema,
    /// Of a job graph.
    pub graph: Option<&'a JobGraph>,
    pub names: &'a dyn Fn(RelationId) -> Option<String>,
    /// State tables and what their keys are.
    pub keys: Vec<(usize, String)>,
}

/// What a plan does not have.
impl OperatorRules for Infallible {
    fn properties(&self, _: usize, _: &[Properties]) -> Properties {
        match *self {}
    }

    fn watermarks(&self, _: &[Vec<DerivedWatermark>], _: &[usize]) -> Vec<DerivedWatermark> {
        match *self {}
    }

    fn keeps_state(&self) -> bool {
        match *self {}
    }

    fn place(&mut self, _: Vec<Placed>) -> Vec<Placed> {
        match *self {}
    }

    fn identity(&mut self) -> Option<RowIdentity<'_>> {
        match *self {}
    }

    fn with_key(&self, _: &Stream) -> Result<Option<Keyed>> {
        match *self {}
    }

    fn prune(self, _: Pruning<'_>) -> Result<Pruned> {
        match self {}
    }

    fn lower(self, _: &mut StateTables, _: &[Input<'_>]) -> Result<Lowered, SqlError> {
        match self {}
    }
}

impl OperatorLine for Infallible {
    fn line(&self, _: &mut LineContext<'_>) -> String {
        match *self {}
    }
}
