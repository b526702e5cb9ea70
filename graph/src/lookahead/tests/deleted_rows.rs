//! What deleted rows of a lookup had met.

use super::*;

/// A lookup of `a b c` by its column `b`, whose rows are told apart as said.
fn lookup(plan: &mut Plan, left: usize, identity: RowStorage, unique_key: &[usize]) -> usize {
    let right = plan.leaf("x y");
    let fields = schema([plan.fields(left), plan.fields(right)].concat());
    let unique_key = unique_key.to_vec();
    let op = Lookup {
        outer: false,
        left_keys: vec![1],
        left_vnode: vec![1],
        right: side(&[0]),
        residual: None,
        output: (0..fields.fields().len()).collect(),
        matches: Some(Matches { table: 1, identity, unique_key }),
    };
    plan.add(Operator::Lookup(op), &[left, right], fields)
}

/// What is found of rows that are deleted.
fn found(plan: Plan) -> Vec<String> {
    let graph = plan.graph();
    let all = checked(&graph);
    all.iter().filter(|l| l.deleted).map(show).collect()
}

#[test]
fn the_key_is_that_of_the_join_with_what_tells_rows_apart() {
    let keyed = (RowStorage::Keyed, vec![0], "2.0 of 0: deleted rows; key (b@1, a@0) vnode (b@1)");
    let whole = "2.0 of 0: deleted rows; key (b@1, a@0, c@2) vnode (b@1)";
    for (identity, unique_key, expected) in [keyed, (RowStorage::Multiset, vec![], whole)] {
        let mut plan = Plan::new();
        let left = plan.leaf("a b c");
        lookup(&mut plan, left, identity, &unique_key);
        let graph = plan.graph();
        let all = checked(&graph);
        let shown: Vec<String> = all.iter().map(show).collect();
        assert_eq!(shown, ["2.0 of 0: key (b@1)", expected]);
        assert_eq!(all[0].places, all[1].places);
    }
}

#[test]
fn a_key_is_followed_as_long_as_deleted_rows_come_of_deleted_rows() {
    let mut plan = Plan::new();
    let (leaf, other) = (plan.leaf("a b c"), plan.leaf("x y"));
    let some = plan.above(leaf, 2, 4);
    let pairs = plan.join([some, other], JoinKind::Inner, [&[0], &[0]]);
    lookup(&mut plan, pairs, RowStorage::Keyed, &[0]);
    // The other side tells neither b nor, by itself, that a pair is deleted.
    assert_eq!(found(plan), ["5.0 of 0: deleted rows; Filter c@2 > 4; key (b@1, a@0) vnode (b@1)"]);
}

#[test]
fn rows_that_come_again_under_other_columns_are_announced_by_no_leaf() {
    // An aggregate deletes the row of a group whatever comes: its own rows tell, where they wait.
    let mut plan = Plan::new();
    let leaf = plan.leaf("a b c");
    let groups = plan.group(leaf, &[0, 1]);
    let top = plan.top(groups, &[0]);
    lookup(&mut plan, top, RowStorage::Keyed, &[0]);
    assert_eq!(found(plan), Vec::<String>::new());
    let mut plan = Plan::new();
    let leaf = plan.leaf("a b c");
    let groups = plan.group(leaf, &[0, 1]);
    let other = plan.leaf("x y");
    let pairs = plan.join([groups, other], JoinKind::Inner, [&[0], &[0]]);
    lookup(&mut plan, pairs, RowStorage::Keyed, &[0]);
    assert_eq!(found(plan), ["5.0 of 1: deleted rows; from 1 at 3; key (b@1, a@0) vnode (b@1)"]);
}

#[test]
fn an_anti_join_is_passed_on_the_side_whose_rows_it_puts_out() {
    for (kind, expected) in [(JoinKind::LeftAnti, 1), (JoinKind::LeftSemi, 2)] {
        let mut plan = Plan::new();
        let (leaf, other) = (plan.leaf("a b"), plan.leaf("x y"));
        let rows = plan.join([leaf, other], kind, [&[0, 1], &[0, 1]]);
        lookup(&mut plan, rows, RowStorage::Keyed, &[0]);
        assert_eq!(found(plan).len(), expected, "{kind:?}");
    }
}
