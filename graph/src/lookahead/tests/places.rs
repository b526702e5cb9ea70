//! Where rows can be looked at: at a leaf behind which they may wait, and in tables behind views.

use super::*;

fn places(graph: &JobGraph) -> Vec<(usize, Vec<Place>)> {
    lookaheads(graph).into_iter().map(|l| (l.node, l.places)).collect()
}

impl Plan {
    /// A subscription to some columns of a relation, all of them BIGINT.
    fn subscribe(&mut self, relation: u32, columns: &[usize], names: &str) -> usize {
        let fields: Vec<Field> = names.split_whitespace().map(bigint).collect();
        assert_eq!(fields.len(), columns.len());
        let of = Subscribe { relation: RelationId(relation), columns: columns.to_vec() };
        self.add(Operator::Subscribe(of), &[], schema(fields))
    }
}

/// `SELECT c AS x, a + 1 AS y FROM relation WHERE b > 5`, with the relation's columns a, b, c.
fn projected(relation: u32) -> JobGraph {
    let mut plan = Plan::new();
    let leaf = plan.subscribe(relation, &[0, 1, 2], "a b c");
    let some = plan.above(leaf, 1, 5);
    let (a, c) = (plan.column(some, 0), plan.column(some, 2));
    plan.project(some, vec![(c, "x"), (binary(a, Binary::Plus, int(1)), "y")]);
    plan.graph()
}

/// Groups by a column of these of a relation.
fn grouped(relation: u32, columns: &[usize], names: &str, by: usize) -> JobGraph {
    let mut plan = Plan::new();
    let leaf = plan.subscribe(relation, columns, names);
    plan.group(leaf, &[by]);
    plan.graph()
}

/// Its first lookahead by rows behind its leaf, each checked.
fn found(graph: &JobGraph, jobs: &[(u32, JobGraph)]) -> Vec<Behind> {
    let l = lookaheads(graph).remove(0);
    let job = |id: RelationId| jobs.iter().find(|(own, _)| *own == id.0);
    let found = behind(graph, &l, &|id| job(id).map(|(_, graph)| Arc::new(graph.clone())));
    for Behind { lookahead, columns, .. } in &found {
        assert_eq!(lookahead.places, [Place::Entry]);
        assert_eq!((lookahead.leaf, lookahead.node), (l.leaf, l.node));
        assert_eq!(lookahead.input.fields().len(), columns.len());
        let mut schema = Arc::clone(&lookahead.input);
        for step in &lookahead.steps {
            check_step(step, &schema);
            schema = Arc::clone(&step.schema);
        }
        assert_eq!(schema, lookahead.schema);
    }
    found
}

fn summary(found: &[Behind]) -> Vec<(u32, Vec<u32>, String)> {
    let relations = |b: &Behind| b.through.iter().map(|r| r.0).collect();
    found
        .iter()
        .map(|b| (b.lookahead.relation.unwrap().0, relations(b), show(&b.lookahead)))
        .collect()
}

#[test]
fn the_leaf_is_a_place_where_rows_may_wait_behind_it() {
    let mut plan = Plan::new();
    let leaf = plan.leaf("a b");
    let kept = plan.above(leaf, 0, 1);
    let first = plan.group(kept, &[0, 1]);
    let second = plan.group(first, &[1]);
    let (entry, root, leaf) = (Place::Entry, Place::Root, Place::Leaf);
    assert_eq!(
        places(&plan.graph()),
        [(first, vec![entry, root]), (second, vec![entry, root, leaf])]
    );
}

#[test]
fn a_key_is_followed_into_the_table_behind_a_view() {
    // Of the view's columns (x, y) the leaf reads y alone, or both in another order.
    let jobs = [(20, projected(7))];
    let of_y = found(&grouped(20, &[1], "y", 0), &jobs);
    assert_eq!(
        summary(&of_y),
        [(
            7,
            vec![20],
            "1.0 of 0: Project a@0, b@1; Filter b@1 > 5; Project a@0 + 1; Project y@0; key (y@0)"
                .to_owned()
        )]
    );
    assert_eq!(of_y[0].columns, [0, 1, 2]);
    let of_x = found(&grouped(20, &[1, 0], "y x", 1), &jobs);
    assert_eq!(
        summary(&of_x),
        [(
            7,
            vec![20],
            "1.0 of 0: Project b@1, c@2; Filter b@0 > 5; Project NULL, c@1; key (x@1)".to_owned()
        )]
    );
}

#[test]
fn a_key_is_followed_through_several_views() {
    let mut plan = Plan::new();
    let leaf = plan.subscribe(20, &[0], "x");
    let x = plan.column(leaf, 0);
    plan.project(leaf, vec![(binary(x, Binary::Multiply, int(2)), "z")]);
    let jobs = [(20, projected(7)), (30, plan.graph())];
    let through = summary(&found(&grouped(30, &[0], "z", 0), &jobs));
    assert_eq!(through.len(), 1);
    let (relation, views, steps) = &through[0];
    assert_eq!((*relation, views.as_slice()), (7, &[30, 20][..]));
    assert!(steps.contains("Filter b@0 > 5") && steps.contains("x@0 * 2"), "{steps}");
}

#[test]
fn each_table_of_a_union_is_one_behind_it() {
    let mut plan = Plan::new();
    let left = plan.subscribe(7, &[0], "x");
    let right = plan.subscribe(8, &[1], "x");
    let schema = Arc::clone(plan.schema(left));
    plan.add(Operator::Union(Union), &[left, right], schema);
    let found = found(&grouped(20, &[0], "x", 0), &[(20, plan.graph())]);
    let mut tables: Vec<(u32, &[usize])> =
        found.iter().map(|b| (b.lookahead.relation.unwrap().0, b.columns.as_slice())).collect();
    tables.sort_unstable();
    assert_eq!(tables, [(7, &[0][..]), (8, &[1])]);
}

#[test]
fn a_table_read_directly_has_none_behind_it() {
    assert!(found(&grouped(7, &[0], "x", 0), &[]).is_empty());
}

#[test]
fn a_key_of_the_group_is_followed_through_a_view_with_state() {
    // `SELECT b, … FROM t GROUP BY b`
    let jobs = [(20, grouped(7, &[0, 1], "a b", 1))];
    let through = summary(&found(&grouped(20, &[0], "b", 0), &jobs));
    assert_eq!(through, [(7, vec![20], "1.0 of 0: Project b@1; key (b@0)".to_owned())]);
}

#[test]
fn a_view_whose_rows_may_come_of_rows_without_the_key_lets_none_through() {
    let job = |wanted: &[usize]| {
        let mut plan = Plan::new();
        let (left, right) = (plan.subscribe(7, &[0, 1], "a b"), plan.subscribe(8, &[0, 1], "k x"));
        let joined = plan.join([left, right], JoinKind::Inner, [&[0], &[0]]);
        let exprs = wanted.iter().map(|&c| (plan.column(joined, c), "y")).collect();
        plan.project(joined, exprs);
        plan.graph()
    };
    // Rows of the right side meet rows of the left one, whose `b` they do not know; the key of both they know.
    assert!(found(&grouped(20, &[0], "y", 0), &[(20, job(&[1]))]).is_empty());
    let both = found(&grouped(20, &[0], "y", 0), &[(20, job(&[0]))]);
    let mut tables: Vec<u32> = both.iter().map(|b| b.lookahead.relation.unwrap().0).collect();
    tables.sort_unstable();
    assert_eq!(tables, [7, 8]);
    // A branch of a union that a source brings.
    let mut plan = Plan::new();
    let left = plan.subscribe(7, &[0], "x");
    let source = Source { relation: RelationId(3), columns: vec![0] };
    let right = plan.add(Operator::Source(source), &[], schema(vec![bigint("x")]));
    let schema = Arc::clone(plan.schema(left));
    plan.add(Operator::Union(Union), &[left, right], schema);
    assert!(found(&grouped(20, &[0], "x", 0), &[(20, plan.graph())]).is_empty());
}

/// Views in pairs that read the pair before, all of it, `levels` times over a table; the last one is `top`.
fn diamonds(levels: u32) -> (u32, Vec<(u32, JobGraph)>) {
    let mut jobs = Vec::new();
    let (mut below, mut next) = (vec![7], 100);
    for _ in 0..levels {
        let above = vec![next, next + 1];
        for &view in &above {
            let mut plan = Plan::new();
            let leaves: Vec<usize> = below.iter().map(|b| plan.subscribe(*b, &[0], "x")).collect();
            let schema = Arc::clone(plan.schema(leaves[0]));
            plan.add(Operator::Union(Union), &leaves, schema);
            jobs.push((view, plan.graph()));
        }
        (below, next) = (above, next + 2);
    }
    (below[0], jobs)
}

#[test]
fn stacked_diamonds_of_views_are_walked_once() {
    for (levels, tables) in [(1, 1), (7, 1), (40, 0)] {
        let (top, jobs) = diamonds(levels);
        let graph = grouped(top, &[0], "x", 0);
        let l = lookaheads(&graph).remove(0);
        let asked = std::cell::Cell::new(0);
        let job = |id: RelationId| {
            asked.set(asked.get() + 1);
            jobs.iter().find(|(own, _)| *own == id.0).map(|(_, graph)| Arc::new(graph.clone()))
        };
        let found = behind(&graph, &l, &job);
        let relations: Vec<u32> = found.iter().map(|b| b.lookahead.relation.unwrap().0).collect();
        assert_eq!(relations, vec![7; tables], "{levels} levels");
        assert!(asked.get() <= 20, "{levels} levels: {} relations were looked at", asked.get());
    }
}

#[test]
fn a_key_that_a_source_brings_is_not_followed_into_it() {
    let mut plan = Plan::new();
    let source = Source { relation: RelationId(3), columns: vec![0] };
    plan.add(Operator::Source(source), &[], schema(vec![bigint("x")]));
    assert!(found(&grouped(20, &[0], "x", 0), &[(20, plan.graph())]).is_empty());
}

#[test]
fn views_that_read_each_other_end_the_walk() {
    let mut plan = Plan::new();
    plan.subscribe(20, &[0], "x");
    assert!(found(&grouped(20, &[0], "x", 0), &[(20, plan.graph())]).is_empty());
}
