//! Rows inside a job that bring a key, and wait for something before they reach its operator.

use super::*;

/// Fragments, each of which reads the one before through an exchange, distributed by a column.
struct Stages(Vec<(Plan, usize)>);

impl Stages {
    /// The rows of a plan's last node go to another.
    fn exchanged(mut self, plan: Plan, by: usize) -> (Stages, Plan, usize) {
        let last = plan.nodes.len() - 1;
        let fields = Arc::clone(plan.schema(last));
        let mut next = Plan::new();
        let exchange = Exchange { fragment: self.0.len(), output: 0 };
        self.0.push((plan, by));
        let entered = next.add(Operator::Exchange(exchange), &[], fields);
        (self, next, entered)
    }

    fn graph(self, last: Plan) -> JobGraph {
        let mut graph = last.graph();
        for (at, (plan, by)) in self.0.into_iter().enumerate() {
            let from = plan.nodes.len() - 1;
            let carries = EdgeKind::Rows { hash: vec![by] };
            let outputs = vec![Edge { from, to: at + 1, carries }];
            let fragment = Fragment { nodes: plan.nodes, singleton: false, outputs };
            graph.fragments.insert(at, fragment);
        }
        graph
    }
}

/// Of the operators of a fragment: as text, with the fragments of where rows are looked at and where they wait.
fn inside(graph: &JobGraph, fragment: usize) -> Vec<(String, usize, usize)> {
    let all = checked(graph);
    let found = all.iter().filter(|l| l.fragment == fragment);
    let of = |l: &Lookahead| l.inside.map(|i| (show(l), i.from.0, i.input_of.0));
    found.filter_map(of).collect()
}

#[test]
fn a_key_that_an_aggregate_computes_is_known_before_the_operators_behind_it() {
    // How many groups have as many rows, among those that are ranked first.
    let mut first = Plan::new();
    let leaf = first.leaf("a b");
    first.group(leaf, &[0]);
    let (stages, mut second, entered) = Stages(vec![]).exchanged(first, 0);
    let top = second.top(entered, &[0]);
    second.above(top, 1, 5);
    let (stages, mut third, entered) = stages.exchanged(second, 1);
    third.group(entered, &[1]);
    let graph = stages.graph(third);
    // The aggregate's rows wait for the top's state and for its barrier.
    let shown = "1.0 of 1: from 1 at 1; Project n@1; Filter n@0 > 5; key (n@0)".to_string();
    assert_eq!(inside(&graph, 2), [(shown, 0, 1)]);
    let all = lookaheads(&graph);
    let found = all.iter().find(|l| l.fragment == 2).unwrap();
    assert_eq!((found.relation, found.depth), (None, 1));
    // The key of the top itself is in the leaf's rows too, and is surer behind the aggregate.
    let shown = "1.0 of 0: from 1 at 0; key (a@0)".to_string();
    assert_eq!(inside(&graph, 1), [(shown, 0, 1)]);
}

#[test]
fn a_computed_key_that_goes_to_another_task_is_known_before_the_exchange() {
    let mut first = Plan::new();
    let leaf = first.leaf("a b");
    first.group(leaf, &[0]);
    let (stages, mut second, entered) = Stages(vec![]).exchanged(first, 1);
    second.group(entered, &[1]);
    let graph = stages.graph(second);
    let shown = "1.0 of 1: from 1 at 0; key (n@1)".to_string();
    assert_eq!(inside(&graph, 1), [(shown, 0, 1)]);
    // In the same task it is there at once.
    let mut plan = Plan::new();
    let leaf = plan.leaf("a b");
    let counted = plan.group(leaf, &[0]);
    let by_count = plan.group(counted, &[1]);
    assert!(plan.found_at(by_count).is_empty());
}

#[test]
fn rows_behind_a_join_are_a_place_beside_those_of_its_leaves() {
    // Categories of what is ordered, counted, then joined by the category.
    let mut plan = Plan::new();
    let (orders, items) = (plan.leaf("id item"), plan.leaf("k category"));
    let joined = plan.join([orders, items], JoinKind::Inner, [&[1], &[0]]);
    let counted = plan.group(joined, &[3]);
    let names = plan.leaf("k name");
    let named = plan.join([counted, names], JoinKind::Inner, [&[0], &[0]]);
    assert_eq!(
        plan.found_at(named),
        [
            "5.0 of 1: key (category@1)",
            "5.0 of 0: after 0; key (category@0)",
            "5.0 of 0: from 2 at 3; key (category@3)",
            "5.0 of 1: from 2 at 3; key (category@3)",
            "5.1 of 4: key (k@0)",
        ]
    );
}

#[test]
fn the_place_is_as_near_as_rows_wait_for_state_behind_it() {
    let mut plan = Plan::new();
    let mut rows = plan.leaf("id a b c d");
    let mut joins = Vec::new();
    for key in 1..5 {
        let table = plan.leaf("k label");
        rows = plan.join([rows, table], JoinKind::Inner, [&[key], &[0]]);
        joins.push(rows);
    }
    let graph = plan.graph();
    let all = checked(&graph);
    let places = |node: usize| -> Vec<(usize, usize)> {
        let of_node = all.iter().filter(|l| (l.node, l.port, l.leaf) == (node, 0, (0, 0)));
        of_node.filter_map(|l| l.inside).map(|i| (i.from.1, i.input_of.1)).collect()
    };
    // Before the second join nothing waits but at the first, and the leaf's rows do.
    assert_eq!(places(joins[1]), []);
    assert_eq!(places(joins[2]), [(joins[0], joins[1])]);
    assert_eq!(places(joins[3]), [(joins[1], joins[2])]);
}

#[test]
fn many_ways_that_end_inside_leave_room_for_those_of_leaves() {
    let mut plan = Plan::new();
    let mut branches = Vec::new();
    for _ in 0..20 {
        let leaf = plan.leaf("a b");
        let counted = plan.group(leaf, &[0]);
        branches.push(plan.top(counted, &[0]));
    }
    let last = plan.leaf("a n");
    branches.push(last);
    let fields = Arc::clone(plan.schema(last));
    let all = plan.add(Operator::Union(Union), &branches, fields);
    let grouped = plan.group(all, &[1]);
    let found = plan.found_at(grouped);
    assert!(found.contains(&format!("{grouped}.0 of {last}: key (n@1)")), "{found:?}");
}

#[test]
fn what_a_join_cannot_chain_is_known_behind_it() {
    let plan = |width: usize| {
        let mut plan = Plan::new();
        let names: Vec<String> = (0..width).map(|c| format!("c{c}")).collect();
        let (left, right) = (plan.leaf(&names.join(" ")), plan.leaf(&names.join(" ")));
        let joined = plan.join([left, right], JoinKind::Inner, [&[0], &[0]]);
        let of_both: Vec<usize> = (1..width).chain(width + 1..2 * width).collect();
        let counted = plan.group(joined, &of_both);
        let names = plan.leaf("k name");
        let named = plan.join([counted, names], JoinKind::Inner, [&[0], &[0]]);
        let key: Vec<usize> = (0..of_both.len()).collect();
        let by_all = plan.group(named, &key);
        let found = plan.found_at(by_all).into_iter();
        found.map(|l| l[..l.find(';').unwrap()].to_string()).collect::<Vec<_>>()
    };
    // Ten columns of one side are more than a hint carries.
    let known = "6.0 of 3: from 3 at 5".to_string();
    assert!(plan(11).contains(&known), "{:?}", plan(11));
    assert!(!plan(5).contains(&known), "{:?}", plan(5));
}

#[test]
fn rows_of_a_buffer_are_looked_at_when_it_lets_them_go() {
    let mut plan = Plan::new();
    let leaf = plan.leaf_of(vec![bigint("a"), bigint("b"), time("at")]);
    let mode = BufferMode::WindowClose;
    let buffer = EventTimeBuffer { mode, column: 2, vnode: vec![0], table: 0 };
    let held = plan.same(Operator::Buffer(buffer), leaf);
    let names = plan.leaf("k name");
    let named = plan.join([held, names], JoinKind::Inner, [&[0], &[0]]);
    let counted = plan.group(named, &[1]);
    let found = plan.found_at(counted);
    assert!(found.contains(&"4.0 of 1: from 1 at 3; key (b@1)".to_string()), "{found:?}");
}
