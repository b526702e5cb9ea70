//! SIGTERM while rows come in and are being written out.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use futures::SinkExt;
use millrace_sqllogictest::{Server, ServerOptions};

/// Longest that a server may take to end, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn ask_to_end(server: &Server) {
    let sent = Command::new("kill").args(["-TERM", &server.pid().to_string()]).status();
    assert!(sent.is_ok_and(|s| s.success()), "kill -TERM");
}

async fn ended(server: &mut Server) {
    let began = Instant::now();
    while !server.has_exited() {
        assert!(began.elapsed() < PATIENCE, "it goes on:\n{}", server.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

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
        ask_to_end(&server);
        ended(&mut server).await;
        load.await.expect("statements end with an error");
        server.kill();
        assert!(!server.log().contains("panicked"), "{}", server.log());
    }
}

/// The data of a COPY ends when the server is ending already: its answer is the truth, whichever it is.
#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_is_answered_while_the_server_ends_is_there_afterwards() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let options = ServerOptions { data_dir: dir.path().to_path_buf(), ..Default::default() };
    let mut server = Server::start(Path::new(env!("CARGO_BIN_EXE_millrace")), options)
        .expect("the server starts");
    let client = server.connect().await.expect("a connection");
    let idle = server.connect().await.expect("a connection");
    client.batch_execute("CREATE TABLE t (k bigint)").await.expect("a table");
    let sink = client.copy_in("COPY t FROM STDIN").await.expect("the data is asked for");
    futures::pin_mut!(sink);
    sink.send(bytes::Bytes::from_static(b"1\n2\n3\n")).await.expect("sent");
    ask_to_end(&server);
    let began = Instant::now();
    while !idle.is_closed() {
        assert!(began.elapsed() < PATIENCE, "an idle session stays:\n{}", server.log());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let answer = sink.finish().await;
    ended(&mut server).await;
    server.restart(None).expect("the server starts again");
    let client = server.connect().await.expect("a connection");
    let count = client.query_one("SELECT count(*) FROM t", &[]).await.expect("a count");
    match answer {
        Ok(rows) => assert_eq!((rows, count.get::<_, i64>(0)), (3, 3), "acknowledged"),
        // It took longer than statements are given.
        Err(error) => assert_eq!(count.get::<_, i64>(0), 0, "refused: {error}"),
    }
}
