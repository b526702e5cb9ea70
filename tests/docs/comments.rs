//! Doc comments have no code that nothing compiles: the crates have no doc-tests (`doctest = false`).

use std::path::{Path, PathBuf};

/// The sources of all crates.
fn sources() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let entries = |folder: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).expect("the folder is read");
        entries.map(|entry| entry.expect("the folder is read").path()).collect()
    };
    let crates = entries(root).into_iter().chain([root.to_owned()]);
    let mut folders: Vec<PathBuf> =
        crates.map(|c| c.join("src")).filter(|src| src.is_dir()).collect();
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        let (inner, files): (Vec<_>, Vec<_>) =
            entries(&folder).into_iter().partition(|path| path.is_dir());
        folders.extend(inner);
        found.extend(files.into_iter().filter(|file| file.extension().is_some_and(|e| e == "rs")));
    }
    found
}

/// The lines of a file at which a block of a doc comment begins that is not fenced as `text`.
fn code_blocks(text: &str) -> Vec<usize> {
    let mut fenced = false;
    let mut found = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let line = line.trim_start();
        let Some(comment) = line.strip_prefix("///").or_else(|| line.strip_prefix("//!")) else {
            fenced = false;
            continue;
        };
        let Some(language) = comment.trim().strip_prefix("```") else { continue };
        if !fenced && language != "text" {
            found.push(i + 1);
        }
        fenced = !fenced;
    }
    found
}

#[test]
fn code_in_a_doc_comment_is_found() {
    let text = "//! ```text\n//! a plan\n//! ```\n\n/// ```\n/// f();\n/// ```\nfn f() {}\n";
    assert_eq!(code_blocks(text), [5]);
}

#[test]
fn doc_comments_have_no_code_that_nothing_compiles() {
    let sources = sources();
    assert!(sources.len() > 500, "only {} files were found", sources.len());
    let mut found = Vec::new();
    for file in sources {
        let text = std::fs::read_to_string(&file).expect("a source is text");
        found.extend(code_blocks(&text).iter().map(|line| format!("{}:{line}", file.display())));
    }
    assert!(found.is_empty(), "make tests of these examples, or fence them as `text`: {found:?}");
}
