//! Frontends that are behind: nobody hands them records, so each knows what its own statements have waited for. A
//! statement that was planned, described or prepared on an older catalog is of the newest one, or is refused.

use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, RecordBatch};
use arrow::util::display::array_value_to_string;
use futures::StreamExt;
use millrace_common::{SqlError, SqlState};
use millrace_frontend::session::{Outcome, Prepared, Session};
use millrace_frontend::statements;
use millrace_storage::sim::{Faults, Profile, SimStore};
use object_store::ObjectStore;
use object_store::memory::InMemory;

use crate::{Server, Sessions, run};

/// PostgreSQL's number of the type bigint.
const BIGINT: u32 = 20;

/// A session that goes on from one statement to the next.
struct Open(Session);

impl Open {
    fn new(sessions: &Sessions) -> Open {
        let shared = Arc::clone(sessions.shared());
        let database = shared.config.database.clone();
        Open(Session::new(shared, 1, "root".to_owned(), database))
    }

    /// The rows of a statement.
    async fn text(&mut self, sql: &str) -> Result<String, SqlError> {
        let parsed = statements::parse(sql)?;
        let [statement] = parsed.as_slice() else { panic!("one statement: {sql}") };
        self.0.arrive();
        self.0.begin_step();
        let outcome = self.0.execute(statement, &[], None).await?;
        text_of(outcome).await
    }

    /// Prepares a statement with one bigint as a parameter.
    async fn prepare(&mut self, sql: &str, way: Way) -> Ready {
        match way {
            Way::Sql => {
                let name = format!("p{}", self.0.prepared.len());
                self.text(&format!("PREPARE {name} (bigint) AS {sql}")).await.unwrap();
                Ready::Named(name)
            }
            Way::Message => Ready::Sent(Box::new(self.0.prepare(sql, &[BIGINT]).unwrap())),
        }
    }

    /// The rows of what was prepared, with this value.
    async fn execute(&mut self, ready: &Ready, value: i64) -> Result<String, SqlError> {
        let prepared = match ready {
            Ready::Named(name) => return self.text(&format!("EXECUTE {name} ({value})")).await,
            Ready::Sent(prepared) => prepared,
        };
        let value: ArrayRef = Arc::new(Int64Array::from(vec![value]));
        self.0.arrive();
        self.0.begin_step();
        let outcome = self.0.run_prepared(prepared, &[value]).await?;
        text_of(outcome).await
    }
}

/// How a statement is prepared.
#[derive(Clone, Copy, Debug)]
enum Way {
    Sql,
    /// By a client's message, of the extended protocol.
    Message,
}

/// Each with the incarnation of a frontend of its own.
const WAYS: [(u64, Way); 2] = [(3_000, Way::Sql), (4_000, Way::Message)];

/// A statement that was prepared.
enum Ready {
    Named(String),
    Sent(Box<Prepared>),
}

/// All rows, values apart by `|`. Of a subscription, which has no end, the values of its first rows.
async fn text_of(outcome: Outcome) -> Result<String, SqlError> {
    let mut rows = Vec::new();
    match outcome {
        Outcome::Rows(mut set) => {
            while let Some(batch) = set.stream.next().await {
                rows.extend(texts(&batch?, 0));
            }
        }
        Outcome::CopyOut(mut copy) => {
            let batch = copy.rows.stream.next().await.expect("it has no end")?;
            // Behind epoch, operation and weight.
            rows.extend(texts(&batch, 3));
        }
        Outcome::Empty | Outcome::Command(_) | Outcome::CopyIn(_) => {}
    }
    Ok(rows.join(" "))
}

/// The rows of a batch, from this column on.
fn texts(batch: &RecordBatch, first: usize) -> Vec<String> {
    let columns = &batch.columns()[first..];
    let row = |at: usize| {
        let values = columns.iter().map(|column| array_value_to_string(column, at).unwrap());
        values.collect::<Vec<_>>().join("|")
    };
    (0..batch.num_rows()).map(row).collect()
}

/// A cached plan's columns are others: nothing was done.
fn assert_refused(result: Result<String, SqlError>) {
    let error = result.unwrap_err();
    assert_eq!(error.state.0, "0A000", "{error:?}");
    assert!(error.message.contains("must not change result type"), "{error:?}");
}

#[test]
fn a_statement_that_was_planned_on_an_older_catalog_is_planned_again() {
    run(async {
        let server = Server::start().await;
        // Nobody hands them records: each knows what its own statements have waited for.
        let (one, other) = (server.remote(2_000).await, server.remote(3_000).await);
        one.rows("CREATE TABLE t (id bigint PRIMARY KEY)").await;
        one.rows("INSERT INTO t VALUES (1)").await;
        one.rows("CREATE VIEW c AS SELECT 1 AS n").await;
        one.rows("CREATE VIEW low AS SELECT id AS n FROM t").await;
        one.rows("CREATE VIEW high AS SELECT n FROM low").await;
        for view in ["c", "high"] {
            assert_eq!(other.text(&format!("SELECT n FROM {view}")).await, "1", "{view}");
        }
        one.rows("CREATE OR REPLACE VIEW low AS SELECT id + 10 AS n FROM t").await;
        assert_eq!(other.text("SELECT n FROM high").await, "11");
        one.rows("CREATE OR REPLACE VIEW c AS SELECT 2 AS n").await;
        assert_eq!(other.text("SELECT n FROM c").await, "2", "it reads no rows");
        one.rows("DROP VIEW c; CREATE VIEW c AS SELECT 3 AS n").await;
        assert_eq!(other.text("SELECT n FROM c").await, "3", "the name stands for another");
        let any = "SET read_freshness = 'any'; SELECT n FROM c";
        one.rows("CREATE OR REPLACE VIEW c AS SELECT 4 AS n").await;
        assert_eq!(other.text(any).await, "3", "it asks nobody");

        other.rows("INSERT INTO t SELECT n FROM c").await;
        one.rows("CREATE OR REPLACE VIEW c AS SELECT 5 AS n").await;
        other.rows("UPDATE t SET id = (SELECT n FROM c) WHERE id = 4").await;
        one.rows("CREATE OR REPLACE VIEW c AS SELECT 6 AS n").await;
        let parts = "WITH w AS (INSERT INTO t SELECT n FROM c RETURNING id) SELECT id FROM w";
        assert_eq!(other.text(parts).await, "6");
        assert_eq!(one.text("SELECT id FROM t ORDER BY id").await, "1 5 6");
        let repeatable =
            "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT n, id FROM c, t WHERE id = 1";
        one.rows("CREATE OR REPLACE VIEW c AS SELECT 7 AS n").await;
        assert_eq!(other.text(repeatable).await, "7|1");
        one.rows("CREATE OR REPLACE VIEW c AS SELECT 8 AS n").await;
        let cursor = "BEGIN; DECLARE d CURSOR FOR SELECT n FROM c; FETCH ALL FROM d";
        assert_eq!(other.text(cursor).await, "8");
    });
}

/// Who asks for it may be behind in each case: it has seen what was there before, and nothing of what came then.
#[test]
fn a_subscription_is_of_the_newest_definition() {
    let cases = [
        ("replaced", "CREATE OR REPLACE VIEW replaced AS SELECT id + 10 AS n FROM t"),
        ("recreated", "DROP VIEW recreated; CREATE VIEW recreated AS SELECT id + 10 AS n FROM t"),
        ("above", "CREATE OR REPLACE VIEW below AS SELECT id + 10 AS n FROM t"),
        (
            "kept",
            "DROP MATERIALIZED VIEW kept; \
             CREATE MATERIALIZED VIEW kept AS SELECT id + 10 AS n FROM t",
        ),
    ];
    run(async move {
        let server = Server::start().await;
        let one = server.remote(2_000).await;
        one.rows("CREATE TABLE t (id bigint PRIMARY KEY)").await;
        one.rows("INSERT INTO t VALUES (1)").await;
        for view in ["replaced", "recreated", "below", "gone"] {
            one.rows(&format!("CREATE VIEW {view} AS SELECT id AS n FROM t")).await;
        }
        one.rows("CREATE VIEW above AS SELECT n FROM below").await;
        one.rows("CREATE MATERIALIZED VIEW kept AS SELECT id AS n FROM t").await;
        for (incarnation, (view, change)) in (3_000..).zip(cases) {
            let other = server.remote(incarnation).await;
            let mut session = Open::new(&other);
            let before = session.text(&format!("SELECT n FROM {view}")).await;
            assert_eq!(before.unwrap(), "1", "{view}");
            one.rows(change).await;
            let followed = session.text(&format!("SUBSCRIBE TO {view}")).await;
            assert_eq!(followed.unwrap(), "11", "{view}");
        }
        let other = server.remote(4_000).await;
        let mut session = Open::new(&other);
        assert_eq!(session.text("SELECT n FROM gone").await.unwrap(), "1");
        one.rows("DROP VIEW gone").await;
        let error = session.text("SUBSCRIBE TO gone").await.unwrap_err();
        assert_eq!(error.state, SqlState::UNDEFINED_TABLE, "{error:?}");
    });
}

/// A view would be made of what it was before.
#[test]
fn nothing_is_subscribed_to_that_cannot_be_looked_up() {
    run(async {
        let bucket: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let server = Server::on(Arc::clone(&bucket)).await;
        let sim = SimStore::new(bucket, Profile::INSTANT, 1);
        let (one, other) = (
            server.remote(2_000).await,
            server.remote_on(&(Arc::new(sim.clone()) as Arc<dyn ObjectStore>), 3_000).await,
        );
        one.rows("CREATE TABLE t (id bigint PRIMARY KEY)").await;
        one.rows("INSERT INTO t VALUES (1)").await;
        one.rows("CREATE VIEW v AS SELECT id AS n FROM t").await;
        let mut session = Open::new(&other);
        assert_eq!(session.text("SELECT n FROM v").await.unwrap(), "1");
        one.rows("CREATE OR REPLACE VIEW v AS SELECT id + 10 AS n FROM t").await;
        sim.set_faults(Faults { error: 1.0, ..Faults::default() });
        let error = session.text("SUBSCRIBE TO v").await.unwrap_err();
        assert_eq!(error.state, SqlState::IO_ERROR, "{error:?}");
        sim.set_faults(Faults::default());
        assert_eq!(session.text("SUBSCRIBE TO v").await.unwrap(), "11");
    });
}

/// What it was of before is still there, and could be followed.
#[test]
fn a_subscription_cursor_is_of_the_newest_subscription() {
    run(async {
        let server = Server::start().await;
        let (one, other) = (server.remote(2_000).await, server.remote(3_000).await);
        one.rows("CREATE TABLE p (id bigint PRIMARY KEY); CREATE TABLE q (id bigint PRIMARY KEY)")
            .await;
        one.rows("INSERT INTO p VALUES (1); INSERT INTO q VALUES (11)").await;
        one.rows("CREATE SUBSCRIPTION s FROM p WITH (retention = '1 day')").await;
        let mut session = Open::new(&other);
        session.text("DECLARE a SUBSCRIPTION CURSOR FOR s FULL").await.unwrap();
        let fetched = session.text("FETCH 1 FROM a").await.unwrap();
        assert!(fetched.ends_with("|1|1"), "{fetched}");
        one.rows("DROP SUBSCRIPTION s").await;
        one.rows("CREATE SUBSCRIPTION s FROM q WITH (retention = '1 day')").await;
        session.text("DECLARE b SUBSCRIPTION CURSOR FOR s FULL").await.unwrap();
        let fetched = session.text("FETCH 1 FROM b").await.unwrap();
        assert!(fetched.ends_with("|1|11"), "{fetched}");
        one.rows("DROP SUBSCRIPTION s").await;
        let error = session.text("DECLARE c SUBSCRIPTION CURSOR FOR s FULL").await.unwrap_err();
        assert_eq!(error.state, SqlState::UNDEFINED_TABLE, "{error:?}");
    });
}

async fn replace_c(one: &Sessions, n: i64) {
    one.rows(&format!("CREATE OR REPLACE VIEW c AS SELECT {n}::bigint AS n")).await;
}

/// Another view of this name.
async fn recreate_c(one: &Sessions, value: &str) {
    one.rows(&format!("DROP VIEW c; CREATE VIEW c AS SELECT {value} AS n")).await;
}

#[test]
fn what_was_prepared_on_an_older_catalog_runs_on_the_newest() {
    run(async {
        let server = Server::start().await;
        let one = server.remote(2_000).await;
        one.rows("CREATE TABLE t (id bigint PRIMARY KEY)").await;
        one.rows("CREATE VIEW c AS SELECT 1::bigint AS n").await;
        for (incarnation, way) in WAYS {
            let other = server.remote(incarnation).await;
            let mut session = Open::new(&other);
            let query = session.prepare("SELECT n + $1 AS n FROM c", way).await;
            let write = "INSERT INTO t SELECT n + $1 FROM c RETURNING id";
            let write = session.prepare(write, way).await;
            replace_c(&one, 2).await;
            assert_eq!(session.execute(&query, 40).await.unwrap(), "42", "{way:?}");
            replace_c(&one, 3).await;
            assert_eq!(session.execute(&write, 40).await.unwrap(), "43", "{way:?}");
            assert_eq!(one.text("SELECT id FROM t").await, "43", "{way:?}");
            one.rows("DELETE FROM t").await;
            replace_c(&one, 1).await;
        }
    });
}

/// The parameter of EXECUTE is a query of its own.
#[test]
fn a_parameter_that_was_planned_on_an_older_catalog_is_planned_again() {
    run(async {
        let server = Server::start().await;
        let (one, other) = (server.remote(2_000).await, server.remote(3_000).await);
        one.rows("CREATE VIEW c AS SELECT 1::bigint AS n").await;
        let mut session = Open::new(&other);
        session.text("PREPARE echo (bigint) AS SELECT $1 AS n").await.unwrap();
        let execute = "EXECUTE echo ((SELECT n FROM c))";
        assert_eq!(session.text(execute).await.unwrap(), "1");
        replace_c(&one, 2).await;
        assert_eq!(session.text(execute).await.unwrap(), "2");
    });
}

/// The frontend is behind each time: when the columns are others, and when they are again those that were described.
#[test]
fn what_was_prepared_is_refused_only_where_its_columns_are_others_by_now() {
    run(async {
        let server = Server::start().await;
        let one = server.remote(2_000).await;
        one.rows("CREATE VIEW c AS SELECT 1::bigint AS n").await;
        for (incarnation, way) in WAYS {
            let other = server.remote(incarnation).await;
            let mut session = Open::new(&other);
            let query = session.prepare("SELECT n FROM c WHERE $1 > 0", way).await;
            recreate_c(&one, "'x'").await;
            assert_refused(session.execute(&query, 1).await);
            recreate_c(&one, "2::bigint").await;
            assert_eq!(session.execute(&query, 1).await.unwrap(), "2", "{way:?}");
        }
    });
}

/// Its parts run one after the other: the first of them would have written.
#[test]
fn a_described_with_that_writes_does_nothing_where_its_columns_are_others_by_now() {
    run(async {
        let server = Server::start().await;
        let one = server.remote(2_000).await;
        one.rows("CREATE TABLE t (id bigint PRIMARY KEY)").await;
        one.rows("CREATE VIEW c AS SELECT 1::bigint AS n").await;
        for (incarnation, way) in WAYS {
            let other = server.remote(incarnation).await;
            let mut session = Open::new(&other);
            let write = "WITH w AS (INSERT INTO t VALUES ($1) RETURNING id) SELECT n, id FROM c, w";
            let write = session.prepare(write, way).await;
            recreate_c(&one, "'x'").await;
            assert_refused(session.execute(&write, 1).await);
            assert_eq!(one.text("SELECT count(*) FROM t").await, "0", "{way:?}");
            recreate_c(&one, "7::bigint").await;
            assert_eq!(session.execute(&write, 2).await.unwrap(), "7|2", "{way:?}");
            assert_eq!(one.text("SELECT id FROM t").await, "2", "{way:?}");
            one.rows("DELETE FROM t").await;
        }
    });
}

/// What an older catalog refuses may be right by now.
#[test]
fn what_does_not_fit_an_older_catalog_is_planned_on_the_newest() {
    run(async {
        let server = Server::start().await;
        let (one, other) = (server.remote(2_000).await, server.remote(3_000).await);
        one.rows("CREATE VIEW c AS SELECT 'x' AS n").await;
        assert_eq!(other.text("SELECT n FROM c").await, "x");
        recreate_c(&one, "2::bigint").await;
        assert_eq!(other.text("SELECT sum(n) FROM c").await, "2");
        recreate_c(&one, "'x'").await;
        let error = other.error("SELECT sum(n) FROM c").await;
        assert_eq!(error.state, SqlState::UNDEFINED_FUNCTION, "{error:?}");
    });
}
