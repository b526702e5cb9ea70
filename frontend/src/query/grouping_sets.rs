//! What is known of the rows below GROUPING SETS, ROLLUP or CUBE does not hold above them.
//!
//! A column that a set leaves out is NULL there. DataFusion goes on taking it for the constant that it was, for equal to
//! another column or for the key by which rows are spread. So between such an aggregate and its input stands a node that
//! says nothing of its rows.

use std::sync::Arc;

use datafusion::common::tree_node::Transformed;
use datafusion::execution::TaskContext;
use datafusion::physical_expr::EquivalenceProperties;
use datafusion::physical_plan::aggregates::AggregateExec;
use datafusion::physical_plan::{
    ExecutionPlan, ExecutionPlanProperties, Partitioning, PlanProperties,
};

use super::node_rule::{Changed, NodeRule};
use super::one_input::{OneInput, Operation, StreamResult};
use super::over;

/// Runs before DataFusion's rules.
pub const GROUPING_SETS_APART: NodeRule = NodeRule::new("grouping_sets_apart", apart);

fn apart(node: Arc<dyn ExecutionPlan>) -> Changed {
    match node.downcast_ref::<AggregateExec>() {
        Some(aggregate) if aggregate.group_expr().has_grouping_set() => {
            let input = Arc::new(OneInput::new(Apart, Arc::clone(aggregate.input())));
            over(node, vec![input]).map(Transformed::yes)
        }
        _ => Ok(Transformed::no(node)),
    }
}

/// Gives the rows of its input, of which nothing is known but their types.
#[derive(Clone, Debug)]
struct Apart;

impl Operation for Apart {
    const NAME: &'static str = "Apart";

    fn properties(&self, input: &Arc<dyn ExecutionPlan>) -> Arc<PlanProperties> {
        Arc::new(PlanProperties::new(
            EquivalenceProperties::new(input.schema()),
            Partitioning::UnknownPartitioning(input.output_partitioning().partition_count()),
            input.pipeline_behavior(),
            input.boundedness(),
        ))
    }

    fn execute(node: &OneInput<Self>, partition: usize, context: Arc<TaskContext>) -> StreamResult {
        node.input.execute(partition, context)
    }
}
