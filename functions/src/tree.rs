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

#[cfg(test)]
mod tests {
    use datafusion::logical_expr::{Expr, LogicalPlanBuilder, col, exists, lit};

    use super::*;

    /// `a + 1 > 2`.
    fn comparison() -> Expr {
        (col("a") + lit(1)).gt(lit(2))
    }

    fn doubled(e: Expr) -> Result<Transformed<Expr>> {
        Ok(match e {
            Expr::Literal(v, _) if v == 1.into() => Transformed::yes(lit(10)),
            Expr::Literal(v, _) if v == 10.into() => Transformed::yes(lit(100)),
            e => Transformed::no(e),
        })
    }

    #[test]
    fn a_walk_meets_every_node_unless_it_is_told_to_stop() {
        let mut met = 0;
        let all = comparison();
        all.walk(|_| {
            met += 1;
            Ok(TreeNodeRecursion::Continue)
        })
        .unwrap();
        assert_eq!(met, 5);
        let mut met = Vec::new();
        all.walk(|e| {
            met.push(e.to_string());
            Ok(if met.len() == 2 { TreeNodeRecursion::Jump } else { TreeNodeRecursion::Continue })
        })
        .unwrap();
        assert_eq!(met.len(), 3, "what is below the second is left out: {met:?}");
    }

    #[test]
    fn a_search_ends_at_the_first_that_is_wanted() {
        let mut asked = 0;
        let found = comparison().any(|e| {
            asked += 1;
            Ok(matches!(e, Expr::BinaryExpr(_)))
        });
        assert!(found.unwrap());
        assert_eq!(asked, 1);
        assert!(!comparison().any(|e| Ok(*e == lit(7))).unwrap());
    }

    #[test]
    fn errors_end_walks_and_rewrites() {
        let fail = || datafusion::error::DataFusionError::Internal("ended".into());
        assert!(comparison().walk(|_| Err(fail())).is_err());
        assert!(comparison().any(|_| Err(fail())).is_err());
        assert!(comparison().rewrite_up(|_| Err(fail())).is_err());
        assert!(comparison().rewrite_down(|_| Err(fail())).is_err());
    }

    #[test]
    fn rewrites_say_whether_anything_changed() {
        let up = comparison().rewrite_up(doubled).unwrap();
        assert!(up.transformed);
        assert_eq!(up.data, (col("a") + lit(10)).gt(lit(2)));
        let down = comparison().rewrite_down(doubled).unwrap();
        assert_eq!(down.data, (col("a") + lit(10)).gt(lit(2)));
        assert!(!comparison().rewrite_up(|e| Ok(Transformed::no(e))).unwrap().transformed);
    }

    /// A plan, and one more in a subquery of its filter.
    fn plan() -> LogicalPlan {
        let inner = LogicalPlanBuilder::empty(true).project([lit(1)]).unwrap().build().unwrap();
        let outer = LogicalPlanBuilder::empty(true).filter(exists(inner.into())).unwrap();
        outer.build().unwrap()
    }

    #[test]
    fn walks_of_plans_go_into_subqueries() {
        let mut projections = 0;
        plan()
            .walk_with_subqueries(|p| {
                projections += usize::from(matches!(p, LogicalPlan::Projection(_)));
                Ok(TreeNodeRecursion::Continue)
            })
            .unwrap();
        assert_eq!(projections, 1);
        let limited = |p: LogicalPlan| match p {
            LogicalPlan::Projection(_) => {
                let limit = LogicalPlanBuilder::from(p).limit(0, Some(1))?.build()?;
                Ok(Transformed::yes(limit))
            }
            p => Ok(Transformed::no(p)),
        };
        let changed = plan().rewrite_up_with_subqueries(limited).unwrap();
        assert!(changed.transformed);
        assert!(changed.data.display_indent().to_string().contains("Limit"));
        let same = plan().rewrite_down_with_subqueries(|p| Ok(Transformed::no(p))).unwrap();
        assert!(!same.transformed);
        assert_eq!(same.data, plan());
    }
}
