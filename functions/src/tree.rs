//! Walks of expressions and plans.
//!
//! [`TreeNode`] compiles the walk of a whole tree again for each closure that it is given. These call theirs by reference,
//! so that each walk is compiled once.

use datafusion::common::Result;
use datafusion::common::tree_node::{Transformed, TreeNode, TreeNodeRecursion};
use datafusion::logical_expr::LogicalPlan;

/// Walks of any tree.
pub trait Walk: TreeNode {
    /// [`TreeNode::apply`].
    fn walk<'n>(
        &'n self,
        mut look: impl FnMut(&'n Self) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        let look: &mut dyn FnMut(&'n Self) -> Result<TreeNodeRecursion> = &mut look;
        self.apply(look)
    }

    /// [`TreeNode::exists`].
    fn any(&self, mut wanted: impl FnMut(&Self) -> Result<bool>) -> Result<bool> {
        let wanted: &mut dyn FnMut(&Self) -> Result<bool> = &mut wanted;
        self.exists(wanted)
    }

    /// [`TreeNode::transform_up`].
    fn rewrite_up(
        self,
        mut change: impl FnMut(Self) -> Result<Transformed<Self>>,
    ) -> Result<Transformed<Self>> {
        let change: &mut dyn FnMut(Self) -> Result<Transformed<Self>> = &mut change;
        self.transform_up(change)
    }

    /// [`TreeNode::transform_down`].
    fn rewrite_down(
        self,
        mut change: impl FnMut(Self) -> Result<Transformed<Self>>,
    ) -> Result<Transformed<Self>> {
        let change: &mut dyn FnMut(Self) -> Result<Transformed<Self>> = &mut change;
        self.transform_down(change)
    }
}

impl<N: TreeNode> Walk for N {}

/// Walks of a plan and of those of its subqueries.
pub trait WalkPlan: Sized {
    /// [`LogicalPlan::apply_with_subqueries`].
    fn walk_with_subqueries(
        &self,
        look: impl FnMut(&Self) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion>;

    /// [`LogicalPlan::transform_up_with_subqueries`].
    fn rewrite_up_with_subqueries(
        self,
        change: impl FnMut(Self) -> Result<Transformed<Self>>,
    ) -> Result<Transformed<Self>>;

    /// [`LogicalPlan::transform_down_with_subqueries`].
    fn rewrite_down_with_subqueries(
        self,
        change: impl FnMut(Self) -> Result<Transformed<Self>>,
    ) -> Result<Transformed<Self>>;
}

impl WalkPlan for LogicalPlan {
    fn walk_with_subqueries(
        &self,
        mut look: impl FnMut(&Self) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        let look: &mut dyn FnMut(&Self) -> Result<TreeNodeRecursion> = &mut look;
        self.apply_with_subqueries(look)
    }

    fn rewrite_up_with_subqueries(
        self,
        mut change: impl FnMut(Self) -> Result<Transformed<Self>>,
    ) -> Result<Transformed<Self>> {
        let change: &mut dyn FnMut(Self) -> Result<Transformed<Self>> = &mut change;
        self.transform_up_with_subqueries(change)
    }

    fn rewrite_down_with_subqueries(
        self,
        mut change: impl FnMut(Self) -> Result<Transformed<Self>>,
    ) -> Result<Transformed<Self>> {
        let change: &mut dyn FnMut(Self) -> Result<Transformed<Self>> = &mut change;
        self.transform_down_with_subqueries(change)
    }
}
