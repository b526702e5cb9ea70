//! What a reader of sink files makes of them.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

/// The lines of all files, in the order of their names. Files that are being written are not there.
fn lines(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(directory)
        .expect("the directory of the sink")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|e| e != "tmp"))
        .collect();
    names.sort();
    let read = |path| std::fs::read_to_string(path).expect("a file of the sink");
    names.iter().flat_map(|p| read(p).lines().map(str::to_owned).collect::<Vec<_>>()).collect()
}

fn cell(value: &Value) -> String {
    match value {
        Value::Null => "NULL".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn row(value: &Value, columns: &[&str]) -> Vec<String> {
    columns.iter().map(|c| cell(&value[c])).collect()
}

/// FORMAT UPSERT: the last value of every key.
pub fn upserted(directory: &Path, columns: &[&str]) -> Vec<Vec<String>> {
    let mut content: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for line in lines(directory) {
        let change: Value = serde_json::from_str(&line).expect("a line of JSON");
        let key = change["key"].to_string();
        match &change["value"] {
            Value::Null => drop(content.remove(&key)),
            value => drop(content.insert(key, row(value, columns))),
        }
    }
    let mut rows: Vec<_> = content.into_values().collect();
    rows.sort();
    rows
}

/// FORMAT DEBEZIUM: every change, of which each old row must be there.
pub fn replayed(directory: &Path, columns: &[&str], when: &str) -> Vec<Vec<String>> {
    let mut content: BTreeMap<Vec<String>, i64> = BTreeMap::new();
    for line in lines(directory) {
        let change: Value = serde_json::from_str(&line).expect("a line of JSON");
        if !change["before"].is_null() {
            let old = row(&change["before"], columns);
            let there = content.remove(&old);
            assert!(there.is_some(), "{when}: {line}: its old row is not there");
        }
        if !change["after"].is_null() {
            let new = row(&change["after"], columns);
            assert!(content.insert(new, 1).is_none(), "{when}: {line}: twice");
        }
    }
    content.into_keys().collect()
}

/// FORMAT PLAIN ENCODE CSV of values without commas.
pub fn csv_lines(directory: &Path) -> Vec<Vec<String>> {
    let cells = |line: &String| line.split(',').map(str::to_owned).collect::<Vec<_>>();
    let mut rows: Vec<Vec<String>> = lines(directory).iter().map(cells).collect();
    rows.sort();
    rows
}
