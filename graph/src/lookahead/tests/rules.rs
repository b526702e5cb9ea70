//! What the walk does at each operator.

use millrace_functions::aggregate_kind::AggFunc;

use super::*;
use crate::{AggCall, ValueTable};

#[test]
fn a_key_of_the_leaf_needs_no_step() {
    let mut plan = Plan::new();
    let leaf = plan.leaf("a b c");
    plan.group(leaf, &[2, 0]);
    let graph = plan.graph();
    assert_eq!(shown(&graph), ["1.0 of 0: key (c@2, a@0) vnode (c@2)"]);
    let found = &lookaheads(&graph)[0];
    assert_eq!((found.relation, found.depth), (Some(RelationId(100)), 1));
    assert_eq!(found.places, [Place::Entry, Place::Root]);
}

#[test]
fn a_source_is_looked_at_where_it_is_read() {
    let mut plan = Plan::new();
    let source = Source { relation: RelationId(3), columns: vec![0] };
    let leaf = plan.add(Operator::Source(source), &[], schema(vec![bigint("a")]));
    plan.group(leaf, &[0]);
    let found = lookaheads(&plan.graph()).remove(0);
    assert_eq!((found.relation, found.places), (Some(RelationId(3)), vec![Place::Entry]));
}

#[test]
fn filters_are_kept_with_the_columns_that_they_need_and_no_others() {
    let mut plan = Plan::new();
    let leaf = plan.leaf("a b c d");
    let filtered = plan.above(leaf, 3, 10);
    plan.group(filtered, &[1]);
    assert_eq!(plan.found(), ["2.0 of 0: Project b@1, d@3; Filter d@1 > 10; key (b@0)"]);
}

#[test]
fn the_filter_nearest_to_the_leaf_comes_first() {
    let mut plan = Plan::new();
    let leaf = plan.leaf("a b");
    let low = plan.above(leaf, 1, 0);
    let sum = binary(plan.column(low, 0), Binary::Divide, plan.column(low, 1));
    let quotient = plan.project(low, vec![(sum, "q")]);
    let high = plan.above(quotient, 0, 7);
    plan.group(high, &[0]);
    assert_eq!(
        plan.found(),
        ["4.0 of 0: Filter b@1 > 0; Filter a@0 / b@1 > 7; Project a@0 / b@1; key (q@0)"]
    );
}

#[test]
fn projections_are_put_into_each_other() {
    let mut plan = Plan::new();
    let leaf = plan.leaf("a b");
    let (a, b) = (plan.column(leaf, 0), plan.column(leaf, 1));
    let one = plan.project(leaf, vec![(b, "y"), (binary(a, Binary::Plus, int(1)), "x")]);
    let (y, x) = (plan.column(one, 0), plan.column(one, 1));
    let two = plan.project(one, vec![(binary(x, Binary::Multiply, int(2)), "twice"), (y, "z")]);
    plan.group(two, &[0, 1]);
    assert_eq!(
        plan.found(),
        ["3.0 of 0: Project (a@0 + 1) * 2, b@1; key (twice@0, b@1) vnode (twice@0)"]
    );
}

#[test]
fn an_expression_that_grows_without_end_ends_the_walk() {
    let mut plan = Plan::new();
    let mut at = plan.leaf("a");
    for _ in 0..40 {
        let a = plan.column(at, 0);
        at = plan.project(at, vec![(binary(Arc::clone(&a), Binary::Plus, a), "a")]);
    }
    plan.group(at, &[0]);
    assert!(plan.found().is_empty());
}

#[test]
fn a_key_without_a_column_is_one_key() {
    let mut plan = Plan::new();
    let leaf = plan.leaf("a");
    let (a, one) = (plan.column(leaf, 0), int(1));
    let both = plan.project(leaf, vec![(one, "one"), (a, "a")]);
    plan.group(both, &[0]);
    assert!(plan.found().is_empty());
    let mut plan = Plan::new();
    let leaf = plan.leaf("a");
    let (a, one) = (plan.column(leaf, 0), int(1));
    let both = plan.project(leaf, vec![(one, "one"), (a, "a")]);
    plan.group(both, &[0, 1]);
    assert_eq!(plan.found(), ["2.0 of 0: Project 1, a@0; key (one@0, a@1) vnode (one@0)"]);
}

#[test]
fn the_event_time_goes_along_where_it_can() {
    let mut plan = Plan::new();
    let leaf = plan.leaf_of(vec![bigint("a"), time("end"), time("at")]);
    plan.nodes[leaf].marks = vec![mark(1, 2), mark(2, 0)];
    let counted = plan.group(leaf, &[0, 1]);
    plan.nodes[counted].marks = vec![mark(1, 2)];
    let top = plan.top(counted, &[0]);
    plan.nodes[top].marks = vec![mark(1, 2)];
    let last = plan.project(top, vec![(plan.column(top, 0), "a"), (plan.column(top, 2), "n")]);
    plan.nodes[last].marks = vec![mark(1, 0)];
    plan.group(last, &[0]);
    assert_eq!(
        plan.found(),
        [
            "1.0 of 0: key (a@0, end@1) vnode (a@0) time at@2",
            "2.0 of 0: key (a@0) time end@1",
            // The count is not known before it is computed.
            "4.0 of 0: key (a@0)",
            "4.0 of 0: from 1 at 2; key (a@0) time n@2",
        ]
    );
}

#[test]
fn windows_are_assigned_where_the_key_needs_them() {
    let plan = |key: &[usize], filter: Option<(usize, i64)>| {
        let mut plan = Plan::new();
        let leaf = plan.leaf_of(vec![bigint("x"), bigint("a"), time("at"), bigint("b")]);
        let fields = [plan.fields(leaf), vec![time("start"), time("end")]].concat();
        let hop = Hop { time_column: 2, size_us: 10, slide_us: 5, offset_us: 0 };
        let mut at = plan.add(Operator::Hop(hop), &[leaf], schema(fields));
        if let Some((c, least)) = filter {
            at = plan.above(at, c, least);
        }
        plan.group(at, key);
        plan.found().remove(0)
    };
    assert_eq!(plan(&[1], None), "2.0 of 0: key (a@1)");
    assert_eq!(
        plan(&[1, 5], None),
        "2.0 of 0: Project a@1, at@2; Hop 1; key (a@0, end@3) vnode (a@0)"
    );
    // A filter on the row itself comes before it is multiplied.
    assert_eq!(
        plan(&[1, 5], Some((3, 7))),
        "3.0 of 0: Project a@1, at@2, b@3; Filter b@2 > 7; Project a@0, at@1; Hop 1; \
         key (a@0, end@3) vnode (a@0)"
    );
}

#[test]
fn grouping_sets_multiply_only_the_columns_of_the_key() {
    let mut plan = Plan::new();
    let leaf = plan.leaf("a b c");
    let fields = [plan.fields(leaf), vec![bigint("a"), bigint("b"), bigint("id")]].concat();
    let set = |keep: [bool; 2], id| GroupingSet { keep: keep.to_vec(), id };
    let sets = vec![set([true, false], 0), set([false, true], 1)];
    let expand = Expand { columns: vec![0, 1], sets };
    let expanded = plan.add(Operator::Expand(expand), &[leaf], schema(fields));
    let counted = plan.group(expanded, &[4, 5]);
    let own = plan.group(expanded, &[2]);
    assert!(own > counted);
    plan.join([counted, own], JoinKind::Inner, [&[], &[]]);
    assert_eq!(
        plan.found(),
        ["2.0 of 0: Project b@1; Expand [0] 2; key (b@1, id@2) vnode (b@1)", "3.0 of 0: key (c@2)",]
    );
}

#[test]
fn lists_are_taken_apart_only_for_the_key() {
    let list =
        |name: &str| Field::new_list(name, Field::new_list_field(DataType::Int64, true), true);
    let plan = |key: usize| {
        let mut plan = Plan::new();
        let leaf = plan.leaf_of(vec![bigint("a"), list("l"), bigint("b")]);
        let fields = vec![bigint("a"), bigint("l"), bigint("b")];
        let unnest = Unnest { lists: vec![1], keep_empty: false };
        let at = plan.add(Operator::Unnest(unnest), &[leaf], schema(fields));
        plan.group(at, &[key]);
        plan.found().remove(0)
    };
    assert_eq!(plan(2), "2.0 of 0: key (b@2)");
    assert_eq!(plan(1), "2.0 of 0: Project l@1; Unnest [0]; key (l@0)");
}

#[test]
fn copies_and_stamps_do_not_matter_but_the_clock_cannot_be_known() {
    let plan = |key: usize| {
        let mut plan = Plan::new();
        let leaf = plan.leaf("a n");
        let copies = plan.same(Operator::Repeat(Repeat { times_column: 1 }), leaf);
        let fields = [plan.fields(copies), vec![time("now")]].concat();
        let stamped = plan.add(Operator::Stamp(Stamp { add_us: 1 }), &[copies], schema(fields));
        plan.group(stamped, &[key]);
        plan.found()
    };
    assert_eq!(plan(0), ["3.0 of 0: key (a@0)"]);
    assert!(plan(2).is_empty());
}

#[test]
fn every_input_of_a_union_brings_keys_and_equal_ways_are_one() {
    let mut plan = Plan::new();
    let (first, second) = (plan.leaf("a b"), plan.leaf("a b"));
    let some = plan.above(first, 1, 3);
    let fields = schema(plan.fields(first));
    let all = plan.add(Operator::Union(Union), &[first, some, second, first], fields);
    plan.group(all, &[0]);
    assert_eq!(
        plan.found(),
        ["4.0 of 0: key (a@0)", "4.0 of 0: Filter b@1 > 3; key (a@0)", "4.0 of 1: key (a@0)",]
    );
}

#[test]
fn many_ways_are_cut_short() {
    let mut plan = Plan::new();
    let mut at = plan.leaf("a b");
    for n in 0..30 {
        let some = plan.above(at, 1, n);
        let fields = schema(plan.fields(at));
        at = plan.add(Operator::Union(Union), &[at, some], fields);
    }
    plan.group(at, &[0]);
    let found = plan.found().len();
    assert!((1..=16).contains(&found), "{found}");
}

#[test]
fn both_sides_of_a_join_have_keys_of_their_own() {
    let mut plan = Plan::new();
    let (left, right) = (plan.leaf("a b"), plan.leaf("x y z"));
    plan.join([left, right], JoinKind::Inner, [&[1], &[2]]);
    assert_eq!(plan.found(), ["2.0 of 0: key (b@1)", "2.1 of 1: key (z@2)"]);
}

/// What the groups over a join are looked up by: a column of the output.
fn over_join(kind: JoinKind, group: &[usize]) -> Vec<String> {
    let mut plan = Plan::new();
    let (left, right) = (plan.leaf("a b"), plan.leaf("x y"));
    let some = plan.above(right, 1, 5);
    let joined = plan.join([left, some], kind, [&[0], &[0]]);
    let counted = plan.group(joined, group);
    plan.found_at(counted)
}

#[test]
fn a_key_passes_through_the_side_of_a_join_that_it_comes_from() {
    let left = "4.0 of 0: key (b@1)";
    // Rows of the other side bring it with the rows that they meet.
    let met = "4.0 of 1: after 1; key (b@0)";
    assert_eq!(over_join(JoinKind::Inner, &[1]), [left, met]);
    assert_eq!(over_join(JoinKind::LeftOuter, &[1]), [left, met]);
    assert_eq!(over_join(JoinKind::LeftAnti, &[1]), [left]);
    let right = "4.0 of 1: Project y@1; Filter y@0 > 5; key (y@0)";
    assert_eq!(over_join(JoinKind::Inner, &[3]), [right, "4.0 of 0: after 0; key (y@0)"]);
    assert_eq!(over_join(JoinKind::RightSemi, &[1]), [right]);
    // Of neither side.
    assert!(over_join(JoinKind::LeftMark, &[2]).is_empty());
}

#[test]
fn the_columns_that_are_joined_are_known_on_both_sides() {
    let both = ["4.0 of 0: key (a@0)", "4.0 of 1: Filter y@1 > 5; key (x@0)"];
    for (kind, column) in [
        (JoinKind::Inner, 0),
        (JoinKind::Inner, 2),
        (JoinKind::FullOuter, 2),
        (JoinKind::LeftSemi, 0),
        (JoinKind::LeftMark, 0),
        (JoinKind::RightAnti, 0),
    ] {
        assert_eq!(over_join(kind, &[column]), both, "{kind:?}");
    }
    // The other column decides the side that knows the key alone.
    let left = "4.0 of 0: key (a@0, b@1) vnode (a@0)";
    let right = "4.0 of 1: after 1; key (x@0, b@1) vnode (x@0)";
    assert_eq!(over_join(JoinKind::Inner, &[2, 1]), [left, right]);
}

#[test]
fn a_join_may_select_columns() {
    let mut plan = Plan::new();
    let (left, right) = (plan.leaf("a b"), plan.leaf("x y"));
    let joined = plan.join([left, right], JoinKind::Inner, [&[0], &[0]]);
    let fields = schema(vec![bigint("y"), bigint("b")]);
    plan.nodes[joined].schema = fields;
    let Operator::Join(join) = &mut plan.nodes[joined].op else { panic!("a join") };
    join.output = vec![3, 1];
    let counted = plan.group(joined, &[1]);
    assert_eq!(plan.found_at(counted), ["3.0 of 0: key (b@1)", "3.0 of 1: after 1; key (b@0)"]);
}

#[test]
fn columns_of_different_types_are_not_taken_for_each_other() {
    let mut plan = Plan::new();
    let (left, right) = (plan.leaf("a"), plan.leaf_of(vec![time("t"), bigint("y")]));
    let joined = plan.join([left, right], JoinKind::Inner, [&[0], &[0]]);
    let counted = plan.group(joined, &[1]);
    assert_eq!(plan.found_at(counted), ["3.0 of 1: key (t@0)", "3.0 of 0: after 0; key (t@0)"]);
}

#[test]
fn a_key_passes_through_groups_and_begins_with_results() {
    let mut plan = Plan::new();
    let leaf = plan.leaf("a b c");
    let counted = plan.group(leaf, &[2, 1]);
    // HAVING: unknown before the group is.
    let most = plan.above(counted, 2, 100);
    let some = plan.above(most, 1, 4);
    let above = plan.top(some, &[0]);
    let ranked = plan.above(above, 3, 1);
    let windowed = plan.window(ranked, &[1]);
    let total = plan.group(windowed, &[2]);
    let by_previous = plan.group(windowed, &[4]);
    plan.join([total, by_previous], JoinKind::Inner, [&[], &[]]);
    assert_eq!(
        plan.found(),
        [
            "1.0 of 0: key (c@2, b@1) vnode (c@2)",
            "4.0 of 0: Project b@1, c@2; Filter b@0 > 4; key (c@1)",
            "6.0 of 0: Project b@1; Filter b@0 > 4; key (b@0)",
            "6.0 of 0: from 1 at 4; Project b@1, n@2; Filter n@1 > 100; Filter b@0 > 4; key (b@0)",
            "7.0 of 1: from 1 at 4; Project b@1, n@2; Filter n@1 > 100; Filter b@0 > 4; key (n@1)",
        ]
    );
}

#[test]
fn left_rows_of_a_lookup_read_and_right_rows_do_not() {
    let mut plan = Plan::new();
    let (left, right) = (plan.leaf("a b"), plan.leaf("x y"));
    let fields = schema([plan.fields(left), plan.fields(right)].concat());
    let lookup = Lookup {
        outer: false,
        left_keys: vec![1],
        left_vnode: vec![1],
        right: side(&[0]),
        residual: None,
        output: vec![0, 1, 2, 3],
        matches: None,
    };
    let found = plan.add(Operator::Lookup(lookup), &[left, right], fields);
    let by_key = plan.group(found, &[2]);
    let by_value = plan.group(found, &[3]);
    plan.join([by_key, by_value], JoinKind::Inner, [&[], &[]]);
    assert_eq!(
        plan.found(),
        ["2.0 of 0: key (b@1)", "3.0 of 0: key (b@1)", "4.0 of 0: after 0; key (y@0)"]
    );
}

#[test]
fn a_key_is_followed_over_exchanges() {
    let mut below = Plan::new();
    let leaf = below.leaf("a b");
    let some = below.above(leaf, 0, 1);
    let (mut above, fields) = (Plan::new(), schema(below.fields(some)));
    let exchange = Operator::Exchange(Exchange { fragment: 0, output: 0 });
    let entered = above.add(exchange, &[], fields);
    above.group(entered, &[1]);
    let mut graph = above.graph();
    let carries = EdgeKind::Rows { hash: vec![1] };
    let outputs = vec![Edge { from: some, to: 1, carries }];
    let first = Fragment { nodes: below.nodes, singleton: false, outputs };
    graph.fragments.insert(0, first);
    assert_eq!(shown(&graph), ["1.0 of 0: Filter a@0 > 1; key (b@1)"]);
    assert_eq!(lookaheads(&graph)[0].leaf, (0, 0));
    assert_eq!(lookaheads(&graph)[0].fragment, 1);
    assert_eq!(lookaheads(&graph)[0].places, [Place::Entry, Place::Root, Place::Leaf]);
}

#[test]
fn rows_that_wait_for_an_instant_are_not_looked_ahead() {
    let plan = |mode| {
        let mut plan = Plan::new();
        let leaf = plan.leaf_of(vec![bigint("a"), time("at")]);
        let buffer = EventTimeBuffer { mode, column: 1, vnode: vec![0], table: 0 };
        let held = plan.same(Operator::Buffer(buffer), leaf);
        plan.group(held, &[0]);
        plan.found()
    };
    assert!(plan(BufferMode::WindowClose).is_empty());
    assert!(plan(BufferMode::LowerBound).is_empty());
    assert_eq!(plan(BufferMode::UpperBound), ["2.0 of 0: key (a@0)"]);
}

#[test]
fn constant_rows_bring_no_keys() {
    let mut plan = Plan::new();
    let fields = schema(vec![bigint("a")]);
    let batch = arrow::record_batch::RecordBatch::new_empty(Arc::clone(&fields));
    let values = plan.add(Operator::Values(Values { batch }), &[], fields);
    plan.group(values, &[0]);
    assert!(plan.found().is_empty());
}

#[test]
fn state_of_one_key_and_state_that_is_not_read_have_none() {
    let mut plan = Plan::new();
    let (left, right) = (plan.leaf("a"), plan.leaf("x"));
    plan.group(left, &[]);
    plan.top(left, &[]);
    plan.window(left, &[]);
    plan.join([left, right], JoinKind::Inner, [&[], &[]]);
    let anti = plan.join([left, right], JoinKind::LeftAnti, [&[0], &[0]]);
    let Operator::Join(join) = &mut plan.nodes[anti].op else { panic!("a join") };
    join.null_aware = true;
    let merged = plan.group(left, &[0]);
    plan.tables[merged].class = AccessClass::Merge;
    assert!(plan.found().is_empty());
}

/// A call with this value table.
fn call(func: AggFunc, arg: usize, filter: Option<usize>, table: usize) -> AggCall {
    let distinct = !matches!(func, AggFunc::Min | AggFunc::Max);
    let state = Some(ValueTable { table, descending: false });
    AggCall { func, arg: Some(arg), distinct, filter, output_type: DataType::Int64, state }
}

#[test]
fn values_that_are_counted_are_looked_up_by_group_and_value() {
    let calls = [
        call(AggFunc::Min, 2, None, 7),
        call(AggFunc::Count, 1, None, 8),
        call(AggFunc::Count, 2, Some(3), 9),
        call(AggFunc::StringAgg, 2, None, 10),
        // It has its values in those of the minimum.
        call(AggFunc::Sum, 2, None, 7),
        call(AggFunc::Sum, 1, None, 8),
    ];
    let found = |group: &[usize]| {
        let mut plan = Plan::new();
        let mut fields: Vec<Field> = ["a", "b", "c"].map(bigint).to_vec();
        fields.push(Field::new("d", DataType::Boolean, true));
        let leaf = plan.leaf_of(fields);
        let counted = plan.group(leaf, group);
        let Operator::Aggregate(aggregate) = &mut plan.nodes[counted].op else { panic!("groups") };
        aggregate.calls = calls.to_vec();
        plan.found()
    };
    assert_eq!(
        found(&[0]),
        [
            "1.0 of 0: key (a@0)",
            "1.1 of 0: key (a@0, b@1) vnode (a@0)",
            "1.2 of 0: Project a@0, c@2, d@3; Filter d@2; key (a@0, c@1) vnode (a@0)",
            "1.3 of 0: key (a@0, c@2) vnode (a@0)",
        ]
    );
    // One group is in memory, and not all of its values.
    assert_eq!(
        found(&[]),
        [
            "1.1 of 0: key (b@1) vnode ()",
            "1.2 of 0: Project c@2, d@3; Filter d@1; key (c@0) vnode ()",
            "1.3 of 0: key (c@2) vnode ()",
        ]
    );
}

#[test]
fn values_of_extremes_alone_are_not_looked_up_by_rows() {
    let mut plan = Plan::new();
    let leaf = plan.leaf("a b");
    let extremes = plan.group(leaf, &[0]);
    let Operator::Aggregate(aggregate) = &mut plan.nodes[extremes].op else { panic!("groups") };
    aggregate.calls = vec![call(AggFunc::Min, 1, None, 7), call(AggFunc::Max, 1, None, 8)];
    assert_eq!(plan.found(), ["1.0 of 0: key (a@0)"]);
}

#[test]
fn what_is_not_the_same_each_time_ends_the_walk() {
    let mut plan = Plan::new();
    let leaf = plan.leaf("a b");
    let drawn = random();
    let even = plan.filter(leaf, binary(Arc::clone(&drawn), Binary::Gt, int(0)));
    let not_null: ExprRef = Arc::new(IsNotNullExpr::new(plan.column(even, 1)));
    let part = binary(not_null, Binary::And, binary(Arc::clone(&drawn), Binary::Gt, int(0)));
    let valid = plan.filter(even, part);
    let a = plan.column(valid, 0);
    let made = plan.project(valid, vec![(a, "a"), (drawn, "r")]);
    let by_row = plan.group(made, &[0]);
    let by_chance = plan.group(made, &[1]);
    plan.join([by_row, by_chance], JoinKind::Inner, [&[], &[]]);
    assert_eq!(plan.found(), ["4.0 of 0: Filter b@1 IS NOT NULL; key (a@0)"]);
}

/// A function that gives another number each time.
fn random() -> ExprRef {
    use datafusion::common::config::ConfigOptions;
    use datafusion::logical_expr::{ScalarUDF, Volatility, create_udf};
    use datafusion::physical_expr::ScalarFunctionExpr;
    use datafusion::physical_plan::ColumnarValue;
    let one = |_: &[ColumnarValue]| Ok(ColumnarValue::Scalar(ScalarValue::from(1i64)));
    let function: ScalarUDF =
        create_udf("drawn", vec![], DataType::Int64, Volatility::Volatile, Arc::new(one));
    let options = Arc::new(ConfigOptions::default());
    let schema = Schema::empty();
    Arc::new(ScalarFunctionExpr::try_new(Arc::new(function), vec![], &schema, options).unwrap())
}
