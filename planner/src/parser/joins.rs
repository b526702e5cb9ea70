//! Joins as sqlparser has them, which tells LEFT from LEFT OUTER and JOIN from INNER JOIN.

use sqlparser::ast::{JoinConstraint, JoinOperator};

/// The pattern of an inner or outer join, with a pattern of what it is by.
macro_rules! qualified_join {
    ($by:pat) => {
        sqlparser::ast::JoinOperator::Join($by)
            | sqlparser::ast::JoinOperator::Inner($by)
            | sqlparser::ast::JoinOperator::Left($by)
            | sqlparser::ast::JoinOperator::LeftOuter($by)
            | sqlparser::ast::JoinOperator::Right($by)
            | sqlparser::ast::JoinOperator::RightOuter($by)
            | sqlparser::ast::JoinOperator::FullOuter($by)
    };
}
pub(crate) use qualified_join;

/// What a join is by, if it has a way to say that.
pub fn constraint(operator: &JoinOperator) -> Option<&JoinConstraint> {
    match operator {
        qualified_join!(by) => Some(by),
        _ => None,
    }
}

/// [`constraint`], to be changed.
pub fn constraint_mut(operator: &mut JoinOperator) -> Option<&mut JoinConstraint> {
    match operator {
        qualified_join!(by) => Some(by),
        _ => None,
    }
}
