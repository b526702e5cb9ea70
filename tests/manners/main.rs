//! Clients find what they expect of a PostgreSQL: psql's backslash commands, psycopg with its defaults,
//! tokio-postgres with typed parameters and binary results. One server serves all of them.
//!
//! psql and the Python of `MILLRACE_TEST_PYTHON` are run as they are; where they are missing the test
//! says so and passes, except in CI.

mod access;
mod backup;
mod binary;
mod blocks;
mod browser;
mod console;
mod ending;
mod flood;
mod formats;
mod login;
mod paths;
mod secrets;
mod takeover;
mod wire;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use futures::TryStreamExt;
use millrace_sqllogictest::{Server, ServerOptions};

struct Running {
    server: Server,
    _dir: tempfile::TempDir,
}

fn start() -> Running {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let options = ServerOptions { data_dir: dir.path().to_path_buf(), ..Default::default() };
    let server = Server::start(Path::new(env!("CARGO_BIN_EXE_millrace")), options)
        .expect("the server starts");
    Running { server, _dir: dir }
}

/// Says that a test is skipped, which CI does not allow.
fn skip(what: &str) {
    assert!(std::env::var("CI").as_deref() != Ok("true"), "{what} is missing in CI");
    println!("skipped: {what} is missing");
}

fn psql(port: u16, commands: &[&str]) -> Option<String> {
    let mut psql = Command::new("psql");
    psql.args(["-X", "-q", "-h", "127.0.0.1", "-U", "root", "-d", "dev", "-p"])
        .arg(port.to_string());
    psql.env("PGCLIENTENCODING", "UTF8").env("LC_ALL", "C.UTF-8");
    for command in commands {
        psql.args(["-c", command]);
    }
    let output = psql.output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    Some(text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n"))
}

const OBJECTS: [&str; 4] = [
    "CREATE TABLE t (id int PRIMARY KEY, v text NOT NULL DEFAULT 'x', n numeric(10,2), ts timestamptz)",
    "CREATE VIEW w AS SELECT id, v FROM t",
    "CREATE MATERIALIZED VIEW mv AS SELECT v, count(*) AS c FROM t GROUP BY v",
    "CREATE SCHEMA other",
];

#[test]
fn psql_describes_objects_as_postgresql_does() {
    let running = start();
    let port = running.server.port;
    let Some(made) = psql(port, &OBJECTS) else { return skip("psql") };
    assert_eq!(made, "");
    let show = |command: &str| psql(port, &[command]).unwrap_or_default();
    assert_eq!(
        show("\\d").trim_end(),
        "              List of relations
 Schema | Name |       Type        |  Owner
--------+------+-------------------+----------
 public | mv   | materialized view | postgres
 public | t    | table             | postgres
 public | w    | view              | postgres
(3 rows)"
    );
    assert_eq!(
        show("\\d t").trim_end(),
        "                           Table \"public.t\"
 Column |           Type           | Collation | Nullable |  Default
--------+--------------------------+-----------+----------+-----------
 id     | integer                  |           | not null |
 v      | text                     |           | not null | 'x'::text
 n      | numeric(10,2)            |           |          |
 ts     | timestamp with time zone |           |          |
Indexes:
    \"t_pkey\" PRIMARY KEY, btree (id)"
    );
    let plus = show("\\d+ w");
    assert!(plus.contains("View definition:") && plus.contains("SELECT id, v FROM t"), "{plus}");
    for (command, expected) in [
        ("\\dt", "public | t    | table | postgres"),
        ("\\dv", "public | w    | view | postgres"),
        ("\\dm", "public | mv   | materialized view | postgres"),
        ("\\di", "public | t_pkey | index | postgres | t"),
        ("\\dn", " other            | postgres"),
        ("\\du", "root      | Superuser, Create role, Create DB, Replication, Bypass RLS | {}"),
        ("\\l", "dev  | postgres | UTF8     | C       | C.UTF-8 |"),
        ("\\d mv", "Materialized view \"public.mv\""),
        ("\\d t_pkey", "primary key, btree, for table \"public.t\""),
        ("\\dt+", "public | t    | table | postgres | permanent   | heap"),
        ("\\df", "(0 rows)"),
        ("\\dp", "public | mv   | materialized view |"),
        ("\\db", "pg_default | postgres |"),
        ("\\conninfo", "You are connected to database \"dev\" as user \"root\""),
    ] {
        let shown = show(command);
        assert!(shown.contains(expected), "{command} prints\n{shown}\nwithout {expected}");
    }
}

/// What psql asks while a name is typed.
const COMPLETION: &str = "SELECT pg_catalog.quote_ident(c.relname) FROM pg_catalog.pg_class c \
    WHERE c.relkind IN ('r', 'S', 'v', 'm', 'f', 'p') AND substring(pg_catalog.quote_ident(c.relname),1,1)='m' \
    AND pg_catalog.pg_table_is_visible(c.oid) AND c.relnamespace <> (SELECT oid FROM pg_catalog.pg_namespace \
    WHERE nspname = 'pg_catalog')";

#[tokio::test]
async fn catalog_queries_of_drivers_work() {
    let running = start();
    let client = running.server.connect().await.expect("a connection");
    for sql in OBJECTS {
        client.batch_execute(sql).await.expect(sql);
    }
    let text = async |sql: &str| -> String {
        let rows = client.simple_query(sql).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"));
        let row = rows.iter().find_map(|m| match m {
            tokio_postgres::SimpleQueryMessage::Row(r) => Some(r),
            _ => None,
        });
        row.and_then(|r| r.get(0)).unwrap_or("NULL").to_owned()
    };
    assert_eq!(text(COMPLETION).await, "mv");
    for (sql, expected) in [
        ("SELECT 't'::regclass", "t"),
        ("SELECT 'other.none'::regclass IS NULL", "error"),
        ("SELECT relname FROM pg_class WHERE oid = 't'::regclass", "t"),
        ("SELECT oid::regclass::text FROM pg_class WHERE relname = 'mv'", "mv"),
        ("SELECT to_regclass('nothing') IS NULL", "t"),
        ("SELECT format_type(1700, 655366)", "numeric(10,2)"),
        ("SELECT 'int4'::regtype::oid", "23"),
        ("SELECT 23::regtype", "integer"),
        ("SELECT current_schema()", "public"),
        ("SELECT 'public' = ANY (current_schemas(true))", "t"),
        (
            "SELECT array_to_string(ARRAY(SELECT nspname FROM pg_namespace WHERE nspname IN ('other', 'public') ORDER BY 1), ',')",
            "other,public",
        ),
        ("SELECT pg_size_pretty(10240::bigint)", "10 kB"),
        ("SELECT indkey FROM pg_index WHERE indrelid = 't'::regclass", "1"),
        (
            "SELECT a.attname FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey) WHERE i.indrelid = 't'::regclass AND i.indisprimary",
            "id",
        ),
        (
            "SELECT data_type FROM information_schema.columns WHERE table_name = 't' AND column_name = 'ts'",
            "timestamp with time zone",
        ),
        ("SELECT count(*) FROM pg_catalog.pg_trigger", "0"),
        ("SELECT kind FROM millrace_catalog.relations WHERE name = 'mv'", "materialized view"),
        ("SELECT name FROM millrace_catalog.jobs WHERE name = 'mv'", "mv"),
        ("RESET ALL; CLOSE ALL; UNLISTEN *; SELECT pg_advisory_unlock_all()", ""),
    ] {
        if expected == "error" {
            assert!(client.simple_query(sql).await.is_err(), "{sql}");
        } else {
            assert_eq!(text(sql).await, expected, "{sql}");
        }
    }
}

#[tokio::test]
async fn typed_parameters_and_binary_results() {
    let running = start();
    let mut client = running.server.connect().await.expect("a connection");
    client
        .batch_execute("CREATE TABLE k (id int PRIMARY KEY, s smallint, b bigint, r real, d double precision, t text, x bytea, o boolean)")
        .await
        .expect("a table");
    let insert = client
        .prepare("INSERT INTO k VALUES ($1,$2,$3,$4,$5,$6,$7,$8)")
        .await
        .expect("types are inferred");
    let bytes: &[u8] = &[0, 1, 255];
    let n = client
        .execute(&insert, &[&1i32, &2i16, &3i64, &1.5f32, &2.5f64, &"text", &bytes, &true])
        .await
        .expect("an insert");
    assert_eq!(n, 1);
    let none: Option<&str> = None;
    client
        .execute(
            &insert,
            &[
                &2i32,
                &None::<i16>,
                &None::<i64>,
                &None::<f32>,
                &None::<f64>,
                &none,
                &None::<&[u8]>,
                &None::<bool>,
            ],
        )
        .await
        .expect("NULLs");
    let row = client.query_one("SELECT * FROM k WHERE id = $1", &[&1i32]).await.expect("a row");
    let values: (i32, i16, i64, f32, f64) =
        (row.get(0), row.get(1), row.get(2), row.get(3), row.get(4));
    assert_eq!(values, (1, 2, 3, 1.5, 2.5));
    assert_eq!(
        (row.get::<_, &str>(5), row.get::<_, &[u8]>(6), row.get::<_, bool>(7)),
        ("text", bytes, true)
    );
    let cast = client.query_one("SELECT $1::int + 1", &[&41i32]).await.expect("a cast");
    assert_eq!(cast.get::<_, i32>(0), 42);
    // An error in a pipeline skips to the Sync; the connection goes on.
    assert!(client.query("SELECT 1 / (id - 1) FROM k", &[]).await.is_err());
    assert_eq!(client.query("SELECT id FROM k", &[]).await.expect("rows").len(), 2);
    let oid = client
        .query_one("SELECT oid, relname FROM pg_class WHERE relname = 'k'", &[])
        .await
        .expect("a class");
    assert!(oid.get::<_, u32>(0) >= 16_384);
    // Portals give their rows in parts.
    let transaction = client.transaction().await.expect("a block");
    let portal = transaction
        .bind("SELECT g FROM generate_series(1, 10) AS t(g)", &[])
        .await
        .expect("a portal");
    let first = transaction.query_portal(&portal, 4).await.expect("four rows");
    let rest = transaction.query_portal(&portal, 0).await.expect("the rest");
    assert_eq!((first.len(), rest.len()), (4, 6));
    transaction.commit().await.expect("a commit");
}

#[tokio::test]
async fn copy_goes_in_and_out() {
    use futures::SinkExt;
    let running = start();
    let client = running.server.connect().await.expect("a connection");
    client.batch_execute("CREATE TABLE c (id int PRIMARY KEY, v text)").await.expect("a table");
    let sink = client.copy_in("COPY c FROM STDIN").await.expect("COPY begins");
    futures::pin_mut!(sink);
    sink.send(bytes::Bytes::from_static(b"1\ta\n2\t\\N\n")).await.expect("data");
    assert_eq!(sink.finish().await.expect("COPY ends"), 2);
    let out =
        client.copy_out("COPY (SELECT * FROM c ORDER BY id) TO STDOUT").await.expect("COPY out");
    let parts: Vec<bytes::Bytes> = out.try_collect().await.expect("data");
    assert_eq!(parts.concat(), b"1\ta\n2\t\\N\n");
}

#[tokio::test]
async fn statements_can_be_canceled_and_time_out() {
    let running = start();
    let client = running.server.connect().await.expect("a connection");
    let other = running.server.connect().await.expect("a connection");
    let started = Instant::now();
    let token = client.cancel_token();
    let cancel = async {
        // A request that comes before its statement cancels nothing.
        let sleeping = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'SELECT pg_sleep(%'";
        while other.query_one(sleeping, &[]).await.expect("an answer").get::<_, i64>(0) == 0 {
            assert!(started.elapsed() < Duration::from_secs(60), "the statement does not begin");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        token.cancel_query(tokio_postgres::NoTls).await
    };
    let (slept, canceled) = tokio::join!(client.batch_execute("SELECT pg_sleep(300)"), cancel);
    canceled.expect("the request is taken");
    let error = slept.expect_err("it was canceled");
    assert_eq!(error.code().map(|c| c.code()), Some("57014"));
    // Long enough for what follows, which it counts for as well.
    client.batch_execute("SET statement_timeout = '3s'").await.expect("a setting");
    let error = client.batch_execute("SELECT pg_sleep(300)").await.expect_err("it timed out");
    assert!(
        error.as_db_error().is_some_and(|e| e.message().contains("statement timeout")),
        "{error:?}"
    );
    assert!(started.elapsed() < Duration::from_secs(120));
    client.batch_execute("BEGIN; SET LOCAL statement_timeout = 0; COMMIT").await.expect("a block");
    let row =
        client.query_one("SELECT current_setting('statement_timeout')", &[]).await.expect("a row");
    assert_eq!(row.get::<_, &str>(0), "3s");
}

/// While joins without an equality run and after they have timed out.
#[tokio::test]
async fn large_joins_leave_others_their_turn_and_end() {
    const LARGE: [&str; 3] = [
        "SELECT count(*) FROM generate_series(1, 100000) a(x) JOIN generate_series(1, 100000) b(y) ON x % 7 <> y % 5",
        "SELECT count(*) FROM generate_series(1, 100000) a(x), generate_series(1, 100000) b(y) WHERE x + y < 0",
        "SELECT count(*) FROM generate_series(1, 100000) a(x) WHERE NOT EXISTS \
         (SELECT 1 FROM generate_series(1, 100000) b(y) WHERE x + y < 0)",
    ];
    let running = start();
    let other = running.server.connect().await.expect("a connection");
    // On a slow machine the first one's time may be over before the last one has begun.
    for seconds in [2, 8, 32] {
        let mut clients = Vec::new();
        for _ in LARGE {
            let client = running.server.connect().await.expect("a connection");
            let limit = format!("SET statement_timeout = '{seconds}s'");
            client.batch_execute(&limit).await.expect("a setting");
            clients.push(client);
        }
        let tasks: Vec<_> = std::iter::zip(clients, LARGE)
            .map(|(client, query)| tokio::spawn(async move { client.batch_execute(query).await }))
            .collect();
        let side_by_side = all_run(&other, LARGE.len() as i64, || tasks[0].is_finished()).await;
        has_its_turn(&other).await;
        for task in tasks {
            let error = task.await.expect("no panic").expect_err("it timed out");
            assert_eq!(error.code().map(|c| c.code()), Some("57014"), "{error:?}");
        }
        has_its_turn(&other).await;
        if side_by_side {
            return;
        }
    }
    panic!("the joins do not run side by side");
}

/// Whether so many of the joins are seen to run at the same time before they are `over`. Each answer is a turn of
/// its own; the last one is given while all of them run.
async fn all_run(client: &tokio_postgres::Client, joins: i64, over: impl Fn() -> bool) -> bool {
    let running_now = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' \
         AND query LIKE 'SELECT count(*) FROM generate_series(1, 100000)%'";
    while !over() {
        let answer = tokio::time::timeout(TURN, client.query_one(running_now, &[])).await;
        let row = answer.expect("its turn comes").expect("an answer");
        if row.get::<_, i64>(0) == joins {
            return true;
        }
        tokio::task::yield_now().await;
    }
    false
}

/// How long a small statement may wait beside large ones.
const TURN: Duration = Duration::from_secs(30);

async fn has_its_turn(client: &tokio_postgres::Client) {
    let answer = tokio::time::timeout(TURN, client.query("SELECT 1", &[])).await;
    assert_eq!(answer.expect("its turn comes").expect("an answer").len(), 1);
}

#[test]
fn psycopg_works_with_its_defaults() {
    let Some(python) = std::env::var_os("MILLRACE_TEST_PYTHON") else {
        return skip("psycopg (MILLRACE_TEST_PYTHON)");
    };
    let running = start();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/manners/drivers.py");
    let output = Command::new(python)
        .arg(script)
        .arg(running.server.port.to_string())
        .output()
        .expect("Python runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
}
