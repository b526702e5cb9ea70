use super::ast::AST_REWRITES;
use super::plan::{Of, PLAN_REWRITES};
use super::testing::bound;

/// Names with the ones that they need before them.
type List = Vec<(&'static str, &'static [&'static str])>;

fn lists() -> [List; 2] {
    let ast = AST_REWRITES.iter().map(|entry| (entry.rewrite.name, entry.after));
    let plan = PLAN_REWRITES.iter().map(|entry| (entry.rewrite.name, entry.after));
    [ast.collect(), plan.collect()]
}

/// A name that stands twice says of neither which one another needs, and an error by name would mean both.
#[test]
fn names_of_rewrites_are_unique() {
    let names: Vec<&str> = lists().into_iter().flatten().map(|(name, _)| name).collect();
    for (at, name) in names.iter().enumerate() {
        assert!(!names[..at].contains(name), "{name} stands twice");
    }
}

/// What an entry says that it needs stands before it, in the same list.
#[test]
fn rewrites_stand_behind_what_they_need() {
    for list in lists() {
        for (at, (name, after)) in list.iter().enumerate() {
            for needed in *after {
                let found = list[..at].iter().any(|(before, _)| before == needed);
                assert!(found, "{name} needs {needed} before it");
            }
        }
    }
}

/// The list is in the order in which plans come to be: those of queries before the statement's, which has them in it.
#[test]
fn plans_of_queries_are_rewritten_before_the_statements() {
    assert!(PLAN_REWRITES.is_sorted_by_key(|entry| entry.of));
    assert!([Of::Query, Of::Statement].iter().all(|of| PLAN_REWRITES.iter().any(|e| e.of == *of)));
}

/// What DISTINCT is ordered by is in the list as it is written, with a window by its name.
#[test]
fn order_names_are_parted_before_windows_are_written_out() {
    let sql = "SELECT DISTINCT sum(a) OVER w FROM t WINDOW w AS (PARTITION BY b) \
               ORDER BY sum(a) OVER w";
    bound(sql).unwrap();
}

/// A column that USING merges is one in a window that ORDER BY names, too: by itself it would be ambiguous.
#[test]
fn windows_of_order_are_written_out_before_merged_columns() {
    let sql = "SELECT 1 FROM t AS x FULL JOIN t AS y USING (a) WINDOW w AS (ORDER BY a) \
               ORDER BY row_number() OVER w";
    bound(sql).unwrap();
}

/// Columns are called as what is written, not as the calls that it becomes.
#[test]
fn columns_are_named_before_their_expressions_are_spelled_out() {
    let sql = "SELECT generate_series(1, 2), EXISTS (SELECT 1), a BETWEEN 1 AND 2, -a FROM t";
    assert_eq!(bound(sql).unwrap().names, ["generate_series", "exists", "?column?", "?column?"]);
}

/// An operator whose place is noted is not known any more as one that compares rows.
#[test]
fn rows_are_compared_before_operators_are_noted() {
    bound("SELECT 1 FROM t WHERE (a, b) = (SELECT 1, 2)").unwrap();
}

/// Numbers are expressions like others until all are spelled out, and positions afterwards.
#[test]
fn positions_are_kept_when_numbers_are_spelled_out() {
    let names = bound("SELECT a, sum(b) FROM t GROUP BY 1 ORDER BY 2, 1 LIMIT 3").unwrap().names;
    assert_eq!(names, ["a", "sum"]);
}
