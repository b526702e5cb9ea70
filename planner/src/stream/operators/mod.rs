//! The operators of stream plans, a file each: how a plan gets one, and all that the passes, the fragmenter and EXPLAIN
//! ask of it ([`OperatorRules`], or [`RowRules`] where it keeps nothing, and [`OperatorLine`]).
//!
//! The passes walk the plan; what they ask of an operator is answered here. No method has a default, so an operator
//! does not compile before it has answered them all. Its settings are declared in `millrace_graph`. Conversions of
//! logical plans that are long have a file of their own beside this folder.

mod aggregate;
mod buffer;
mod common;
mod exchange;
mod expand;
mod filter;
mod hop;
mod join;
mod lookup;
mod project;
mod repeat;
mod root;
pub mod rules;
mod scan;
mod stamp;
mod top_n;
mod union;
mod unnest;
mod values;
mod window;

use datafusion::logical_expr::LogicalPlan;
use millrace_common::SqlError;
use millrace_functions::interrupt;

use crate::stream::convert::{Converter, in_view, node_name};
use crate::stream::plan::Stream;

pub use rules::{Input, LineContext, Lowered, OperatorLine, OperatorRules, RowIdentity, RowRules};

impl Converter<'_> {
    /// The stream plan of a logical plan. Refuses by name what a view cannot have.
    pub fn convert(&self, plan: &LogicalPlan) -> Result<Stream, SqlError> {
        interrupt::check()?;
        match plan {
            LogicalPlan::TableScan(scan) => self.scan(scan),
            LogicalPlan::Filter(filter) => self.filter(filter),
            LogicalPlan::Projection(projection) => self.projection(projection),
            LogicalPlan::SubqueryAlias(alias) => self.convert(&alias.input),
            LogicalPlan::Union(union) => self.union(union),
            LogicalPlan::Aggregate(aggregate) => self.aggregate(aggregate),
            LogicalPlan::Distinct(distinct) => self.distinct(distinct),
            LogicalPlan::Join(join) => self.join(join),
            LogicalPlan::Sort(sort) => self.sort(sort),
            LogicalPlan::Limit(limit) => self.limit(limit),
            LogicalPlan::Window(window) => self.window(window),
            LogicalPlan::Values(values) => self.values(values),
            LogicalPlan::EmptyRelation(empty) => self.empty(empty),
            LogicalPlan::Unnest(unnest) => self.unnest(unnest),
            LogicalPlan::Extension(extension) => self.extension(extension),
            LogicalPlan::RecursiveQuery(_) => Err(in_view("WITH RECURSIVE")),
            other => Err(in_view(node_name(other))),
        }
    }
}
