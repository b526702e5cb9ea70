//! The stream planner as a whole: SQL in, pinned plans out; stored graphs load as they were.

mod common;

use millrace_common::{SqlError, SqlState};
use millrace_graph::codec::{CodecError, decode_graph, encode_graph};
use millrace_graph::lookahead::lookaheads;
use millrace_graph::{JobGraph, Role};
use millrace_planner::explain::{explain_stream, lookahead_subject};

use common::{TestCatalog, compare, explain, plan, plan_closed, plan_seen, tests_dir};

const NEXMARK: [&str; 22] = [
    "q0", "q1", "q2", "q3", "q4", "q5", "q6", "q7", "q8", "q9", "q10", "q11", "q13", "q14", "q15",
    "q16", "q17", "q18", "q19", "q20", "q21", "q22",
];

fn nexmark(query: &str) -> String {
    let file = tests_dir().join(format!("nexmark/{query}.sql"));
    std::fs::read_to_string(&file).expect("the query's text")
}

/// The named queries of a file.
fn named_queries(file: &str) -> Vec<(String, String)> {
    let text = std::fs::read_to_string(tests_dir().join(file)).expect("the queries");
    let mut shapes = Vec::new();
    let mut lines = text.lines();
    while let (Some(name), Some(sql)) = (lines.next(), lines.next()) {
        shapes.push((name.trim_start_matches("-- ").to_owned(), sql.to_owned()));
    }
    shapes
}

fn all_graphs() -> Vec<(String, JobGraph)> {
    let queries = NEXMARK.iter().map(|q| ((*q).to_owned(), nexmark(q)));
    let planned = queries.chain(named_queries("shapes.sql")).map(|(name, sql)| {
        let graph = plan(&sql).unwrap_or_else(|e| panic!("{name}: {e}"));
        (name, graph)
    });
    planned.collect()
}

#[test]
fn nexmark_plans_are_pinned() {
    let mut failures = Vec::new();
    for query in NEXMARK {
        let text = match plan(&nexmark(query)) {
            Ok(graph) => explain(&graph),
            Err(e) => format!("error: {e:?}\n"),
        };
        failures.extend(compare(&format!("snapshots/nexmark/{query}.txt"), &text).err());
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn shapes_are_pinned() {
    pin("shapes", plan);
}

/// Queries whose lookahead is told by the last lines of their plans.
#[test]
fn lookaheads_are_pinned() {
    pin("lookahead", plan);
}

/// What a running job tells of its lookaheads is named as its plan names them.
#[test]
fn what_lookaheads_are_about_is_named_as_in_the_plan() {
    let catalog = TestCatalog::new();
    let planned = named_queries("lookahead.sql").into_iter().filter_map(|(name, sql)| {
        let graph = plan(&sql).ok()?;
        Some((name, graph))
    });
    let mut all = Vec::new();
    for (query, graph) in planned.chain(all_graphs()) {
        let plan = explain(&graph);
        for l in lookaheads(&graph) {
            let name = |id| catalog.name_of(id);
            let told = lookahead_subject(&graph, (l.fragment, l.node), l.subject(), &name);
            let told = told.expect("the operator is in the graph");
            let (reads, from) = told.rsplit_once(" from ").expect("an operator, and whose rows");
            let (head, tail) = (format!("lookahead {reads}: key ("), format!(" from {from} at "));
            let is_it = |line: &str| line.starts_with(&head) && line.contains(&tail);
            assert!(plan.lines().any(is_it), "{query}: {told}\n{plan}");
            all.push(told);
        }
    }
    for part in [" values [state ", " left, deleted rows [state ", " from Aggregate [state "] {
        assert!(all.iter().any(|told| told.contains(part)), "{part}: {all:?}");
    }
}

/// With EMIT ON WINDOW CLOSE: the watermark announces what is held back.
#[test]
fn closed_ranges_are_pinned() {
    pin("window_close", plan_closed);
}

/// The plans of a file's queries.
fn pin(file: &str, plan: impl Fn(&str) -> Result<JobGraph, SqlError>) {
    let mut text = String::new();
    for (name, sql) in named_queries(&format!("{file}.sql")) {
        let plan = match plan(&sql) {
            Ok(graph) => explain(&graph),
            Err(e) => format!("error: {e:?}\n"),
        };
        text.push_str(&format!("-- {name}\n{sql}\n\n{plan}\n"));
    }
    compare(&format!("snapshots/{file}.txt"), &text).expect("the plans are as pinned");
}

#[test]
fn a_stored_graph_loads_as_it_was() {
    for (name, graph) in all_graphs() {
        let bytes = encode_graph(&graph).unwrap_or_else(|e| panic!("{name}: {e}"));
        let loaded = decode_graph(&bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(explain(&graph), explain(&loaded), "{name}");
        assert_eq!(format!("{graph:?}"), format!("{loaded:?}"), "{name}");
        assert_eq!(bytes, encode_graph(&loaded).unwrap(), "{name}: encoding again differs");
    }
}

/// The newest format version is q9's graph; versions that are not read are refused by their number.
#[test]
fn golden_graphs_load() {
    let graph = plan(&nexmark("q9")).unwrap();
    let file = tests_dir().join("golden/graph_v2.bin");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&file, encode_graph(&graph).unwrap()).unwrap();
    }
    let loaded = decode_graph(&std::fs::read(&file).unwrap()).unwrap();
    compare("golden/graph_v2.txt", &explain(&loaded)).unwrap();
    assert!(matches!(decode_graph(&[8, 1]), Err(CodecError::Version(1))));
}

#[test]
fn damaged_graphs_are_errors() {
    let bytes = encode_graph(&plan(&nexmark("q4")).unwrap()).unwrap();
    assert!(matches!(decode_graph(&[8, 99]), Err(CodecError::Version(99))));
    let mut damaged = bytes.to_vec();
    for i in (0..damaged.len()).step_by(13) {
        assert!(decode_graph(&damaged[..i]).is_err(), "cut at {i}");
        damaged[i] ^= 0x55;
        assert!(decode_graph(&damaged).is_err(), "byte {i}");
        damaged[i] ^= 0x55;
    }
}

/// What a view cannot have says so by name.
#[test]
fn refusals_name_the_feature() {
    let cases = [
        ("SELECT id, now() FROM item", "now()"),
        ("SELECT id, random() FROM item", "random()"),
        ("SELECT item_id, median(rate) FROM orders GROUP BY item_id", "median"),
    ];
    for (sql, name) in cases {
        let e = plan(sql).expect_err(sql);
        assert_eq!(e.state, SqlState::FEATURE_NOT_SUPPORTED, "{sql}: {e}");
        assert!(e.message.contains(name), "{sql}: {e}");
    }
}

#[test]
fn a_view_cannot_have_two_columns_of_one_name() {
    let e = plan("SELECT id, name AS id FROM item").unwrap_err();
    assert_eq!(e.state, SqlState::DUPLICATE_COLUMN);
}

/// What EXPLAIN (PASSES) shows: the plan after each pass.
#[test]
fn each_pass_leaves_its_mark() {
    let sql = "SELECT id, name, r FROM (SELECT o.id, i.name, row_number() OVER (PARTITION BY i.name ORDER BY o.id) AS r \
        FROM orders o JOIN item i ON o.item_id = i.id) t WHERE r <= 2";
    let mut seen: Vec<(&str, String)> = Vec::new();
    plan_seen(sql, &mut |name, stream| seen.push((name, explain_stream(stream).join("\n"))))
        .unwrap();
    let names: Vec<&str> = seen.iter().map(|(name, _)| *name).collect();
    let passes = ["simplify", "limit ranks", "number rows", "add identities", "prune", "simplify"];
    assert_eq!(names[0], "convert");
    assert_eq!(names[1..7], passes);
    assert_eq!(names[7..], ["place exchanges", "lay out the result", "mark common subplans"]);
    let after = |at: usize| seen[at].1.as_str();
    // The condition becomes the rank's limit.
    assert!(after(1).contains("Filter") && !after(1).contains("TopN row_number <= 2"));
    assert!(!after(2).contains("Filter") && after(2).contains("TopN row_number <= 2"));
    // Each projection that only chooses columns goes, or into the join.
    assert!(after(5).lines().count() > after(6).lines().count(), "{}\n{}", after(5), after(6));
    // Rows move to where their group is.
    assert!(!after(6).contains("Exchange") && after(7).contains("Exchange hash (name)"));
}

/// A subquery that stands in two places is computed once, with one state table and two outputs; so is a table's scan.
#[test]
fn common_subplans_are_computed_once() {
    let sql = "WITH n AS (SELECT item_id, count(*) AS c FROM orders GROUP BY item_id) \
        SELECT a.item_id, a.c FROM n a JOIN (SELECT max(c) AS most FROM n) m ON a.c = m.most";
    let graph = plan(sql).unwrap();
    let tables = |name: &str| graph.tables.iter().filter(|t| t.name == name).count();
    // Of the counts, and of their maximum.
    assert_eq!(tables("aggregate"), 2);
    let outputs = |n: usize| graph.fragments.iter().filter(|f| f.outputs.len() == n).count();
    assert_eq!(outputs(2), 1);
    let pairs = plan("SELECT a.id, b.id AS other FROM orders a JOIN orders b ON a.item_id = b.id");
    let inputs = |graph: &JobGraph| {
        let nodes = graph.fragments.iter().flat_map(|f| &f.nodes);
        nodes.filter(|n| n.op.role() == Role::Input).count()
    };
    assert_eq!(inputs(&graph), 1);
    // One side lies where it is joined already, and does not move to be read once.
    assert_eq!(inputs(&pairs.unwrap()), 2);
    // The join's rows lie by a column that they do not have any more.
    let sql = "WITH n AS (SELECT o.note FROM orders o JOIN item i ON o.item_id = i.id) \
        SELECT note, 1 AS k FROM n UNION ALL SELECT note, 2 FROM n";
    let graph = plan(sql).unwrap();
    assert_eq!(graph.tables.iter().filter(|t| t.name.starts_with("join")).count(), 2);
    assert_eq!(inputs(&graph), 2);
}
