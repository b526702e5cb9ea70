use super::ast::AST_REWRITES;
use super::plan::{Of, PLAN_REWRITES};

/// Names with the ones that they need before them.
type List = Vec<(&'static str, &'static [&'static str])>;

fn lists() -> [List; 2] {
    let ast = AST_REWRITES.iter().map(|entry| (entry.rewrite.name(), entry.after));
    let plan = PLAN_REWRITES.iter().map(|entry| (entry.rewrite.name(), entry.after));
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
