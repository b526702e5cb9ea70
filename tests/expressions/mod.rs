//! Expressions side by side: what each line of `*.txt` returns as `SELECT …` here and in PostgreSQL, rows,
//! types and names of columns, or the SQLSTATE.
//!
//! `different.txt` holds what differs, by intent or not yet built. A line of it that agrees is a failure too, so
//! that the list stays true.

mod inserts;

use std::path::{Path, PathBuf};

use millrace_sqllogictest::{Server, ServerOptions};
use tokio_postgres::{Client, NoTls, SimpleQueryMessage};

const KNOWN: &str = "different.txt";

fn files() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/expressions");
    let entries = std::fs::read_dir(folder).expect("the expressions are part of the repository");
    let mut files: Vec<PathBuf> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == "txt"));
    files.sort();
    files
}

fn lines(file: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(file).expect("the expressions are part of the repository");
    let kept = text.lines().filter(|l| !l.is_empty() && !l.starts_with('#'));
    kept.map(str::to_owned).collect()
}

/// A result as text; an error as its SQLSTATE.
async fn answer(client: &Client, sql: &str) -> String {
    let messages = match client.simple_query(sql).await {
        Ok(messages) => messages,
        Err(e) => {
            let state = e.code().map_or_else(|| e.to_string(), |c| c.code().to_owned());
            return format!("error {state}");
        }
    };
    let mut out = String::new();
    for message in messages {
        match message {
            SimpleQueryMessage::RowDescription(columns) => {
                let names: Vec<&str> = columns.iter().map(|c| c.name()).collect();
                out.push_str(&format!("({})", names.join(", ")));
            }
            SimpleQueryMessage::Row(row) => {
                let values: Vec<&str> =
                    (0..row.len()).map(|i| row.get(i).unwrap_or("NULL")).collect();
                out.push_str(&format!(" [{}]", values.join(" | ")));
            }
            _ => {}
        }
    }
    // The types: a statement that prepares tells them.
    match client.prepare(sql).await {
        Ok(statement) => {
            let types: Vec<&str> = statement.columns().iter().map(|c| c.type_().name()).collect();
            out.push_str(&format!(" : {}", types.join(", ")));
        }
        Err(e) => out.push_str(&format!(" : {e}")),
    }
    out
}

/// PostgreSQL, if there is one to ask.
async fn postgres() -> Option<Client> {
    let Ok(address) = std::env::var("MILLRACE_TEST_POSTGRES") else {
        assert!(
            !std::env::var("CI").is_ok_and(|v| v == "true"),
            "MILLRACE_TEST_POSTGRES is not set"
        );
        return None;
    };
    let (postgres, driver) =
        tokio_postgres::connect(&address, NoTls).await.expect("PostgreSQL answers");
    tokio::spawn(driver);
    postgres.batch_execute("SET timezone = 'UTC'").await.expect("PostgreSQL knows UTC");
    Some(postgres)
}

fn start(dir: &Path) -> Server {
    let options = ServerOptions { data_dir: dir.to_path_buf(), ..ServerOptions::default() };
    Server::start(Path::new(env!("CARGO_BIN_EXE_millrace")), options).expect("the server starts")
}

#[tokio::test(flavor = "multi_thread")]
async fn inserted_values_are_those_of_a_query() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let server = start(dir.path());
    let ours = server.connect().await.expect("the server answers");
    let postgres = postgres().await;
    if let Some(postgres) = &postgres {
        postgres.batch_execute("SET search_path = pg_temp").await.expect("a place of its own");
    }
    let (count, failures) = inserts::differences(&ours, postgres.as_ref()).await;
    println!("{count} expressions inserted");
    assert!(failures.is_empty(), "{} differ:\n{}", failures.len(), failures.join("\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn expressions_have_the_results_of_postgres() {
    let Some(postgres) = postgres().await else { return };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let server = start(dir.path());
    let ours = server.connect().await.expect("the server answers");
    let (mut count, mut failures) = (0, Vec::new());
    for file in files() {
        let known = file.file_name().is_some_and(|n| n == KNOWN);
        for line in lines(&file) {
            count += 1;
            let sql = format!("SELECT {line}");
            let (theirs, mine) = (answer(&postgres, &sql).await, answer(&ours, &sql).await);
            match (known, theirs == mine) {
                (false, false) => {
                    failures.push(format!("{line}\n  PostgreSQL: {theirs}\n  here:       {mine}"));
                }
                (true, true) => failures.push(format!("{line}\n  agrees: take it out of {KNOWN}")),
                _ => {}
            }
        }
    }
    println!("{count} expressions compared with PostgreSQL");
    assert!(failures.is_empty(), "{} differ:\n{}", failures.len(), failures.join("\n"));
}
