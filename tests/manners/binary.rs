//! Binary parameters and results of every type: the bytes are PostgreSQL's, both ways, NULLs and arrays too.

use std::error::Error;

use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, to_sql_checked};
use tokio_postgres::{Client, NoTls};

use super::start;

/// A value as it is on the wire.
#[derive(Clone, Debug, PartialEq)]
struct Raw(Option<Vec<u8>>);

impl<'a> FromSql<'a> for Raw {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Raw, Box<dyn Error + Sync + Send>> {
        Ok(Raw(Some(raw.to_vec())))
    }

    fn from_sql_null(_: &Type) -> Result<Raw, Box<dyn Error + Sync + Send>> {
        Ok(Raw(None))
    }

    fn accepts(_: &Type) -> bool {
        true
    }
}

impl ToSql for Raw {
    fn to_sql(
        &self,
        _: &Type,
        out: &mut bytes::BytesMut,
    ) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        match &self.0 {
            None => Ok(IsNull::Yes),
            Some(raw) => {
                out.extend_from_slice(raw);
                Ok(IsNull::No)
            }
        }
    }

    fn accepts(_: &Type) -> bool {
        true
    }

    to_sql_checked!();
}

/// Types with values of each.
const VALUES: [(&str, &[&str]); 18] = [
    ("boolean", &["true", "false"]),
    ("smallint", &["-32768", "7"]),
    ("integer", &["-2147483648", "7"]),
    ("bigint", &["-9223372036854775808", "7"]),
    ("real", &["1.5", "NaN", "-Infinity"]),
    ("double precision", &["-0.1", "NaN", "1e300"]),
    ("numeric(12,4)", &["0", "-1.5", "12345678.9012", "0.0001"]),
    ("numeric(38,0)", &["99999999999999999999999999999999999999", "10000"]),
    ("text", &["", "é, \"quoted\" {braces}", "NULL"]),
    ("varchar(10)", &["ten"]),
    ("bytea", &["\\x", "\\x00ff5c"]),
    ("date", &["2000-01-01", "1969-12-31", "9999-12-31"]),
    ("time", &["00:00:00", "23:59:59.999999"]),
    ("timestamp", &["2000-01-01 00:00:00", "1969-12-31 23:59:59.999999"]),
    ("timestamptz", &["2026-03-01 10:00:00.5+02"]),
    ("interval", &["1 month -2 days 03:04:05.6", "0"]),
    ("uuid", &["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"]),
    ("jsonb", &["{\"a\": [1, null, \"x\"]}", "null"]),
];

/// `t` of arrays of it; lengths and precisions aside.
fn array_of(t: &str) -> String {
    format!("{}[]", t.split('(').next().unwrap_or(t))
}

/// An array of all values and a NULL.
fn array_literal(values: &[&str]) -> String {
    let quoted = values.iter().map(|v| {
        let escaped = v.replace('\\', "\\\\").replace('"', "\\\"");
        format!("\"{escaped}\"")
    });
    let items: Vec<String> = quoted.chain(["NULL".to_owned()]).collect();
    format!("{{{}}}", items.join(","))
}

/// What a server answers to everything that the test asks, in order.
async fn answers(client: &Client) -> Vec<String> {
    let mut out = Vec::new();
    for (t, values) in VALUES {
        out.extend(ask(client, t, values).await);
        // More digits than a numeric without a scale has before its point; and elements that are texts here.
        if t == "numeric(38,0)" || t == "varchar(10)" {
            continue;
        }
        let array = array_literal(values);
        out.extend(ask(client, &array_of(t), &[&array, "{}"]).await);
    }
    out
}

fn ok<T>(t: &str, result: Result<T, tokio_postgres::Error>) -> T {
    result.unwrap_or_else(|e| panic!("{t}: {e:?}"))
}

async fn ask(client: &Client, t: &str, values: &[&str]) -> Vec<String> {
    let mut out = Vec::new();
    let create = format!("DROP TABLE IF EXISTS bin; CREATE TABLE bin (id int PRIMARY KEY, v {t})");
    ok(t, client.batch_execute(&create).await);
    let echo = ok(t, client.prepare(&format!("SELECT $1::{t} AS v")).await);
    let insert = ok(t, client.prepare("INSERT INTO bin VALUES ($1, $2)").await);
    // A varchar is a text here.
    let types = format!("{t}: {:?} {:?}", echo.params(), insert.params());
    out.push(types.replace("Varchar", "Text"));
    let mut raws = vec![Raw(None)];
    for value in values {
        let literal = format!("SELECT '{}'::{t} AS v", value.replace('\'', "''"));
        raws.push(ok(t, client.query_one(&literal, &[]).await).get(0));
    }
    for (id, raw) in (0i32..).zip(&raws) {
        let row = ok(t, client.query_one(&echo, &[raw]).await);
        assert_eq!(row.get::<_, Raw>(0), *raw, "{t}: a parameter comes back");
        ok(t, client.execute(&insert, &[&id, raw]).await);
        let stored = client.query_one("SELECT v FROM bin WHERE id = $1", &[&id]).await;
        assert_eq!(ok(t, stored).get::<_, Raw>(0), *raw, "{t}: a stored value comes back");
        let same = ok(t, client.query("SELECT id FROM bin WHERE v = $1", &[raw]).await).len();
        out.push(format!("{t}: {raw:?} is equal to {same}"));
    }
    out
}

#[tokio::test]
async fn a_statement_whose_columns_have_changed_is_not_misread() {
    let running = start();
    let client = running.server.connect().await.expect("a connection");
    client.batch_execute("CREATE TABLE changing (v int)").await.expect("a table");
    let read = client.prepare("SELECT v FROM changing").await.expect("a statement");
    let change =
        "DROP TABLE changing; CREATE TABLE changing (v text); INSERT INTO changing VALUES ('x')";
    client.batch_execute(change).await.expect("another table");
    let e = client.query(&read, &[]).await.expect_err("other columns");
    assert_eq!(e.code().map(|c| c.code()), Some("0A000"));
}

#[tokio::test]
async fn bytes_of_every_type_are_those_of_postgres() {
    let running = start();
    let client = running.server.connect().await.expect("a connection");
    let ours = answers(&client).await;
    let Ok(address) = std::env::var("MILLRACE_TEST_POSTGRES") else {
        return super::skip("PostgreSQL (MILLRACE_TEST_POSTGRES)");
    };
    let (postgres, driver) =
        tokio_postgres::connect(&address, NoTls).await.expect("PostgreSQL answers");
    tokio::spawn(driver);
    let schema = "DROP SCHEMA IF EXISTS manners_binary CASCADE; CREATE SCHEMA manners_binary; \
                  SET search_path = manners_binary; SET timezone = 'UTC'";
    postgres.batch_execute(schema).await.expect("a schema");
    let theirs = answers(&postgres).await;
    for (mine, theirs) in ours.iter().zip(&theirs) {
        assert_eq!(mine, theirs);
    }
    assert_eq!(ours.len(), theirs.len());
}

/// psycopg with values of every type that Python has, in text and in binary.
#[test]
fn psycopg_sends_and_reads_every_type() {
    let Some(python) = std::env::var_os("MILLRACE_TEST_PYTHON") else {
        return super::skip("psycopg (MILLRACE_TEST_PYTHON)");
    };
    let running = start();
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = std::process::Command::new(python)
        .arg(folder.join("tests/manners/every_type.py"))
        .arg(running.server.port.to_string())
        .output()
        .expect("Python runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
}
