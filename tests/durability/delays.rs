//! A writer that compaction does not keep up with is slowed, and says so.

use std::sync::Arc;
use std::time::Duration;

use millrace::{Config, Overrides, Standalone, Tuning};
use millrace_sqllogictest::server;
use object_store::ObjectStore;
use object_store::memory::InMemory;

use super::{one, run};

#[tokio::test(flavor = "multi_thread")]
async fn commits_that_wait_for_compaction_say_so_and_go_on() {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    // Each commit is a run of its own.
    let tuning = Tuning { direct_run_bytes: Some(0), ..Tuning::DEFAULT };
    let config = Config { tuning, ..Config::embedded(&std::env::temp_dir()) };
    let overrides =
        Overrides { object_store: Some(store), overlap_limit: Some(1), ..Overrides::default() };
    let server = Standalone::start(config, overrides).await.expect("the server starts");
    let client = server::connect(server.address.port()).await.expect("a connection");
    run(&client, "CREATE TABLE t (k int PRIMARY KEY, v int)").await;
    let reason = "SELECT coalesce(reason, 'none') FROM millrace_catalog.jobs WHERE name = 't'";
    assert_eq!(one(&client, reason).await, "none");
    // Many keys, so that the runs overlap.
    let insert = |n: u32| {
        format!("INSERT INTO t SELECT {n} + 10 * x, 0 FROM generate_series(0, 99) AS s(x)")
    };
    for n in 0..3 {
        run(&client, &insert(n)).await;
    }
    let said = one(&client, reason).await;
    assert!(said.starts_with("its commits are delayed because compaction is behind: "), "{said}");
    for n in 3..8 {
        run(&client, &insert(n)).await;
    }
    let delayed = server.store.delayed_commits();
    assert!(delayed.commits > 0 && delayed.waited > Duration::ZERO, "{delayed:?}");
    assert_eq!(one(&client, "SELECT count(*) FROM t").await, "800");
}
