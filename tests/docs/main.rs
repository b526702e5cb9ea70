//! Every SQL example of the documents runs on the real binary and returns what the document says.
//!
//! A block fenced as `sql` runs statement by statement, all blocks of a document in one session on a
//! fresh server. A line `-- = a | b` after a statement is a row of its result, in order; without such
//! lines the result is not looked at. In a block fenced as `sql error` every statement must fail, and
//! `-- = 0A000` gives the SQLSTATE. A block whose lines begin with psql's prompt is a transcript: tags
//! and rows must be the real ones. The rows of function tables run too ([`functions`]). The tables of settings
//! and options are compared with their source.

mod blocks;
mod comments;
mod crates;
mod formats;
mod functions;
mod runner;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
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

/// Runs a row of a table of functions, also under the other names of the function.
async fn check_function(client: &Client, row: &functions::Row) -> Result<(), String> {
    for expression in row.expressions() {
        let sql = format!("SELECT {expression}");
        let place = format!("line {}: {sql}", row.line);
        let messages = match client.simple_query(&sql).await {
            Ok(messages) => messages,
            Err(e) => return Err(format!("{place}\n  failed: {e:?}")),
        };
        let rows = messages.iter().filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(row.get(0).unwrap_or("NULL").to_owned()),
            _ => None,
        });
        let rows: Vec<String> = rows.collect();
        if row.expected.as_ref().is_some_and(|expected| *expected != rows) {
            return Err(format!("{place}\n  answered {rows:?}\n  not {:?}", row.expected));
        }
    }
    Ok(())
}

/// Runs a document on a server of its own; how many statements and rows of function tables it has.
async fn run(path: &str) -> Result<usize, String> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let options = ServerOptions { data_dir: dir.path().to_path_buf(), ..ServerOptions::default() };
    let server = Server::start(Path::new(env!("CARGO_BIN_EXE_millrace")), options)
        .expect("the server starts");
    let client = server.connect().await.expect("a connection");
    let mut failures = Vec::new();
    let mut run = 0;
    let text = read(path);
    for block in blocks::sql_blocks(&text) {
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
    for row in functions::rows(&text) {
        run += 1;
        failures.extend(check_function(&client, &row).await.err());
    }
    println!("{path}: {run} examples");
    match failures.is_empty() {
        true => Ok(run),
        false => Err(format!("{path}\n{}\n\nserver log:\n{}", failures.join("\n"), server.log())),
    }
}

async fn run_document(path: &str, at_least: usize) {
    match run(path).await {
        Ok(run) => assert!(run >= at_least, "{path}: only {run} examples were found"),
        Err(failures) => panic!("{failures}"),
    }
}

/// The Markdown files below a folder, as paths from the repository's root.
fn documents(folder: &str) -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders = vec![PathBuf::from(folder)];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(root.join(&folder)).expect("the folder is read") {
            let entry = entry.expect("the folder is read");
            let path = folder.join(entry.file_name());
            match root.join(&path).is_dir() {
                true => folders.push(path),
                false if path.extension().is_some_and(|e| e == "md") => {
                    found.push(path.to_str().expect("a path in UTF-8").to_owned());
                }
                false => {}
            }
        }
    }
    found.sort();
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn the_readme_runs() {
    run_document("README.md", 9).await;
}

/// The first page of the SQL reference, which has no examples of its own.
const SQL_INDEX: &str = "docs/sql/README.md";

#[tokio::test(flavor = "multi_thread")]
async fn the_sql_reference_runs() {
    let mut failures = Vec::new();
    let mut all = 0;
    for page in documents("docs/sql") {
        match run(&page).await {
            Ok(0) if page != SQL_INDEX => failures.push(format!("{page} has no examples")),
            Ok(run) => all += run,
            Err(failure) => failures.push(failure),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
    assert!(all >= 400, "only {all} examples were found");
}

#[test]
fn the_index_of_the_sql_reference_names_every_page() {
    let index = read(SQL_INDEX);
    for page in documents("docs/sql").iter().filter(|p| *p != SQL_INDEX) {
        let link = page.trim_start_matches("docs/sql/");
        assert!(index.contains(&format!("]({link})")), "{SQL_INDEX} has no link to {link}");
    }
}

/// Functions without a row in the reference: those of operators and of the planner's rewrites, and those that are
/// refused by name.
#[rustfmt::skip]
const NOT_IN_THE_REFERENCE: [&str; 56] = [
    "bytea_concat", "ilike_all", "ilike_any", "ilike_escape", "interval_span",
    "jsonb_array_elements_list", "jsonb_array_elements_text_list", "jsonb_cmp", "jsonb_concat",
    "jsonb_contained", "jsonb_contains", "jsonb_delete", "jsonb_delete_keys",
    "jsonb_delete_path", "jsonb_each_keys_list", "jsonb_each_texts_list",
    "jsonb_each_values_list", "jsonb_exists", "jsonb_exists_all", "jsonb_exists_any",
    "jsonb_follow", "jsonb_follow_text", "jsonb_get", "jsonb_get_text",
    "jsonb_object_keys_list", "jsonb_path_exists", "jsonb_path_exists_tz", "jsonb_path_match",
    "jsonb_path_match_tz", "jsonb_path_query", "jsonb_path_query_array",
    "jsonb_path_query_array_tz", "jsonb_path_query_first", "jsonb_path_query_first_tz",
    "jsonb_path_query_tz", "like_all", "like_any", "like_escape", "regex_imatch", "regex_match",
    "regexp_matches_list", "round_seconds", "row_text", "similar_to", "to_ascii", "zoned_add",
    "zoned_instant", "zoned_iso", "zoned_local", "zoned_offset", "zoned_read", "zoned_sub",
    "zoned_text", "zoned_to_char", "zoned_to_timestamp", "zoned_trunc",
];

#[test]
fn every_declared_function_is_in_the_reference() {
    let pages = documents("docs/sql/functions");
    let documented: BTreeSet<String> =
        pages.iter().flat_map(|p| functions::rows(&read(p))).flat_map(|row| row.names).collect();
    let declared: BTreeSet<String> =
        millrace_functions::call::defs().keys().map(|name| (*name).to_owned()).collect();
    let missing: Vec<&String> = declared
        .difference(&documented)
        .filter(|name| !NOT_IN_THE_REFERENCE.contains(&name.as_str()))
        .collect();
    assert!(missing.is_empty(), "docs/sql/functions has no row for {missing:?}");
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

/// What is named in the first column of the first table after a heading.
fn named_in_table<'a>(text: &'a str, heading: &str) -> Vec<&'a str> {
    let (_, section) = text.split_once(heading).expect("the heading");
    let rows = section.lines().skip_while(|line| !line.starts_with('|'));
    let rows = rows.take_while(|line| line.starts_with('|')).skip(2);
    let cells = rows.filter_map(|row| row.split('|').nth(1));
    cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_columns_that_tell_of_lookahead_are_those_of_its_manual() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let options = ServerOptions { data_dir: dir.path().to_path_buf(), ..ServerOptions::default() };
    let server = Server::start(Path::new(env!("CARGO_BIN_EXE_millrace")), options)
        .expect("the server starts");
    let client = server.connect().await.expect("a connection");
    let sql = "SELECT * FROM millrace_catalog.lookahead";
    let messages = client.simple_query(sql).await.expect("the table is read");
    let columns = messages.iter().find_map(|message| match message {
        SimpleQueryMessage::RowDescription(columns) => Some(columns),
        _ => None,
    });
    let columns: Vec<&str> = columns.expect("columns").iter().map(|c| c.name()).collect();
    let text = read("docs/lookahead.md");
    assert_eq!(columns, named_in_table(&text, "## How to read `millrace_catalog.lookahead`"));
}

/// Every flag of a command is in this text, with its variable of the environment.
fn check_flags(command: &clap::Command, text: &str) {
    for arg in command.get_arguments() {
        let Some(flag) = arg.get_long().filter(|f| *f != "help") else { continue };
        let named = [format!("`--{flag} "), format!("`--{flag}`")];
        assert!(named.iter().any(|n| text.contains(n)), "--{flag} is not in docs/operations.md");
        let Some(env) = arg.get_env().map(|e| e.to_string_lossy()) else { continue };
        assert!(text.contains(&format!("`{env}`")), "{env} is not in docs/operations.md");
    }
}

/// Every command below this one has a row in this text, with its flags.
fn check_commands(command: &clap::Command, before: &str, text: &str) {
    for command in command.get_subcommands() {
        let name = format!("{before}{}", command.get_name());
        if command.has_subcommands() {
            check_commands(command, &format!("{name} "), text);
            continue;
        }
        let begins = [format!("| `{name}`"), format!("| `{name} ")];
        let is_its = |line: &&str| begins.iter().any(|begin| line.starts_with(begin));
        let row = text.lines().find(is_its);
        let row = row.unwrap_or_else(|| panic!("{name} is not in docs/operations.md"));
        for flag in command.get_arguments().filter_map(|arg| arg.get_long()) {
            assert!(row.contains(&format!("--{flag}")), "{name}: --{flag} is not in its row");
        }
    }
}

#[test]
fn every_option_of_the_command_line_is_in_the_manual() {
    use clap::{Args, Command};
    let text = read("docs/operations.md");
    check_flags(&millrace::Options::augment_args(Command::new("standalone")), &text);
    let cluster = millrace::roles::ClusterFlags::augment_args(Command::new("meta"));
    check_flags(&cluster, &text);
    let (_, steering) = text.split_once("### Steering a cluster").expect("the heading");
    let (steering, _) = steering.split_once("\n### ").expect("the next heading");
    let ctl = millrace::ctl::CtlOptions::augment_args(Command::new("ctl"));
    check_flags(&ctl, steering);
    check_commands(&ctl, "", steering);
}

/// The anchors of a document's headings, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut fenced = false;
    let headings = text.lines().filter(|line| {
        fenced ^= line.starts_with("```");
        !fenced && line.starts_with('#')
    });
    let anchor = |heading: &str| {
        let words = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = words.chars().filter(|c| c.is_alphanumeric() || "-_ ".contains(*c));
        kept.collect::<String>().replace(' ', "-")
    };
    headings.map(anchor).collect()
}

#[test]
fn links_between_documents_lead_somewhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = documents("docs").into_iter().chain(["README.md".to_owned()]);
    for file in files {
        let text = read(&file);
        for (at, opening) in text.match_indices("](") {
            let link = text[at + opening.len()..].split(')').next().unwrap_or_default();
            let (target, anchor) = link.split_once('#').unwrap_or((link, ""));
            if link.is_empty() || target.contains("://") {
                continue;
            }
            let place = match target.is_empty() {
                true => root.join(&file),
                false => root.join(&file).with_file_name(target),
            };
            assert!(place.exists(), "{file} links to {target}, which does not exist");
            if !anchor.is_empty() {
                let text = std::fs::read_to_string(&place).expect("the document is read");
                assert!(anchors(&text).contains(anchor), "{file}: {link} has no such heading");
            }
        }
    }
}
