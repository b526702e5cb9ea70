//! Functions of the catalogs with arguments at the edges of their types: each call is answered, with a value or with what
//! is wrong, and the server stays as small as it was. Those of the planner have a test of their own, which needs no server.

use millrace_frontend::catalog::functions;
use tokio_postgres::Client;

use crate::{peak_bytes, started};

/// Beyond what it had before.
const MOST_BYTES: u64 = 256 << 20;

/// Literals of every type that these functions take.
const VALUES: [&str; 22] = [
    "NULL",
    "0",
    "-1",
    "2147483647",
    "-2147483648",
    "9223372036854775807",
    "'-9223372036854775808'::bigint",
    "1e38",
    "'NaN'::float8",
    "''",
    "'pg_class'",
    "'no_such'",
    "'a.b.c.d'",
    "'\"'",
    "'('",
    "repeat('a.', 3000)",
    "repeat('(', 3000)",
    "true",
    "'pg_class'::regclass",
    "ARRAY[1, NULL]",
    "array_fill('x'::text, ARRAY[3000])",
    "'{\"a\": [1]}'::jsonb",
];

/// Functions that wait, which is what they are for.
const WAITING: [&str; 4] =
    ["pg_sleep", "pg_advisory_lock", "pg_advisory_lock_shared", "pg_advisory_xact_lock"];

/// Calls of a function: without arguments, with each value, and with two and three that are drawn.
fn calls(name: &str) -> Vec<String> {
    let mut all = vec![format!("{name}()")];
    all.extend(VALUES.map(|v| format!("{name}({v})")));
    let mut state = name
        .bytes()
        .fold(0x9e37_79b9_7f4a_7c15u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    let mut draw = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        VALUES[(state >> 11) as usize % VALUES.len()]
    };
    for count in [2, 2, 2, 2, 3, 3] {
        let args: Vec<&str> = (0..count).map(|_| draw()).collect();
        all.push(format!("{name}({})", args.join(", ")));
    }
    all
}

/// What is wrong with the answer of a call.
async fn fault(client: &Client, call: &str) -> Option<String> {
    let e = client.simple_query(&format!("SELECT {call}")).await.err()?;
    match e.code() {
        Some(code) if code.code() == "XX000" || code.code() == "57014" => {
            Some(format!("{call}: {}: {e:?}", code.code()))
        }
        Some(_) => None,
        None => Some(format!("{call}: the connection ended: {e}")),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn functions_of_the_catalogs_answer_any_call() {
    let (server, _dir) = started(&[]);
    let client = server.connect().await.expect("the server answers");
    client.batch_execute("SET statement_timeout = '20s'").await.expect("a setting");
    client.batch_execute("CREATE TABLE t (a int PRIMARY KEY, b text)").await.expect("a table");
    let before = peak_bytes(&server);
    let mut faults = Vec::new();
    for name in functions::names().filter(|n| !n.starts_with('#') && !WAITING.contains(n)) {
        for call in calls(name) {
            faults.extend(fault(&client, &call).await);
        }
    }
    assert!(faults.is_empty(), "{} calls:\n{}", faults.len(), faults.join("\n"));
    let more = peak_bytes(&server) - before;
    assert!(more < MOST_BYTES, "the server has grown by {} MiB", more >> 20);
}
