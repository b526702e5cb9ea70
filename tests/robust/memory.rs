//! Short statements that ask for much: each is answered or refused, and the server stays as small as it was.

use std::time::{Duration, Instant};

use millrace_sqllogictest::Server;
use tokio_postgres::{Client, SimpleQueryMessage};

use crate::{peak_bytes, started};

/// What a statement may make the server grow by, several times what its queries may have together.
const MOST_BYTES: u64 = 256 << 20;

struct Node {
    server: Server,
    client: Client,
    _dir: tempfile::TempDir,
}

async fn start() -> Node {
    let (server, dir) = started(&["--memory-limit=128MB"]);
    let client = server.connect().await.expect("the server answers");
    client
        .batch_execute(
            "CREATE TABLE x (a int, b text); INSERT INTO x VALUES (1, 'a'), (2, 'b'), (2, 'c')",
        )
        .await
        .expect("a table");
    Node { server, client, _dir: dir }
}

/// The rows, their values separated by spaces, or the SQLSTATE.
async fn answer(client: &Client, sql: &str) -> String {
    let messages = match client.simple_query(sql).await {
        Ok(messages) => messages,
        Err(e) => return e.code().map_or_else(|| format!("{sql}: {e}"), |c| c.code().to_owned()),
    };
    let rows = messages.iter().filter_map(|m| match m {
        SimpleQueryMessage::Row(r) => {
            Some((0..r.len()).map(|i| r.get(i).unwrap_or("NULL")).collect::<Vec<_>>().join(" "))
        }
        _ => None,
    });
    rows.collect::<Vec<_>>().join(", ")
}

impl Node {
    /// Each statement has its answer, and none makes the server large.
    async fn answers(&self, expected: &[(&str, &str)]) {
        let before = peak_bytes(&self.server);
        for (sql, expected) in expected {
            assert_eq!(answer(&self.client, sql).await, *expected, "{sql}");
            let more = peak_bytes(&self.server).saturating_sub(before);
            assert!(more < MOST_BYTES, "{sql}: the server has grown by {} MiB", more >> 20);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_takes_no_memory_for_rows_that_there_are_not() {
    const ALL: &str = "9223372036854775807";
    let node = start().await;
    for limit in ["2147483647", ALL] {
        let with = |sql: &str| sql.replace("#", limit);
        let distinct = with("SELECT DISTINCT a FROM x ORDER BY a LIMIT #");
        let greatest = with("SELECT a, max(b) FROM x GROUP BY a ORDER BY max(b) DESC LIMIT #");
        let union = with("SELECT a FROM x UNION SELECT a FROM x ORDER BY a LIMIT #");
        let first = with("SELECT DISTINCT a FROM x ORDER BY a FETCH FIRST # ROWS ONLY");
        let frame = with(
            "SELECT a, sum(a) OVER (ORDER BY b ROWS BETWEEN CURRENT ROW AND # FOLLOWING) \
             FROM x ORDER BY b LIMIT # OFFSET 1",
        );
        let rank = with(
            "SELECT a FROM (SELECT a, row_number() OVER (PARTITION BY a ORDER BY b) AS n FROM x) t \
             WHERE n <= # ORDER BY a",
        );
        node.answers(&[
            (&distinct, "1, 2"),
            (&greatest, "2 c, 1 a"),
            (&union, "1, 2"),
            (&first, "1, 2"),
            (&frame, "2 4, 2 2"),
            (&with("SELECT a FROM x LIMIT # OFFSET #"), ""),
            (&rank, "1, 2, 2"),
        ])
        .await;
    }
}

/// A limit that leaves every row does not keep a sort from going to disk.
#[tokio::test(flavor = "multi_thread")]
async fn a_sort_with_a_large_limit_goes_to_disk() {
    let node = start().await;
    let sorted = "SELECT count(*), min(g), max(g) FROM \
        (SELECT g, repeat('y', 120) || g AS t FROM generate_series(1, 400000) AS s(g) \
         ORDER BY t LIMIT 2147483647) u";
    node.answers(&[(sorted, "400000 1 400000")]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_fit_into_memory_is_refused() {
    let node = start().await;
    node.answers(&[
        ("SELECT string_agg(repeat('a', 1000000), '') FROM generate_series(1, 100000)", "53200"),
        ("SELECT string_agg(repeat('a', 50000), '') FROM generate_series(1, 100000)", "53200"),
        ("SELECT array_agg(repeat('a', 50000)) FROM generate_series(1, 100000)", "53200"),
        ("SELECT jsonb_agg(repeat('a', 50000)) FROM generate_series(1, 100000)", "53200"),
        (
            "SELECT count(*) FROM (SELECT string_agg(repeat('a', 100), '') OVER (ORDER BY g) AS s \
             FROM generate_series(1, 30000) g) t WHERE s IS NULL",
            "53200",
        ),
        ("SELECT length(regexp_replace(repeat('a', 1000), 'a', repeat('b', 60000), 'g'))", "54000"),
    ])
    .await;
    assert_eq!(answer(&node.client, "SELECT count(*) FROM x").await, "3");
}

/// Rows that are wide come in batches of as many as fit.
#[tokio::test(flavor = "multi_thread")]
async fn wide_values_are_made_a_few_at_a_time() {
    let node = start().await;
    node.answers(&[
        ("SELECT max(length(repeat('x', g * 10))) FROM generate_series(1, 9000) g", "90000"),
        (
            "SELECT count(DISTINCT length(repeat('x', 300000) || g)) FROM generate_series(1, 1000) g",
            "4",
        ),
        ("SELECT max(repeat('x', 500000)) = repeat('x', 500000) FROM generate_series(1, 500) g", "t"),
        (
            "SELECT max(length(repeat('x', g * 10))) FROM generate_series(1, 9000) g WHERE g % 10 < 9",
            "90000",
        ),
    ])
    .await;
}

/// Each would go on for minutes: a thread of queries that does not hear of the end would be missing afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn functions_end_with_their_statement_within_a_row() {
    let node = start().await;
    let numbers = "(SELECT jsonb_agg(g) FROM generate_series(1, 100000) g)";
    let keys = "(SELECT array_agg(g::text) FROM generate_series(1, 100000) g)";
    let many = "regexp_replace(repeat('a', 1000), 'a', repeat('b', 1000), 'g')";
    let endless = [
        format!("SELECT {numbers} @> {numbers}"),
        format!("SELECT {numbers} <@ {numbers}"),
        format!("SELECT jsonb_agg(g::text) ?& {keys} FROM generate_series(1, 100000) g"),
        format!("SELECT {many} LIKE ANY (ARRAY[repeat('%b', 100000) || 'c'])"),
        "SELECT sum(length(regexp_replace(repeat('ab', 500000), '(a)(b)', '\\2\\1', 'g') || g)) \
         FROM generate_series(1, 10000) g"
            .to_owned(),
    ];
    node.client.batch_execute("SET statement_timeout = '200ms'").await.expect("a setting");
    let began = Instant::now();
    for sql in &endless {
        assert_eq!(answer(&node.client, sql).await, "57014", "{sql}");
    }
    node.client.batch_execute("RESET statement_timeout").await.expect("a setting");
    assert_eq!(answer(&node.client, "SELECT count(*) FROM generate_series(1, 1000)").await, "1000");
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
}

/// Joins and unnests copy a row once for each partner.
#[tokio::test(flavor = "multi_thread")]
async fn wide_rows_are_copied_a_few_at_a_time() {
    let node = start().await;
    let wide = "CREATE TABLE wide (k int, t text); \
        INSERT INTO wide SELECT g, repeat('x', 100000) FROM generate_series(1, 3) g; \
        CREATE TABLE narrow (k int); INSERT INTO narrow SELECT g % 3 + 1 FROM generate_series(1, 9000) g";
    node.client.batch_execute(wide).await.expect("tables");
    node.answers(&[
        ("SELECT sum(length(t)) FROM wide w JOIN narrow n ON w.k = n.k", "900000000"),
        ("SELECT sum(length(t)) FROM wide w LEFT JOIN narrow n ON w.k = n.k", "900000000"),
        ("SELECT sum(length(t)) FROM wide w JOIN narrow n ON w.k > n.k", "900000000"),
        ("SELECT sum(length(t || n.k)) FROM wide w CROSS JOIN narrow n", "2700027000"),
        ("SELECT sum(length(t)) FROM wide, generate_series(1, 9000)", "2700000000"),
        (
            "SELECT sum(length(t)) FROM wide, unnest(string_to_array(repeat('a,', 8999), ',')) u",
            "2700000000",
        ),
    ])
    .await;
    // Rows of one branch are with the client when those of another turn out to be wide.
    let branches = "SELECT length(t) FROM (SELECT count(*)::text AS t FROM generate_series(1, 2000000) \
        UNION ALL SELECT w.t FROM wide w JOIN narrow n ON w.k = n.k WHERE n.k = 1 LIMIT ALL) u";
    let expected = ["7"].into_iter().chain(["100000"; 3_000]).collect::<Vec<_>>().join(", ");
    node.answers(&[(branches, &expected)]).await;
    let plan =
        answer(&node.client, "EXPLAIN ANALYZE SELECT count(*) FROM wide w JOIN narrow n USING (k)");
    let plan = plan.await;
    assert!(plan.starts_with("ProjectionExec: ") && !plan.contains("Measured"), "{plan}");
    // Counters of what runs above the join, too.
    assert!(plan.contains("as count], metrics=[output_rows=1,"), "{plan}");
}

/// What a client sends takes from the memory of queries: what does not fit is read over, and the connection goes on.
#[tokio::test(flavor = "multi_thread")]
async fn a_large_message_is_refused_before_it_is_kept() {
    let node = start().await;
    let before = peak_bytes(&node.server);
    let long = "x".repeat(200 << 20);
    let refused = |e: tokio_postgres::Error| e.code().map(|c| c.code().to_owned());
    let query = node.client.query("SELECT length($1::text)", &[&long]).await;
    assert_eq!(query.map_err(refused).err(), Some(Some("53200".into())));
    let statement = format!("SELECT length('{long}')");
    assert_eq!(answer(&node.client, &statement).await, "53200");
    let copied = node.client.copy_in::<_, bytes::Bytes>("COPY x FROM STDIN").await;
    let mut copied = Box::pin(copied.expect("COPY begins"));
    let line = bytes::Bytes::from(format!("7\t{long}\n"));
    let sent = futures::SinkExt::send(&mut copied, line).await;
    let ended = match sent {
        Ok(()) => copied.as_mut().finish().await.map(|_| ()),
        Err(e) => Err(e),
    };
    assert_eq!(ended.map_err(refused).err(), Some(Some("53200".into())));
    let more = peak_bytes(&node.server).saturating_sub(before);
    assert!(more < MOST_BYTES / 2, "the server has grown by {} MiB", more >> 20);
    let fits = "x".repeat(3 << 20);
    let row = node.client.query_one("SELECT length($1::text)", &[&fits]).await;
    assert_eq!(row.expect("it fits").get::<_, i32>(0), 3 << 20);
    assert_eq!(answer(&node.client, "SELECT count(*) FROM x").await, "3");
}

/// The rows of `t`; by view, what it is made of, and what tells its content: views that hold changes of an epoch
/// until its barrier.
const ROWS: usize = 25_000;
const VIEWS: [(&str, &str, &str); 6] = [
    (
        "extremes",
        "SELECT g, min(v) AS lo, max(v) AS hi FROM t GROUP BY g",
        "sum(g * lo), sum(g * hi)",
    ),
    ("distincts", "SELECT g, count(DISTINCT v) AS n FROM t GROUP BY g", "sum(g * n)"),
    (
        "lists",
        "SELECT g, string_agg(s, ',' ORDER BY v) AS l FROM t GROUP BY g",
        "sum(length(l)), min(l), max(l)",
    ),
    (
        "firsts",
        "SELECT id, v, r FROM (SELECT id, v, row_number() OVER (PARTITION BY g ORDER BY v DESC, id) AS r FROM t) x \
         WHERE r <= 2",
        "sum(id * r), sum(v * r)",
    ),
    (
        "moving",
        "SELECT id, sum(v) OVER (PARTITION BY g ORDER BY id ROWS 3 PRECEDING) AS w FROM t",
        "sum(id::bigint * w)",
    ),
    ("once", "SELECT DISTINCT g, v FROM t", "sum(g::bigint * v)"),
];

/// The sum of a metric over its labels.
pub async fn metric(server: &Server, name: &str) -> u64 {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let port = server.http.expect("an HTTP port");
    let mut socket = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.expect("it listens");
    let request =
        format!("GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).await.expect("it reads");
    let mut text = String::new();
    socket.read_to_string(&mut text).await.expect("it answers");
    let of = |line: &str| {
        let (labelled, value) = line.rsplit_once(' ')?;
        let is_it = labelled.split('{').next() == Some(name);
        is_it.then(|| value.trim().parse::<f64>().ok()).flatten()
    };
    text.lines().filter_map(of).sum::<f64>() as u64
}

/// Statements that change every row of a table under views that hold changes until the barrier: what they hold
/// is bounded by the memory limit, and they stay exact.
#[tokio::test(flavor = "multi_thread")]
#[cfg_attr(
    not(feature = "jemalloc"),
    ignore = "the allocator counts with the feature jemalloc only"
)]
async fn whole_table_statements_under_many_views_stay_within_the_limit() {
    const LIMIT: u64 = 64_000_000;
    let (server, _dir) = started(&["--memory-limit=64MB"]);
    let client = server.connect().await.expect("the server answers");
    client
        .batch_execute(
            "SET read_wait_timeout = '300s'; CREATE TABLE t (id int PRIMARY KEY, g int, v int, s text)",
        )
        .await
        .expect("a table");
    for (name, query, _) in VIEWS {
        let view = format!("CREATE MATERIALIZED VIEW {name} AS {query}");
        client.batch_execute(&view).await.expect("a view");
    }
    let rows = format!(
        "INSERT INTO t SELECT i, i % {}, i * 7 % 10007, repeat('x', 40) || i FROM generate_series(1, {ROWS}) i",
        ROWS / 10
    );
    client.batch_execute(&rows).await.expect("rows");
    client.batch_execute("UPDATE t SET v = v + 1, s = s || 'y'").await.expect("an update");
    for (name, query, content) in VIEWS {
        let view = answer(&client, &format!("SELECT count(*), {content} FROM {name}")).await;
        let batch = answer(&client, &format!("SELECT count(*), {content} FROM ({query}) q")).await;
        assert_eq!(view, batch, "{name} is not its query");
        assert!(view.len() > 6, "{name} could not be read: {view}");
    }
    assert!(metric(&server, "millrace_operator_settled_early_total").await > 0);
    let peak = metric(&server, "millrace_memory_peak_bytes").await;
    println!("peak of {} MB in use, {} MB resident", peak >> 20, peak_bytes(&server) >> 20);
    // With so small a limit what does not depend on it counts for much.
    assert!(peak > 0 && peak * 2 <= LIMIT * 3, "{} MB were in use", peak >> 20);
}
