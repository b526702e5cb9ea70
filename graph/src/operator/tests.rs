//! Every operator is named where it is declared, lowered and built, so that a new one concerns few files.

use std::path::{Path, PathBuf};

/// The lists of all operators.
const LISTS: [&str; 2] = ["graph/src/operator/mod.rs", "executor/src/operators/mod.rs"];

/// Where an operator has a file of its own.
const OWN: [&str; 2] = ["graph/src/operator/", "planner/src/stream/operators/"];

/// Rewrites and checks that look for particular operators, and leave all others as they are.
const PARTICULAR: [&str; 27] = [
    "executor/src/input/generated.rs",
    "executor/src/lookahead/random_hints.rs",
    "executor/src/lookahead/wiring.rs",
    "executor/src/task/build.rs",
    "executor/src/task/order.rs",
    "executor/src/worker/start.rs",
    "frontend/src/ddl/sink.rs",
    "graph/src/edges.rs",
    "graph/src/lookahead.rs",
    "graph/src/lookahead/closing.rs",
    "graph/src/lookahead/deleted.rs",
    "graph/src/lookahead/steps.rs",
    "graph/src/lookahead/upstream.rs",
    "graph/src/lookahead/walk.rs",
    "planner/src/explain/lookahead.rs",
    "planner/src/explain/mod.rs",
    "planner/src/passes/exchange.rs",
    "planner/src/passes/rank.rs",
    "planner/src/passes/share.rs",
    "planner/src/passes/simplify.rs",
    "planner/src/passes/ttl.rs",
    "planner/src/passes/window_close.rs",
    "planner/src/stream/fragment.rs",
    "planner/src/stream/lookup.rs",
    "planner/src/stream/outputs.rs",
    "planner/src/stream/window_tvf.rs",
    "src/http/api.rs",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The source files of the crates that know operators, by their paths in the repository, without their tests.
fn sources() -> Vec<(String, String)> {
    let mut found = Vec::new();
    let crates = ["executor/src", "frontend/src", "graph/src", "meta/src", "planner/src", "src"];
    let mut directories: Vec<PathBuf> = crates.iter().map(PathBuf::from).collect();
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(root().join(&directory)).unwrap() {
            let entry = entry.unwrap();
            let path = directory.join(entry.file_name());
            if entry.file_type().unwrap().is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = std::fs::read_to_string(entry.path()).unwrap();
                let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
                let comment = |l: &&str| l.trim_start().starts_with("//");
                let code: Vec<&str> = code.lines().filter(|l| !comment(l)).collect();
                found.push((path.to_str().unwrap().to_owned(), code.join("\n")));
            }
        }
    }
    found.retain(|(path, _)| !path.contains("/tests/") && !path.ends_with("/tests.rs"));
    found
}

/// Whether code names a variant of an enumeration that is called `Operator` or `Op` there.
fn names(code: &str, variant: &str) -> bool {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    ["Operator::", "Op::"].iter().any(|of| {
        let pattern = format!("{of}{variant}");
        code.match_indices(&pattern).any(|(at, _)| {
            let (before, after) = (&code[..at], &code[at + pattern.len()..]);
            !before.ends_with(word) && !after.starts_with(word)
        })
    })
}

fn variants(list: &str) -> Vec<&str> {
    let start = list.find("pub enum Operator<").expect("the enumeration");
    let body = &list[start..];
    let body = &body[..body.find("\n}").expect("its end")];
    let names = body.lines().skip(1).map(str::trim).filter(|l| !l.starts_with("//"));
    names.filter_map(|l| Some(l.split_once('(')?.0)).collect()
}

#[test]
fn an_operator_is_named_in_few_files() {
    let sources = sources();
    let list = &sources.iter().find(|(path, _)| path == LISTS[0]).expect("the list").1;
    let variants = variants(list);
    assert!(variants.len() > 15, "only {variants:?}");
    for variant in variants {
        let named: Vec<&str> = sources
            .iter()
            .filter(|(path, code)| !PARTICULAR.contains(&path.as_str()) && names(code, variant))
            .map(|(path, _)| path.as_str())
            .collect();
        for own in OWN {
            let files = named.iter().filter(|p| p.starts_with(own) && !LISTS.contains(p)).count();
            assert!(files <= 1, "{variant} has more than one file: {named:?}");
        }
        let elsewhere = named
            .iter()
            .filter(|p| !LISTS.contains(p) && !OWN.iter().any(|own| p.starts_with(own)))
            .collect::<Vec<_>>();
        assert!(elsewhere.is_empty(), "{variant} is named in {elsewhere:?}, too");
    }
}
