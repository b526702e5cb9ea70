//! Every stored format of docs/architecture.md is pinned by a test that exists.

use super::read;

/// Whether a file has a test of this name.
fn has_test(text: &str, name: &str) -> bool {
    let head = format!("fn {name}(");
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    lines.iter().enumerate().any(|(i, line)| {
        let attributes = lines[..i].iter().rev().take_while(|l| l.starts_with("#["));
        line.starts_with(&head) && attributes.into_iter().any(|l| *l == "#[test]")
    })
}

/// The pairs of a file and a test in the column `pinned by`, each with its format.
fn pinned(text: &str) -> Vec<(String, String, String)> {
    let rows = text.lines().skip_while(|l| !l.ends_with("| pinned by |")).skip(2);
    let mut all = Vec::new();
    for row in rows.take_while(|l| l.starts_with('|')) {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        let (Some(format), Some(tests)) = (cells.first(), cells.last()) else { continue };
        let codes: Vec<&str> = tests.split('`').skip(1).step_by(2).collect();
        assert!(
            !codes.is_empty() && codes.len().is_multiple_of(2),
            "{format}: a file and a test, not {tests}"
        );
        for pair in codes.chunks_exact(2) {
            all.push(((*format).to_owned(), pair[0].to_owned(), pair[1].to_owned()));
        }
    }
    all
}

#[test]
fn every_stored_format_is_pinned_by_a_test() {
    let pinned = pinned(&read("docs/architecture.md"));
    assert!(pinned.len() >= 10, "only {} formats were found", pinned.len());
    let missing: Vec<String> = pinned
        .iter()
        .filter(|(_, file, name)| !has_test(&read(file), name))
        .map(|(format, file, name)| format!("{format}: {file} has no test {name}"))
        .collect();
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}
