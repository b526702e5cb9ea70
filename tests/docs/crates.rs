//! The crates depend on each other as docs/design.md §13 says.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

/// What each package of the workspace asks for itself, tests aside.
fn direct_dependencies() -> BTreeMap<String, BTreeSet<String>> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline", "--manifest-path"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo answers in JSON");
    let packages = metadata["packages"].as_array().expect("there are packages");
    let name = |of: &Value| of["name"].as_str().unwrap_or_default().to_owned();
    let wanted = |package: &Value| {
        let dependencies = package["dependencies"].as_array().into_iter().flatten();
        dependencies.filter(|d| d["kind"] != "dev").map(name).collect()
    };
    packages.iter().map(|package| (name(package), wanted(package))).collect()
}

/// What a package of the workspace reaches: its own dependencies, and those of ours among them.
fn reached(from: &str, direct: &BTreeMap<String, BTreeSet<String>>) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    let mut next = vec![from.to_owned()];
    while let Some(package) = next.pop() {
        for dependency in direct.get(&package).into_iter().flatten() {
            if all.insert(dependency.clone()) {
                next.push(dependency.clone());
            }
        }
    }
    all
}

#[test]
fn what_runs_plans_knows_nothing_of_how_they_are_made() {
    let direct = direct_dependencies();
    assert!(direct["millrace-planner"].contains("sqlparser"), "the names are those of today");
    for package in
        ["millrace-functions", "millrace-graph", "millrace-executor", "millrace-compactor"]
    {
        let reached = reached(package, &direct);
        assert!(reached.contains("millrace-common"), "{package}");
        for refused in ["millrace-planner", "millrace-frontend", "sqlparser"] {
            assert!(!reached.contains(refused), "{package} depends on {refused}");
        }
    }
}
