//! What rows of a lookup that are deleted had met: the state that only they read, and how far upstream it can be told that
//! they will be.
//!
//! A row of a leaf that is deleted announces it, one that is added does not. So the key is followed only as long as rows that
//! are deleted come of rows that are deleted.

use super::Access;
use crate::{JoinKind, Node, Operator};

/// By what a deleted left row of a lookup reads what it had met. `None`: nothing is stored of it.
pub fn access(nodes: &[Node], node: &Node) -> Option<Access> {
    let Operator::Lookup(lookup) = &node.op else { return None };
    let left = nodes.get(*node.inputs.first()?)?;
    let key = lookup.told_by(left.schema.fields().len())?;
    Some(Access { deleted: true, ..Access::of_input(0, &key, &lookup.left_vnode) })
}

/// Whether an operator deletes rows because rows of its input are deleted, and for no others. Those that compute rows of
/// several delete the old one whatever comes.
pub fn passes(op: &Operator) -> bool {
    !matches!(op, Operator::Aggregate(_) | Operator::TopN(_) | Operator::Window(_))
}

/// Whether rows that a join puts out may be deleted because rows of an input are. A row of the other input that is
/// deleted adds rows of an anti join, and changes marks whether it is added or deleted.
pub fn passes_join(kind: JoinKind, side: usize) -> bool {
    match kind {
        JoinKind::LeftAnti | JoinKind::LeftMark => side == 0,
        JoinKind::RightAnti => side == 1,
        _ => true,
    }
}
