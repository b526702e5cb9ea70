//! SIGTERM while rows are being written out.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use millrace_sqllogictest::{Server, ServerOptions};

/// Longest that a server may take to end, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_stopped_at_work_ends_without_a_panic() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    for round in 0..4 {
        let options = ServerOptions::small(dir.path());
        let mut server = Server::start(Path::new(env!("CARGO_BIN_EXE_millrace")), options)
            .expect("the server starts");
        let client = server.connect().await.expect("a connection");
        let setup = "CREATE TABLE IF NOT EXISTS t (k bigint, v text);
            CREATE MATERIALIZED VIEW IF NOT EXISTS m AS
                SELECT k % 1000 AS g, count(*) AS c, max(v) AS v FROM t GROUP BY 1";
        client.batch_execute(setup).await.expect("a view");
        let load = tokio::spawn(async move {
            let insert =
                "INSERT INTO t SELECT x, md5(x::text) FROM generate_series(1, 5000) AS s(x)";
            let mut done = 0;
            while client.batch_execute(insert).await.is_ok() {
                done += 1;
            }
            done
        });
        // Somewhere within the work.
        tokio::time::sleep(Duration::from_millis(300 + 170 * round)).await;
        let sent = Command::new("kill").args(["-TERM", &server.pid().to_string()]).status();
        assert!(sent.is_ok_and(|s| s.success()), "kill -TERM");
        let began = Instant::now();
        while !server.has_exited() {
            assert!(began.elapsed() < PATIENCE, "it goes on:\n{}", server.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        load.await.expect("statements end with an error");
        server.kill();
        assert!(!server.log().contains("panicked"), "{}", server.log());
    }
}
