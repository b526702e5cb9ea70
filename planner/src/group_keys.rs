//! What is unique after GROUP BY, so that the optimizer's rules may trust it.
//!
//! DataFusion keeps with a plan which columns determine others (`functional_dependencies.rs`). Of an aggregate over rows
//! with such columns it takes them for a key of the groups as soon as they are among those that are grouped by, also where
//! others are that they do not determine: a group over a join that repeats the keys of another group. Rules that trust it
//! make semi joins of joins, and leave out columns of GROUP BY, ORDER BY and DISTINCT. It tells columns by their names,
//! so the groups of such an aggregate get names of their own, and a projection gives the old ones back.

use std::sync::Arc;

use datafusion::common::Column;
use datafusion::common::tree_node::{Transformed, TreeNodeRecursion};
use datafusion::error::Result;
use datafusion::logical_expr::{Aggregate, Expr, LogicalPlan, Projection};
use datafusion::optimizer::{OptimizerConfig, OptimizerRule};
use millrace_functions::tree::WalkPlan;

/// Leaves no aggregate that says more of its keys than is so.
#[derive(Debug)]
pub struct GroupKeys;

impl OptimizerRule for GroupKeys {
    fn name(&self) -> &str {
        "group_keys"
    }

    fn rewrite(
        &self,
        plan: LogicalPlan,
        _config: &dyn OptimizerConfig,
    ) -> Result<Transformed<LogicalPlan>> {
        if !has_nested_groups(&plan)? {
            return Ok(Transformed::no(plan));
        }
        plan.rewrite_up_with_subqueries(|node| match recomputed(node)? {
            LogicalPlan::Aggregate(a) if claims_too_much(&a) => {
                Ok(Transformed::yes(by_names_of_their_own(a)?))
            }
            node => Ok(Transformed::no(node)),
        })
    }
}

/// Only a group over another one can be concerned.
fn has_nested_groups(plan: &LogicalPlan) -> Result<bool> {
    let mut groups = 0;
    plan.walk_with_subqueries(|node| {
        groups += usize::from(matches!(node, LogicalPlan::Aggregate(_)));
        Ok(if groups > 1 { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
    })?;
    Ok(groups > 1)
}

/// A node that knows of its inputs as they are now.
fn recomputed(node: LogicalPlan) -> Result<LogicalPlan> {
    match node {
        LogicalPlan::Projection(_)
        | LogicalPlan::SubqueryAlias(_)
        | LogicalPlan::Join(_)
        | LogicalPlan::Window(_)
        | LogicalPlan::Aggregate(_) => node.recompute_schema(),
        node => Ok(node),
    }
}

fn by_names_of_their_own(a: Aggregate) -> Result<LogicalPlan> {
    let groups = a.group_expr.len();
    let key = |at: usize| format!("#key{at}");
    let named = a.group_expr.into_iter().enumerate();
    let named = named.map(|(at, e)| e.unalias().alias(key(at))).collect();
    let outputs = a.schema.iter().enumerate().map(|(at, (qualifier, field))| match at < groups {
        true => Expr::Column(Column::new_unqualified(key(at)))
            .alias_qualified(qualifier.cloned(), field.name()),
        false => Expr::Column((qualifier, field).into()),
    });
    let outputs = outputs.collect();
    let aggregate = LogicalPlan::Aggregate(Aggregate::try_new(a.input, named, a.aggr_expr)?);
    Projection::try_new(outputs, Arc::new(aggregate)).map(LogicalPlan::Projection)
}

/// Whether some of an aggregate's groups are taken for a key, and do not determine the others in its input.
fn claims_too_much(a: &Aggregate) -> bool {
    let input = a.input.schema();
    let place = |e: &Expr| match e {
        Expr::Column(c) => input.maybe_index_of_column(c),
        _ => None,
    };
    let places: Vec<Option<usize>> = a.group_expr.iter().map(place).collect();
    let determine_all = |key: &[usize]| {
        let source: Option<Vec<usize>> = key.iter().map(|at| *places.get(*at)?).collect();
        let Some(source) = source else { return false };
        input.functional_dependencies().iter().any(|known| {
            let reads = known.source_indices.iter().all(|at| source.contains(at));
            let tells = |at: &Option<usize>| {
                at.is_some_and(|at| source.contains(&at) || known.target_indices.contains(&at))
            };
            reads && places.iter().all(tells)
        })
    };
    let is_part = |key: &[usize]| key.len() < a.group_expr.len();
    a.schema
        .functional_dependencies()
        .iter()
        .any(|claim| is_part(&claim.source_indices) && !determine_all(&claim.source_indices))
}
