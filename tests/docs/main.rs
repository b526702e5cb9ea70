//! The manual is true: every SQL example in it runs on the real binary and answers what it says.
//!
//! A block fenced as `sql` runs statement by statement, all blocks of a document in one session on a
//! fresh server. A line `-- = a | b` after a statement is a row of its result, in order; without such
//! lines the result is not looked at. In a block fenced as `sql error` every statement must fail, and
//! `-- = 0A000` gives the SQLSTATE. A block whose lines begin with psql's prompt is a transcript: tags
//! and rows must be the real ones. The tables of settings and options are compared with their source.

mod blocks;
mod crates;

use std::path::Path;
use std::time::{Duration, Instant};

use millrace_common::settings::settings_table;
use millrace_sqllogictest::{Server, ServerOptions};
use tokio_postgres::{Client, SimpleQueryMessage};

use blocks::{Block, Example};

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// What a statement answered: its tag or rows, or the SQLSTATE and message of its error.
async fn answer(client: &Client, sql: &str) -> Result<Vec<String>, (String, String)> {
    let messages = client.simple_query(sql).await.map_err(|e| match e.as_db_error() {
        Some(db) => (db.code().code().to_owned(), db.message().to_owned()),
        None => (String::new(), e.to_string()),
    })?;
    let mut lines = Vec::new();
    for message in messages {
        if let SimpleQueryMessage::Row(row) = message {
            let cells: Vec<&str> = (0..row.len()).map(|i| row.get(i).unwrap_or("")).collect();
            lines.push(cells.join(" | ").trim().to_owned());
        }
    }
    Ok(lines)
}

async fn check(client: &Client, block: &Block, example: &Example) -> Result<(), String> {
    let place = format!("line {}: {}", example.line, example.sql);
    match (answer(client, &example.sql).await, block.fails) {
        (Ok(_), true) => Err(format!("{place}\n  ran, but must fail")),
        (Err((state, message)), false) => Err(format!("{place}\n  failed: {state} {message}")),
        (Err((state, message)), true) => match example.expected.first() {
            Some(expected) if *expected != state => {
                Err(format!("{place}\n  failed with {state} {message}, not {expected}"))
            }
            _ => Ok(()),
        },
        (Ok(rows), false) => {
            if (example.checked || block.transcript) && rows != example.expected {
                return Err(format!(
                    "{place}\n  answered {rows:#?}\n  not {:#?}",
                    example.expected
                ));
            }
            Ok(())
        }
    }
}

/// How long what a document promises to arrive may take.
const ARRIVAL: Duration = Duration::from_secs(120);

fn write_file(path: &Path, content: &str) {
    let folder = path.parent().expect("a file lies in a folder");
    std::fs::create_dir_all(folder).expect("the folder is made");
    std::fs::write(path, content).expect("the file is written");
}

async fn run_document(path: &str, at_least: usize) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let options = ServerOptions { data_dir: dir.path().to_path_buf(), ..ServerOptions::default() };
    let server = Server::start(Path::new(env!("CARGO_BIN_EXE_millrace")), options)
        .expect("the server starts");
    let client = server.connect().await.expect("a connection");
    let mut failures = Vec::new();
    let mut run = 0;
    for block in blocks::sql_blocks(&read(path)) {
        if let Some((path, content)) = &block.file {
            write_file(Path::new(path), content);
        }
        for example in &block.examples {
            run += 1;
            let begun = Instant::now();
            let outcome = loop {
                match check(&client, &block, example).await {
                    Err(_) if block.eventually && begun.elapsed() < ARRIVAL => {
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                    outcome => break outcome,
                }
            };
            failures.extend(outcome.err());
        }
    }
    println!("{path}: {run} statements");
    assert!(run >= at_least, "{path}: only {run} statements were found");
    assert!(
        failures.is_empty(),
        "{path}\n{}\n\nserver log:\n{}",
        failures.join("\n"),
        server.log()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_readme_runs() {
    run_document("README.md", 9).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sql_reference_runs() {
    run_document("docs/sql.md", 150).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_connectors_run() {
    run_document("docs/connectors.md", 12).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tutorial_runs() {
    const FILES: &str = "/tmp/millrace-tutorial";
    // What an earlier run left.
    let _ = std::fs::remove_dir_all(FILES);
    run_document("docs/tutorial.md", 10).await;
    let _ = std::fs::remove_dir_all(FILES);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_manual_of_sinks_and_subscriptions_runs() {
    run_document("docs/sinks.md", 30).await;
}

/// A manual's part between two markers.
fn generated<'a>(text: &'a str, name: &str) -> &'a str {
    let (_, rest) = text.split_once(&format!("<!-- {name} -->\n")).expect("the marker");
    rest.split_once("<!-- end -->").expect("the end marker").0
}

#[test]
fn the_table_of_settings_is_that_of_the_source() {
    let text = read("docs/operations.md");
    let expected = settings_table();
    assert!(
        generated(&text, "settings") == expected,
        "docs/operations.md: replace the table of settings by\n\n{expected}"
    );
}

#[test]
fn every_option_of_the_command_line_is_in_the_manual() {
    use clap::CommandFactory;
    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        options: millrace::Options,
    }
    let text = read("docs/operations.md");
    for arg in Cli::command().get_arguments() {
        let Some(flag) = arg.get_long().filter(|f| *f != "help") else { continue };
        let env = arg.get_env().map(|e| e.to_string_lossy().into_owned()).unwrap_or_default();
        let named = [format!("`--{flag} "), format!("`--{flag}`")];
        assert!(named.iter().any(|n| text.contains(n)), "--{flag} is not in docs/operations.md");
        assert!(text.contains(&format!("`{env}`")), "{env} is not in docs/operations.md");
    }
}

#[test]
fn links_between_documents_lead_somewhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for file in [
        "README.md",
        "docs/architecture.md",
        "docs/sql.md",
        "docs/sinks.md",
        "docs/operations.md",
        "docs/development.md",
        "docs/connectors.md",
        "docs/tutorial.md",
    ] {
        let text = read(file);
        for (at, opening) in text.match_indices("](") {
            let target = text[at + opening.len()..].split([')', '#']).next().unwrap_or_default();
            if !target.is_empty() && !target.contains("://") {
                let place = root.join(file).with_file_name(target);
                assert!(place.exists(), "{file} links to {target}, which does not exist");
            }
        }
    }
}
