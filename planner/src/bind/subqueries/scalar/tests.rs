//! How large plans of many and of nested subqueries are, and that planning ends when its statement does.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::logical_expr::LogicalPlan;
use millrace_common::{SqlError, SqlState};
use millrace_functions::interrupt::Interrupt;
use millrace_functions::tree::WalkPlan;

use crate::bind::tests::{TestCatalog, bind};
use crate::optimizer::{optimize_for_batch, optimize_for_view};

/// Tables that a plan reads, each as often as it does.
fn scans(plan: &LogicalPlan) -> usize {
    let mut scans = 0;
    plan.walk_with_subqueries(|node| {
        scans += usize::from(matches!(node, LogicalPlan::TableScan(_)));
        Ok(TreeNodeRecursion::Continue)
    })
    .unwrap();
    scans
}

fn bound(sql: &str) -> LogicalPlan {
    bind(&TestCatalog::new(), sql, true).unwrap_or_else(|e| panic!("{sql}: {e:?}")).plan
}

/// IN as a value, `levels` times within each other.
fn nested_values(levels: usize) -> String {
    (1..=levels).fold("SELECT k0.id FROM k AS k0".to_owned(), |within, i| {
        format!("SELECT CASE WHEN k{i}.id IN ({within}) THEN k{i}.id END AS v FROM k AS k{i}")
    })
}

/// EXISTS in filters, `levels` times within each other; each reads all queries around it.
fn nested_filters(levels: usize) -> String {
    (0..=levels).rev().fold("true".to_owned(), |within, i| {
        let around: Vec<String> = (0..i).map(|j| format!("k{i}.id > k{j}.id AND ")).collect();
        let query = format!("SELECT k{i}.id FROM k AS k{i} WHERE {}{within}", around.concat());
        if i == 0 { query } else { format!("EXISTS ({query})") }
    })
}

/// Plans as a server's threads do, whose stacks are larger than those of tests.
fn on_large_stack(work: fn()) {
    std::thread::Builder::new().stack_size(32 << 20).spawn(work).unwrap().join().unwrap();
}

#[test]
fn nested_predicates_do_not_multiply() {
    on_large_stack(nested);
}

fn nested() {
    // Further out each level reads the ones within it once more, and adds less and less in proportion; twice
    // of each would double it.
    let sizes: Vec<usize> = (3..=7).map(|levels| scans(&bound(&nested_values(levels)))).collect();
    assert!(sizes.windows(2).all(|s| s[1] * 2 <= s[0] * 3), "{sizes:?}");
    optimize_for_view(bound(&nested_values(5))).unwrap();
    let five = bound(&nested_filters(5));
    assert!(scans(&five) <= 100, "{}", scans(&five));
    optimize_for_view(five).unwrap();
}

#[test]
fn subqueries_side_by_side_do_not_multiply() {
    let value =
        |i: usize| format!("(SELECT max(b.id) FROM k AS b WHERE b.id < a.id + {i}) AS m{i}");
    let values: Vec<String> = (0..8).map(value).collect();
    // Each reads its own table, and the query around it as often as it would alone.
    let one = scans(&bound(&format!("SELECT {} FROM k AS a", values[0])));
    let plan = bound(&format!("SELECT {} FROM k AS a", values.join(", ")));
    assert!(scans(&plan) <= 8 * one, "{} of {one}", scans(&plan));
    // The same where both read a table by the same name.
    let inner = "FROM (SELECT a.id FROM k AS a) AS b";
    let values: Vec<String> = values.iter().map(|v| v.replace("FROM k AS b", inner)).collect();
    let one = scans(&bound(&format!("SELECT {} FROM k AS a", values[0])));
    let plan = bound(&format!("SELECT {} FROM k AS a", values.join(", ")));
    assert!(scans(&plan) <= 8 * one, "{} of {one}", scans(&plan));
}

#[test]
fn too_many_levels_are_refused() {
    on_large_stack(too_many);
}

fn too_many() {
    bound(&nested_filters(8));
    let e = bind(&TestCatalog::new(), &nested_filters(9), true).unwrap_err();
    assert_eq!(e.state, SqlState::STATEMENT_TOO_COMPLEX);
}

/// Wherever it is asked whether the statement has ended, that it has is what the client hears.
#[test]
fn planning_ends_with_its_statement() {
    on_large_stack(ended);
}

fn ended() {
    let sql = format!(
        "SELECT s.id, s.id IN ({}), l.m FROM ({}) AS s, \
         LATERAL (SELECT max(b.id) AS m FROM k AS b WHERE b.id < s.id) AS l",
        nested_values(2),
        nested_filters(2)
    );
    let catalog = TestCatalog::new();
    let mut question = 0;
    loop {
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&asked);
        let interrupt = Interrupt::new(move || {
            let before = counted.fetch_add(1, Ordering::Relaxed);
            (before >= question).then(|| SqlError::new(SqlState::QUERY_CANCELED, "ended"))
        });
        let planned = interrupt
            .during(|| bind(&catalog, &sql, true).and_then(|bound| optimize_for_view(bound.plan)));
        match planned {
            Ok(_) => break,
            Err(e) => {
                assert_eq!((e.state, e.message.as_str()), (SqlState::QUERY_CANCELED, "ended"))
            }
        }
        assert!(asked.load(Ordering::Relaxed) > question);
        question += 1 + question / 3;
    }
    assert!(question > 100, "{question}");
}

/// A join without an equality compares every row of one side with every row of the other.
#[test]
fn exists_over_not_exists_joins_by_keys() {
    let sql = "SELECT a.id FROM k AS a JOIN t ON t.a = a.id WHERE EXISTS \
        (SELECT 1 FROM k AS b WHERE b.id = a.id AND NOT EXISTS \
        (SELECT 1 FROM t AS c WHERE c.a = b.id AND c.b = t.b))";
    let batch = bind(&TestCatalog::new(), sql, false).unwrap().plan;
    for plan in [optimize_for_batch(batch).unwrap(), optimize_for_view(bound(sql)).unwrap()] {
        let mut joins = 0;
        plan.walk_with_subqueries(|node| {
            if let LogicalPlan::Join(join) = node {
                joins += 1;
                assert!(!join.on.is_empty(), "{}", plan.display_indent());
            }
            Ok(TreeNodeRecursion::Continue)
        })
        .unwrap();
        assert!(joins >= 3, "{}", plan.display_indent());
    }
}
