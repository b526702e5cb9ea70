//! Keys that rows bring only with the rows that they meet.

use super::*;

impl Plan {
    /// A join whose right side has at most one row of a key.
    fn find(&mut self, inputs: [usize; 2], kind: JoinKind, keys: [&[usize]; 2]) -> usize {
        let joined = self.join(inputs, kind, keys);
        self.join_at(joined).right.state.unique_per_key = true;
        joined
    }

    fn join_at(&mut self, node: usize) -> &mut Join {
        let Operator::Join(join) = &mut self.nodes[node].op else { panic!("a join") };
        join
    }
}

/// The lookaheads of one operator, as text.
fn at(graph: &JobGraph, node: usize) -> Vec<String> {
    let all = checked(graph);
    all.iter().filter(|l| l.node == node).map(show).collect()
}

#[test]
fn each_key_of_a_chain_comes_out_of_the_row_before() {
    let mut plan = Plan::new();
    let mut rows = plan.leaf("id a");
    let mut joins = Vec::new();
    let mut key = 1;
    for _ in 0..4 {
        let table = plan.leaf("k next");
        rows = plan.find([rows, table], JoinKind::Inner, [&[key], &[0]]);
        joins.push(rows);
        key += 2;
    }
    let graph = plan.graph();
    assert_eq!(at(&graph, joins[0]), ["2.0 of 0: key (a@1)", "2.1 of 1: key (k@0)"]);
    assert_eq!(
        at(&graph, joins[1]),
        ["4.0 of 1: key (next@1)", "4.0 of 0: after 0; key (next@0)", "4.1 of 3: key (k@0)"]
    );
    assert_eq!(
        at(&graph, joins[2]),
        [
            "6.0 of 3: key (next@1)",
            "6.0 of 1: after 2; key (next@0)",
            "6.0 of 0: after 3; key (next@0)",
            "6.1 of 5: key (k@0)",
        ]
    );
    let depths = |l: &Lookahead| (l.node == joins[3] && l.port == 0).then_some(l.depth);
    assert_eq!(lookaheads(&graph).iter().filter_map(depths).collect::<Vec<_>>(), [1, 2, 3, 4]);
}

#[test]
fn keys_of_a_star_are_all_in_the_row() {
    let mut plan = Plan::new();
    let mut rows = plan.leaf("id a b c d");
    for key in 1..5 {
        let table = plan.leaf("k label");
        rows = plan.find([rows, table], JoinKind::Inner, [&[key], &[0]]);
    }
    let graph = plan.graph();
    let all = lookaheads(&graph);
    let of_leaf = |l: &&Lookahead| l.leaf == (0, 0) && l.inside.is_none();
    let of_row: Vec<_> = all.iter().filter(of_leaf).collect();
    assert_eq!(of_row.len(), 4);
    assert!(of_row.iter().all(|l| l.depth == 1 && l.carried.is_empty()));
    // A row of a table brings the key of the next join with the rows that it meets.
    assert!(all.iter().filter(|l| l.depth > 1).all(|l| l.port == 0 && l.leaf != (0, 0)));
}

#[test]
fn a_key_of_both_sides_is_made_of_what_a_hint_carries_and_what_it_finds() {
    let plan = |kind| {
        let mut plan = Plan::new();
        let (orders, items) = (plan.leaf("id item note"), plan.leaf("k name"));
        let joined = plan.find([orders, items], kind, [&[1], &[0]]);
        let sum = binary(plan.column(joined, 2), Binary::Plus, plan.column(joined, 4));
        let name = plan.column(joined, 4);
        let made = plan.project(joined, vec![(sum, "sum"), (name, "name")]);
        plan.group(made, &[0, 1]);
        plan.found()
    };
    let expected = [
        "2.0 of 0: key (item@1) carries (note@2)",
        "2.1 of 1: key (k@0) carries (name@1)",
        "4.0 of 0: after 0; Project note@0 + name@1, name@1; key (sum@0, name@1) vnode (sum@0)",
        "4.0 of 1: after 1; Project note@1 + name@0, name@0; key (sum@0, name@1) vnode (sum@0)",
    ];
    assert_eq!(plan(JoinKind::Inner), expected);
    assert_eq!(plan(JoinKind::LeftOuter), expected);
    assert_eq!(plan(JoinKind::FullOuter), expected);
}

#[test]
fn conditions_of_a_join_and_filters_behind_it_are_applied_as_far_as_they_can_be() {
    let mut plan = Plan::new();
    let (orders, items) = (plan.leaf("id item paid"), plan.leaf("k price name"));
    let joined = plan.find([orders, items], JoinKind::Inner, [&[1], &[0]]);
    // What an order has paid is not carried.
    let cheap = binary(plan.column(joined, 4), Binary::Lt, plan.column(joined, 2));
    let dear = binary(plan.column(joined, 4), Binary::Gt, int(10));
    plan.join_at(joined).residual = Some(binary(cheap, Binary::And, dear));
    let some = plan.above(joined, 5, 7);
    let counted = plan.group(some, &[5]);
    let found = plan.found_at(counted);
    assert_eq!(found[1], "4.0 of 0: after 0; Filter price@0 > 10; Filter name@1 > 7; key (name@1)");
}

#[test]
fn what_all_chained_keys_need_is_carried_by_one_lookahead() {
    let mut plan = Plan::new();
    let (left, right) = (plan.leaf("a b c d"), plan.leaf("k x"));
    let joined = plan.find([left, right], JoinKind::Inner, [&[0], &[0]]);
    let by_b = plan.group(joined, &[5, 1]);
    let by_c = plan.group(joined, &[5, 2]);
    plan.join([by_b, by_c], JoinKind::Inner, [&[], &[]]);
    let graph = plan.graph();
    assert_eq!(
        at(&graph, joined),
        ["2.0 of 0: key (a@0) carries (b@1, c@2)", "2.1 of 1: key (k@0) carries (x@1)"]
    );
    assert_eq!(at(&graph, by_b)[0], "3.0 of 0: after 0; key (x@2, b@0) vnode (x@2)");
    assert_eq!(at(&graph, by_c)[0], "4.0 of 0: after 0; key (x@2, c@1) vnode (x@2)");
}

#[test]
fn a_key_of_three_relations_is_carried_through_two_joins() {
    let mut plan = Plan::new();
    let (rows, first, second) = (plan.leaf("id a b"), plan.leaf("k x"), plan.leaf("k y"));
    let one = plan.find([rows, first], JoinKind::Inner, [&[1], &[0]]);
    let two = plan.find([one, second], JoinKind::Inner, [&[2], &[0]]);
    let counted = plan.group(two, &[0, 4, 6]);
    let graph = plan.graph();
    // The second join's key is known at once; with `x` it is only behind the first.
    let found = at(&graph, two);
    assert_eq!(found[0], "4.0 of 0: key (b@2)");
    assert!(found.iter().any(|l| l == "4.0 of 0: after 0; key (b@1) carries (id@0, x@2)"));
    let found = at(&graph, counted);
    assert_eq!(found[0], "5.0 of 2: after 5; key (id@1, x@2, y@0) vnode (id@1)");
    // Behind both joins by way of the row's hint, and behind the second by way of what `first` brings.
    let ends = [("0", "4"), ("1", "3")];
    let carried = |(of, after)| format!("5.0 of {of}: after {after}; key (id@0, x@1, y@2)");
    assert!(ends.map(carried).iter().all(|l| found.iter().any(|f| f.starts_with(l))), "{found:?}");
}

#[test]
fn more_than_64_bytes_are_not_carried() {
    let mut plan = Plan::new();
    let (left, right) = (plan.leaf("a b c d e f g h i j"), plan.leaf("k x"));
    let joined = plan.find([left, right], JoinKind::Inner, [&[0], &[0]]);
    let few: Vec<usize> = (1..9).chain([11]).collect();
    let many: Vec<usize> = (1..10).chain([11]).collect();
    let (few, many) = (plan.group(joined, &few), plan.group(joined, &many));
    plan.join([few, many], JoinKind::Inner, [&[], &[]]);
    let graph = plan.graph();
    // From the other side only the one column has to come along.
    let of = |node| at(&graph, node).iter().map(|l| l[..8].to_string()).collect::<Vec<_>>();
    assert_eq!(of(few), ["3.0 of 0", "3.0 of 1"]);
    assert_eq!(of(many), ["4.0 of 1"]);
}

#[test]
fn joins_that_do_not_put_out_pairs_are_no_link() {
    for kind in [JoinKind::LeftSemi, JoinKind::LeftAnti, JoinKind::LeftMark] {
        let mut plan = Plan::new();
        let (left, right) = (plan.leaf("a b"), plan.leaf("k"));
        let joined = plan.find([left, right], kind, [&[0], &[0]]);
        plan.group(joined, &[1]);
        assert!(lookaheads(&plan.graph()).iter().all(|l| l.depth == 1), "{kind:?}");
    }
    let mut plan = Plan::new();
    let (left, right) = (plan.leaf("a b"), plan.leaf("k x"));
    let joined = plan.join([left, right], JoinKind::Inner, [&[], &[]]);
    let counted = plan.group(joined, &[1, 3]);
    assert!(plan.found_at(counted).is_empty(), "a cross join has no key");
}
