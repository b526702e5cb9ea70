//! A server whose clock is wrong neither commits nor answers fresh reads, says so, and goes on when the clock is right.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use millrace::{Http, health};
use millrace_common::{Env, EnvHandle, SystemEnv};
use object_store::memory::InMemory;
use tokio_postgres::Client;

use crate::node::{Node, NodeOptions, one, run};

/// The machine's clock, which the store has, set forward by so many milliseconds.
#[derive(Default)]
pub struct SetForward(pub AtomicI64);

impl Env for SetForward {
    fn now_ms(&self) -> u64 {
        SystemEnv.now_ms().saturating_add_signed(self.0.load(Ordering::Relaxed))
    }

    fn since_boot(&self) -> Duration {
        SystemEnv.since_boot()
    }

    fn random(&self) -> u64 {
        SystemEnv.random()
    }
}

fn options(clock: &Arc<SetForward>) -> NodeOptions {
    NodeOptions {
        env: EnvHandle::from(Arc::clone(clock) as Arc<dyn Env>),
        max_clock_skew: Some(Duration::from_secs(2)),
        http: Http::At("127.0.0.1:0".to_owned()),
        ..NodeOptions::new(Arc::new(InMemory::new()))
    }
}

/// What `millrace health` says.
async fn asked(node: &Node) -> Result<(), String> {
    let address = node.http.expect("it was asked for").to_string();
    tokio::task::spawn_blocking(move || health::check(&address)).await.expect("no panic")
}

async fn until_health(node: &Node, is_well: bool) -> Result<(), String> {
    let began = Instant::now();
    loop {
        let said = asked(node).await;
        if said.is_ok() == is_well {
            return said;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "it says {said:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn refused(client: &Client, sql: &str) {
    let error = client.batch_execute(sql).await.expect_err(sql);
    let error = error.as_db_error().unwrap_or_else(|| panic!("{sql}: {error:?}"));
    assert_eq!(error.code().code(), "58000", "{sql}: {error:?}");
    assert!(error.message().contains("ms ahead of that of the object store"), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_whose_clock_was_set_refuses_statements_until_it_is_right() {
    let clock = Arc::<SetForward>::default();
    let node = Node::start(&options(&clock)).await;
    let client = node
        .run(
            "CREATE TABLE t (v int); INSERT INTO t VALUES (1);
             CREATE MATERIALIZED VIEW s AS SELECT sum(v) AS s FROM t",
        )
        .await;
    assert_eq!(one(&client, "SELECT s FROM s").await, "1");
    assert_eq!(asked(&node).await, Ok(()));

    clock.0.store(62_000, Ordering::Relaxed);
    let said = until_health(&node, false).await.expect_err("it is not well");
    assert!(said.contains("503") && said.contains("ahead of that of the object store"), "{said}");
    for sql in [
        "INSERT INTO t VALUES (2)",
        "UPDATE t SET v = 3",
        "CREATE TABLE u (v int)",
        "SELECT s FROM s",
    ] {
        refused(&client, sql).await;
    }
    run(&client, "SET read_freshness = 'any'").await;
    assert_eq!(one(&client, "SELECT s FROM s").await, "1");
    run(&client, "RESET read_freshness").await;

    clock.0.store(0, Ordering::Relaxed);
    assert_eq!(until_health(&node, true).await, Ok(()));
    run(&client, "INSERT INTO t VALUES (5)").await;
    assert_eq!(one(&client, "SELECT s FROM s").await, "6", "what was refused is not there");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_does_not_start_with_a_wrong_clock() {
    let clock = Arc::<SetForward>::default();
    clock.0.store(-10_000, Ordering::Relaxed);
    let error = Node::try_start(&options(&clock)).await.err().expect("it does not start");
    let error = error.to_string();
    assert!(error.contains("behind that of the object store"), "{error}");
    assert!(error.contains("Set the clock"), "{error}");
}
